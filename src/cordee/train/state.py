"""What a state is made of: tensors, each under one name, and the rest as JSON that refers to them. Nothing is pickled.

A state is a dict of modules, optimizers, other objects with `state_dict`, and plain values.
"""

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from cordee.errors import CheckpointError
from cordee.units import MiB

# A JSON object with this key stands for something that JSON has no word for.
TAG = "$"
# In place of its state: the parameter groups of an optimizer that has not made a step.
FRESH = "fresh"
# An object with `state_dict` whose tensors are no larger than this together, and on the CPU, belongs to its rank.
OWN_TENSORS_BYTES_MAX = 1 * MiB


def gather(state: dict[str, Any], *, template: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Every tensor by its name `object/path/to/it`, and for each object the JSON that refers to them.

    A template is there to be loaded into: then an optimizer without state is given one of the right shape.

    Raises:
        CheckpointError: something in it cannot be stored.
    """
    tensors: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor, path: str) -> dict[str, Any]:
        if path in tensors:
            raise CheckpointError(f"two tensors of the state are named {path}", hint="rename one of its keys")
        tensors[path] = tensor
        return {TAG: "tensor", "name": path}

    values = {}
    for name, entry in state.items():
        value = _state_of(name, state, template)
        values[name] = encode(value, name, None if is_own(entry, value) else keep)
    return tensors, values


def scatter(state: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Give each object of the state what was loaded for it."""
    for name, value in loaded.items():
        target = state[name]
        if isinstance(target, torch.nn.Module):
            set_model_state_dict(target, value)
        elif isinstance(target, torch.optim.Optimizer):
            _load_optimizer(_owner(name, state), target, value)
        elif is_stateful(target):
            target.load_state_dict(value)
        else:
            state[name] = value


def is_own(entry: Any, value: Any) -> bool:
    """Whether each rank keeps its own copy of this object, whose state is `value`.

    What holds no tensor is a rank's own; so is an object with little in its tensors, such as a data loader that keeps
    the state of a generator.
    """
    if isinstance(entry, (torch.nn.Module, torch.optim.Optimizer)):
        return False
    tensors = list(_tensors_in(value))
    if not is_stateful(entry):
        return not tensors
    here = all(not isinstance(each, DTensor) and each.device.type == "cpu" for each in tensors)
    return here and sum(each.numel() * each.element_size() for each in tensors) <= OWN_TENSORS_BYTES_MAX


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def encode(value: Any, path: str, keep: Callable[[torch.Tensor, str], Any] | None = None) -> Any:
    """JSON for the value; `keep` says what stands for a tensor, and without it tensors are written inline.

    Raises:
        CheckpointError: a type that cannot be stored.
    """
    if value is None or (isinstance(value, (bool, int, str)) and type(value) in (bool, int, str)):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {TAG: "float", "v": repr(value)}
    if isinstance(value, torch.Tensor):
        return keep(value, path) if keep else _inline(value)
    if type(value) in (dict, OrderedDict):
        pairs = {key: encode(item, f"{path}/{key}", keep) for key, item in value.items()}
        if TAG not in value and all(type(key) is str for key in value) and list(value) == sorted(value):
            return pairs  # Other dicts become lists of pairs: stored JSON is sorted, and their order may matter.
        return {TAG: "dict", "v": [[encode(key, path), item] for key, item in pairs.items()]}
    if type(value) is Counter:
        return {TAG: "counter", "v": [[encode(key, path), count] for key, count in value.items()]}
    if type(value) in (list, tuple, torch.Size):
        items = [encode(item, f"{path}/{i}", keep) for i, item in enumerate(value)]
        return items if type(value) is list else {TAG: "tuple" if type(value) is tuple else "size", "v": items}
    if type(value) is set:
        return {TAG: "set", "v": sorted((encode(item, path) for item in value), key=repr)}
    if type(value) in (bytes, bytearray):
        return {TAG: "bytes", "v": _text(value)}
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject and value.dtype.names is None:
        array = np.asarray(value)
        kind = "ndarray" if isinstance(value, np.ndarray) else "number"
        return {TAG: kind, "dtype": array.dtype.str, "shape": list(array.shape), "v": _text(array.tobytes())}
    if isinstance(value, (torch.dtype, torch.device)):
        return {TAG: type(value).__name__, "v": str(value).removeprefix("torch.")}
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold",
        hint="use numbers, strings, bytes, lists, dicts, arrays and tensors, or an object with state_dict()",
    )


