"""Both pipelines together: a question is searched, its passages become a prompt, and an engine answers.

Neither waits for the other: while one request's answer is generated, partitions are loaded and searched for the next.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from cordee.serve.policy.rag_forecast import AnswerLatency
from cordee.serve.rag.catalog import Passage
from cordee.serve.rag.engine import EngineRefused, Generator
from cordee.serve.rag.index import Problem, RagIndex
from cordee.serve.rag.retrieval import Retrieval

INSTRUCTION = (
    "Answer the question from the passages below, and cite those that you use by their numbers, as in [1]. "
    "If they do not hold the answer, say so."
)


@dataclass(frozen=True, slots=True)
class FoundPassages:
    """The passages of a question, and the seconds before and in its retrieval."""

    passages: tuple[tuple[Passage, float], ...]
    not_searched: tuple[Problem, ...]
    wait_s: float
    retrieval_s: float


@dataclass(slots=True)
class Asked:
    """One request on its way through both pipelines.

    Attributes:
        path: of the API.
        body: as the client sent it.
        top: passages.
        passages: that are in the prompt now: fewer than were found if they do not fit the engine's context.
        wait_s, generation_s: so far.
    """

    path: str
    body: Mapping[str, Any]
    top: int
    found: FoundPassages | None = None
    passages: tuple[tuple[Passage, float], ...] = ()
    wait_s: float = 0.0
    generation_s: float = 0.0

    @property
    def latency(self) -> AnswerLatency:
        """Return its seconds by what they were spent on."""
        assert self.found is not None, "it was retrieved"
        return AnswerLatency(self.wait_s, self.found.retrieval_s, self.generation_s)


class Rag:
    """A knowledge base with an engine that answers from it."""

    def __init__(self, index: RagIndex, retrieval: Retrieval, generator: Generator) -> None:
        self.index, self.retrieval, self.generator = index, retrieval, generator

    async def open(self) -> None:
        """Open the engine's connections."""
        await self.generator.open()

    async def close(self) -> None:
        """End both pipelines."""
        await self.generator.close()
        await asyncio.to_thread(self.retrieval.stop)

    async def retrieve(self, question: str, top: int) -> FoundPassages:
        """Return the passages for a question."""
        began_s = time.monotonic()
        vectors = await asyncio.to_thread(self.index.embed, [question])
        embedded_s = time.monotonic()
        ranked = await asyncio.wrap_future(self.retrieval.submit(vectors[0], top))
        passages = await asyncio.to_thread(self.index.passages, ranked.chunks)
        wait_s = max(0.0, ranked.began_s - embedded_s)
        return FoundPassages(passages, ranked.not_searched, wait_s, time.monotonic() - began_s - wait_s)

    async def look_up(self, asked: Asked) -> None:
        """Find the passages of a request."""
        asked.found = await self.retrieve(question_of(asked.body), asked.top)
        asked.passages, asked.wait_s = asked.found.passages, asked.found.wait_s

    async def stream(self, asked: Asked) -> AsyncIterator[bytes]:
        """Yield the events of an answer; passages that do not fit the engine's context are left out.

        Raises:
            EngineRefused: the request is wrong.
            EngineFailed: the engine broke off too often.
        """
        async with self._turn(asked):
            while True:
                try:
                    async for data in self.generator.stream(asked.path, self._prompted(asked)):
                        yield data
                    return
                except EngineRefused as error:
                    self._shorten(asked, error)

    async def whole(self, asked: Asked) -> dict[str, Any]:
        """Return an answer that is one document; as `stream`."""
        async with self._turn(asked):
            while True:
                try:
                    return await self.generator.whole(asked.path, self._prompted(asked))
                except EngineRefused as error:
                    self._shorten(asked, error)

    @asynccontextmanager
    async def _turn(self, asked: Asked) -> AsyncIterator[None]:
        """Wait for the engine, and have it for the block; both are counted in the request's seconds."""
        ready_s = time.monotonic()
        async with self.generator.turnstile.turn():
            began_s = time.monotonic()
            asked.wait_s += began_s - ready_s
            try:
                yield
            finally:
                asked.generation_s = time.monotonic() - began_s

    def _shorten(self, asked: Asked, error: EngineRefused) -> None:
        """Leave out passages after the engine refused a prompt as too long.

        Raises:
            EngineRefused: it refused something else, or the request is too long without any passage.
        """
        if not asked.passages or b"context" not in error.body.lower():
            raise error
        asked.passages = asked.passages[: len(asked.passages) // 2]

    def _prompted(self, asked: Asked) -> dict[str, Any]:
        """Return the request to the engine: the client's, with the passages before its question."""
        body = {key: value for key, value in asked.body.items() if key != "rag"}
        if not asked.passages:
            return body
        text = f"{INSTRUCTION}\n\n{passages_text(asked.passages)}"
        if "messages" in body:
            messages = list(body["messages"])
            last = max(at for at, each in enumerate(messages) if each["role"] == "user")
            return {**body, "messages": [*messages[:last], {"role": "system", "content": text}, *messages[last:]]}
        return {**body, "prompt": f"{text}\n\n{body['prompt']}"}


def question_of(body: Mapping[str, Any]) -> str:
    """Return the text that is searched for: the last message of the user, or the prompt."""
    if "messages" not in body:
        return str(body.get("prompt", ""))
    content = next(each.get("content") for each in reversed(body["messages"]) if each["role"] == "user")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def passages_text(passages: Sequence[tuple[Passage, float]]) -> str:
    """Return passages as the engine gets them, each under its number and source."""
    parts = []
    for number, (each, _) in enumerate(passages, 1):
        heading = f", {each.heading}" if each.heading and each.heading != each.title else ""
        parts.append(f"[{number}] {each.title}{heading}\n{each.text}")
    return "\n\n".join(parts)


def citations(passages: Sequence[tuple[Passage, float]]) -> list[dict[str, Any]]:
    """Return the passages of a prompt, as an answer names them."""
    return [
        {
            "number": number, "document": each.document, "title": each.title, "heading": each.heading,
            "page": each.page, "chunk": each.chunk, "start": each.start, "end": each.end, "score": round(score, 6),
            "text": each.text,
        }
        for number, (each, score) in enumerate(passages, 1)
    ]  # fmt: skip
