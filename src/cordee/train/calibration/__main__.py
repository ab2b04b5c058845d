"""`python -m cordee.train.calibration device|collectives|check`: what was measured, one JSON object a line."""

import argparse
import json
import time
from collections.abc import Sequence

import torch

from cordee.train.calibration.cases import DTYPES, cases
from cordee.train.calibration.timing import CudaDevice, Device, measure


def main(argv: Sequence[str] | None = None) -> None:
    """Do what is asked for, and print what was measured."""
    parser = argparse.ArgumentParser(prog="python -m cordee.train.calibration", description=__doc__)
    parser.add_argument("work", choices=("device",))
    parser.add_argument("--gpu", type=int, help="index; without it the CPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds")
    given = parser.parse_args(argv)
    device = Device(given.threads) if given.gpu is None else CudaDevice(given.gpu)
    for sample in measure(cases(device, given.dtype), device, given.limit):
        print(json.dumps(sample._asdict()), flush=True)


if __name__ == "__main__":
    main()