def decode(value: Any, find: Callable[[str], torch.Tensor] | None = None) -> Any:
    """The value that `encode` wrote; `find` gives the tensor of a name."""
    if isinstance(value, list):
        return [decode(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: decode(item, find) for key, item in value.items()}
    kind = value[TAG]
    if kind == "tensor":
        return _outline(value) if find is None or "v" in value else find(value["name"])
    if kind in ("ndarray", "number"):
        data = base64.b64decode(value["v"])
        array = np.frombuffer(data, dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
        return array if kind == "ndarray" else array[()]
    makers: dict[str, Callable[[Any], Any]] = {
        "float": float,
        "dict": lambda v: {decode(key): decode(item, find) for key, item in v},
        "counter": lambda v: Counter({decode(key): count for key, count in v}),
        "tuple": lambda v: tuple(decode(item, find) for item in v),
        "size": torch.Size,
        "set": lambda v: {decode(item) for item in v},
        "bytes": base64.b64decode,
        "dtype": dtype_of,
        "device": torch.device,
    }
    if kind not in makers:
        raise CheckpointError(f"the checkpoint holds a {kind!r}, unknown here", hint="install a newer Cordee")
    return makers[kind](value["v"])


def names_in(value: Any) -> set[str]:
    """Names of all tensors that an encoded value refers to."""
    if isinstance(value, list):
        return set().union(*map(names_in, value)) if value else set()
    if not isinstance(value, dict):
        return set()
    if value.get(TAG) == "tensor" and "name" in value:
        return {value["name"]}
    return set().union(*map(names_in, value.values())) if value else set()


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name such as bfloat16.

    Raises:
        CheckpointError: this torch has none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"this torch ({torch.__version__}) has no dtype {name}", hint="install a newer torch")
    return found


def _state_of(name: str, state: dict[str, Any], template: bool) -> Any:
    value = state[name]
    if isinstance(value, torch.nn.Module):
        return get_model_state_dict(value)
    if isinstance(value, torch.optim.Optimizer):
        owner = _owner(name, state)
        if not (value.state or template):
            # torch would take a step with zero gradients to make a state, and count it: the run would not be the same.
            groups = [{key: item for key, item in group.items() if key != "params"} for group in value.param_groups]
            return {FRESH: groups}
        return get_optimizer_state_dict(owner, value)
    return value.state_dict() if is_stateful(value) else value


def _load_optimizer(owner: torch.nn.Module, target: torch.optim.Optimizer, value: dict[str, Any]) -> None:
    if FRESH not in value:
        # Not strict: a parameter that has had no gradient has no state, here as in the run that was saved.
        set_optimizer_state_dict(owner, target, value, options=StateDictOptions(strict=False))
        return
    target.state.clear()
    for group, saved in zip(target.param_groups, value[FRESH], strict=True):
        group.update(saved)


def is_stateful(value: Any) -> bool:
    """Whether it is asked for its state, and given it back, by the two usual methods."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _owner(name: str, state: dict[str, Any]) -> torch.nn.Module:
    """The module whose parameters this optimizer steps: its names make the optimizer's state independent of order."""
    wanted = {id(p) for group in state[name].param_groups for p in group["params"]}
    for value in state.values():
        if isinstance(value, torch.nn.Module) and wanted <= {id(p) for p in value.parameters()}:
            return value
    raise CheckpointError(
        f"no module in the state owns all parameters of the optimizer {name!r}",
        hint="put the model that it steps into the state too, after wrapping it",
    )


def _inline(tensor: torch.Tensor) -> dict[str, Any]:
    plain = tensor.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    name = str(plain.dtype).removeprefix("torch.")
    return {TAG: "tensor", "dtype": name, "shape": list(plain.shape), "v": _text(data)}


def _outline(value: dict[str, Any]) -> torch.Tensor:
    tensor = torch.empty(value["shape"], dtype=dtype_of(value["dtype"]))
    if tensor.numel():
        data = torch.frombuffer(bytearray(base64.b64decode(value["v"])), dtype=torch.uint8)
        tensor.reshape(-1).view(torch.uint8).copy_(data)
    return tensor


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")
