"""Idle sessions: after which pause a session's KV cache should leave the GPU.

A session that waits for its user or a tool holds KV blocks that others could fill. Staying costs its fraction of the
pool for as long as it pauses; leaving costs a restore, or a prefill, once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from cordee.errors import SpecError
from cordee.plan.serving.levers.reuse import BlockReuse


def leave_after_s(pool_bytes: float, kv_bytes: float, return_s: float, worth_fraction: float = 1.0) -> float:
    """Return the pause after which an idle session should leave the GPU.

    Staying keeps kv_bytes of the pool from others: of each second, kv_bytes / pool_bytes of the replica's GPU time,
    times `worth_fraction`, by which throughput grows with the batch (1 where memory alone limits the batch, 0 where the
    pool is not full). Returning costs `return_s` of it. The pause at which both are equal is also the limit that never
    costs more than twice the best choice in hindsight (ski rental, Karlin et al. 1988). Where the return is a restore
    over a link, the session's size cancels: the limit is the time to move the whole pool.

    >>> leave_after_s(pool_bytes=50e9, kv_bytes=2e9, return_s=2e9 / 25e9)
    2.0
    """
    if worth_fraction <= 0:
        return math.inf
    return return_s * pool_bytes / kv_bytes / worth_fraction


@dataclass(frozen=True, slots=True)
class IdlePlan:
    """The limit after which an idle session leaves the GPU, and GPU-seconds of one pause on average.

    `limit_s` infinite: stay. `always_s` and `never_s` are of leaving immediately and of never leaving.
    """

    limit_s: float
    gpu_s: float
    always_s: float
    never_s: float


def idle_plan(pauses_s: Sequence[float], hold_per_s: float, return_s: float) -> IdlePlan:
    """Return the best limit for pauses such as these.

    Args:
        pauses_s: seconds between a session's answer and its next prompt; infinite: it never came back.
        hold_per_s: GPU-seconds that a second of staying costs: the session's fraction of the KV pool.
        return_s: GPU-seconds of restoring, or of computing again; a session that never comes back counts with it.

    >>> idle_plan([1.0] * 9 + [1000.0], hold_per_s=0.1, return_s=1.0).limit_s
    1.0

    Raises:
        SpecError: no pauses.
    """
    if not pauses_s:
        raise SpecError("no pauses", hint="give requests whose sessions come back")
    count, held_s, longer = len(pauses_s), 0.0, len(pauses_s)
    # A limit between two pauses costs more than the lower of them: only 0, the pauses and infinity can be best.
    costs = [(0.0, return_s * sum(pause > 0 for pause in pauses_s) / count)]
    for pause, group in groupby(sorted(pauses_s)):
        ended = len(list(group))
        longer -= ended
        held_s += ended * pause
        beyond_s = longer * pause if longer else 0.0
        costs.append((pause, (hold_per_s * (held_s + beyond_s) + longer * return_s) / count))
    never_s = costs[-1][1]
    best_limit_s, best_s = min(costs[:-1], key=lambda each: each[1])
    if never_s <= best_s:
        best_limit_s, best_s = math.inf, never_s
    return IdlePlan(best_limit_s, best_s, costs[0][1], never_s)


def session_pauses_s(reuse: BlockReuse) -> tuple[float, ...]:
    """Return the seconds between two uses of a block: the pauses of sessions, weighted by their blocks."""
    return tuple(sorted(gap for gap in reuse.gaps_s if gap > 0))
