"""The state that belongs to one rank alone: its random number generators, and its copies of objects without shards.

Each rank keeps it besides the sharded state. With another world size or layout a rank gets generators derived from the
checkpoint, so that two resumes of it are the same run.
"""

import hashlib
import logging
import random
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from cordee.errors import InputError
from cordee.storage.sealed import canonical
from cordee.train.checkpoint.consensus import NotFiniteError
from cordee.train.checkpoint.state import encode, gather, give, is_own, is_sharded, is_stateful, parts_of, value_of
from cordee.train.data import stateful
from cordee.train.data.sampler import ElasticBatchSampler
from cordee.train.data.stateful import is_stateful_loader

log = logging.getLogger("cordee")

_FSDP1 = "FullyShardedDataParallel"  # compared by name, since importing it takes a second


def enter(state: dict[str, object]) -> None:
    """Check the state before anything is loaded.

    Raises:
        InputError: something in the state cannot be saved, or the position in the data is there twice.
        CheckpointError: something else in it cannot be saved.
    """
    for name, entry in state.items():
        if isinstance(entry, torch.nn.Module) and any(type(each).__name__ == _FSDP1 for each in entry.modules()):
            raise InputError(
                f"{name!r} is wrapped in {_FSDP1} (FSDP1), whose weights are in flat parts without a place",
                hint='use FSDP2: fully_shard(); with Hugging Face fsdp_config={"version": 2}; with Lightning'
                " ModelParallelStrategy",
            )
        if isinstance(getattr(entry, "batch_sampler", None), ElasticBatchSampler):
            raise InputError(
                f"{name!r} reads from an ElasticBatchSampler, which has the position in the data itself",
                hint="put the sampler into the state, and not its loader: both would skip what was trained on",
            )
        if isinstance(entry, (DataLoader, Sampler, _BaseDataLoaderIter)) and not is_stateful(entry):
            kind = next(each for each in (DataLoader, Sampler, _BaseDataLoaderIter) if isinstance(entry, each))
            raise InputError(
                f"{name!r} is a {kind.__name__.strip('_')}, which does not know its position in the data and so cannot"
                " be saved",
                hint="put a cordee.ElasticBatchSampler into the state, or use torchdata's StatefulDataLoader",
            )
    # A loader makes an iterator, and starts its workers, when it is asked for its state.
    gather({name: entry for name, entry in state.items() if not is_stateful_loader(entry)})
    for sampler in _samplers(state):
        sampler.enter()
    for _, loader in _loaders(state):
        stateful.enter(loader)


def loaded(state: dict[str, object]) -> None:
    """Move data loaders' iterators to their positions, once the state has been loaded."""
    for _, loader in _loaders(state):
        stateful.loaded(loader)


def begin(state: dict[str, object], step: int) -> None:
    """Note the position in the data just before the first step, and before `restore_rng`."""
    for sampler in _samplers(state):
        sampler.begin(step)
    for name, loader in _loaders(state):
        stateful.begin(name, loader)


def learning_rates(state: dict[str, object]) -> dict[str, list[float]]:
    """Return the learning rates of each optimizer's groups; where a scheduler changes them, the initial ones."""
    return {
        name: [float(group.get("initial_lr", group["lr"])) for each in optimizers for group in each.param_groups]
        for name, entry in state.items()
        if (optimizers := parts_of(entry, torch.optim.Optimizer))
        and all("lr" in g for o in optimizers for g in o.param_groups)
    }


def _samplers(state: dict[str, object]) -> list[ElasticBatchSampler]:
    return [entry for entry in state.values() if isinstance(entry, ElasticBatchSampler)]


def _loaders(state: dict[str, object]) -> list[tuple[str, object]]:
    return [(name, entry) for name, entry in state.items() if is_stateful_loader(entry)]


def capture(state: dict[str, Any], step: int | None = None) -> dict[str, Any]:
    """Return this rank's generators, its position in the data, and its copies of all objects without shards.

    Raises:
        CheckpointError: the batches of a sampler were not counted.
    """
    plain = {name: entry for name, entry in state.items() if not is_sharded(entry)}
    for sampler in _samplers(state):
        sampler.check(step)
    values = {name: value_of(entry) for name, entry in plain.items()}
    own = {name: value for name, value in values.items() if is_own(state[name], value)}
    return {"rng": capture_rng(), "own": own, "dp": dp_of(state)}


