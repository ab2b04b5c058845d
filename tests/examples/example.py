"""Runs one of the examples, as `python examples/<name>` does; what they import is here once, for all of them."""

# ruff: noqa: F401
import runpy
import warnings

import lightning.pytorch
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.pipelining
import torchdata.stateful_dataloader
from transformers import LlamaForCausalLM, Trainer

import cordee.train.job


def main(argv: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    runpy.run_path(argv[0], run_name="__main__")
