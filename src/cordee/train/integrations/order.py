"""What decides in which order an epoch's data comes: the generators, as they are when its iterator is made.

Not for the position inside the epoch: a loader that has a state knows it, and any other is drawn again up to there.
"""

from collections.abc import Iterable
from typing import Any

import torch

from cordee.train.checkpoint import rank_state

# Where loaders, samplers and their wrappers keep what they draw from.
_NAMES = ("generator", "sampler", "batch_sampler", "_sampler", "dataset")


def capture(loaders: Iterable[Any]) -> dict[str, Any]:
    """The generators of this rank and those of the loaders' own, as plain values."""
    return {"rank": rank_state.capture_rng(), "loaders": [each.get_state() for each in _generators(loaders)]}


def restore(loaders: Iterable[Any], saved: dict[str, Any]) -> None:
    """Put them back to what `capture` saw of the same loaders."""
    rank_state.restore_rng(saved["rank"])
    for each, state in zip(_generators(loaders), saved["loaders"], strict=False):
        each.set_state(state)


def _generators(loaders: Iterable[Any]) -> list[torch.Generator]:
    found: list[torch.Generator] = []
    todo, seen = list(loaders), set()
    while todo:
        each = todo.pop(0)
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Generator):
            found.append(each)
        else:
            todo += [getattr(each, name, None) for name in _NAMES]
    return found
