"""Take a state apart: tensors, each under one name, and the rest as JSON that refers to them. Nothing is pickled.

A state is a dict of modules, optimizers, other objects with `state_dict`, and plain values. A list of modules, such as
a rank's stages of a pipeline, is one object with the names of all; so is a list of optimizers, one for each module.
"""

import base64
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

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
from cordee.train.data import stateful
from cordee.train.data.stateful import is_stateful_loader
from cordee.units import MiB

T = TypeVar("T")
# A JSON object with this key stands for a value of a type that JSON lacks.
TAG = "$"
# In place of an optimizer's state: the parameter groups of one that has not made a step.
FRESH = "fresh"
# An object with `state_dict` belongs to its rank if its tensors are on the CPU and together no larger than this.
OWN_TENSORS_BYTES_MAX = 1 * MiB
# Numbers of a weight that are compared with other ranks' weights of the same name.
SAMPLES = 4


def gather(state: dict[str, object], *, template: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Return every tensor by its name `object/path/to/it`, and for each object the JSON that refers to them.

    A template is the target of a load: an optimizer without state gets one of the right shape.

    Raises:
        CheckpointError: something in it cannot be stored.
    """
    tensors: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor, path: str) -> dict[str, object]:
        if path in tensors:
            raise CheckpointError(f"two tensors of the state are named {path}", hint="rename one of its keys")
        tensors[path] = tensor
        return {TAG: "tensor", "name": path}

    values = {}
    for name, entry in state.items():
        value = _state_of(name, state, template)
        values[name] = encode(value, name, None if is_own(entry, value) else keep)
    return tensors, values


def scatter(state: dict[str, object], loaded: dict[str, Any]) -> None:
    """Give each object of the state its loaded value."""
    for name, value in loaded.items():
        target = state[name]
        if modules := parts_of(target, torch.nn.Module):
            for module in modules:
                own = value if len(modules) == 1 else {key: value[key] for key in get_model_state_dict(module)}
                set_model_state_dict(module, own)
        elif optimizers := parts_of(target, torch.optim.Optimizer):
            _load_optimizers(name, state, optimizers, value)
        elif is_stateful(target):
            give(name, target, value)
        else:
            state[name] = value


def samples_of(state: dict[str, object], tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Return a few numbers of this rank's part of each weight, but not of buffers, which may differ by replica."""
    modules = [module for entry in state.values() for module in parts_of(entry, torch.nn.Module)]
    weights = {_local(parameter).data_ptr() for module in modules for parameter in module.parameters()}
    held = {name: _local(tensor) for name, tensor in tensors.items() if tensor.is_floating_point()}
    return {
        name: local.flatten()[:: -(-local.numel() // SAMPLES)].float().tolist()
        for name, local in held.items()
        if local.numel() and local.data_ptr() in weights
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def give(name: str, target: Any, value: object) -> None:
    """Give an object its state back.

    Raises:
        CheckpointError: it is a data loader's state for another number of workers.
    """
    if is_stateful_loader(target) and isinstance(value, dict):
        stateful.give(name, target, value)
    else:
        target.load_state_dict(value)


def value_of(entry: Any) -> object:
    """Return the state of an object that has one, or the plain value itself."""
    if is_stateful_loader(entry):
        return stateful.state_of(entry)
    return entry.state_dict() if is_stateful(entry) else entry


def is_own(entry: object, value: object) -> bool:
    """Return whether each rank keeps its own copy of this object, whose state is `value`.

    Each rank does for an object without tensors or with small ones, such as a data loader with a generator's state.
    """
    if is_sharded(entry):
        return False
    tensors = list(_tensors_in(value))
    if not is_stateful(entry):
        return not tensors
    here = all(not isinstance(each, DTensor) and each.device.type == "cpu" for each in tensors)
    return here and sum(each.numel() * each.element_size() for each in tensors) <= OWN_TENSORS_BYTES_MAX


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def encode(value: Any, path: str, keep: Callable[[torch.Tensor, str], object] | None = None) -> object:
    """Return JSON for the value; `keep` returns the JSON of a tensor, and without it tensors are written inline.

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


def decode(value: object, find: Callable[[str], torch.Tensor] | None = None) -> Any:
    """Return the value that `encode` wrote; `find` returns the tensor of a name."""
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
    makers: dict[str, Callable[[Any], object]] = {
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
        raise CheckpointError(
            f"the checkpoint holds a value of type {kind!r}, which this version does not know",
            hint="install a newer Cordee",
        )
    return makers[kind](value["v"])


def names_in(value: object) -> set[str]:
    """Return the names of all tensors that an encoded value refers to."""
    if isinstance(value, list):
        return set().union(*map(names_in, value)) if value else set()
    if not isinstance(value, dict):
        return set()
    if value.get(TAG) == "tensor" and "name" in value:
        return {value["name"]}
    return set().union(*map(names_in, value.values())) if value else set()


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of a name such as bfloat16.

    Raises:
        CheckpointError: this torch has none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"this torch ({torch.__version__}) has no dtype {name}", hint="install a newer torch")
    return found


def _state_of(name: str, state: dict[str, Any], template: bool) -> object:
    value = state[name]
    if modules := parts_of(value, torch.nn.Module):
        return _joined(name, [get_model_state_dict(module) for module in modules])
    if optimizers := parts_of(value, torch.optim.Optimizer):
        owners = [_owner(name, state, optimizer) for optimizer in optimizers]
        if not (any(optimizer.state for optimizer in optimizers) or template):
            # torch would make a state by a step with zero gradients, and count it, which would change the run.
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            return {FRESH: [{key: item for key, item in group.items() if key != "params"} for group in groups]}
        if not all(optimizer.state or template for optimizer in optimizers):
            raise CheckpointError(f"some optimizers of {name!r} have made a step and others none", hint="step them all")
        states = [get_optimizer_state_dict(*pair) for pair in zip(owners, optimizers, strict=True)]
        groups = [group for each in states for group in each["param_groups"]]
        return {"state": _joined(f"{name}/state", [each["state"] for each in states]), "param_groups": groups}
    return value_of(value)


def _joined(name: str, parts: list[dict[str, object]]) -> dict[str, object]:
    whole: dict[str, object] = {}
    for part in parts:
        if twice := whole.keys() & part.keys():
            raise CheckpointError(
                f"two parts of {name!r} have {min(twice)}", hint="parts of one model need the names of the whole model"
            )
        whole |= part
    return whole


def _load_optimizers(
    name: str, state: dict[str, object], optimizers: list[torch.optim.Optimizer], value: dict[str, Any]
) -> None:
    groups = iter(value[FRESH] if FRESH in value else value["param_groups"])
    for optimizer in optimizers:
        own = list(itertools.islice(groups, len(optimizer.param_groups)))
        if FRESH in value:
            optimizer.state.clear()
            for group, saved in zip(optimizer.param_groups, own, strict=True):
                group.update(saved)
            continue
        names = {fqn for group in own for fqn in group["params"]}
        mine = {fqn: saved for fqn, saved in value["state"].items() if fqn in names}
        # Not strict: a parameter without a gradient so far has no state, here as in the saved run.
        options = StateDictOptions(strict=False)
        owner = _owner(name, state, optimizer)
        set_optimizer_state_dict(owner, optimizer, {"state": mine, "param_groups": own}, options=options)


def is_sharded(value: object) -> bool:
    """Return whether it is a module, an optimizer, or a list of them; they are saved under global names."""
    return bool(parts_of(value, torch.nn.Module) or parts_of(value, torch.optim.Optimizer))


def parts_of(value: Any, kind: type[T]) -> list[T]:
    """Return the object, or those in a list, if all are of this kind; else nothing."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    return list(parts) if all(isinstance(part, kind) for part in parts) else []


def is_stateful(value: object) -> bool:
    """Return whether it has state_dict() and load_state_dict()."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _owner(name: str, state: dict[str, object], optimizer: torch.optim.Optimizer) -> torch.nn.Module:
    """Return the module with this optimizer's parameters; its names make the state independent of their order."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for value in state.values():
        for module in parts_of(value, torch.nn.Module):
            if wanted <= {id(p) for p in module.parameters()}:
                return module
    raise CheckpointError(
        f"no module in the state owns all parameters of the optimizer {name!r}",
        hint="put the model that it steps into the state too, after wrapping it; with several, one optimizer each",
    )


def _inline(tensor: torch.Tensor) -> dict[str, object]:
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
