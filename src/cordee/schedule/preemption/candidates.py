"""Candidates: the attempts that a waiting job may preempt, with the GPUs that they would free and their losses.

Searches read columns (numpy), not records, so they take the same few vector operations on a cluster of any size.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cordee.hardware.arrays import Floats, Ints, Mask
from cordee.ids import JobId
from cordee.schedule.placement.view import Pool
from cordee.schedule.state.failed_searches import Scope
from cordee.schedule.state.order import TIERS, counts_service
from cordee.schedule.state.records import Attempt
from cordee.schedule.state.state import State
from cordee.units import US_PER_HOUR

Weight = tuple[int, int, int, list[JobId]]
"""The order of sets of victims: cost, number, tiers (lower ones first), names."""


class Costs:
    """The costs of preemptions at one moment, by row of the running attempts."""

    def __init__(self, state: State, now_us: int) -> None:
        self._state, self._now_us = state, now_us
        self._seen = -1  # changes of the rows
        self._each: Floats = np.empty(0)

    def of(self, scope: Scope) -> Floats:
        """Return the cost of preempting each row.

        A victim may preempt jobs below it in its turn, so a higher tier costs more. Among nearly equal victims of its
        own tier a job takes the one that received more service.
        """
        policy, tier = self._state.policy, self._state.running.rows.ints["tier"]
        weights = policy.weights
        cost = self._charges() * (1 + weights.cascade * (len(TIERS) - 1 - tier))
        if scope.standing is None or not weights.favour or policy.order != "service":
            return cost
        hours = self._state.running.served(self._now_us) / US_PER_HOUR
        favoured = cost * np.maximum(0.1, 1 - weights.favour * np.log2(1 + hours))
        return np.where(tier == scope.tier, favoured, cost)

    def _charges(self) -> Floats:
        """Return `loss.charge` of each row, as floats."""
        running = self._state.running
        rows = running.rows
        if self._seen != rows.changes:
            ints, rate = rows.ints, rows.floats["rate"]
            work = np.minimum(running.at_risk_us(self._now_us), ints["every_us"])
            lost = np.where(rows.flags["saves"], ints["save_us"], work) + ints["restart_us"]
            self._each = rate * lost / US_PER_HOUR if rate.any() else (ints["gpus"] * lost).astype(np.float64)
            self._seen = rows.changes
        return self._each


@dataclass
class Reach:
    """The victims of one scope, valid until an attempt is placed or leaves.

    Attributes:
        gain: GPUs that each lease would free; 0 if its attempt may not be preempted.
        freed: the sum of that on each node.
    """

    gain: Ints
    freed: Ints
    scope: Scope
    costs: Costs

    @cached_property
    def cost(self) -> Floats:
        """The cost of preempting each row, computed when it is first needed, as most searches end before."""
        return self.costs.of(self.scope)


@dataclass(slots=True)
class Field:
    """The nodes and leases that one search looks at.

    Attributes:
        nodes: a mask of the nodes of the pool.
        free: GPUs of each node that are free.
        available: those, and all GPUs that the victims would free.
        gain: GPUs that each lease would free; 0 if its attempt may not be preempted.
        row: the attempt of each lease.
        node: the node of each lease.
    """

    nodes: Mask
    free: Ints
    available: Ints
    gain: Ints
    row: Ints
    node: Ints
    reach: Reach

    @property
    def cost(self) -> Floats:
        """The cost of preempting each row."""
        return self.reach.cost

    def on(self, nodes: Ints) -> Ints:
        """Return the leases of victims on these nodes."""
        there = np.zeros(len(self.nodes), np.bool_)
        there[nodes] = True
        return np.flatnonzero((self.gain > 0) & there[self.node])


class Candidates:
    """The possible victims at one moment; the state may change between two questions."""

    def __init__(self, state: State, now_us: int) -> None:
        self._state, self._now_us = state, now_us
        self._seen = self._seen_nodes = -1  # changes of rows, and of nodes
        self._costs = Costs(state, now_us)
        self._standing: Ints | None = None
        self._lost: dict[int, Mask] = {}
        self._has_lost: dict[tuple[int, int], bool] = {}
        self._reaches: dict[tuple[Scope, frozenset[str]], Reach] = {}
        self._fields: dict[tuple[Scope, Pool, frozenset[str]], Field] = {}

    def none_in(self, scope: Scope) -> bool:
        """Return whether tiers and standings alone show that a scope has no victim; that is true of most scopes."""
        if scope.borrowers or scope.moves is not None:
            return False
        if self._state.running.lowest_tier > scope.tier:
            return False
        return scope.standing is None or not self._any_lost(scope.tier, scope.standing)

    def attempts(self, scope: Scope) -> list[Attempt]:
        """Return all possible victims, in no order."""
        state = self._state
        return [state.attempts[state.running.jobs[row]] for row in np.flatnonzero(self.allowed(scope)).tolist()]

    def standing(self) -> Ints:
        """Return the standing of each row now."""
        self._refresh()
        if self._standing is None:
            running = self._state.running
            by_level = counts_service(self._state.policy)
            self._standing = (running.of_level if by_level else running.served)(self._now_us)
        return self._standing

    def lost(self, standing: int) -> Mask:
        """Return whether each row has lost its turn to jobs of its tier of this standing.

        An overdue job (-1) does not wait for the next checkpoint of an attempt that cannot save in time.
        """
        self._refresh()
        found = self._lost.get(standing)
        if found is None:
            running, policy, now_us = self._state.running, self._state.policy, self._now_us
            if not counts_service(policy):
                found = (running.rows.ints["slice_ends_us"] <= now_us) & (self.standing() > standing)
            elif standing < len(running.levels):
                found = running.lost_us(standing) <= now_us
            else:
                found = np.zeros(running.rows.size, np.bool_)
            if standing >= 0 and running.awaited:
                found &= running.kept_until_us(now_us, policy) <= now_us
            found &= running.rows.flags["live"]
            self._lost[standing] = found
        return found

    def allowed(self, scope: Scope) -> Mask:
        """Return for each row whether it may be preempted, or moved, now."""
        running, now_us = self._state.running, self._now_us
        rows, flags = running.rows.ints, running.rows.flags
        tier = rows["tier"]
        if scope.moves is not None:
            movable = (tier >= scope.tier) & (rows["gpus"] <= scope.moves) & flags["saves"]
            return movable & (rows["slice_ends_us"] <= now_us) & flags["live"]
        min_run_over = rows["min_run_ends_us"] <= now_us
        allowed = (tier > scope.tier) & min_run_over
        if scope.standing is not None:
            allowed |= (tier == scope.tier) & self.lost(scope.standing) & (rows["priority"] <= scope.priority)
        if scope.borrowers:
            allowed |= running.of_queues(scope.borrowers) & min_run_over
        return allowed & flags["live"]

    def field(self, scope: Scope, pool: Pool, shielded: frozenset[str]) -> Field:
        """Return the field of a search for victims of a scope in a pool; attempts of shielded queues stay."""
        self._refresh()
        key = (scope, pool, shielded)
        found = self._fields.get(key)
        if found is None:
            columns, leases, reach = self._state.nodes.columns, self._state.running.leases, self._reach(scope, shielded)
            free, row, node = columns.free, leases.ints["row"], leases.ints["node"]
            found = Field(columns.of_pool(pool), free, free + reach.freed, reach.gain, row, node, reach)
            self._fields[key] = found
        return found

    def weigh(self, rows: list[int], field: Field) -> Weight:
        """Return the weight of a set of victims."""
        jobs, tiers, cost = self._state.running.jobs, self._state.running.rows.ints["tier"], field.cost
        named = sorted((jobs[row], row) for row in rows)
        total = sum(round(float(cost[row])) for _, row in named)
        return total, len(rows), -sum(int(tiers[row]) for row in rows), [job_id for job_id, _ in named]

    def _refresh(self) -> None:
        rows, columns = self._state.running.rows, self._state.nodes.columns
        if self._seen != rows.changes:
            self._seen = rows.changes
            self._standing = None
            self._lost.clear()
            self._has_lost.clear()
            self._reaches.clear()
            self._fields.clear()
        if self._seen_nodes != columns.changes:
            self._seen_nodes = columns.changes
            self._fields.clear()

    def _any_lost(self, tier: int, standing: int) -> bool:
        """Return whether an attempt of a tier has lost its turn to a job of this standing."""
        self._refresh()
        found = self._has_lost.get((tier, standing))
        if found is None:
            running, lost = self._state.running, self.lost(standing)
            if running.of_tiers[tier] < sum(running.of_tiers):
                lost = lost & (running.rows.ints["tier"] == tier)
            found = self._has_lost[tier, standing] = bool(np.count_nonzero(lost))
        return found

    def _reach(self, scope: Scope, shielded: frozenset[str]) -> Reach:
        key = (scope, shielded)
        found = self._reaches.get(key)
        if found is None:
            running, count = self._state.running, len(self._state.nodes.columns.names)
            leases = running.leases.ints
            row, node = leases["row"], leases["node"]
            allowed = self.allowed(scope)
            if shielded:
                allowed &= ~running.of_queues(shielded)
            gain = np.where(allowed[row], leases["gpus"], 0)
            freed = np.zeros(count, np.int64)
            if len(row):
                freed = np.bincount(node, weights=gain, minlength=count).astype(np.int64)
            found = self._reaches[key] = Reach(gain, freed, scope, self._costs)
        return found
