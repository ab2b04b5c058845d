"""Write `checkpoint_0_1`: two jobs' checkpoints, and the weights that a resume of each has to find.

`single` is one destination with two generations. `levels` has two storage levels: the farther one, `home`, gets every
third checkpoint, so that the chunks of generation 2 are in `near` only.
"""

import json
import os
import sys
from pathlib import Path

import torch

import cordee


def state() -> dict:
    """A model of 21 parameters, its optimizer, and a plain value."""
    torch.manual_seed(5)
    model = torch.nn.Linear(6, 3)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01), "seen": 0}


def train(to: str, steps: int) -> list[list[float]]:
    """Save at each step; the final weights."""
    here = state()
    with cordee.job(here, to=to, every=1, keep=3, ram="off") as job:
        for _ in job.steps(steps):
            here["optimizer"].zero_grad()
            here["model"](torch.randn(2, 6)).square().mean().backward()
            here["optimizer"].step()
            here["seen"] += 2
            job._saving.finish(30.0)  # The save before is durable: the next one may be counted.
    return here["model"].weight.tolist()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir()
    os.chdir(folder)
    weights = {"single": train("single", 2), "levels": train("levels/near,levels/home every 3", 3)}
    Path("weights.json").write_text(json.dumps(weights))
