"""Nodes, their reservations and maintenance, tokens with which they join, and tickets of browsers."""

from typing import Annotated

from pydantic import Field

from cordee.answers.view import View


class NodeView(View):
    """A node.

    `used` names the attempt that holds each GPU; `unavailable` are GPUs that cannot be leased, each with its reason in
    `unavailable_why`. `domain` is block, rack and an island that spans nodes, outermost first, where they are known;
    `island_gpus` is 0 where an island is the whole node. `down_why` says why the node is down.
    `reachable` is false while its agent is silent; `refused` counts its reports that were refused; `clock_off_us`
    is its clock minus the server's. `cordoned_by` is the operator who took the node out of use; with `drains` its
    attempts got notice too. `reserved` has its reservations in words.
    """

    name: str
    up: bool
    epoch: int
    gpu_name: str
    gpus: int
    used: dict[int, str]
    unavailable: list[int]
    micro_usd_per_gpu_hour: int
    price_source: str
    cordoned_by: str | None = None
    cordon_why: str = ""
    drains: bool = False
    down_why: str = ""
    reachable: bool = True
    refused: int = 0
    clock_off_us: int = 0
    unavailable_why: list[str] = Field([])
    domain: list[str] = Field([])
    island_gpus: int = 0
    capacity: str = "on-demand"
    cpu_milli: int | None = None
    memory_bytes: int | None = None
    software: list[str] = Field([])
    reserved: list[str] = Field([])


class NodeOrder(View):
    """An operator's reason to cordon, drain or uncordon a node."""

    why: Annotated[str, Field(max_length=1000)] = ""


class MaintenanceOrder(NodeOrder):
    """A request to book a node for maintenance: its attempts have left by `from_us`."""

    from_us: Annotated[int, Field(ge=0, le=2**62)]
    until_us: Annotated[int, Field(ge=0, le=2**62)]


class MaintenanceView(View):
    """A node's maintenance, to come or under way; `began` says whether nothing starts there any more."""

    booking: str
    node: str
    from_us: int
    until_us: int
    by: str
    why: str
    began: bool


class ReservationOrder(NodeOrder):
    """A request to reserve `nodes`, or whole nodes with at least `gpus` GPUs, for the jobs of a queue or of a user.

    Without either it is for the user who asks.
    """

    nodes: Annotated[list[str], Field(max_length=10_000)] = Field([])
    gpus: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    from_us: Annotated[int, Field(ge=0, le=2**62)]
    until_us: Annotated[int, Field(ge=0, le=2**62)]
    queue: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    user: Annotated[str, Field(min_length=1, max_length=100)] | None = None


class ReservationView(View):
    """A reservation of nodes, to come or under way; `began`: no job of others starts there any more."""

    reservation: str
    nodes: list[str]
    from_us: int
    until_us: int
    queue: str | None
    user: str | None
    by: str
    why: str
    began: bool


class JoinTokenRequest(View):
    """A request for a join token: good for `uses` nodes and `for_s` seconds."""

    uses: Annotated[int, Field(ge=1, le=100_000)] = 1
    for_s: Annotated[int, Field(ge=1, le=366 * 86_400)] = 3600


class JoinTokenView(View):
    """A join token, and the URL at which a machine presents it."""

    token: str
    url: str
    uses: int
    expires_us: int


class JoinRequest(View):
    """A machine's request to become a node; `machine` identifies it, so that it may join again under its name."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    machine: Annotated[str, Field(min_length=1, max_length=300)]


class Joined(View):
    """A node's own token, and the URLs of the servers that accept it."""

    node: str
    token: str
    servers: list[str]


class Leaving(View):
    """A node that leaves; it has left when no attempt holds it."""

    node: str
    attempts: int


class WebTicketView(View):
    """The address at which a browser logs in as a user, once and within two minutes."""

    url: str
