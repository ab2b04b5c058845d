"""torchdata's StatefulDataLoader in a state: a resume is exact wherever the script makes the loader's iterator.

A loader puts its saved position into the iterator that it makes next. A script that made its own before the job was
entered holds another one, which is moved to the position here. One that is made only in the loop would draw a seed from
the loop's generators, which the saved run did not do there; so it is made before they are restored.
"""

import logging
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from cordee.errors import CheckpointError
from cordee.units import plural

log = logging.getLogger("cordee")

_GENERATOR = "cordee_generator"  # beside torchdata's own keys


@dataclass
class _Entered:
    """A loader within a job.

    Attributes:
        iterator: made by the script before the job was entered; None: there is none.
        yielded: batches of the epoch that the loader had given when its state was loaded, or the job entered.
        generator: saved state of the loader's own generator; None: it has none, or nothing was loaded.
    """

    iterator: Any = None
    yielded: int = 0
    generator: torch.Tensor | None = None


_entered: "weakref.WeakKeyDictionary[DataLoader[Any], _Entered]" = weakref.WeakKeyDictionary()


def is_stateful_loader(entry: object) -> bool:
    """Return whether it is a loader of torchdata, with the attributes that this module uses."""
    return isinstance(entry, DataLoader) and hasattr(entry, "next_iter_state") and hasattr(entry, "_iterator")


def state_of(loader: Any) -> dict[str, Any]:
    """Return the loader's position and the state of its own generator, which later epochs draw from."""
    state: dict[str, Any] = loader.state_dict()
    return state if loader.generator is None else {**state, _GENERATOR: loader.generator.get_state()}


def enter(loader: Any) -> None:
    """Note that a job is entered, and which iterator the script may hold."""
    made = None if getattr(loader, "_initial_iter_for_state_dict", False) else loader._iterator
    _entered[loader] = _Entered(made, made._num_yielded if made is not None else 0)


def give(name: str, loader: Any, value: dict[str, Any]) -> None:
    """Give a loader its saved state; its next iterator begins there.

    Raises:
        CheckpointError: torchdata would refuse it later, in the middle of the loop.
    """
    workers, inside = loader.num_workers, value.get("_snapshot", {}).get("_main_snapshot", {})
    saved = inside.get("_num_workers", 0 if "_num_yielded" in value else workers)
    if saved != workers:
        raise CheckpointError(
            f"the position of the data loader {name!r} is that of {saved} workers, and it has {workers}",
            hint=f"num_workers={saved}; or use cordee.ElasticBatchSampler, which needs no number of workers",
        )
    entered = _entered.setdefault(loader, _Entered())
    entered.generator = value.get(_GENERATOR)
    loader.load_state_dict({key: item for key, item in value.items() if key != _GENERATOR})


def loaded(loader: Any) -> None:
    """Move the iterator that the script holds to the position that was loaded, if anything was."""
    entered, saved = _entered.setdefault(loader, _Entered()), loader.next_iter_state
    if saved is None:
        return
    entered.yielded = (
        saved["_num_yielded"]
        if "_num_yielded" in saved
        else saved["_snapshot"]["_snapshot_step"] + saved["_steps_since_snapshot"]
    )
    held, entered.iterator = entered.iterator, None
    if held is not None:
        if hasattr(held, "_shutdown_workers"):
            held._shutdown_workers()
        type(held).__init__(held, loader, saved)
        loader._iterator, loader.next_iter_state = held, None
        # A script that makes another iterator gets this one, whose position is the right one.
        loader._initial_iter_for_state_dict = True


def begin(name: str, loader: Any) -> None:
    """Make a restored iterator before the loop's generators are restored, and check that no batch is ahead of it."""
    if loader.next_iter_state is not None:
        loader.state_dict()  # makes it
    entered = _entered.pop(loader, None)
    if entered is None:
        return  # the job is unprotected
    if entered.generator is not None and loader.generator is not None:
        loader.generator.set_state(entered.generator)
    ahead = (loader._iterator._num_yielded if loader._iterator is not None else 0) - entered.yielded
    if ahead > 0:
        log.warning(
            "%s of %r %s taken before the first step: a resumed run would skip as many. Take them in the loop: "
            "`for step in job.steps(n): batch = next(batches)`",
            plural(ahead, "batch", "batches"),
            name,
            "was" if ahead == 1 else "were",
        )
