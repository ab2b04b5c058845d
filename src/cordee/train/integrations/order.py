"""The generators that decide an epoch's order of data, as they are when its iterator is made.

The position inside the epoch is not kept here: a loader that has a state knows it, and any other is read again up to
that position.
"""

from collections.abc import Iterable
from typing import Any

import torch

from cordee.train.checkpoint import rank_state

# Attributes in which loaders, samplers and their wrappers keep their generators.
_NAMES = ("generator", "sampler", "batch_sampler", "_sampler", "dataset")


def capture(loaders: Iterable[Any]) -> dict[str, Any]:
    """Return the generators of this rank and those of the loaders, as plain values."""
    return {"rank": rank_state.capture_rng(), "loaders": [each.get_state() for each in _generators(loaders)]}


def restore(loaders: Iterable[Any], saved: dict[str, Any]) -> None:
    """Restore the generators that `capture` returned for the same loaders."""
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
