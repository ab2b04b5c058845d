"""`python -m cordee.train.calibration device|collectives|together|step`: what was measured, one JSON object a line."""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cordee.errors import InputError, MissingExtraError
from cordee.imports import end_uncollected
from cordee.train.calibration.beyond import beyond
from cordee.train.calibration.cases import DTYPES, Maker, cases
from cordee.train.calibration.collectives import measure_collectives
from cordee.train.calibration.memory import measure_memory, measure_sustained
from cordee.train.calibration.pace import Pace
from cordee.train.calibration.real_step import Steps, real_steps
from cordee.train.calibration.sweeps import measure
from cordee.train.calibration.timing import CudaDevice, Device, keep_memory
from cordee.train.calibration.together import STORAGE_BYTES, measure_together
from cordee.train.calibration.transfers import measure_copies

COPIES_S = 20.0


def main(argv: Sequence[str] | None = None) -> None:
    """Do what is asked for, and print what was measured."""
    parser = argparse.ArgumentParser(prog="python -m cordee.train.calibration", description=__doc__)
    parser.add_argument("work", choices=("device", "collectives", "together", "step"))
    parser.add_argument("--gpu", type=int, help="index; without it the CPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds")
    parser.add_argument("--known", type=float, help="seconds of the reference in an earlier calibration")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--to", type=Path, help="together: a folder that every rank writes at once")
    parser.add_argument("--bytes", type=int, default=STORAGE_BYTES, help="together: that a rank writes")
    parser.add_argument("--config", type=Path, help="step: a config.json")
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2, help="step: of the model; 0: all")
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args(argv)
    try:
        _print(given)
    except (MissingExtraError, InputError) as error:
        parser.exit(error.exit_code, f"{error.message}: {error.hint}\n")


def _print(given: argparse.Namespace) -> None:
    if given.work == "collectives":
        found = measure_collectives(given.ranks, on_gpu=given.gpu is not None)
    elif given.work == "together":
        found = measure_together(given.to, on_gpu=given.gpu is not None, storage_bytes=given.bytes)
    elif given.work == "step":
        wanted = Steps(given.seq, given.batch, given.layers, given.steps, given.dtype)
        found = real_steps(given.config, wanted, _of(given))
    else:
        found = _device(given)
    for record in found:
        print(json.dumps(record), flush=True)


def _of(given: argparse.Namespace) -> Device:
    return Device(given.threads) if given.gpu is None else CudaDevice(given.gpu)


def _device(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    keep_memory()
    device = _of(given)
    yield from measure_memory(device)
    yield from measure_sustained(device)
    make = Maker(device, given.dtype)
    more, refused = beyond(make)
    yield from ({"refused": each.what, "why": each.why} for each in refused)
    listed = [*cases(make), *more]
    pace = Pace(device, listed, given.known)
    yield from (sample._asdict() for sample in measure(listed, device, given.limit, pace))
    yield from ({"number": name, "value": value} for name, value in pace.numbers().items())
    if isinstance(device, CudaDevice):
        yield from (sample._asdict() for sample in measure_copies(device, COPIES_S))


if __name__ == "__main__":
    end_uncollected()
    main()
