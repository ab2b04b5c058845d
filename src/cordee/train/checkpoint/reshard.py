"""Choose this rank's part of the saved values, by names, whichever rank saved them.

All values here are JSON as `state.py` writes it; `dcp.py` reads the bytes of a name.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from cordee.errors import CheckpointError
from cordee.train.checkpoint.state import FRESH, TAG, decode, encode, names_in, parts_of


def fit(state: dict[str, object], saved: Sequence[dict[str, object]], mine: dict[str, object]) -> dict[str, object]:
    """Return the saved value of each object in this rank's state.

    Args:
        state: this rank's state.
        saved: the values of rank 0, then those of other ranks that had more names.
        mine: the values that `gather` returns for the state.

    Raises:
        CheckpointError: this rank has a name that no rank saved.
    """
    if missing := [name for name in state if not any(name in values for values in saved)]:
        there = dict.fromkeys(name for values in saved for name in values)
        raise CheckpointError(f"the checkpoint has no {', '.join(missing)}", hint=f"it has {', '.join(there)}")
    fitted = {}
    for name, entry in state.items():
        found = [values[name] for values in saved if name in values]
        if parts_of(entry, torch.nn.Module):
            whole = _union(found)
            if lacking := [key for key in _fields(mine[name]) if key not in whole]:
                raise CheckpointError(
                    f"the checkpoint lacks {len(lacking)} of {name}'s names, such as {name}/{lacking[0]}",
                    hint="is it the same model? Parts of a model need the names of the whole model",
                )
            fitted[name] = _json({key: whole[key] for key in _fields(mine[name])})
        elif parts_of(entry, torch.optim.Optimizer):
            fitted[name] = _fit_optimizer(name, found, _fields(mine[name]))
        else:
            fitted[name] = found[0]
    return fitted


def model_names(state: dict[str, object], values: Iterable[dict[str, object]]) -> set[str]:
    """Return the names of the tensors in these values that belong to the state's modules."""
    modules = [name for name, entry in state.items() if parts_of(entry, torch.nn.Module)]
    return {tensor for each in values for name in modules if name in each for tensor in names_in(each[name])}


def _fit_optimizer(name: str, found: list[object], mine: dict[str, Any]) -> object:
    saved = [_fields(each) for each in found]
    if fresh := [each[FRESH] for each in saved if FRESH in each]:
        count = len(mine["param_groups"])
        if len(fresh[0]) == count:
            return {FRESH: fresh[0]}
        if any(group != fresh[0][0] for groups in fresh for group in groups):
            raise CheckpointError(
                f"{name} has {count} groups of parameters, the checkpoint {len(fresh[0])} that differ",
                hint="before an optimizer's first step its groups have no names: load into the same layout",
            )
        return {FRESH: fresh[0][:1] * count}
    states = _union(each["state"] for each in saved)
    groups = [_fields(group) for each in saved for group in each["param_groups"]]
    of = {fqn: group for group in reversed(groups) for fqn in group["params"]}
    unnamed = next((group for group in groups if not group["params"]), {})
    own = [_fields(group) for group in mine["param_groups"]]
    fitted = []
    for group in own:
        like = next((of[fqn] for fqn in group["params"] if fqn in of), unnamed)
        fitted.append(_json({**group, **like, "params": group["params"]}))
    names = [fqn for group in own for fqn in group["params"]]
    return _json({"state": _json({fqn: states[fqn] for fqn in names if fqn in states}), "param_groups": fitted})


def _union(found: Iterable[object]) -> dict[str, object]:
    """Merge by key; where several ranks have a key, take the first rank's value."""
    whole: dict[str, object] = {}
    for each in found:
        whole = {**_fields(each), **whole}
    return whole


def _fields(value: Any) -> dict[str, Any]:
    """Return the items of an encoded dict, themselves still encoded."""
    if TAG not in value:
        return dict(value)
    assert value[TAG] == "dict", "modules, optimizers and their groups are dicts"
    return {decode(key): item for key, item in value["v"]}


def _json(fields: dict[str, object]) -> object:
    return {TAG: "dict", "v": [[encode(key, "key"), item] for key, item in fields.items()]}
