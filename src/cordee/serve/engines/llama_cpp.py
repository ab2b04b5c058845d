"""llama.cpp: started as `llama-server` or by the wheel xllamacpp, and its dialect.

Tokens of a stream: llama.cpp's own /completion names them, but its OpenAI routes do so only in `logprobs`; with
`post_sampling_probs` these cost no pass over the vocabulary. They name the last token of an event only, and the engine
holds back text that is half a character or may become a stop word: `timings` say how many tokens there were. Both are
asked for, and taken out again.
"""

import importlib.util
import json
import shutil
import sys
from collections.abc import Generator, Mapping
from typing import Any

from cordee.errors import MissingExtraError
from cordee.serve.engines.openai import CHAT, END, OpenAIStream, Part, Steps, is_parsed, with_usage
from cordee.serve.engines.port import Body, EngineCapacity, EngineCommand, EngineLaunch, EngineLoad, Upstream, Usage
from cordee.serve.engines.replay import with_seed
from cordee.serve.engines.words import sum_of, words

# The parts of an event with one token, of /v1/chat/completions, of /v1/completions and of /completion.
_CHAT_TEXT, _CHAT_PROBS, _CHAT_REST = b'"delta":{"content":"', b'"},"logprobs":{"content":[{"id":', b'}],"created":'
_TEXT, _PROBS, _REST = b'"text":"', b'","index":0,"logprobs":{"content":[{"id":', b',"finish_reason":'
_TIMINGS, _MADE = b',"timings":{', b'"predicted_n":'
_OWN_TEXT, _OWN_TOKENS, _OWN_STOP = b'"content":"', b'","tokens":[', b'],"stop":false'
_OWN_MADE = b'"tokens_predicted":'

SLOTS = 4
"""Slots of an engine for which neither the plan nor the service names a number."""

_TEMPLATE = frozenset(("messages", "add_generation_prompt", "chat_template_kwargs", "reasoning_format"))
_FINISH = {"eos": "stop", "word": "stop", "limit": "length"}


class LlamaStream(OpenAIStream):
    """A stream of llama.cpp's server."""

    def __init__(self, path: str, body: Mapping[str, object]) -> None:
        super().__init__(path, body)
        self._made = 0  # Tokens that the replica has made.

    def ask(self, body: Body) -> Body:
        """Return the client's request with what this needs: usage, and the tokens of each event."""
        body = with_seed(body)  # It costs nothing, and thoughts, which nobody announces, can be replayed.
        if is_parsed(body):  # It is replayed, so its tokens are not needed; with tools, log probabilities are refused.
            return with_usage(body)
        probs: Body = {"logprobs": True, "top_logprobs": 1} if "messages" in body else {"logprobs": 1}
        return with_usage({**body, **probs, "post_sampling_probs": True, "timings_per_token": True})

    def plain(self, event: bytes) -> bytes | None:
        """Take an event that is one token of text, and return what the client gets; None: it is another one."""
        is_chat = self._frame.path == CHAT
        mark, probs, rest = (_CHAT_TEXT, _CHAT_PROBS, _CHAT_REST) if is_chat else (_TEXT, _PROBS, _REST)
        start = event.find(mark) + len(mark)
        end = event.find(probs, start)
        tail = event.find(rest, end)
        timings = event.find(_TIMINGS, tail)
        made = event.find(_MADE, timings)
        if not len(mark) <= start <= end < tail < timings < made or self.body.get("logprobs"):
            return None
        number, escaped, before = end + len(probs), event[start:end], self._made
        try:
            token = int(event[number : event.find(b",", number)])
            self._made = int(event[made + len(_MADE) : event.find(b",", made + 1)])
        except ValueError:  # In another order than this version's.
            return None
        self.sent.take([token], escaped, exact=self._made == before + 1)
        return event[:end] + (b'"}' if is_chat else b'","index":0,"logprobs":null') + event[tail:timings] + b"}" + END

    def take_out(self, chunk: dict[str, Any]) -> tuple[list[int], bool]:
        """Return the tokens of a parsed event, and whether these are all; take out what only `ask` asked for."""
        ids = list[int]()
        for choice in chunk.get("choices") or ():
            probs = choice.get("logprobs")
            ids += [each["id"] for each in (probs or {}).get("content") or () if "id" in each]
            if probs is not None and not self.body.get("logprobs"):
                choice["logprobs"] = None
        before = self._made
        if not self.body.get("timings_per_token"):
            self._made = chunk.pop("timings", {}).get("predicted_n", before)
        return ids, self._made - before <= len(ids)

    def resume(self) -> Steps | None:
        """Return the requests by which another replica of the same model goes on; None: it cannot be done."""
        self._made = 0
        return super().resume()

    def prompt_steps(self) -> Generator[Upstream, bytes, list[int]]:
        """Ask for the tokens of the prompt."""
        prompt = self.body.get("prompt")
        if self._frame.path == CHAT:
            template = {key: value for key, value in self.body.items() if key in _TEMPLATE}
            prompt = json.loads((yield Upstream("/apply-template", template)))["prompt"]
        return (yield from self._tokens(prompt, special=True))

    def text_steps(self, text: str) -> Generator[Upstream, bytes, list[int]]:
        """Ask for the tokens of a text."""
        return (yield from self._tokens(text, special=False))

    def _tokens(self, text: object, *, special: bool) -> Generator[Upstream, bytes, list[int]]:
        if isinstance(text, list) and all(isinstance(each, int) for each in text):
            return text
        answer = yield Upstream("/tokenize", {"content": text, "add_special": special, "parse_special": special})
        return [int(each) for each in json.loads(answer)["tokens"]]

    def continuation(self, sampling: Body, ids: list[int], limit: int | None) -> Upstream:
        """Return the request for the tokens after `ids`, `limit` at most."""
        most = {} if limit is None else {"n_predict": limit}
        asked = {**sampling, **most, "prompt": ids, "stream": True, "return_tokens": True}
        return Upstream("/completion", asked, stream=True)

    def part(self, event: bytes) -> Part:
        """Take apart an event of a continuation, which is of llama.cpp's own form."""
        start = event.find(_OWN_TEXT) + len(_OWN_TEXT)
        end = event.find(_OWN_TOKENS, start)
        stop = event.find(_OWN_STOP, end)
        made = event.find(_OWN_MADE, stop)
        if len(_OWN_TEXT) <= start <= end < stop < made:
            ids = [int(each) for each in event[end + len(_OWN_TOKENS) : stop].split(b",") if each]
            before, self._made = self._made, int(event[made + len(_OWN_MADE) : event.find(b",", made + 1)])
            return Part(ids, event[start:end], exact=self._made - before == len(ids))
        return self._last_part(json.loads(event[5:]))

    def _last_part(self, chunk: dict[str, Any]) -> Part:
        if "error" in chunk or not chunk.get("stop"):
            return Part(error=json.dumps(chunk))
        evaluated, timings = chunk.get("tokens_evaluated", 0), chunk.get("timings") or {}
        usage = Usage(evaluated, timings.get("cache_n", 0), chunk.get("tokens_predicted", 0))
        text = json.dumps(chunk.get("content") or "", ensure_ascii=False)[1:-1].encode(errors="surrogatepass")
        finish = _FINISH.get(chunk.get("stop_type", ""), "stop")
        return Part(chunk.get("tokens") or [], text, finish=finish, usage=usage, last=True)


