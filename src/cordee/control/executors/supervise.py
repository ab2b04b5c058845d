"""The agent of one node as the server sees it: its process, its epoch, and the commands sent to it."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cordee.agent import wire
from cordee.agent.gpus import lock_file

LOOK_S = 0.1  # between two checks of an agent that is not connected
_RESPAWN_S_MAX = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """A node of this machine, with `slots` CPU slots in place of its GPUs."""

    name: str
    slots: int | None = None


class Supervised:
    """The agent of one node.

    Attributes:
        epoch: the node's highest known epoch; an agent with a lower one is refused.
        channel: the connection; None while the agent is not connected.
        sent: numbers of the commands sent over this connection and not confirmed.
        confirmed: numbers of the commands that the agent has on disk.
        gone: the agent has exited, and no new one shall be started.
    """

    def __init__(self, config: NodeConfig, home: Path, epoch: int) -> None:
        self.config = config
        self._home = home
        self._folder = home / "nodes" / config.name
        self._folder.mkdir(parents=True, exist_ok=True)
        # An agent leaves its stream on disk even if its NodeUp was never committed.
        on_disk = [int(path.stem) for path in self._folder.glob("*.jsonl") if path.stem.isdigit()]
        self.epoch = max([epoch, *on_disk])
        self.channel: wire.Channel | None = None
        self.sent: set[int] = set()
        self.confirmed: set[int] = set()
        self.gone = False
        self.next_look_s = 0.0
        self._child: subprocess.Popen[bytes] | None = None
        self._respawn_s = LOOK_S

    def must_send(self, number: int) -> bool:
        """Return whether a command must be sent: the agent is connected, and the command was not sent yet."""
        return self.channel is not None and number not in self.sent and number not in self.confirmed

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
        """Start an agent with the next epoch; retry ever less often on a node whose agents keep dying."""
        self.epoch += 1
        self.next_look_s = time.monotonic() + self._respawn_s
        self._respawn_s = min(2 * self._respawn_s, _RESPAWN_S_MAX)
        argv = [sys.executable, "-m", "cordee.agent", "--home", str(self._home), "--node", self.config.name]
        argv += ["--epoch", str(self.epoch)]
        if self.config.slots is not None:
            argv += ["--slots", str(self.config.slots)]
        with (self._folder / "agent.log").open("ab") as log:
            # In its own session, so that neither the terminal's signals nor the server's end reach it.
            self._child = subprocess.Popen(
                argv, cwd=self._home, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def adopt(self, channel: wire.Channel, epoch: int) -> None:
        """Take over the agent's connection."""
        self.channel, self.epoch = channel, epoch
        self._respawn_s = LOOK_S

    def hang_up(self) -> None:
        """Close the connection; commands that are not confirmed are sent again over the next one."""
        if self.channel is not None:
            self.channel.close()
        self.channel = None
        self.sent.clear()
        self.next_look_s = 0.0

    def release(self) -> None:
        """Let the agent outlive this server, without waiting for its end."""
        self.hang_up()
        if self._child is not None and self._child.poll() is None:
            self._child.returncode = 0
