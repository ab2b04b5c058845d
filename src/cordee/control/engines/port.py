"""The port between the executor and an engine of machines: this machine, Ray, Slurm; joined machines need none.

An engine writes an agent.json (`cordee.agent.settings.AgentSettings`) with a token from `control.node_tokens`, and
starts `python -m cordee.agent.keeper --folder F` with it, or keeps `python -m cordee.agent` running itself. Everything
else goes over the agent's link.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Death(NamedTuple):
    """An agent of the engine is dead for certain.

    Attributes:
        node: the node's name.
        why: the reason, one sentence; with `ranks_gone` it is another one for each agent of the node.
        ranks_gone: its ranks ended with it, as when the machine is gone; else its successor there ends them, and
            until then their GPUs are not free.
    """

    node: str
    why: str
    ranks_gone: bool = False


class Reclaim(NamedTuple):
    """A node that its cluster takes back at the deadline."""

    node: str
    deadline_us: int


@dataclass(frozen=True, slots=True)
class Host:
    """The part of the server that an engine may ask; callable on each thread.

    Attributes:
        join: returns the command with which a machine joins, with a new token of one use; a name can be added.
        is_held: returns whether an attempt holds GPUs of the node.
        dismiss: makes the node's agent exit once no rank group runs there.
    """

    join: Callable[[], Sequence[str]]
    is_held: Callable[[str], bool]
    dismiss: Callable[[str], None]


class Engine(Protocol):
    """A source of machines."""

    def start(self, on_change: Callable[[], None], is_connected: Callable[[str], bool]) -> None:
        """Begin to start agents.

        Args:
            on_change: to be called, on any thread, when `ended` or `reclaims` has something new.
            is_connected: returns whether a node's agent is connected; callable on any thread.
        """
        ...

    def owns(self, node: str) -> bool:
        """Return whether the engine starts the agents of this node."""
        ...

    def ended(self) -> Sequence[Death]:
        """Return the nodes of this engine without a living agent, and start agents there unless `retire` was called.

        The executor's thread calls it after `on_change`, and often while a node of the engine is not connected. A
        death may be returned again and again: the executor counts it once for each agent.
        """
        ...

    def reclaims(self) -> Sequence[Reclaim]:
        """Return the nodes that will be taken back; one may be returned again and again."""
        ...

    def want(self, gpus: int) -> None:
        """Note that queued jobs would use this number of further GPUs; an engine that cannot grow ignores it."""
        ...

    def spare_nodes(self) -> int:
        """Return the number of further nodes, like those that it has or had, that the engine may still bring."""
        ...

    def missing(self) -> str:
        """Return the reason, with a hint, why no agent has come up."""
        ...

    def retire(self) -> None:
        """Start no more agents, since the server shuts down; those that run exit by themselves."""
        ...

    def close(self) -> None:
        """Stop the engine; agents and ranks go on."""
        ...
