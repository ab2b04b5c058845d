"""Streams of the OpenAI API, event by event in bytes: what the dialects of all engines have in common.

The common event, one token of text, is taken apart by its marks without a JSON parser; any other is parsed. A mark such
as `"},"` cannot stand inside a JSON string, where each quote has a backslash before it.
"""

import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cordee.serve.engines.port import Body, Upstream, Usage
from cordee.serve.engines.replay import DivergedError, SentChoices, can_replay, with_seed

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DONE = b"data: [DONE]\n\n"
END = b"\n\n"
COMMENT = b": computed again\n\n"
"""A line that clients skip; it keeps their connection open while they get nothing."""
COMMENT_EVENTS = 32
"""Events that are left out between two comments."""

Steps = Generator[Upstream, bytes, None]
"""Requests to a replica, the last of which streams; the answers of the others are sent in."""

_LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")
_NOT_SAMPLING = frozenset(
    (*_LIMITS, "messages", "prompt", "model", "stream", "stream_options", "logprobs", "top_logprobs", "n", "echo")
)
_FROM_FIRST_TOKEN = ("tools", "functions", "response_format", "json_schema", "grammar", "echo", "suffix", "logprobs")
"""Keys with which an engine parses or limits the text from its first token on: it cannot enter in the middle."""


class Part(NamedTuple):
    """One event of a continuation: `escaped` is its text as in a JSON string."""

    ids: list[int] = []  # noqa: RUF012 - never changed
    escaped: bytes = b""
    exact: bool = True
    finish: str | None = None
    usage: Usage | None = None
    last: bool = False
    error: str = ""


class _Gap(NamedTuple):
    """Tokens (from `first`, up to `last`) that are not what the text between `start` and `end` was made of."""

    first: int
    last: int
    start: int
    end: int


@dataclass(slots=True)
class Transcript:
    """The text that the client has got, escaped as in a JSON string, and its tokens.

    Tokens whose text the engine holds back, since it is half a character or may become a stop word, are pending: they
    count when their text comes. Where that text cannot be theirs, the engine has held back unnamed tokens too: a gap.
    """

    ids: "array[int]" = field(default_factory=lambda: array("q"))
    text: bytearray = field(default_factory=bytearray)
    pending: list[int] = field(default_factory=list)
    gap: _Gap | None = None

    def take(self, ids: list[int], escaped: bytes, *, exact: bool) -> None:
        """Add the text of one event, and its tokens; not `exact`: of some tokens only."""
        self.pending += ids
        if not escaped:
            return
        first, start = len(self.ids), len(self.text)
        self.ids.extend(self.pending or [-1])
        exact = exact and bool(self.pending)
        self.pending.clear()
        self.text += escaped
        if not exact:
            if self.gap is not None:
                first, start = self.gap.first, self.gap.start
            self.gap = _Gap(first, len(self.ids), start, len(self.text))

    def mend(self, ids: list[int]) -> None:
        """Put tokens in place of the gap."""
        assert self.gap is not None, "there is a gap"
        self.ids = array("q", [*self.ids[: self.gap.first], *ids, *self.ids[self.gap.last :]])
        self.gap = None

    def words(self, start: int = 0, end: int | None = None) -> str:
        """Return the text between two of its bytes, no longer escaped."""
        return str(json.loads(b'"' + self.text[start:end] + b'"'))


