"""What belongs to one rank alone: its random number generators, and the position of its data.

Kept beside the sharded state, for each rank, and given back only on a world of the same size.
"""

import logging
import random
import sys
from typing import Any

import torch

from cordee.train.state import is_own, is_stateful

log = logging.getLogger("cordee")

_SHARDED = (torch.nn.Module, torch.optim.Optimizer)


def capture(state: dict[str, Any]) -> dict[str, Any]:
    """This rank's generators, and its own copy of everything in the state that is not shared."""
    plain = {name: entry for name, entry in state.items() if not isinstance(entry, _SHARDED)}
    values = {name: entry.state_dict() if is_stateful(entry) else entry for name, entry in plain.items()}
    return {"rng": capture_rng(), "own": {name: value for name, value in values.items() if is_own(state[name], value)}}


def restore(state: dict[str, Any], extras: dict[str, Any]) -> None:
    """Replace what rank 0 had by what this rank had. The generators are for `restore_rng`, just before the loop."""
    for name, value in extras["own"].items():
        if name not in state:
            continue
        if is_stateful(state[name]):
            state[name].load_state_dict(value)
        else:
            state[name] = value


def capture_rng() -> dict[str, Any]:
    """The state of every generator that this rank may draw from, as plain values and CPU tensors."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy as np

        state["numpy"] = np.random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Put the generators back to what `capture_rng` saw."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
    if "cuda" not in state:
        return
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    else:
        log.warning("the checkpoint was made on a GPU and this rank has none: its random numbers will differ")
