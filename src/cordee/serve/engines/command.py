"""Any command that listens on $CORDEE_PORT: its health says whether it is ready, and its streams are passed on."""

import sys
from collections.abc import Generator, Mapping
from typing import Any

from cordee.errors import InputError
from cordee.serve.engines.openai import CHAT, OpenAIStream, Part, completion_part
from cordee.serve.engines.port import Body, EngineCapacity, EngineCommand, EngineLaunch, EngineLoad, Upstream


class CommandStream(OpenAIStream):
    """A stream of an engine of which nothing is known but the OpenAI API.

    It names no tokens, so a completion goes on from the text so far, which other tokens may spell; a chat cannot go on,
    since the API does not say how an answer is continued.
    """

    rewrites = False

    def ask(self, body: Body) -> Body:
        """Return the client's request as it is."""
        return body

    def plain(self, event: bytes) -> bytes | None:
        """Leave all events to the parser."""
        return None

    def take_out(self, chunk: dict[str, Any]) -> tuple[list[int], bool]:
        """Return no tokens: the engine names none."""
        return [], False

    @property
    def can_continue(self) -> bool:
        """Return whether a continuation may begin in the middle of the text."""
        return super().can_continue and self._frame.path != CHAT and isinstance(self.body.get("prompt"), str)

    def prompt_steps(self) -> Generator[Upstream, bytes, list[int]]:
        """Ask for nothing: the prompt stays a text."""
        yield from ()
        return []

    def text_steps(self, text: str) -> Generator[Upstream, bytes, list[int]]:
        """Ask for nothing: the text stays one."""
        yield from ()
        return [-1] * len(self.sent.ids)

    def continuation(self, sampling: Body, ids: list[int], limit: int | None) -> Upstream:
        """Return the request for the text after the prompt and the text so far; an event counts as a token."""
        text = f"{self.body['prompt']}{self.sent.words()}"
        most = {} if limit is None else {"max_tokens": limit}
        asked = {**sampling, **most, "model": self.body.get("model"), "prompt": text, "stream": True}
        return Upstream(self._frame.path, asked, stream=True)

    def part(self, event: bytes) -> Part:
        """Take apart an event of a continuation."""
        return completion_part(event)


class CommandDialect:
    """The wire half of an unknown engine (`port.Dialect`)."""

    name = "command"

    def open(self, path: str, body: Mapping[str, object]) -> CommandStream:
        """Return the stream of a request that has `"stream": true`."""
        return CommandStream(path, body)


class Command:
    """The process half of an unknown engine (`port.Engine`)."""

    name = "command"
    spans_nodes = True
    size_path = load_path = ""
    sessions = None

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Return the service's own command, with CORDEE_HOST, CORDEE_PORT and CORDEE_MODEL in its environment.

        On several nodes it is started on each, and MASTER_ADDR and MASTER_PORT are free for its own rendezvous.

        Raises:
            InputError: the service has none.
        """
        if not launch.run:
            raise InputError("the engine `command` has no command", hint="give `run:`, which listens on $CORDEE_PORT")
        argv = ("/bin/sh", "-c", launch.run) if isinstance(launch.run, str) else launch.run
        env = {
            "CORDEE_HOST": launch.host,
            "CORDEE_PORT": str(launch.port),
            "CORDEE_MODEL": launch.model,
            "CORDEE_PYTHON": sys.executable,
        }
        if launch.part is not None:
            env |= {"MASTER_ADDR": launch.part.master, "MASTER_PORT": str(launch.part.ports[0])}
        return EngineCommand(tuple(argv), env)

    def capacity(self, answer: bytes) -> EngineCapacity:
        """Return no size: the engine says none."""
        return EngineCapacity()

    def load(self, answer: bytes) -> EngineLoad | None:
        """Return None: the engine does not say."""
        return None