@dataclass(slots=True)
class _Frame:
    """The form of the client's events: its path, and id, model and time of the first event."""

    path: str
    same: dict[str, Any] = field(default_factory=dict)

    def chunk(self, escaped: bytes, finish: str | None = None) -> bytes:
        """Return an event with this text."""
        end = b',"finish_reason":' + json.dumps(finish).encode() + b"}]," + self._plain({}) + b"}" + END
        if self.path != CHAT:
            return b'data: {"choices":[{"index":0,"text":"' + escaped + b'","logprobs":null' + end
        delta = b'{"content":"' + escaped + b'"}' if escaped else b"{}"
        return b'data: {"choices":[{"index":0,"delta":' + delta + end

    def usage(self, usage: Usage) -> bytes:
        """Return the event that says what was used."""
        numbers = {
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.input_tokens + usage.output_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }
        return b'data: {"choices":[],' + self._plain({"usage": numbers}) + b"}" + END

    def _plain(self, more: dict[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self.path == CHAT else "text_completion"
        return _dumps({**self.same, "object": kind, **more})[1:-1]


class OpenAIStream(ABC):
    """A stream (`port.Stream`): passes events on, and gives another replica's continuation their form."""

    rewrites = True  # Events have what only `ask` asked for.

    def __init__(self, path: str, body: Mapping[str, object]) -> None:
        self.first = Upstream(path, self.ask(dict(body)), stream=True)
        self.body, self.sent = body, Transcript()
        self.prompt_ids: list[int] | None = None
        self.usage: Usage | None = None
        self.finish: str | None = None
        self.done, self.error, self.diverged = False, "", False
        self._frame, self._rest = _Frame(path), b""
        self._take = self._pass  # What is done with an event.
        self._others = 0  # Pieces of other kinds than text, such as calls of tools: text alone does not continue them.
        self._sent = SentChoices(choices_of(body))

    # -- what differs between engines ----------------------------------------------------------------------

    @abstractmethod
    def ask(self, body: Body) -> Body:
        """Return the client's request with what this needs: usage, and the tokens of each event."""

    @abstractmethod
    def plain(self, event: bytes) -> bytes | None:
        """Take an event that is one piece of text, and return what the client gets; None: it is another one."""

    @abstractmethod
    def take_out(self, chunk: dict[str, Any]) -> tuple[list[int], bool]:
        """Return the tokens of a parsed event, and whether these are all; take out what only `ask` asked for."""

    @abstractmethod
    def prompt_steps(self) -> Generator[Upstream, bytes, list[int]]:
        """Ask for the tokens of the prompt."""

    @abstractmethod
    def text_steps(self, text: str) -> Generator[Upstream, bytes, list[int]]:
        """Ask for the tokens of a text."""

    @abstractmethod
    def continuation(self, sampling: Body, ids: list[int], limit: int | None) -> Upstream:
        """Return the request for the tokens after `ids`, `limit` at most."""

    @abstractmethod
    def part(self, event: bytes) -> Part:
        """Take apart an event of a continuation."""

    # -- from the first replica ----------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Return the number of output tokens that the client has got; a piece of another kind counts as one."""
        return len(self.sent.ids) + self._others

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the answer as they come, and return the bytes that the client gets."""
        if self._rest:
            data = self._rest + data
        if 0 < data.find(END) == len(data) - 2:  # One event, as mostly.
            self._rest = b""
            return self._take(data)
        *events, self._rest = data.split(END)
        return b"".join([self._take(event + END) for event in events])

    def _pass(self, event: bytes) -> bytes:
        if not self._frame.same:
            self._frame.same = _same(event)
        out = self.plain(event) if self._sent.wanted == 1 else None
        return self._pass_parsed(event) if out is None else out

    def _pass_parsed(self, event: bytes) -> bytes:
        """Take an event that is not one piece of text: the first one, the last ones, or one of another kind."""
        if not event.startswith(b"data:"):
            return event  # A comment, by which the engine keeps the connection open.
        if event.startswith(b"data: [DONE]"):
            if self.finish is None:
                self.error = '"[DONE] without a finish reason"'
                return b""
            self.done = True
            return event
        try:
            chunk = json.loads(event[5:])
        except ValueError:
            return event
        if not isinstance(chunk, dict):
            return event
        if "error" in chunk:
            self.error = event[5:].decode(errors="replace").strip()
            return b""
        ids, exact = self.take_out(chunk)
        if usage := chunk.get("usage"):
            self.usage = read_usage(usage)
            if not self._wants_usage:
                del chunk["usage"]
                if not chunk.get("choices"):
                    return b""
        try:
            lacking = self._sent.lacking(chunk.get("choices") or [])
        except DivergedError as error:
            self.error, self.diverged = str(error), True
            return b""
        if self._sent.comes_again:
            return self._pass_again(chunk, lacking, ids, exact)
        self._read_choices(chunk.get("choices") or [], ids, exact)
        return b"data: " + _dumps(chunk) + END if self.rewrites else event

    def _pass_again(self, chunk: dict[str, Any], lacking: list[dict[str, Any]], ids: list[int], exact: bool) -> bytes:
        """Return an event of an answer that is computed again, with the parts of it that the client lacks."""
        is_whole = lacking == (chunk.get("choices") or [])
        if not (is_whole or lacking or "usage" in chunk):
            self._sent.left_out += 1
            return b"" if self._sent.left_out % COMMENT_EVENTS else COMMENT
        self._read_choices(lacking, ids if is_whole else [], exact and is_whole)
        return b"data: " + _dumps({**chunk, **self._frame.same, "choices": lacking}) + END

    def _read_choices(self, choices: list[dict[str, Any]], ids: list[int], exact: bool) -> None:
        for choice in choices:
            if (reason := choice.get("finish_reason")) and self._sent.is_whole:
                self.finish = reason
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content")
            others = any(value for key, value in delta.items() if key not in ("role", "content"))
            self._others += others or not isinstance(text, str | None)
            if isinstance(text, str):
                self.sent.take(ids, _dumps(text)[1:-1], exact=exact)

    @property
    def _wants_usage(self) -> bool:
        options = self.body.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    # -- from another replica ------------------------------------------------------------------------------

    def resume(self) -> Steps | None:
        """Return the requests by which another replica of the same model goes on; None: it cannot be done."""
        self._rest, self.error = b"", ""
        self.sent.pending.clear()
        if self.tokens and self.can_continue:
            return self._continue()
        if self.tokens and not can_replay(self.first.body or {}):
            return None
        return self._replay()

    @property
    def can_continue(self) -> bool:
        """Return whether a continuation may begin in the middle of the text."""
        return not (self._others or is_parsed(self.body))

    def _replay(self) -> Steps:
        """Begin again, and leave out what the client has: nothing, the event that opens an answer, or more."""
        if self.tokens or self._frame.same:
            if self.tokens and self._sent.wanted == 1:  # Most of it was counted as text alone.
                path = (0, "delta", "content") if self._frame.path == CHAT else (0, "text")
                self._sent.set_text(path, self.sent.words())
            self._sent.begin_again()
            self._take = self._pass_parsed
        yield self.first

    def _continue(self) -> Steps:
        sent = self.sent
        if self.prompt_ids is None:
            self.prompt_ids = yield from self.prompt_steps()
        if (gap := sent.gap) is not None:
            sent.mend((yield from self.text_steps(sent.words(gap.start, gap.end))))
        left = self._left
        if self.finish is None and (left is None or left > 0):
            self._take = self._reshape
            sampling = {key: value for key, value in self.body.items() if key not in _NOT_SAMPLING}
            yield self.continuation(sampling, [*self.prompt_ids, *sent.ids], left)

    @property
    def _left(self) -> int | None:
        limit = next((value for key in _LIMITS if isinstance(value := self.body.get(key), int) and value >= 0), None)
        return None if limit is None else limit - self.tokens

    def _reshape(self, event: bytes) -> bytes:
        """Return the client's form of an event of a continuation."""
        if not event.startswith(b"data:"):
            return event
        part = Part(last=True) if event.startswith(b"data: [DONE]") else self.part(event)
        if part.error:
            self.error = part.error
            return b""
        self.sent.take(part.ids, part.escaped, exact=part.exact)
        out = self._frame.chunk(part.escaped) if part.escaped else b""
        if part.finish is not None:
            self.finish = part.finish
            out += self._frame.chunk(b"", part.finish)
        if part.usage is not None:
            prompt = len(self.prompt_ids or ())
            self.usage = Usage(prompt, min(part.usage.cached_tokens, prompt), self.tokens)
        return out + self._close() if part.last else out

    def closing(self) -> bytes | None:
        """Return the events that the client still lacks, if all of the text has come; None: call `resume`."""
        is_full = self.can_continue and self.tokens and self._left is not None and self._left <= 0
        if self.finish is None and not is_full:
            return None
        if self.done:
            return b""
        if self.usage is None:
            if self.prompt_ids is None and self._wants_usage and self.can_continue:
                return None
            self.usage = Usage(len(self.prompt_ids or ()), 0, self.tokens)
        out = b""
        if self.finish is None:
            self.finish = "length"
            out = self._frame.chunk(b"", self.finish)
        return out + self._close()

    def _close(self) -> bytes:
        self.done = True
        usage = self.usage
        return (self._frame.usage(usage) if self._wants_usage and usage and usage.input_tokens else b"") + DONE


def read_usage(usage: Mapping[str, Any]) -> Usage:
    """Return a `usage` object of an answer.

    >>> read_usage({"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}})
    Usage(input_tokens=9, cached_tokens=8, output_tokens=2, retrieval_us=0, generation_us=0)
    """
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") or 0
    times = (usage.get(name) or 0 for name in ("retrieval_us", "generation_us"))
    return Usage(usage.get("prompt_tokens") or 0, cached, usage.get("completion_tokens") or 0, *times)


def completion_part(event: bytes) -> Part:
    """Take apart an event of /v1/completions, with `token_ids` where the engine names them."""
    chunk = json.loads(event[5:])
    if "error" in chunk:
        return Part(error=json.dumps(chunk["error"]))
    usage = read_usage(chunk["usage"]) if chunk.get("usage") else None
    for choice in chunk.get("choices") or ():
        ids, text = choice.get("token_ids") or [], _dumps(choice.get("text") or "")[1:-1]
        return Part(ids, text, exact=bool(ids), finish=choice.get("finish_reason"), usage=usage)
    return Part(usage=usage)


def with_usage(body: Body) -> Body:
    """Return a request that asks for usage at the end of the stream, and that can be replayed if it must be."""
    options = body.get("stream_options")
    asked = with_seed(body) if is_parsed(body) else body
    return {**asked, "stream_options": {**(options if isinstance(options, dict) else {}), "include_usage": True}}


def _same(event: bytes) -> dict[str, Any]:
    """Return what all events of an answer have in common, from its first one."""
    try:
        chunk = json.loads(event[5:]) if event.startswith(b"data: {") else {}
    except ValueError:
        return {}
    return {key: chunk[key] for key in ("id", "model", "created") if key in chunk}


def choices_of(body: Mapping[str, object]) -> int:
    """Return the number of answers that a request asks for: `n` of each prompt."""
    prompts, number = body.get("prompt"), body.get("n")
    several = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    return several * (number if isinstance(number, int) and number > 0 else 1)


def is_parsed(body: Mapping[str, object]) -> bool:
    """Return whether an engine parses or limits the answer from its first token on, or gives several ones."""
    return choices_of(body) > 1 or any(body.get(key) for key in _FROM_FIRST_TOKEN)


def _dumps(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")
