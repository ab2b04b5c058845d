"""The software that a rank runs on, kept beside its attempt, and what of it has changed when another attempt goes on.

It is read once, when the checkpoint has been loaded: from names of folders, not from the packages themselves.
"""

import json
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

_FILE = "software.json"
_NAMED = 5
_DRIVER = Path("/proc/driver/nvidia/version")


def software_here() -> dict[str, str]:
    """Return the versions of Python, torch, CUDA, the driver and all packages by name."""
    found = {}
    for folder in reversed([each for each in sys.path if each]):  # the first folder wins
        for path in Path(folder).glob("*.dist-info"):
            name, _, version = path.name.removesuffix(".dist-info").partition("-")
            found[name.lower().replace("_", "-")] = version
    driver = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _DRIVER.read_text()) if _DRIVER.exists() else None
    own = {"Python": platform.python_version(), "CUDA": torch.version.cuda or "none"}
    return {**found, **own, "torch": torch.__version__, "driver": driver[1] if driver else "none"}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the changes of versions, those that matter most first.

    >>> changes({"Python": "3.11.7", "numpy": "1.26"}, {"Python": "3.12.1", "numpy": "1.26", "triton": "3.1"})
    ['Python 3.11.7 -> 3.12.1', 'triton none -> 3.1']
    """
    first = ("Python", "torch", "CUDA", "driver")
    rank = {name: number for number, name in enumerate(first)}
    names = sorted(before.keys() | now.keys(), key=lambda name: (rank.get(name, len(first)), name))
    pairs = ((name, before.get(name, "none"), now.get(name, "none")) for name in names)
    return [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]


def software_changed(spool: Path, saved_by: int | None) -> str | None:
    """Keep the software of this attempt, and return what has changed since the attempt that saved, in one sentence.

    Args:
        spool: of this attempt, `attempts/<job>/<epoch>/<node>/spool`.
        saved_by: the epoch of the attempt that saved the checkpoint; None: there is no checkpoint.

    None is returned if nothing has changed, or that attempt did not run on this node.
    """
    try:
        now = software_here()
        (spool.parent / _FILE).write_text(json.dumps(now, indent=1, sort_keys=True))
        before = json.loads((spool.parents[2] / str(saved_by) / spool.parent.name / _FILE).read_text())
    except (OSError, ValueError):
        return None
    found = changes(before, now)
    if not found:
        return None
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"the software has changed since attempt {saved_by} saved: {', '.join(found[:_NAMED])}{more}"
