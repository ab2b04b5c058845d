"""Reservations: the GPUs that a gang will get first, from the known ends of the attempts that hold them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cordee.events import Job, Lease
from cordee.hardware.arrays import Ints, Mask
from cordee.schedule.placement.entry import gpus_of
from cordee.schedule.placement.need import DOMAIN_HEIGHTS, Need
from cordee.schedule.placement.view import Pool
from cordee.schedule.state.records import NEVER
from cordee.schedule.state.state import State

Found = tuple[tuple[int, int], list[tuple[int, int]]]
"""The time at which all units are free and the number of free GPUs kept until then; (number, GPUs) of each node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """GPUs of certain nodes that are kept for the first gang that waits for a pool.

    Attributes:
        starts_by_us: the time at which it can start at the latest; None if the end of an attempt there is not known.
        kept: GPUs there that are free already and are kept.
        nodes: the nodes on which it will start, as far as is known now.
    """

    job: Job
    pool: Pool
    starts_by_us: int | None
    kept: tuple[Lease, ...]
    nodes: tuple[str, ...]


def soonest(state: State, job: Job, pool: Pool, need: Need, now_us: int) -> Reservation | None:
    """Return the reservation of the units that a gang will get first; None if the pool can never hold it."""
    columns = state.nodes.columns
    found = (_soonest(state, group, need, now_us) for group in _groups(state, columns.of_pool(pool), need))
    best = min((each for each in found if each is not None), key=lambda each: each[0], default=None)
    if best is None:
        return None
    (starts_by_us, _), wanted = best
    kept = []
    for number, gpus in wanted:
        name = columns.names[number]
        free = gpus_of(state.nodes.soon.entries[name].free)[:gpus]
        if free:
            kept.append(Lease(node=name, gpus=free))
    names = tuple(sorted(columns.names[number] for number, _ in wanted))
    by_us = None if starts_by_us >= NEVER else starts_by_us
    return Reservation(job=job, pool=pool, starts_by_us=by_us, kept=tuple(kept), nodes=names)


def _groups(state: State, nodes: Mask, need: Need) -> Iterator[Mask]:
    """Yield masks of nodes over which the gang may spread."""
    up = DOMAIN_HEIGHTS.get(need.within or "")
    if up is None:
        yield nodes
        return
    found: dict[tuple[str, ...], list[int]] = {}
    for number in np.flatnonzero(nodes):
        domain = state.nodes.records[state.nodes.columns.names[number]].node.domain
        found.setdefault(domain[: len(domain) - up], []).append(int(number))
    for _, numbers in sorted(found.items()):
        mask = np.zeros_like(nodes)
        mask[numbers] = True
        yield mask


def _soonest(state: State, nodes: Mask, need: Need, now_us: int) -> Found | None:
    """Return the better of two orders: units before the rest, and the rest before units."""
    if need.within in ("node", "island"):
        need = Need(need.gpus, 1, 0, need.in_island, None)
    units, rest = (need.unit, need.units), (need.rest, 1)
    orders = ((units, rest), (rest, units)) if need.rest and need.units else ((units,) if need.units else (rest,),)
    found = [each for order in orders if (each := _in_order(state, nodes, order, now_us)) is not None]
    return min(found, default=None)


def _in_order(state: State, nodes: Mask, sizes: tuple[tuple[int, int], ...], now_us: int) -> Found | None:
    """Take the given number of parts of each size, one size after the other."""
    columns = state.nodes.columns
    chosen: dict[int, int] = {}
    starts_by_us = 0
    for size, wanted in sizes:
        at_us, lack, node = _openings(state, nodes, size, chosen, now_us)
        order = np.lexsort((columns.ranks()[node], lack, at_us))[:wanted]
        if len(order) < wanted:
            return None
        for number in node[order].tolist():
            chosen[number] = chosen.get(number, 0) + size
        starts_by_us = max(starts_by_us, int(at_us[order].max()))
    kept = sum(min(gpus, int(columns.free[number])) for number, gpus in chosen.items())
    return (starts_by_us, kept), sorted(chosen.items())


def _openings(state: State, nodes: Mask, size: int, taken: dict[int, int], now_us: int) -> tuple[Ints, Ints, Ints]:
    """Return each further part of a size that nodes will hold: its time, the GPUs that it lacks now, its node."""
    columns = state.nodes.columns
    free, usable = columns.free.copy(), columns.usable.copy()
    for number, gpus in taken.items():
        free[number] -= gpus
        usable[number] -= gpus
    on, more, ends_us = _ending(state, nodes, now_us)
    total = np.cumsum(more)
    first = np.r_[True, on[1:] != on[:-1]] if len(on) else np.empty(0, np.bool_)
    base = np.maximum.accumulate(np.where(first, total - more, 0)) if len(on) else total
    after = free[on] + total - base
    before = after - more
    gained = np.maximum(0, after) // size - np.maximum(0, before) // size
    open_now = np.repeat(np.arange(len(free)), np.maximum(0, np.where(nodes, free, 0)) // size)
    later = np.repeat(on, gained)
    # GPUs of attempts that are ending are not in these columns; the time at which they become free is not known.
    held = free + (np.bincount(on, weights=more, minlength=len(free)).astype(np.int64) if len(on) else 0)
    hidden = np.where(nodes, np.maximum(0, usable) // size - np.maximum(0, held) // size, 0)
    unknown = np.repeat(np.arange(len(free)), np.maximum(0, hidden))
    at_us = np.concatenate([
        np.full(len(open_now), now_us), np.repeat(ends_us, gained), np.full(len(unknown), NEVER),
    ])  # fmt: skip
    lack = np.concatenate([
        np.zeros(len(open_now), np.int64), np.repeat(np.maximum(0, size - np.maximum(0, free[on]) % size), gained),
        np.maximum(0, size - np.maximum(0, free[unknown])),
    ])  # fmt: skip
    return at_us.astype(np.int64), lack.astype(np.int64), np.concatenate([open_now, later, unknown])


def _ending(state: State, nodes: Mask, now_us: int) -> tuple[Ints, Ints, Ints]:
    """Return the leases on these nodes ordered by node and end: the node, the GPUs, the latest end."""
    rows, leases = state.running.rows.ints, state.running.leases.ints
    row, node, gpus = leases["row"], leases["node"], leases["gpus"]
    if not len(row):
        return row, node, gpus
    there = np.flatnonzero((gpus > 0) & nodes[node])
    ends_us = np.maximum(rows["ends_us"][row[there]], now_us)
    order = np.lexsort((ends_us, node[there]))
    return node[there[order]], gpus[there[order]], ends_us[order]
