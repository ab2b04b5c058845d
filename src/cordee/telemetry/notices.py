"""Notices, hints and models to hold, from an agent to its ranks, as small files in their spool.

The agent writes a notice before it sends SIGTERM, since a signal cannot carry a deadline, and again when the deadline
moves closer. Both sides run on one machine, so they share a clock. A hint says that the machine may go; it comes
without a signal.
"""

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cordee.units import US_PER_S

_NAME = "notice.json"
_HINT = "hint.json"
_MODEL = "model.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A notice: processes that still run at `deadline_us`, in microseconds since the Unix epoch, are killed.

    Attributes:
        machine_stays: the machine's own disks can be read afterwards.
    """

    deadline_us: int
    machine_stays: bool = True

    def left_s(self) -> float:
        """Return the seconds until the deadline."""
        return max(0.0, self.deadline_us / US_PER_S - time.time())


def write_notice(spool: Path, notice: Notice) -> None:
    """Write the notice for the ranks; a failure, as on a full disk, is ignored: the signal follows anyway."""
    _write(spool, _NAME, asdict(notice))


def write_hint(spool: Path, at_us: int, why: str) -> None:
    """Write the hint that the machine may go."""
    _write(spool, _HINT, {"at_us": at_us, "why": why})


def read_hint(spool: Path) -> tuple[int, str] | None:
    """Return the time of the newest hint, and its reason; None without one."""
    try:
        body = json.loads((spool / _HINT).read_text())
        return int(body["at_us"]), str(body["why"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def write_model(spool: Path, model: str, number: int) -> None:
    """Write the model that a replica shall hold, unless an order of a higher number, which is newer, is there.

    Raises:
        OSError: it cannot be written.
    """
    if number > _model_order(spool)[1]:
        _replace(spool, _MODEL, {"model": model, "number": number})


def read_model(spool: Path) -> str | None:
    """Return the model that a replica shall hold; None: none was ordered yet."""
    return _model_order(spool)[0]


def _model_order(spool: Path) -> tuple[str | None, int]:
    try:
        body = json.loads((spool / _MODEL).read_text())
        return str(body["model"]), int(body["number"])
    except (OSError, ValueError, LookupError, TypeError):
        return None, 0


def _write(spool: Path, name: str, body: dict[str, Any]) -> None:
    with suppress(OSError):
        _replace(spool, name, body)


def _replace(spool: Path, name: str, body: dict[str, Any]) -> None:
    spool.mkdir(parents=True, exist_ok=True)
    half = spool / f".{name}"
    half.write_text(json.dumps(body))
    os.replace(half, spool / name)  # noqa: PTH105 - atomic


def read_notice(spool: Path | None) -> Notice | None:
    """Return the newest notice; None without one."""
    if spool is None:
        return None
    try:
        body = json.loads((spool / _NAME).read_text())
        return Notice(deadline_us=int(body["deadline_us"]), machine_stays=bool(body.get("machine_stays", True)))
    except (OSError, ValueError, LookupError, TypeError):
        return None
