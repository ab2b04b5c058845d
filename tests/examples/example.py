"""Runs one of the examples, as `python examples/<name>` does; torch is imported here once, for all of them.

Lightning and transformers take 20 s to import: only the soak runs their examples, and each of those imports its own.
"""

import runpy
import warnings

import torch
import torch.distributed.fsdp
import torch.distributed.pipelining


def main(argv: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    runpy.run_path(argv[0], run_name="__main__")
