"""The load that a tuning measures with: requests of a file or made up, sent to one replica, and timed.

Each round has requests of its own, the same ones for every setting. All are greedy, so that texts can be compared.
"""

import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

from cordee.errors import InputError, ReplicaError
from cordee.serve.engines.known import DIALECTS
from cordee.serve.engines.openai import CHAT, COMPLETIONS
from cordee.serve.engines.port import Body
from cordee.serve.policy.tuning import Round

ANSWER_S = 600.0
_TEXT = (
    "a an and are as at be but by can do for from get has have he if in into is it its like make more my no not of on "
    "one or other our out people see she so some than that the their them then there they this time to up use was we "
    "what when which who will with would year you table train light water river paper model cost hour number cluster"
)
_WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: its path, and its body without the model."""

    path: str
    body: Body


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean lengths of requests, in tokens; cached tokens are among the input tokens."""

    input_tokens: int = 256
    cached_tokens: int = 128
    output_tokens: int = 64


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One answer: its text, tokens and times; `error` says why there is none."""

    text: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float = 0.0
    tpot_s: float | None = None
    error: str = ""


def read_prompts(path: Path, output_tokens: int) -> list[Prompt]:
    """Return the requests of a file of JSON lines, each with `messages` or a `prompt`, as the OpenAI API takes them.

    Raises:
        InputError: it cannot be read, or a line is no request.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            found.append(_read_prompt(line, f"{path}, line {number}", output_tokens))
    if not found:
        raise InputError(f"{path} has no prompts", hint='write a line for each: {"prompt": "..."}')
    return found


def _read_prompt(line: str, where: str, output_tokens: int) -> Prompt:
    hint = 'write {"messages": [...]} or {"prompt": "..."} with the keys of the OpenAI API'
    try:
        body = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON: {error}", hint=hint) from error
    if not isinstance(body, dict) or not ({"messages", "prompt"} & body.keys()):
        raise InputError(f"{where}: neither messages nor a prompt", hint=hint)
    limit = body.get("max_tokens") or body.get("max_completion_tokens") or output_tokens
    kept = {key: value for key, value in body.items() if key not in ("model", "stream", "stream_options")}
    return Prompt(CHAT if "messages" in body else COMPLETIONS, {**kept, "max_tokens": limit})


class MadeUp:
    """Prompts of random words with the lengths of a service's requests; a part at the start is the same in all."""

    def __init__(self, lengths: Lengths, tokens_per_word: float, seed: int = 0) -> None:
        self._lengths, self._per_word, self._rng = lengths, tokens_per_word, random.Random(seed)
        self._start = self._text(lengths.cached_tokens)

    def take(self, number: int) -> list[Prompt]:
        """Return the next prompts."""
        own = max(1, self._lengths.input_tokens - self._lengths.cached_tokens)
        limit = {"max_tokens": self._lengths.output_tokens, "ignore_eos": True}
        return [Prompt(COMPLETIONS, {"prompt": f"{self._start} {self._text(own)}", **limit}) for _ in range(number)]

    def _text(self, tokens: int) -> str:
        return " ".join(self._rng.choices(_WORDS, k=max(1, round(tokens / self._per_word))))


def rounds_of(prompts: Sequence[Prompt], number: int, rounds: int) -> list[list[Prompt]]:
    """Return the requests of each round from a file's, which begin again where there are too few."""
    again = (each for _ in range(rounds * number) for each in prompts)
    return [list(islice(again, number)) for _ in range(rounds)]


@dataclass(frozen=True, slots=True)
class Target:
    """A replica that is asked: its address, its engine, and the model's name."""

    address: str
    engine: str
    model: str

    def ask(self, prompt: Prompt) -> TimedAnswer:
        """Return the greedy answer to a request, timed."""
        where = urlsplit(self.address)
        body = {**prompt.body, "model": self.model, "stream": True, "temperature": 0}
        stream = DIALECTS[self.engine].open(prompt.path, body)
        connection = HTTPConnection(where.hostname or "", where.port, timeout=ANSWER_S)
        began_s, first_s, text = time.perf_counter(), 0.0, b""
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", stream.first.path, json.dumps(stream.first.body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                return TimedAnswer(error=f"status {answer.status}: {answer.read(300).decode(errors='replace')}")
            while data := answer.read1(65_536):
                text += stream.feed(data)
                if not first_s and stream.tokens:
                    first_s = time.perf_counter()
        except (OSError, HTTPException) as error:
            return TimedAnswer(error=f"{type(error).__name__}: {error}")
        finally:
            connection.close()
        if stream.error or not stream.done:
            return TimedAnswer(error=stream.error or "the answer broke off")
        usage, last_s = stream.usage, time.perf_counter()
        made = stream.tokens if usage is None else usage.output_tokens
        tpot_s = (last_s - first_s) / (made - 1) if made > 1 and first_s else None
        return TimedAnswer(
            _text_of(text), 0 if usage is None else usage.input_tokens, made, (first_s or last_s) - began_s, tpot_s
        )

    def run(self, prompts: Sequence[Prompt], concurrency: int) -> tuple[Round, list[TimedAnswer]]:
        """Return the times of some requests, of which so many are open at a time, and their answers."""
        pool = ThreadPoolExecutor(concurrency)
        try:
            began_s = time.perf_counter()
            answers = list(pool.map(self.ask, prompts))
            seconds = time.perf_counter() - began_s
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        good = [each for each in answers if not each.error]
        if not good:
            raise ReplicaError(f"no request of {len(answers)} was answered: {answers[0].error}")
        found = Round(
            len(answers), len(answers) - len(good), seconds,
            sum(each.input_tokens for each in good), sum(each.output_tokens for each in good),
            tuple(each.ttft_s for each in good), tuple(each.tpot_s for each in good if each.tpot_s is not None),
        )  # fmt: skip
        return found, answers

    def tokens_per_word(self) -> float:
        """Return the tokens of one word of made-up text.

        Raises:
            ReplicaError: the replica does not answer.
        """
        answer = self.ask(Prompt(COMPLETIONS, {"prompt": _TEXT, "max_tokens": 1}))
        if answer.error:
            raise ReplicaError(f"the replica does not answer: {answer.error}")
        return max(0.1, answer.input_tokens / len(_WORDS))


def _text_of(events: bytes) -> str:
    """Return the text of streamed events."""
    text = ""
    for event in events.split(b"\n\n"):
        if event.startswith(b"data: {"):
            for choice in json.loads(event[6:]).get("choices") or ():
                text += (choice.get("text") or (choice.get("delta") or {}).get("content")) or ""
    return text
