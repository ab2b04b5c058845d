"""Runs one of the examples, as `python examples/<name>` does; what they import is here once, for all of them."""

import runpy
import warnings

import lightning.pytorch
import torch
import torchdata.stateful_dataloader
import transformers

IMPORTED = (lightning.pytorch, torchdata.stateful_dataloader, transformers)


def main(argv: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    runpy.run_path(argv[0], run_name="__main__")