def check_finite(state: dict[str, object]) -> None:
    """Raise NotFiniteError if a weight that is trained is not finite: such a checkpoint is not worth a good one."""
    modules = [module for entry in state.values() for module in parts_of(entry, torch.nn.Module)]
    weights = {
        name: each.to_local().detach() if hasattr(each, "to_local") else each.detach()
        for module in modules
        for name, each in module.named_parameters()
        if each.requires_grad and each.is_floating_point() and each.numel()
    }
    by_device: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, weight in weights.items():
        if weight.numel():
            by_device.setdefault((weight.device, weight.dtype), []).append(name)
    for names in by_device.values():
        norms = torch.stack(torch._foreach_norm([weights[name] for name in names], ord=float("inf")))
        finite = norms.isfinite().tolist()
        if not all(finite):
            bad = [name for name, good in zip(names, finite, strict=True) if not good]
            raise NotFiniteError(
                f"{len(bad)} of {len(names)} weights are not finite, the first {bad[0]}",
                hint='the training has diverged: on_spike="rollback" goes back by itself; "off" saves all the same',
            )


def positions(state: dict[str, object]) -> list[int]:
    """Return the global batches that each sampler of the state has given."""
    return [sampler.position // sampler.order.global_batch for sampler in _samplers(state)]


def detours(state: dict[str, object]) -> int:
    """Return how often a sampler of the state has left batches out, or put them off."""
    return max((sampler.detours for sampler in _samplers(state)), default=0)


def detour(state: dict[str, object], ahead: list[int], step: int, first: int, done: int, *, reorder: bool) -> int:
    """Leave out the batches of the steps from `first` until `done`, or put them off; return their number.

    Args:
        state: as of `step`.
        ahead: the positions before it was loaded, when `done` steps were done.
        step: the next one.
        first: the first one whose batches are changed.
        done: the steps that were done.
        reorder: put them off until the end of their epoch.
    """
    moved = 0
    for sampler, given in zip(_samplers(state), ahead, strict=True):
        at = sampler.position // sampler.order.global_batch
        each = max(1, (given - at) // max(1, done - step))  # global batches of a step
        count = given - at - each * (first - step)
        if count > 0:
            sampler.detour(at + each * (first - step), count, reorder=reorder)
            moved += count
    return moved


def contents(state: dict[str, Any], step: int) -> list[tuple[str, bool, bytes]]:
    """Return each object without shards and the generators: name, whether it is a position in the data, and content.

    Raises:
        CheckpointError: the batches of a sampler were not counted.
    """
    captured = capture(state, step)
    plain = {name: value_of(entry) for name, entry in state.items() if not is_sharded(entry)}
    data = {
        name for name, entry in state.items() if isinstance(entry, ElasticBatchSampler) or is_stateful_loader(entry)
    }
    every = [*plain.items(), ("random numbers", captured["rng"])]
    return [(name, name in data, canonical(encode(value, name))) for name, value in every]


def dp_of(state: dict[str, object]) -> list[int] | None:
    """Return this rank's data-parallel rank and the number of them, by its sampler; None without one."""
    return next(([each.dp_rank, each.dp_size] for each in _samplers(state)), None)


def restore(state: dict[str, object], extras: dict[str, Any]) -> None:
    """Replace rank 0's objects by this rank's; `restore_rng` restores the generators, just before the loop."""
    for name, value in extras["own"].items():
        if name not in state:
            continue
        if is_stateful(state[name]):
            give(name, state[name], value)
        else:
            state[name] = value


def rng_elsewhere(first: dict[str, Any], last: dict[str, Any], step: int, stream: int) -> object:
    """Return generators for `restore_rng` on another world size or layout than the checkpoint's.

    If the first and the last rank read different data and yet had the same generators, all ranks share one seed and go
    on with it. Otherwise each stream has a seed that is derived from the first rank's generators and the step.

    Args:
        first: generators that rank 0 captured.
        last: generators that the last rank captured.
        step: the checkpoint's step.
        stream: ranks with the same number draw the same, as ranks that read the same data must.
    """
    state = first.get("rng")
    encoded = canonical(encode(state, "rng"))
    apart = (first.get("dp") or [0])[0] != (last.get("dp") or [1])[0]
    if first is not last and apart and encoded == canonical(encode(last.get("rng"), "rng")):
        return state
    digest = hashlib.blake2b(encoded + f"/{step}/{stream}".encode(), digest_size=8).digest()
    return {"seed": int.from_bytes(digest, "little")}


def differing(first: dict[str, Any], last: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the objects whose copies on the first and the last rank differed."""
    one, other = first.get("own", {}), last.get("own", {})
    return tuple(
        name
        for name in one
        if name not in other or canonical(encode(one[name], name)) != canonical(encode(other[name], name))
    )


def capture_rng() -> dict[str, object]:
    """Return the state of every generator that this rank may draw from, as plain values and CPU tensors."""
    state: dict[str, object] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy as np

        state["numpy"] = np.random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Restore the generators that `capture_rng` returned, or seed them as `rng_elsewhere` says."""
    import numpy as np

    if "seed" in state:
        random.seed(state["seed"])
        np.random.seed(state["seed"] % 2**32)
        torch.manual_seed(state["seed"])  # the GPU's too
        return
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])
    if "cuda" not in state:
        return
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    else:
        log.warning("the checkpoint was made on a GPU, but this rank has none: its random numbers will differ")
