"""Small models that the tests trace by `module:function`."""

from collections.abc import Callable

import torch
from torch import nn


def perceptron(micro_batch: int) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Two matrices of a mebibyte each in fp32, whose inputs and outputs can be counted by hand."""
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.ReLU(), nn.Linear(512, 512, bias=False))
    rows = torch.zeros(micro_batch, 512)
    return model, lambda: model(rows).sum()


def reads_a_value() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A model that decides by a number that a fake tensor does not have."""
    model = nn.Linear(4, 4)

    def loss() -> torch.Tensor:
        out = model(torch.zeros(2, 4)).sum()
        return out if out.item() > 0 else -out

    return model, loss
