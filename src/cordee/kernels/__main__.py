"""`python -m cordee.kernels compile|check|measure`: one JSON object a line for each kernel, as soon as it is known.

A process of its own, since Triton decides when it is imported whether it interprets, and since only it needs torch.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from cordee.errors import MissingExtraError
from cordee.imports import end_uncollected
from cordee.kernels.catalogue import ARCHITECTURES, KERNELS

if TYPE_CHECKING:
    from cordee.kernels.catalogue import Checked, Compiled, Measured


def main(argv: Sequence[str] | None = None) -> None:
    """Print the records of what is asked for; a missing library is named with the exit code of its error."""
    parser = argparse.ArgumentParser(prog="python -m cordee.kernels", description=__doc__)
    parser.add_argument("work", choices=("compile", "check", "measure"))
    parser.add_argument("kernels", nargs="*", help="of these alone")
    parser.add_argument("--arch", choices=tuple(ARCHITECTURES), action="append", help="compile: of these alone")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    try:
        names = given.kernels or [kernel.name for kernel in KERNELS]
        for record in _records(given.work, names, given.arch or list(ARCHITECTURES), given.seed):
            print(json.dumps(asdict(record)), flush=True)
    except MissingExtraError as error:
        parser.exit(error.exit_code, f"{error}: {error.hint}\n")


def _records(
    work: str, names: Sequence[str], architectures: Sequence[str], seed: int
) -> "Iterator[Compiled | Checked | Measured]":
    if work == "compile":
        from cordee.kernels.compiled import compile_kernel

        wanted = [kernel for kernel in KERNELS if kernel.name in names]
        yield from (compile_kernel(kernel, each) for kernel in wanted for each in architectures)
        return
    try:
        import torch
    except ImportError:
        raise MissingExtraError("kernels are launched with torch", hint="install torch as your machine needs") from None
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    try:
        import triton  # noqa: F401
    except ImportError:
        raise MissingExtraError("kernels are written in Triton", hint="pip install 'cordee[kernels]'") from None
    if work == "check":
        from cordee.kernels.check import check

        yield from check(names, seed, "cuda" if torch.cuda.is_available() else "cpu")
    else:
        from cordee.kernels.roofline import measure

        yield from measure(names, seed)


if __name__ == "__main__":
    end_uncollected()
    main()
