"""The agent's own folder: agent.json, which says which node it is and where its servers are, and the machine's id.

agent.json     written by whoever starts the agent (an engine, `cordee nodes join`), readable by its owner only
machine        drawn once: two agents with one folder are on one machine
lock           held by the running agent
<epoch>.jsonl  the reports of the agent with this epoch
"""

import json
import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal

from cordee.agent.gpus import lock_file
from cordee.agent.journal import write_json
from cordee.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """The content of agent.json.

    Attributes:
        node: the node's name.
        token: the node's token, which each server of the cluster accepts for this node only.
        servers: URLs of the servers; empty with `home`.
        home: the home of a server on this machine: its URL stands in `<home>/server.json`, its logs are read there.
        fingerprint: the SHA-256 of the servers' certificate, in hexadecimal; None: the system's authorities decide.
        labels: facts about the machine, such as `{"rack": "r7"}`.
        slots: offer this many CPU slots in place of GPUs.
        address: the address at which ranks on other nodes reach this one; None: the one that dials the server.
    """

    node: str
    token: str = field(repr=False)
    servers: tuple[str, ...] = ()
    home: str | None = None
    fingerprint: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    slots: int | None = None
    address: str | None = None

    @classmethod
    def read(cls, folder: Path) -> "AgentSettings":
        """Return the settings of an agent's folder.

        Raises:
            InputError: the file is absent or cannot be used.
        """
        path = folder / "agent.json"
        try:
            found = json.loads(path.read_text())
            known = {each.name: found[each.name] for each in fields(cls) if each.name in found}
            settings = cls(**known | {"servers": tuple(known.get("servers", ()))})
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise InputError(f"{path} cannot be used: {error}", hint="`cordee nodes join` writes one") from error
        if bool(settings.servers) == bool(settings.home):
            raise InputError(f"{path} names {'both' if settings.home else 'neither'} `servers` and a `home`")
        return settings

    def write(self, folder: Path) -> None:
        """Keep the settings in an agent's folder, which is for its owner only: it will hold the orders of jobs."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(folder / "agent.json", asdict(self), mode=0o600)

    def urls(self) -> tuple[str, ...]:
        """Return the URLs of the servers; none if the home says that no server runs.

        Raises:
            InputError: what the home says cannot be read, which proves nothing.
        """
        if self.home is None:
            return self.servers
        path = Path(self.home) / "server.json"
        try:
            facts = json.loads(path.read_text())
            own, servers = str(facts["agents"]), facts.get("servers", ())
            return (own, *(str(url) for url in servers if url != own))
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} cannot be read: {error}", hint="start a server again") from error

    def pinned(self) -> str | None:
        """Return the fingerprint of the servers' certificate, which those of a pair share."""
        if self.home is None:
            return self.fingerprint
        try:
            found = json.loads((Path(self.home) / "server.json").read_text()).get("fingerprint")
        except (OSError, ValueError, AttributeError):
            return None
        return None if found is None else str(found)

    def attempts(self, folder: Path) -> Path:
        """Return the folder of all attempts on this node."""
        return (folder if self.home is None else Path(self.home)) / "attempts"


@dataclass(frozen=True, slots=True)
class AgentState:
    """The result of the newest attempt of an agent to reach a server.

    Attributes:
        state: `welcomed`, `refused`, or `away`: no server was reached, or the connection broke.
        why: the reason, if it was not welcomed.
        hint: what to do about a refusal.
    """

    state: Literal["welcomed", "refused", "away"]
    why: str = ""
    hint: str | None = None

    @classmethod
    def read(cls, folder: Path) -> "AgentState | None":
        """Return the state of a folder's agent; None if it has none yet."""
        try:
            return cls(**json.loads((folder / "state.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, folder: Path) -> None:
        """Keep the state for people and commands; without space for it, or without its folder, the agent goes on."""
        with suppress(OSError):
            if folder.exists():  # a home that was moved away must not come back as an empty one
                write_json(folder / "state.json", asdict(self))


def is_running(folder: Path) -> bool:
    """Return whether an agent runs on a folder."""
    try:
        lock = lock_file(folder / "lock") if (folder / "lock").exists() else -1
    except OSError:
        return False
    if lock is None:
        return True
    if lock >= 0:
        os.close(lock)
    return False


def machine_id(folder: Path) -> str:
    """Return the machine's id, which is drawn once into the folder.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / "machine"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        drawn = f"{socket.gethostname()}/{secrets.token_hex(8)}"
        fresh = path.with_suffix(".new")
        fresh.write_text(drawn + "\n")
        fresh.replace(path)
        return drawn
