"""The two faces of an engine: `Engine` starts and probes it beside its wrapper, `Dialect` is its HTTP for the gateway.

Neither does I/O here: they say what to start, what to send, and what an answer means. A `Stream` is one request of a
client across all replicas that ever work on it.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

Body = dict[str, object]
"""The JSON object of a request."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """One request to a replica: POST with a JSON body, GET without; `stream`: its answer goes to `Stream.feed`."""

    path: str
    body: Body | None = None
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request as its client is charged for them; cached tokens are among the input tokens.

    A knowledge base says as well for how long it searched, and for how long its engine answered.
    """

    input_tokens: int
    cached_tokens: int
    output_tokens: int
    retrieval_us: int = 0
    generation_us: int = 0


class Stream(Protocol):
    """One streamed request, on whichever replica works on it: passes events on, and remembers what a resume needs.

    Attributes:
        first: the request to the first replica.
        usage: what the client is charged for; None before the last events.
        finish: the reason for which the text ends (`stop`, `length`); None before.
        done: the last event was passed on: the connection to the replica is of no more use.
        error: what the replica said instead of an answer, as its JSON text; "": nothing. The client has not got it.
        diverged: another replica computed the answer again and got a different one: nobody can go on.
    """

    first: Upstream
    usage: Usage | None
    finish: str | None
    done: bool
    error: str
    diverged: bool

    @property
    def tokens(self) -> int:
        """Return the number of output tokens that the client has got."""

    @property
    def can_continue(self) -> bool:
        """Return whether another replica goes on from the middle, and need not compute the answer again."""

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the answer as they come, and return the bytes that the client gets."""

    def resume(self) -> Generator[Upstream, bytes, None] | None:
        """Return the requests by which another replica of the same model goes on; None: it cannot be done.

        Send each request, and the answer's body back into the generator, until one with `stream` comes: its answer goes
        to `feed`; if none comes, `closing` has the rest. Half an event of the replica before is forgotten.
        """

    def closing(self) -> bytes | None:
        """Return the events that the client still lacks, if all of the text has come; None: call `resume`."""


class Dialect(Protocol):
    """The wire half of an engine."""

    @property
    def name(self) -> str:
        """Return the engine's name."""

    def open(self, path: str, body: Mapping[str, object]) -> Stream:
        """Return the stream of a request to /v1/chat/completions or /v1/completions that has `"stream": true`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePart:
    """One node's part of an engine on several nodes.

    Attributes:
        rank: of the node; that of 0 listens.
        gpus: GPUs of the replica on each node; 0: CPU slots.
        master: address of rank 0's node.
        ports: free ports there, for the rendezvous of the parts.
    """

    rank: int
    gpus: tuple[int, ...]
    master: str
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """The settings of an engine, by names of ours.

    Attributes:
        model: a folder, a .gguf file, or a name that the engine itself resolves; "": the command knows.
        served_names: the model's names in the API.
        port: a free port of `host`.
        context: longest prompt and answer of one request, in tokens; None: the model's.
        gpus: GPUs that the replica holds on this node, over which each layer is cut; 0: none, it runs on the CPU.
        threads: CPU threads; None: the engine's default.
        session_folder: where KV of paused sessions is kept; None: nowhere.
        host_cache_bytes: host memory for paused sessions; None: the engine's default.
        run: the command of the engine `command`.
        part: this node's part of an engine on several nodes; None: it is on one.
        flags: settings by their names, of the plan and of the service, over all others; a value of "" is a switch, None
            takes a setting out.
    """

    model: str
    served_names: tuple[str, ...]
    host: str
    port: int
    context: int | None = None
    gpus: int = 0
    threads: int | None = None
    session_folder: str | None = None
    host_cache_bytes: int | None = None
    run: str | tuple[str, ...] = ()
    part: EnginePart | None = None
    flags: Mapping[str, object] = field(default_factory=dict)

    def at(self, port: int) -> "EngineLaunch":
        """Return the same on another port."""
        return replace(self, port=port)


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """The words of a command, and variables over those of the wrapper."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """The size of an engine, as it says; None: it does not say. `kv_tokens` is over all slots."""

    kv_tokens: int | None = None
    slots: int | None = None
    context: int | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The requests inside an engine that run or wait, and a number that grows while it computes."""

    open: int
    progress: int


class SessionFiles(Protocol):
    """An engine that writes the KV of a slot to a file in `EngineLaunch.session_folder`, and reads it again."""

    @property
    def slots_path(self) -> str:
        """Return the path of the answer that `idle_slots` reads."""

    def idle_slots(self, answer: bytes) -> dict[int, int]:
        """Return the slots that hold the KV of a session and have no request, each with its tokens."""

    @property
    def speed_path(self) -> str:
        """Return the path of the answer that `prefill_tokens_per_s` reads."""

    def prefill_tokens_per_s(self, answer: bytes) -> float:
        """Return the speed at which prompts were computed; 0: none was."""

    def saved(self, answer: bytes) -> tuple[int, int, float]:
        """Return the tokens, the bytes and the seconds of a save, from its answer."""

    def save(self, slot: int, name: str) -> Upstream:
        """Return the request that writes a slot to a file."""

    def restore(self, slot: int, name: str) -> Upstream:
        """Return the request that reads a slot from a file."""


class Engine(Protocol):
    """The process half of an engine."""

    @property
    def name(self) -> str:
        """Return the engine's name."""

    @property
    def spans_nodes(self) -> bool:
        """Return whether it starts on several nodes."""

    @property
    def size_path(self) -> str:
        """Return the path of the answer that `capacity` reads; "": none."""

    @property
    def load_path(self) -> str:
        """Return the path of the answer that `load` reads; "": none."""

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Return how to start the engine.

        Raises:
            MissingExtraError: it is not installed.
        """

    @property
    def sessions(self) -> SessionFiles | None:
        """Return how sessions are written to files; None: they are not."""

    def capacity(self, answer: bytes) -> EngineCapacity:
        """Return the engine's size as it says itself."""

    def load(self, answer: bytes) -> EngineLoad | None:
        """Return the requests inside the engine; None: it does not say."""
