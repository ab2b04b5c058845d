"""The rendezvous address of an attempt's ranks: picked once, kept on disk, the same for every node."""

import json
import random
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cordee.agent.journal import write_json

# Below the ephemeral range, so that no outgoing connection of another program takes the port.
_PORTS = range(20_000, 30_000)
_TRIES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Address of rank 0, and the nodes of the attempt in the order of its leases."""

    master_addr: str
    master_port: int
    nodes: tuple[str, ...]


def known(home: Path, job_id: str, epoch: int) -> Meeting | None:
    """Return the address that this server or an earlier one picked for an attempt; None if none was picked."""
    try:
        data = json.loads(_path(home, job_id, epoch).read_text())
    except OSError:
        return None
    return Meeting(**data | {"nodes": tuple(data["nodes"])})


def agree(home: Path, job_id: str, epoch: int, nodes: Sequence[str]) -> Meeting:
    """Return the address picked for an attempt; if there is none, pick a free port and store it."""
    found = known(home, job_id, epoch)
    if found is not None:
        return found
    meeting = Meeting(master_addr="127.0.0.1", master_port=_free_port(), nodes=tuple(nodes))
    write_json(_path(home, job_id, epoch), asdict(meeting), sync=True)
    return meeting


def _path(home: Path, job_id: str, epoch: int) -> Path:
    return home / "attempts" / job_id / str(epoch) / "meeting.json"


def _free_port() -> int:
    for _ in range(_TRIES):
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port among {_TRIES} tries in {_PORTS.start}-{_PORTS.stop - 1}")
