"""Questions at given times against the pipelines in this process, and their latency by what it was spent on."""

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from cordee.serve.engines.openai import CHAT
from cordee.serve.policy.rag_forecast import AnswerLatency
from cordee.serve.rag.answer import Asked, Rag


class Played(NamedTuple):
    """One request: its latency, and the chunks that were found."""

    latency: AnswerLatency
    chunks: tuple[int, ...]


def request(question: str, output_tokens: int, top: int) -> Asked:
    """Return a greedy request whose answer has exactly so many tokens, where the engine can be made to."""
    body = {
        "messages": [{"role": "user", "content": question}], "max_tokens": output_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    return Asked(CHAT, body, top)


async def answer(rag: Rag, asked: Asked) -> Played:
    """Answer one request."""
    await rag.look_up(asked)
    async for _ in rag.stream(asked):
        pass
    assert asked.found is not None, "it was looked up"
    return Played(asked.latency, tuple(each.chunk for each, _ in asked.found.passages))


async def play(
    rag: Rag, arrivals_s: Sequence[float], questions: Sequence[str], output_tokens: int, top: int
) -> list[Played]:
    """Answer questions that come at these times, as fast as the pipelines do, and return them in their order."""
    began_s = time.monotonic()

    async def one(at_s: float, question: str) -> Played:
        await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
        return await answer(rag, request(question, output_tokens, top))

    works = [one(at_s, question) for at_s, question in zip(arrivals_s, questions, strict=True)]
    return list(await asyncio.gather(*works))
