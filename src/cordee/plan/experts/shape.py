"""Loads, the fleet, a placement, and their checks.

Placements are found in `solve.py` and changed in `moves.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cordee.errors import InputError, LayoutError
from cordee.hardware.arrays import Floats, Ints


@dataclass(frozen=True, slots=True)
class Fleet:
    """GPUs in nodes, `replicas` slots for experts in each layer, and groups of experts that stay on one node.

    `groups` 1 means that an expert may go to any node (the global policy); otherwise the policy is hierarchical.
    """

    gpus: int
    replicas: int
    nodes: int = 1
    groups: int = 1

    @property
    def slots(self) -> int:
        """Slots of one GPU in each layer."""
        return self.replicas // self.gpus

    @property
    def domains(self) -> int:
        """Parts of the fleet within which an expert stays: the nodes, or the whole fleet."""
        return self.nodes if self.groups > 1 else 1

    def check(self, experts: int) -> None:
        """Check that so many experts can be placed.

        Raises:
            LayoutError: something does not divide, or there are fewer slots than experts.
        """
        for name, value in (("gpus", self.gpus), ("nodes", self.nodes), ("groups", self.groups)):
            if value < 1:
                raise LayoutError(f"{name} is {value}", hint=f"give {name} of 1 or more")
        if self.replicas < experts:
            hint = f"give at least {-(-experts // self.gpus) * self.gpus} replicas: every expert needs a slot"
            raise LayoutError(f"{self.replicas} replicas cannot hold {experts} experts", hint=hint)
        _divides("replicas", self.replicas, "GPUs", self.gpus)
        _divides("GPUs", self.gpus, "nodes", self.nodes)
        if self.groups > 1:
            _divides("experts", experts, "groups", self.groups)
            _divides("groups", self.groups, "nodes", self.nodes)


def _divides(name: str, value: int, over: str, parts: int) -> None:
    if value % parts:
        below, above = value // parts * parts, -(-value // parts) * parts
        near = f"{below} or {above}" if below else f"{above}"
        raise LayoutError(f"{value} {name} do not divide over {parts} {over}", hint=f"{near} {name} would")


def checked_loads(rows: Sequence[Sequence[float]] | Floats) -> Floats:
    """Return loads as an array of layers x experts.

    Raises:
        InputError: ragged, empty, negative, not a number, or a layer without any load.
    """
    lengths = [len(row) for row in rows]
    if not lengths or not lengths[0]:
        raise InputError("there are no loads", hint="give one row of tokens for each layer, one column for each expert")
    for at, length in enumerate(lengths):
        if length != lengths[0]:
            hint = "every layer needs one load for each expert"
            raise InputError(f"layer {at} has {length} loads, layer 0 has {lengths[0]}", hint=hint)
    try:
        loads = np.asarray(rows, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError("a load is not a number", hint="loads are tokens routed to each expert") from None
    for bad, what in ((~np.isfinite(loads), "not a finite number"), (loads < 0, "negative")):
        if bad.any():
            layer, expert = (int(i) for i in np.argwhere(bad)[0])
            worth = f"{loads[layer, expert]:g}"
            hint = "loads are tokens routed to each expert: 0 or more"
            raise InputError(f"layer {layer}, expert {expert} has a load of {worth}: {what}", hint=hint)
    silent = np.flatnonzero(loads.sum(axis=1) == 0)
    if len(silent):
        hint = "leave dense layers out, or count over a longer window"
        raise InputError(f"layer {int(silent[0])} has no load on any expert", hint=hint)
    return loads


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPlacement:
    """The expert in each slot: `slots[layer, gpu, slot]`, with the GPUs of a node side by side."""

    fleet: Fleet
    slots: Ints
    experts: int

    @property
    def counts(self) -> Ints:
        """Replicas of each expert in each layer."""
        return counted(self.slots, self.experts)

    def gpu_loads(self, loads: Floats) -> Floats:
        """Return the load of each GPU in each layer; the replicas of an expert have equal loads."""
        return gpu_loads(loads, self.slots)

    def balance(self, loads: Floats) -> Floats:
        """Return the mean over the max of the GPUs' loads, for each layer: 1 is perfect."""
        found = self.gpu_loads(loads)
        balance: Floats = found.mean(axis=1) / found.max(axis=1)
        return balance


def checked_placement(rows: object, fleet: Fleet, layers: int, experts: int) -> ExpertPlacement:
    """Return a placement from physical-to-logical rows, one for each layer.

    Raises:
        InputError: another shape, an unknown expert, an expert without a slot, or a group on two nodes.
    """
    try:
        flat = np.asarray(rows, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        raise InputError("the present placement is ragged or not made of whole numbers", hint=_HINT) from None
    if flat.shape != (layers, fleet.replicas):
        shape = " x ".join(str(n) for n in flat.shape)
        raise InputError(f"the present placement is {shape}, not {layers} layers x {fleet.replicas} slots", hint=_HINT)
    if flat.min() < 0 or flat.max() >= experts:
        bad = int(flat.min()) if flat.min() < 0 else int(flat.max())
        raise InputError(f"the present placement names expert {bad} of {experts}", hint=_HINT)
    placement = ExpertPlacement(fleet, flat.reshape(layers, fleet.gpus, fleet.slots), experts)
    missing = np.argwhere(placement.counts == 0)
    if len(missing):
        layer, expert = (int(i) for i in missing[0])
        raise InputError(f"the present placement has no slot for expert {expert} of layer {layer}", hint=_HINT)
    if fleet.domains > 1:
        _check_groups(placement)
    return placement


_HINT = "--from takes what `cordee experts --json` or `--out` wrote for the same fleet"


def _check_groups(placement: ExpertPlacement) -> None:
    fleet = placement.fleet
    group = placement.slots.reshape(len(placement.slots), fleet.domains, -1) // (placement.experts // fleet.groups)
    for layer, nodes in enumerate(group):
        seen: dict[int, int] = {}
        for node, held in enumerate(nodes):
            for each in np.unique(held).tolist():
                if seen.setdefault(each, node) != node:
                    hint = "plan without --groups, or without --from"
                    both = f"nodes {seen[each]} and {node}"
                    raise InputError(f"group {each} of layer {layer} is on {both} at present", hint=hint)


def trivial_placement(fleet: Fleet, layers: int, experts: int) -> ExpertPlacement:
    """Return the experts in order, then the first ones again, as engines start. Groups stay on their nodes."""
    each = experts // fleet.domains
    local = np.arange(fleet.replicas // fleet.domains) % each
    row = (local[None, :] + each * np.arange(fleet.domains)[:, None]).reshape(fleet.gpus, fleet.slots)
    return ExpertPlacement(fleet, np.repeat(row[None], layers, axis=0), experts)


def counted(slots: Ints, experts: int) -> Ints:
    """Return the replicas of each expert in each layer."""
    layers = len(slots)
    where = slots.reshape(layers, -1) + experts * np.arange(layers)[:, None]
    found: Ints = np.bincount(where.ravel(), minlength=layers * experts).reshape(layers, experts).astype(np.int64)
    return found


def gpu_loads(loads: Floats, slots: Ints) -> Floats:
    """Return the load of each GPU: the sum of its replicas' loads."""
    replica_load = loads / np.maximum(counted(slots, loads.shape[1]), 1)
    flat = np.take_along_axis(replica_load, slots.reshape(len(slots), -1), axis=1)
    found: Floats = flat.reshape(slots.shape).sum(axis=2)
    return found
