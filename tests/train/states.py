"""Small states on one rank, with a checkpointer for each attempt."""

import json

import torch

from cordee.train.checkpoint.checkpointer import Checkpointer
from cordee.train.checkpoint.state import gather

WAIT_S = 60


def build(width: int = 8) -> dict:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(width, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
    opt = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": [*model[1].parameters(), *model[2].parameters()]}]
    )
    return {"model": model, "opt": opt, "sched": torch.optim.lr_scheduler.StepLR(opt, 2), "seen": 0}


def step(state: dict) -> None:
    state["opt"].zero_grad()
    state["model"](torch.randn(4, state["model"][0].in_features)).square().mean().backward()
    state["opt"].step()
    state["sched"].step()
    state["seen"] += 4


def flat(state: dict) -> tuple[dict, dict]:
    tensors, values = gather(state)
    return {name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(values))


def same(a: tuple[dict, dict], b: tuple[dict, dict]) -> bool:
    return a[1] == b[1] and a[0].keys() == b[0].keys() and all(torch.equal(a[0][name], b[0][name]) for name in a[0])


def saved(checkpointer: Checkpointer, state: dict, steps: int) -> list[tuple[dict, dict]]:
    """Open, then train and save so many steps; the state at each."""
    checkpointer.open()
    states = []
    for number in range(1, steps + 1):
        step(state)
        checkpointer.save(state, step=number, extras={"rng": torch.get_rng_state(), "at": number})
        states.append(flat(state))
        step(state)  # What is trained after the capture must not be in it.
        checkpointer.wait(WAIT_S)
    return states
