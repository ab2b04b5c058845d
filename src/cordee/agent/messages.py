"""The messages between an agent and its server: JSON texts over one WebSocket a node (docs/decisions/0012).

A text is an object with one key, the message's name, and its fields as the value: `{"confirm": {"number": 7}}`. The
agent dials and claims its node; the server answers with a welcome or a refusal. The agent imports no pydantic, so the
types are plain dataclasses; the server checks what agents send against them (`control/agents/link.py`).
"""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Le

from cordee.reports import COUNT_MAX

PROTOCOL = 2
"""The version of this protocol; a claim with another one is refused."""

Count = Annotated[int, Ge(0), Le(COUNT_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An agent's claim of its node, the first message of a connection.

    Attributes:
        incarnation: drawn when the agent's process started.
        machine: drawn once into the agent's folder, `HOST/...`; the folder's lock admits one agent at a time.
        epoch: the epoch that a server granted to this incarnation; 0: none did.
        epoch_min: the lowest epoch that does not collide with streams on the agent's disk.
        sources: the streams with records that the agent still holds.
        clock_us: the agent's time.
    """

    incarnation: str
    machine: str
    epoch: Count
    epoch_min: Count
    sources: list[str]
    clock_us: Count
    cordee: str
    python: str
    protocol: Count = PROTOCOL


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Acceptance of a claim.

    Attributes:
        epoch: that of the agent from now on; ranks that an earlier epoch started must not go on.
        marks: the committed seqs by stream.
        lease_s: the agent ends its ranks after this time without an answer to a beat.
        beat_s: the time between two beats.
        clock_us: the server's time.
        servers: URLs of all servers of the cluster, the leader's first; empty if this one is the only one.
    """

    epoch: int
    marks: dict[str, int]
    lease_s: float
    beat_s: float
    clock_us: int
    servers: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Refusal of a claim. With `final` the node has left or belongs to a newer agent: end the ranks and exit."""

    why: str
    hint: str = ""
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Successive records of one stream, sent to the server: their seqs and their encoded events."""

    source: str
    seqs: list[Count]
    events: list[dict[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Acknowledgement that a stream is committed up to `seq`."""

    source: str
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbourhood:
    """The nodes of a cluster that give pieces of datasets to each other.

    Attributes:
        key: by which they know each other.
        sets: by the URL of a dataset, the nodes that read it, each as `Node.gives_at` has it.
    """

    key: str = field(repr=False)
    sets: dict[str, list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A heartbeat of the agent, and the server's answer with the same number; each carries its sender's time.

    Attributes:
        servers: in an answer: URLs of all servers of the cluster, if they have changed since the last message.
        queued: in an answer: URLs of the datasets of waiting jobs in the order of the queue, if they have changed.
        neighbours: in an answer: the nodes that give data to each other, if there are several and they have changed.
    """

    number: Count
    clock_us: Count
    servers: list[str] | None = None
    queued: list[str] | None = None
    neighbours: Neighbourhood | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The rendezvous of an attempt's ranks, picked by the agent of rank 0: MASTER_ADDR and MASTER_PORT.

    Attributes:
        python, torch: the versions of rank 0's interpreter, which the others must match; "": not known, not there.
    """

    address: str
    port: Annotated[int, Ge(1), Le(65535)]
    python: str = ""
    torch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A command: its event, encoded, and the JobSpec as JSON.

    Attributes:
        estimate: an `events.Estimate` as a dict, for an attempt whose job was planned.
        secrets: values by name, for a start; never stored on disk.
        meeting: for a start that goes to the agents of other ranks than 0; None: the agent of rank 0 picks it.
    """

    number: int
    event: dict[str, object]
    spec: str
    estimate: dict[str, object] | None = None
    secrets: dict[str, str] | None = field(default=None, repr=False)
    meeting: Meeting | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm:
    """Confirmation that an order is on the agent's disk; of a start at rank 0 with the meeting that it picked."""

    number: Count
    meeting: Meeting | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Request to exit when no rank group runs; with `now`, after ending the rank groups."""

    now: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """Request to dial a tunnel to an attempt on this node (`agent/tunnels.py`); it is no order, and is not confirmed.

    Attributes:
        tunnel: its number, known to nobody else.
        opening: what the client asks for: `what` is `exec`, `port` or `shell`.
    """

    tunnel: str
    job_id: str
    epoch: int
    opening: dict[str, Any]


FromAgent = Claim | Records | Beat | Confirm
FromServer = Welcome | Refused | Seen | Beat | Order | Shutdown | Dial
Message = FromAgent | FromServer

NAMES: dict[type[Any], str] = {
    cls: cls.__name__.lower() for cls in (Claim, Welcome, Refused, Records, Seen, Beat, Order, Confirm, Shutdown, Dial)
}
_BY_NAME = {name: cls for cls, name in NAMES.items()}
_BEAT = re.compile(r'\{"beat":\{"number":([0-8]?[0-9]{1,15}),"clock_us":([0-8]?[0-9]{1,15})\}\}')  # at most COUNT_MAX
_ENCODER = json.JSONEncoder(separators=(",", ":"), default=dataclasses.asdict)


def encode(message: Message) -> str:
    """Return the message as text.

    >>> encode(Confirm(number=7))
    '{"confirm":{"number":7}}'
    """
    if type(message) is Beat and (message.servers, message.queued, message.neighbours) == (None, None, None):  # most
        return f'{{"beat":{{"number":{message.number},"clock_us":{message.clock_us}}}}}'
    fields = {each.name: getattr(message, each.name) for each in dataclasses.fields(message)}
    known = {name: value for name, value in fields.items() if value is not None}
    return _ENCODER.encode({NAMES[type(message)]: known})


def read_beat(text: str) -> Beat | None:
    """Return the beat that `encode` wrote; None: it is another message, or a beat that somebody else wrote.

    >>> read_beat(encode(Beat(number=7, clock_us=1_790_000_000_000_000)))
    Beat(number=7, clock_us=1790000000000000, servers=None, queued=None, neighbours=None)
    """
    found = _BEAT.fullmatch(text)
    return None if found is None else Beat(number=int(found[1]), clock_us=int(found[2]))


def decode(text: str | bytes) -> FromServer:
    """Return the message of the agent's server.

    >>> decode('{"seen": {"source": "node/local/1", "seq": 7}}')
    Seen(source='node/local/1', seq=7)

    Raises:
        ValueError: it is not a message of this protocol.
    """
    try:
        ((name, fields),) = json.loads(text).items()
        if fields.get("meeting") is not None:
            fields["meeting"] = Meeting(**fields["meeting"])
        if fields.get("neighbours") is not None:
            fields["neighbours"] = Neighbourhood(**fields["neighbours"])
        message: FromServer = _BY_NAME[name](**fields)
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a message: {text[:200]!r}") from error
    return message
