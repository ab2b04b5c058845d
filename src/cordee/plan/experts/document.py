"""The answers as JSON documents, version 2; `placement` has DeepSeek's names, and `--from` reads it."""

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import BeforeValidator

from cordee.document import Row, read_from
from cordee.hardware.arrays import Floats
from cordee.plan.experts.answer import ControllerWindow, ExpertsAnswer
from cordee.plan.experts.mappings import mapping
from cordee.plan.experts.shape import ExpertPlacement


class BalanceDocument(Row):
    """Balance of the layers: mean over max of the GPUs' loads."""

    mean: float
    worst: float
    layers: tuple[float, ...]


class RebalanceDocument(Row):
    """The placement that few moves reach, and whether it pays."""

    pays: bool
    sentence: str
    balance_found: Annotated[float, BeforeValidator(np.mean)]
    layers_beyond_noise: int
    moved_slots: int
    moved_fraction: float = read_from("moved_fraction")
    moved_bytes: int
    transfer_s: float
    saved_s: float


class MappingDocument(Row):
    """A placement as DeepSeek's balancer returns it."""

    phy2log: tuple[tuple[int, ...], ...]
    log2phy: tuple[tuple[tuple[int, ...], ...], ...]
    logcnt: tuple[tuple[int, ...], ...]


class ExpertsDocument(Row):
    """The answer for one window of loads."""

    version: int = 2
    layers: int
    experts: int
    tokens: float
    gpus: int
    nodes: int
    replicas: int
    groups: int
    slots_per_gpu: int
    policy: Literal["hierarchical", "global"]
    bound: BalanceDocument
    before: BalanceDocument
    after: BalanceDocument
    fresh: BalanceDocument
    rebalance: RebalanceDocument | None
    gpu_loads_before: tuple[tuple[float, ...], ...]
    gpu_loads_after: tuple[tuple[float, ...], ...]
    placement: MappingDocument


class WindowDocument(Row):
    """One window and the action of the controller after it."""

    name: str
    balance: float
    excess_fraction: float
    drift: float
    action: Literal["hold", "watch", "rest", "move"]
    sentence: str | None
    moved_slots: int
    moved_bytes: int


class WindowsDocument(Row):
    """Every window, and the placement after the last."""

    version: int = 2
    windows: tuple[WindowDocument, ...]
    placement: MappingDocument


def experts_document(answer: ExpertsAnswer) -> ExpertsDocument:
    """Return the document of the answer for one window."""
    loads, fleet = answer.loads, answer.fleet
    return ExpertsDocument(
        layers=len(loads), experts=loads.shape[1], tokens=float(loads.sum()), gpus=fleet.gpus, nodes=fleet.nodes,
        replicas=fleet.replicas, groups=fleet.groups, slots_per_gpu=fleet.slots,
        policy="hierarchical" if fleet.domains > 1 else "global",
        bound=_balance(answer.bound),
        before=_balance(answer.before.balance(loads)),
        after=_balance(answer.placement.balance(loads)),
        fresh=_balance(answer.fresh.balance(loads)),
        rebalance=None if answer.found is None else RebalanceDocument.model_validate(answer.found),
        gpu_loads_before=answer.before.gpu_loads(loads).tolist(),
        gpu_loads_after=answer.placement.gpu_loads(loads).tolist(),
        placement=_mapping(answer.placement),
    )  # fmt: skip


def stream_document(windows: Sequence[ControllerWindow], placement: ExpertPlacement) -> WindowsDocument:
    """Return the document of several windows."""
    rows = []
    for window in windows:
        observation, found = window.observation, window.observation.rebalance
        rows.append(WindowDocument(
            name=window.name, balance=window.balance, excess_fraction=observation.excess, drift=observation.drift,
            action=observation.action, sentence=None if found is None else found.sentence,
            moved_slots=window.moved_slots, moved_bytes=found.moved_bytes if window.moved_slots and found else 0,
        ))  # fmt: skip
    return WindowsDocument(windows=tuple(rows), placement=_mapping(placement))


def _mapping(placement: ExpertPlacement) -> MappingDocument:
    return MappingDocument.model_validate(mapping(placement, "deepseek"))


def _balance(found: Floats) -> BalanceDocument:
    return BalanceDocument(mean=float(found.mean()), worst=float(found.min()), layers=found.tolist())
