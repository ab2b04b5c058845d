"""The dialect of engines that name the tokens of each event on request: vLLM, and our server around transformers.

`return_token_ids` adds `prompt_token_ids` to the first event and `token_ids` to each choice. A continuation is a
completion whose prompt is a list of tokens.
"""

import json
from collections.abc import Generator, Mapping
from typing import Any

from cordee.serve.engines.openai import CHAT, COMPLETIONS, OpenAIStream, Part, completion_part, with_usage
from cordee.serve.engines.port import Body, Upstream

_CHAT_TEXT, _TEXT = b'"delta":{"content":"', b'"text":"'
_IDS, _NO_PROMPT = b',"token_ids":[', b',"prompt_token_ids":null'
# What follows a text; within a JSON string the second quote would have a backslash before it.
_CHAT_END, _END = b'"},"', b'","'

_TEMPLATE = frozenset(("model", "messages", "chat_template", "chat_template_kwargs", "add_generation_prompt"))


class TokenIdStream(OpenAIStream):
    """A stream whose events name their tokens."""

    def ask(self, body: Body) -> Body:
        """Return the client's request with what this needs: usage, and the tokens of each event."""
        return with_usage({**body, "return_token_ids": True})

    def plain(self, event: bytes) -> bytes | None:
        """Take an event that is one piece of text, and return what the client gets; None: it is another one."""
        if self.prompt_ids is None or self.body.get("return_token_ids"):
            return None  # The first event names the prompt's tokens.
        mark, after = (_CHAT_TEXT, _CHAT_END) if self._frame.path == CHAT else (_TEXT, _END)
        start = event.find(mark) + len(mark)
        end = event.find(after, start)
        ids = event.find(_IDS, end)
        close = event.find(b"]", ids)
        is_last = b'"finish_reason":null' not in event
        if not len(mark) <= start <= end < ids < close or is_last or b'"logprobs":{' in event:
            return None
        try:
            named = [int(each) for each in event[ids + len(_IDS) : close].split(b",") if each]
        except ValueError:
            return None
        self.sent.take(named, event[start:end], exact=bool(named))
        return (event[:ids] + event[close + 1 :]).replace(_NO_PROMPT, b"")

    def take_out(self, chunk: dict[str, Any]) -> tuple[list[int], bool]:
        """Return the tokens of a parsed event, and whether these are all; take out what only `ask` asked for."""
        keep = bool(self.body.get("return_token_ids"))
        ids, holders = list[int](), [chunk, *(chunk.get("choices") or ())]
        for holder in holders:
            if isinstance(prompt := holder.get("prompt_token_ids"), list):
                self.prompt_ids = prompt
            if isinstance(named := holder.get("token_ids"), list):
                ids += named
            if not keep:
                holder.pop("prompt_token_ids", None)
                holder.pop("token_ids", None)
        return ids, True

    def prompt_steps(self) -> Generator[Upstream, bytes, list[int]]:
        """Ask for the tokens of the prompt."""
        if self._frame.path == CHAT:
            asked = {key: value for key, value in self.body.items() if key in _TEMPLATE}
            return (yield from self._tokens(asked))
        prompt = self.body.get("prompt")
        if isinstance(prompt, list) and all(isinstance(each, int) for each in prompt):
            return prompt
        return (yield from self._tokens({"model": self.body.get("model"), "prompt": prompt}))

    def text_steps(self, text: str) -> Generator[Upstream, bytes, list[int]]:
        """Ask for the tokens of a text."""
        asked = {"model": self.body.get("model"), "prompt": text, "add_special_tokens": False}
        return (yield from self._tokens(asked))

    def _tokens(self, asked: Body) -> Generator[Upstream, bytes, list[int]]:
        answer = yield Upstream("/tokenize", asked)
        return [int(each) for each in json.loads(answer)["tokens"]]

    def continuation(self, sampling: Body, ids: list[int], limit: int | None) -> Upstream:
        """Return the request for the tokens after `ids`, `limit` at most."""
        # A completion without a limit is one of 16 tokens; a chat without one, to the end of the context.
        most: Body = {} if limit is None and self._frame.path != CHAT else {"max_tokens": limit}
        asked = {**sampling, **most, "model": self.body.get("model"), "prompt": ids, "stream": True}
        return Upstream(COMPLETIONS, with_usage({**asked, "return_token_ids": True}), stream=True)

    def part(self, event: bytes) -> Part:
        """Take apart an event of a continuation."""
        return completion_part(event)


class TokenIdDialect:
    """The wire half of an engine that names tokens (`port.Dialect`)."""

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, path: str, body: Mapping[str, object]) -> TokenIdStream:
        """Return the stream of a request that has `"stream": true`."""
        return TokenIdStream(path, body)
