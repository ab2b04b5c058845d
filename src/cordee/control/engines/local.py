"""The engine of this machine: one agent a node, each a separate process that outlives the server."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cordee.agent.gpus import lock_file
from cordee.agent.settings import AgentSettings
from cordee.control.engines.port import Death
from cordee.control.node_tokens import NodeTokens

_RESPAWN_S_MIN, _RESPAWN_S_MAX = 0.1, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """A node of this machine, with `slots` CPU slots in place of its GPUs."""

    name: str
    slots: int | None = None


class LocalEngine:
    """The agents of this machine's nodes; a dead one is replaced, ever more slowly if agents keep dying.

    Args:
        home: the server's; an agent finds the server by the home's `server.json` (`agents`: URL).
        nodes: the nodes of this machine.
        tokens: issues the nodes' tokens.
    """

    def __init__(self, home: Path, nodes: Sequence[NodeConfig], tokens: NodeTokens) -> None:
        self._home = home
        self._tokens = tokens
        self._nodes = {config.name: _LocalNode(home, config) for config in nodes}
        self._retired = False

    def start(self, on_change: Callable[[], None], is_connected: Callable[[str], bool]) -> None:
        """Write the agents' settings: agents that run already read them when they dial again."""
        for node in self._nodes.values():
            node.configure(self._tokens.issue(node.config.name))

    def owns(self, node: str) -> bool:
        """Return whether it is a node of this machine."""
        return node in self._nodes

    def ended(self) -> list[Death]:
        """Return the nodes without an agent, and start agents there."""
        dead = [node for node in self._nodes.values() if not node.is_alive()]
        if not self._retired:
            for node in dead:
                node.spawn()
        return [Death(node.config.name, "its agent is gone") for node in dead]

    def reclaims(self) -> tuple[()]:
        """Return nothing: the agent watches the cloud's notices itself."""
        return ()

    def want(self, gpus: int) -> None:
        """Ignore the wish: this machine does not grow."""

    def spare_nodes(self) -> int:
        """Return 0: this machine does not grow."""
        return 0

    def missing(self) -> str:
        """Return where the agents log."""
        return f"its log is in {self._home / 'nodes'}"

    def retire(self) -> None:
        """Start no more agents."""
        self._retired = True

    def close(self) -> None:
        """Let the agents outlive this server."""
        for node in self._nodes.values():
            node.release()


class _LocalNode:
    """One node of this machine, and the agent that was started for it."""

    def __init__(self, home: Path, config: NodeConfig) -> None:
        self.config = config
        self._home = home
        self._folder = home / "nodes" / config.name
        self._child: subprocess.Popen[bytes] | None = None
        self._respawn_s = _RESPAWN_S_MIN
        self._next_s = 0.0

    def configure(self, token: str) -> None:
        settings = AgentSettings(node=self.config.name, token=token, home=str(self._home), slots=self.config.slots)
        settings.write(self._folder)

    def is_alive(self) -> bool:
        """Return whether an agent runs: a process holds the node's lock, or was started to take it."""
        if self._child is not None:
            if self._child.poll() is None:
                return True
            self._child = None
        lock = lock_file(self._folder / "lock")
        if lock is None:
            return True
        os.close(lock)
        return False

    def spawn(self) -> None:
        """Start an agent, unless the last one was started a moment ago.

        Raises:
            OSError: that is not possible now.
        """
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        lived = now_s > self._next_s + _RESPAWN_S_MAX
        self._respawn_s = _RESPAWN_S_MIN if lived else min(2 * self._respawn_s, _RESPAWN_S_MAX)
        self._next_s = now_s + self._respawn_s
        argv = [sys.executable, "-m", "cordee.agent", "--folder", str(self._folder)]
        with (self._folder / "agent.log").open("ab") as log:
            # In its own session, so that neither the terminal's signals nor the server's end reach it.
            self._child = subprocess.Popen(
                argv, cwd=self._home, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def release(self) -> None:
        """Let the agent outlive this server, without waiting for its end."""
        if self._child is not None and self._child.poll() is None:
            self._child.returncode = 0
