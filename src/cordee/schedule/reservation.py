"""What is kept for the first gang that waits: the units that will be free first, by what is known of who holds them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cordee.events import Job, Lease
from cordee.schedule.placement.entry import gpus_of
from cordee.schedule.placement.fill import Need
from cordee.schedule.placement.view import Pool
from cordee.schedule.preemption.running import NEVER
from cordee.schedule.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """GPUs of certain nodes are kept for the first gang that waits for a pool.

    Attributes:
        starts_by_us: when it can start by what is known of those who run there; None: nobody knows.
        kept: what is free there already and is kept.
        nodes: where it will start, as things are.
    """

    job: Job
    pool: Pool
    starts_by_us: int | None
    kept: tuple[Lease, ...]
    nodes: tuple[str, ...]


def soonest(state: State, job: Job, pool: Pool, need: Need, now_us: int) -> Reservation | None:
    """The units that a gang will have first; None if the pool can never hold it."""
    running = state.running
    nodes = running.of_pool(pool)
    best: tuple[tuple[int, int], list[tuple[int, int]]] | None = None
    for group in _groups(state, nodes, need):
        found = _soonest(state, group, need, now_us)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    if best is None:
        return None
    (starts_by_us, _), wanted = best
    kept = []
    for number, gpus in wanted:
        name = running.node_names[number]
        free = gpus_of(state.soon.entries[name].free)[:gpus]
        if free:
            kept.append(Lease(node=name, gpus=free))
    names = tuple(sorted(running.node_names[number] for number, _ in wanted))
    by_us = None if starts_by_us >= NEVER else starts_by_us
    return Reservation(job=job, pool=pool, starts_by_us=by_us, kept=tuple(kept), nodes=names)


def _groups(state: State, nodes: Any, need: Need) -> Iterable[Any]:
    """Nodes that the gang may lie in together."""
    running = state.running
    if need.within not in ("rack", "block"):
        yield nodes
        return
    up = {"rack": 0, "block": 1}[need.within]
    found: dict[tuple[str, ...], list[int]] = {}
    for number in np.flatnonzero(nodes):
        domain = state.nodes[running.node_names[number]].node.domain
        found.setdefault(domain[: len(domain) - up], []).append(int(number))
    for _, numbers in sorted(found.items()):
        mask = np.zeros_like(nodes)
        mask[numbers] = True
        yield mask


def _soonest(state: State, nodes: Any, need: Need, now_us: int) -> tuple[tuple[int, int], list[tuple[int, int]]] | None:
    """When the units are there, how much of what is free they keep, and the GPUs wanted of each node."""
    if need.within in ("node", "island"):
        need = Need(need.gpus, 1, 0, need.in_island, None)
    units, rest = (need.unit, need.units), (need.rest, 1)
    orders = ((units, rest), (rest, units)) if need.rest and need.units else ((units,) if need.units else (rest,),)
    found = [each for order in orders if (each := _in_order(state, nodes, order, now_us)) is not None]
    return min(found, default=None)


def _in_order(
    state: State, nodes: Any, sizes: tuple[tuple[int, int], ...], now_us: int
) -> tuple[tuple[int, int], list[tuple[int, int]]] | None:
    """So many parts of each size, one size after the other."""
    chosen: dict[int, int] = {}
    starts_by_us = 0
    for size, wanted in sizes:
        at_us, lack, node = _openings(state, nodes, size, chosen, now_us)
        order = np.lexsort((state.running.name_ranks()[node], lack, at_us))[:wanted]
        if len(order) < wanted:
            return None
        for number in node[order].tolist():
            chosen[number] = chosen.get(number, 0) + size
        starts_by_us = max(starts_by_us, int(at_us[order].max()))
    free = state.running.node_free
    kept = sum(min(gpus, int(free[number])) for number, gpus in chosen.items())
    return (starts_by_us, kept), sorted(chosen.items())


def _openings(state: State, nodes: Any, size: int, taken: dict[int, int], now_us: int) -> tuple[Any, Any, Any]:
    """Each further unit of a size that nodes will hold: when, how many GPUs it lacks now, on which node."""
    running = state.running
    count = len(running.node_names)
    free, usable = running.node_free[:count].copy(), running.node_usable[:count].copy()
    for number, gpus in taken.items():
        free[number] -= gpus
        usable[number] -= gpus
    row, node, gpus = running.leases["row"], running.leases["node"], running.leases["gpus"]
    there = np.flatnonzero((gpus > 0) & nodes[node]) if len(row) else np.empty(0, np.int64)
    ends_us = np.maximum(running.rows["ends_us"][row[there]], now_us) if len(there) else there
    order = there[np.lexsort((ends_us, node[there]))] if len(there) else there
    ends_us = np.sort(ends_us) if not len(there) else np.maximum(running.rows["ends_us"][row[order]], now_us)
    on, more = node[order], gpus[order]
    total = np.cumsum(more)
    first = np.r_[True, on[1:] != on[:-1]] if len(on) else np.empty(0, bool)
    base = np.maximum.accumulate(np.where(first, total - more, 0)) if len(on) else total
    after = free[on] + total - base
    before = after - more
    gained = np.maximum(0, after) // size - np.maximum(0, before) // size
    now_there = np.maximum(0, np.where(nodes, free, 0)) // size
    open_now = np.repeat(np.arange(count), now_there)
    later = np.repeat(on, gained)
    # What nobody in these columns holds (attempts that are ending) becomes free at a time that nobody knows.
    held = free + (np.bincount(on, weights=more, minlength=count).astype(np.int64) if len(on) else 0)
    hidden = np.where(nodes, np.maximum(0, usable) // size - np.maximum(0, held) // size, 0)
    unknown = np.repeat(np.arange(count), np.maximum(0, hidden))
    at_us = np.concatenate([
        np.full(len(open_now), now_us), np.repeat(ends_us, gained), np.full(len(unknown), NEVER),
    ])  # fmt: skip
    lack = np.concatenate([
        np.zeros(len(open_now), np.int64), np.repeat(np.maximum(0, size - np.maximum(0, free[on]) % size), gained),
        np.maximum(0, size - np.maximum(0, free[unknown])),
    ])  # fmt: skip
    return at_us.astype(np.int64), lack.astype(np.int64), np.concatenate([open_now, later, unknown])
