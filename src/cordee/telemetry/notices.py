"""What an agent tells the ranks of a share besides SIGTERM, which says only that they have to leave: until when.

One small file in the share's spool, written before the signal and again when there is less time. Both sides run on one
machine, so they have one clock. Another one holds a hint, for which there is no signal: that the machine may go soon.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Whoever is still there at `deadline_us`, since the Unix epoch, is killed.

    Attributes:
        machine_stays: what lies on the machine's own disks is there afterwards.
    """

    deadline_us: int
    machine_stays: bool = True

    def left_s(self) -> float:
        """Seconds until then."""
        return max(0.0, self.deadline_us / US_PER_S - time.time())


def write_notice(spool: Path, told: Told) -> None:
    """Tell the ranks; a disk that is full keeps nobody from the signal."""
    _write(spool, _NAME, asdict(told))


def write_hint(spool: Path, at_us: int, why: str) -> None:
    """Tell the ranks that the machine may go soon."""
    _write(spool, _HINT, {"at_us": at_us, "why": why})


def read_hint(spool: Path) -> tuple[int, str] | None:
    """When the agent gave the newest hint, and why."""
    try:
        body = json.loads((spool / _HINT).read_text())
        return int(body["at_us"]), str(body["why"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _write(spool: Path, name: str, body: dict[str, Any]) -> None:
    with suppress(OSError):
        spool.mkdir(parents=True, exist_ok=True)
        half = spool / f".{name}"
        half.write_text(json.dumps(body))
        os.replace(half, spool / name)  # noqa: PTH105 - atomic


def read_notice(spool: Path | None) -> Told | None:
    """What the agent has told, if anything."""
    if spool is None:
        return None
    try:
        body = json.loads((spool / _NAME).read_text())
        return Told(deadline_us=int(body["deadline_us"]), machine_stays=bool(body.get("machine_stays", True)))
    except (OSError, ValueError, LookupError, TypeError):
        return None
