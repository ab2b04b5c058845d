"""The port between the executor and an engine of machines: this machine, Ray, Slurm; joined machines need none.

An engine writes an agent.json (`cordee.agent.settings.AgentSettings`) with a token from `control.node_tokens`, and
starts `python -m cordee.agent --folder F` with it. Everything else goes over the agent's link.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class Death(NamedTuple):
    """An agent of the engine is dead for certain.

    Attributes:
        node: the node's name.
        why: the reason, one sentence.
        ranks_gone: its ranks ended with it, as when the machine is gone; else its successor there ends them, and
            until then their GPUs are not free.
    """

    node: str
    why: str
    ranks_gone: bool = False


class Engine(Protocol):
    """A source of machines."""

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin to start agents; call `on_change`, on any thread, when `ended` has something new."""
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

    def retire(self) -> None:
        """Start no more agents, since the server shuts down; those that run exit by themselves."""
        ...

    def close(self) -> None:
        """Stop the engine; agents and ranks go on."""
        ...