class LlamaDialect:
    """The wire half of llama.cpp (`port.Dialect`)."""

    name = "llama.cpp"

    def open(self, path: str, body: Mapping[str, object]) -> LlamaStream:
        """Return the stream of a request that has `"stream": true`."""
        return LlamaStream(path, body)


class LlamaSessions:
    """The KV of llama.cpp's slots in files (`port.SessionFiles`)."""

    slots_path, speed_path = "/slots", "/metrics"

    def idle_slots(self, answer: bytes) -> dict[int, int]:
        """Return the slots that hold the KV of a session and have no request, each with its tokens."""
        # Of a slot that was never used it says nothing about a prompt.
        slots = [each for each in json.loads(answer) if not each["is_processing"]]
        return {each["id"]: each["n_prompt_tokens"] for each in slots if each.get("n_prompt_tokens")}

    def prefill_tokens_per_s(self, answer: bytes) -> float:
        """Return the speed at which prompts were computed; 0: none was."""
        return float(sum_of(answer, "llamacpp:prompt_tokens_seconds") or 0)

    def saved(self, answer: bytes) -> tuple[int, int, float]:
        """Return the tokens, the bytes and the seconds of a save, from its answer."""
        found = json.loads(answer)
        return found["n_saved"], found["n_written"], found["timings"]["save_ms"] / 1e3

    def save(self, slot: int, name: str) -> Upstream:
        """Return the request that writes a slot to a file."""
        return Upstream(f"/slots/{slot}?action=save", {"filename": name})

    def restore(self, slot: int, name: str) -> Upstream:
        """Return the request that reads a slot from a file."""
        return Upstream(f"/slots/{slot}?action=restore", {"filename": name})


class LlamaCpp:
    """The process half of llama.cpp (`port.Engine`)."""

    name = "llama.cpp"
    spans_nodes = False
    size_path = "/props"
    sessions = LlamaSessions()
    load_path = "/metrics"

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Return how to start the engine.

        Raises:
            MissingExtraError: it is not installed.
        """
        binary = shutil.which("llama-server")
        if binary is None and importlib.util.find_spec("xllamacpp") is None:
            raise MissingExtraError(
                "the engine llama.cpp is not installed: there is neither llama-server on PATH nor xllamacpp",
                hint="pip install 'cordee[serve]'; for CUDA, a wheel of xllamacpp for it, or build llama-server",
            )
        slots = int(str(launch.flags.get("--parallel") or launch.flags.get("-np") or SLOTS))
        settings = {
            "--model": launch.model,
            "--alias": ",".join(launch.served_names),
            "--host": launch.host,
            "--port": launch.port,
            "--parallel": slots,
            # The context is divided among the slots.
            "--ctx-size": None if launch.context is None else slots * launch.context,
            "--n-gpu-layers": "all" if launch.gpus else 0,
            "--split-mode": "tensor" if launch.gpus > 1 else None,
            "--threads": launch.threads,
            "--slot-save-path": launch.session_folder,
            # A session leaves its slot for there when another request needs it.
            "--cache-ram": None if launch.host_cache_bytes is None else launch.host_cache_bytes >> 20,
            "--metrics": "",
            "--props": "",
            "--no-webui": "",
            **launch.flags,
        }
        program = (binary,) if binary else (sys.executable, "-m", "cordee.serve.engines.llama_server")
        return EngineCommand((*program, *words(settings)))

    def capacity(self, answer: bytes) -> EngineCapacity:
        """Return the engine's size as it says itself."""
        props = json.loads(answer)
        slots, context = props["total_slots"], props["default_generation_settings"]["n_ctx"]
        return EngineCapacity(kv_tokens=slots * context, slots=slots, context=context)

    def load(self, answer: bytes) -> EngineLoad | None:
        """Return the requests inside the engine; None: it does not say."""
        is_open = sum_of(answer, "llamacpp:requests_processing", "llamacpp:requests_deferred")
        done = sum_of(answer, "llamacpp:n_decode_total", "llamacpp:prompt_tokens_total")
        return None if is_open is None else EngineLoad(is_open, done or 0)
