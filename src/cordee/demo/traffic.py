"""Users of a service: they ask a gateway one question after the other, as any client of OpenAI's API does."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from urllib.parse import urlsplit

QUESTIONS = (
    "What is a rope team?",
    "Who goes first?",
    "What holds a fall?",
    "How far is the summit?",
    "When do we turn back?",
    "Who carries the rope?",
    "Is the ice safe today?",
    "Where do we sleep?",
)
_PATIENCE_S = 240.0
_MOVED = "cordee_gateway_requests_moved_total"


def tokens_of(question: int) -> int:
    """Return the length of the answer to a question: answers of several lengths do not end together."""
    return 400 + 60 * question


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as its client got it.

    Attributes:
        question: index of its question.
        text: the whole text.
        begun_us, first_us, ended_us: times of the request, of the first token (None: there was none), and of the end.
        error: the reason for which it is not whole; empty if it is.
    """

    question: int
    text: str
    begun_us: int
    first_us: int | None
    ended_us: int
    error: str = ""

    def was_open(self, at_us: int) -> bool:
        """Return whether it had begun to stream, and had not ended."""
        return self.first_us is not None and self.first_us <= at_us < self.ended_us


@dataclass(slots=True)
class _Stream:
    """An answer as it comes."""

    begun_us: int
    text: str = ""
    first_us: int | None = None
    finish: str = ""
    is_done: bool = False
    error: str = ""

    def read(self, answer: HTTPResponse) -> None:
        """Read the events of an answer to its end."""
        if answer.status != 200:
            self.error = f"status {answer.status}: {answer.read(300)!r}"
            return
        for line in answer:
            if line.startswith(b"data: [DONE]"):
                self.is_done = True
            elif line.startswith(b"data: {"):
                self._take(json.loads(line[6:]))

    def _take(self, chunk: dict[str, object]) -> None:
        if "error" in chunk:
            self.error = str(chunk["error"])
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            self.text += choice["delta"].get("content") or ""
            self.finish = choice.get("finish_reason") or self.finish
        if self.text and self.first_us is None:
            self.first_us = _now_us()

    def problem(self) -> str:
        """Return the reason for which the answer is not whole; empty if it is: these have a limit and no other end."""
        if self.error or (self.is_done and self.finish == "length"):
            return self.error
        return f"it ended with the finish reason {self.finish or 'none'!r}" + (
            "" if self.is_done else ", without [DONE]"
        )


class Traffic:
    """The requests to one service at one gateway, and their answers so far."""

    def __init__(self, url: str, model: str) -> None:
        self.answers: list[Answer] = []
        self._address, self._model = urlsplit(url), model
        self._open: list[_Stream] = []

    @property
    def streaming(self) -> int:
        """Return the number of open requests that have got a token."""
        return sum(stream.first_us is not None for stream in tuple(self._open))

    def has_open_since(self, at_us: int) -> bool:
        """Return whether a request that had begun by then is still open."""
        return any(stream.begun_us <= at_us for stream in tuple(self._open))

    def ask(self, question: int) -> None:
        """Ask one question, and wait for its whole answer."""
        stream = _Stream(_now_us())
        self._open.append(stream)
        try:
            stream.read(self._post(question))
        except (OSError, HTTPException, ValueError) as error:
            stream.error = stream.error or repr(error)
        self._open.remove(stream)
        answer = Answer(question, stream.text, stream.begun_us, stream.first_us, _now_us(), stream.problem())
        self.answers.append(answer)

    @contextmanager
    def users(self, number: int, *, pause_s: float = 0.0) -> Iterator[None]:
        """Let users ask, each with this pause between an answer and the next question, until the block ends."""
        over = threading.Event()

        def work(question: int) -> None:
            while not over.is_set():
                self.ask(question % len(QUESTIONS))
                question += 1
                over.wait(pause_s)

        threads = [threading.Thread(target=work, args=(user,), daemon=True) for user in range(number)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
        for thread in threads:
            thread.join()

    def moved(self) -> int:
        """Return how many requests went on with another replica, as the gateway counts them.

        Of a replica that is killed the gateway learns by its streams or, if that comes first, from the server.
        """
        answer = self._send("GET", "/metrics", None)
        lines = answer.read().decode().splitlines()
        counts = [line for line in lines if line.startswith(_MOVED)]
        return round(sum(float(line.rpartition(" ")[2]) for line in counts))

    def _post(self, question: int) -> HTTPResponse:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": QUESTIONS[question]}],
            "max_tokens": tokens_of(question),
            "temperature": 0,
            "stream": True,
        }
        return self._send("POST", "/v1/chat/completions", json.dumps(body).encode())

    def _send(self, method: str, path: str, body: bytes | None) -> HTTPResponse:
        assert self._address.hostname is not None, "a gateway's URL has a host"
        connection = HTTPConnection(self._address.hostname, self._address.port, timeout=_PATIENCE_S)
        connection.request(method, path, body, {"Content-Type": "application/json", "Connection": "close"})
        return connection.getresponse()


def _now_us() -> int:
    return time.time_ns() // 1000
