"""A calibration of ranks that torchrun started: links and storage, added to what is kept of this machine's device."""

import os
import socket
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cordee.agent.calibration import files
from cordee.agent.calibration.fingerprint import CPU
from cordee.agent.calibration.probes import Number, probe
from cordee.errors import NotFoundError
from cordee.hardware.calibration import among_ranks
from cordee.hardware.catalog import Catalogue
from cordee.hardware.measured import Sample, tables_of


@dataclass(slots=True)
class Together:
    """Measurements of ranks together.

    Attributes:
        name: of the device in the catalogue.
        samples: of collectives.
        numbers: single ones.
        fractions: of the links' nameplates.
        path: the file that they were added to.
    """

    name: str
    path: Path
    samples: list[Sample] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    fractions: dict[str, float] = field(default_factory=dict)


def started_together() -> bool:
    """Return whether torchrun, or a like of it, started this process as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and {"RANK", "MASTER_ADDR"} <= os.environ.keys()


def calibrate_together(
    home: Path, *, on_gpu: bool, storage: Path | None, catalogue: Catalogue, said: Callable[[str], None]
) -> Together | None:
    """Take part in the measurements of all ranks; the first rank adds them to the file of its device.

    Args:
        home: Cordee's home; the first rank's gets the numbers.
        on_gpu: each rank has the GPU of its number on its node.
        storage: a folder that all ranks write at once; None: none.
        catalogue: with what this machine was calibrated to before.
        said: is told what is measured now.

    Returns:
        What was found; None on all ranks but the first.

    Raises:
        NotFoundError: the device of this machine was not calibrated by itself before.
        InputError: nodes have unequal numbers of ranks, or a rank cannot write the folder.
        MissingExtraError, ScriptError: the probes do not run.
    """
    words = [*(["--gpu", "0"] if on_gpu else []), *([] if storage is None else ["--to", str(storage)])]
    said(f"collectives among {os.environ['WORLD_SIZE']} ranks" + ("" if storage is None else f", storage: {storage}"))
    if os.environ["RANK"] != "0":
        for _ in probe("together", *words):
            pass
        return None
    host = socket.gethostname()
    mine = (each for each in files.kept(home, host) if (each.fingerprint.get("device") != CPU) == on_gpu)
    kept = next(mine, None)
    if kept is None:
        device = "a GPU of" if on_gpu else "the CPU of"
        hint = "run cordee calibrate there first, without torchrun: links are added to a device"
        raise NotFoundError(f"{home} has no calibration of {device} {host}", hint=hint)
    found = Together(kept.name, kept.path)
    for each in probe("together", *words):
        if isinstance(each, Sample):
            found.samples.append(each)
        elif isinstance(each, Number):
            found.numbers[each.name] = each.value
    found.numbers["collectives_spread"] = statistics.median(each.spread for each in found.samples)
    found.fractions = among_ranks(found.samples, found.numbers, catalogue.find_gpu(kept.name))
    tables = files.table_values(tables_of(found.samples))
    files.add(kept.path, kept.name, {"efficiency": found.fractions, "numbers": found.numbers, "tables": tables})
    return found
