"""The ledger of a cluster that Cordee does not run, from the accounting of its own scheduler: a pure fold.

    capacity = held + idle
    held     = completed + running + cancelled + failed + out_of_memory + timeout + node_fail + preempted + requeued

The accounting knows when an attempt held its GPUs and how it ended, but not whether its work was kept. Two assumptions
fill that in, and the answer names them: work is lost with every attempt that was cut short, or, if jobs are said to
save, half an interval of it. An attempt that its user cancelled is never counted as lost.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cordee.units import US_PER_HOUR, US_PER_S, format_duration

ENDS = (
    "completed",
    "running",
    "cancelled",
    "failed",
    "out_of_memory",
    "timeout",
    "node_fail",
    "preempted",
    "requeued",
)
"""The ends of attempts, which are the classes of GPU time too."""

CUT_SHORT = ("failed", "out_of_memory", "timeout", "node_fail", "preempted", "requeued")
"""The ends with which work is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherAttempt:
    """One execution of a job, or its wait for one, as another scheduler's accounting has it.

    Attributes:
        end: one of ENDS; of an attempt that never started, what became of it.
        gpu_name: the cluster's name of the kind of GPU; "" if it is not said.
        submit_us: since when it could have started.
        start_us: None if it never started.
        end_us: the end of the export for one that runs or waits.
        node: the first of its nodes; "" if it is not said.
        line: in its file, for messages.
    """

    job_id: str
    end: str
    gpus: int
    submit_us: int
    start_us: int | None
    end_us: int
    line: int
    user: str = ""
    account: str = ""
    partition: str = ""
    gpu_name: str = ""
    node: str = ""
    limit_us: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRow:
    """GPU time and money of one job, user, account or partition.

    Attributes:
        gpu_us: by end.
        micro_usd: by end; of GPUs that have a price.
        lost_gpu_us, lost_micro_usd: the part of the time cut short that is taken for lost.
        waiting_gpu_us: from when it could have started until it did, times its GPUs.
    """

    key: str
    jobs: int
    attempts: int
    gpu_us: Mapping[str, int]
    micro_usd: Mapping[str, int]
    lost_gpu_us: int
    lost_micro_usd: int
    waiting_gpu_us: int
    wait_mean_s: float
    wait_p99_s: float

    @property
    def held_gpu_us(self) -> int:
        """Return the sum over all ends."""
        return sum(self.gpu_us.values())

    @property
    def held_micro_usd(self) -> int:
        """Return its cost."""
        return sum(self.micro_usd.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherCost:
    """The answer: rows, their total, and the GPUs that nobody held.

    Attributes:
        from_us, to_us: the time that it covers.
        gpus: of the cluster, or the most that were held at once.
        gpus_given: whether they were given.
        assumptions: sentences.
    """

    by: str
    from_us: int
    to_us: int
    gpus: int
    gpus_given: bool
    rows: tuple[OtherRow, ...]
    total: OtherRow
    idle_gpu_us: int
    idle_micro_usd: int
    assumptions: tuple[str, ...]


@dataclass(slots=True)
class _Sums:
    jobs: set[str] = field(default_factory=set)
    attempts: int = 0
    gpu_us: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENDS, 0))
    micro_usd: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENDS, 0))
    lost_gpu_us: int = 0
    lost_micro_usd: int = 0
    waiting_gpu_us: int = 0
    waits_us: list[int] = field(default_factory=list)

    def row(self, key: str) -> OtherRow:
        """Return them as a row."""
        waits = sorted(self.waits_us)
        return OtherRow(
            key=key,
            jobs=len(self.jobs),
            attempts=self.attempts,
            gpu_us=self.gpu_us,
            micro_usd=self.micro_usd,
            lost_gpu_us=self.lost_gpu_us,
            lost_micro_usd=self.lost_micro_usd,
            waiting_gpu_us=self.waiting_gpu_us,
            wait_mean_s=sum(waits) / len(waits) / US_PER_S if waits else 0.0,
            wait_p99_s=waits[-(-99 * len(waits) // 100) - 1] / US_PER_S if waits else 0.0,
        )


def other_cost(
    attempts: Sequence[OtherAttempt],
    *,
    by: str,
    price_of: Callable[[str], int],
    gpus: int | None = None,
    window_us: tuple[int | None, int | None] = (None, None),
    every_us: int | None = None,
) -> OtherCost:
    """Return the cost of a cluster that Cordee does not run.

    Args:
        attempts: in any order.
        by: `job`, `user`, `account` or `partition`.
        price_of: micro-dollars an hour of a kind of GPU, 0 without a price.
        gpus: of the cluster; None: the most that were held at once.
        window_us: attempts outside it are left out, those across its bounds are cut; None: the export's own bounds.
        every_us: the interval at which jobs save their state; None: they do not.
    """
    from_us, to_us = bounds_us(attempts, window_us)
    rows: dict[str, _Sums] = {}
    total = _Sums()
    held = []
    for whole in attempts:
        each = _cut(whole, from_us, to_us)
        if each is None:
            continue
        held.append(each)
        for sums in (rows.setdefault(_key(each, by), _Sums()), total):
            _add(sums, each, price_of(each.gpu_name), every_us)
    peak = _peak(held)
    there = peak if gpus is None else gpus
    all_row = total.row("all")
    idle_gpu_us = max(0, there * (to_us - from_us) - all_row.held_gpu_us)
    rate = all_row.held_micro_usd * US_PER_HOUR // max(1, all_row.held_gpu_us)  # the mean price of those held
    return OtherCost(
        by=by,
        from_us=from_us,
        to_us=to_us,
        gpus=there,
        gpus_given=gpus is not None,
        rows=tuple(sorted((sums.row(key) for key, sums in rows.items()), key=lambda row: (-row.held_gpu_us, row.key))),
        total=all_row,
        idle_gpu_us=idle_gpu_us,
        idle_micro_usd=idle_gpu_us * rate // US_PER_HOUR,
        assumptions=tuple(_assumptions(every_us, there, peak, given=gpus is not None)),
    )


def bounds_us(attempts: Iterable[OtherAttempt], window_us: tuple[int | None, int | None]) -> tuple[int, int]:
    """Return the time that the answer covers: the window, and where it is open from the first start to the last end."""
    started = [(each.start_us, each.end_us) for each in attempts if each.start_us is not None]
    from_us = min((start for start, _ in started), default=0) if window_us[0] is None else window_us[0]
    to_us = max((end for _, end in started), default=from_us) if window_us[1] is None else window_us[1]
    return from_us, max(from_us, to_us)


def _cut(each: OtherAttempt, from_us: int, to_us: int) -> OtherAttempt | None:
    """Return the part of an attempt in the window; None without any."""
    begin_us = each.submit_us if each.start_us is None else each.start_us
    if (each.end_us <= from_us and begin_us < from_us) or begin_us >= to_us:
        return None
    end_us = min(each.end_us, to_us)
    start_us = None if each.start_us is None else max(each.start_us, from_us)
    return replace(each, start_us=start_us, end_us=end_us)


def _key(each: OtherAttempt, by: str) -> str:
    key: str = {"job": each.job_id, "user": each.user, "account": each.account, "partition": each.partition}[by]
    return key or "–"


def _add(sums: _Sums, each: OtherAttempt, price: int, every_us: int | None) -> None:
    until_us = each.end_us if each.start_us is None else each.start_us
    wait_us = max(0, until_us - each.submit_us)
    sums.jobs.add(each.job_id)
    sums.waiting_gpu_us += wait_us * each.gpus
    if each.start_us is None:
        return
    sums.waits_us.append(wait_us)
    sums.attempts += 1
    held_us = max(0, each.end_us - each.start_us)
    sums.gpu_us[each.end] += held_us * each.gpus
    sums.micro_usd[each.end] += held_us * each.gpus * price // US_PER_HOUR
    if each.end in CUT_SHORT:
        lost_us = lost_of(held_us, every_us)
        sums.lost_gpu_us += lost_us * each.gpus
        sums.lost_micro_usd += lost_us * each.gpus * price // US_PER_HOUR


def lost_of(held_us: int, every_us: int | None) -> int:
    """Return the time of an attempt that is lost when it is cut short: all of it, or half an interval of saving.

    >>> lost_of(7200, None), lost_of(7200, 3600), lost_of(600, 3600)
    (7200, 1800, 600)
    """
    return held_us if every_us is None else min(held_us, every_us // 2)


def _peak(attempts: Iterable[OtherAttempt]) -> int:
    """Return the most GPUs that were held at once."""
    changes = sorted(
        change
        for each in attempts
        if each.start_us is not None and each.end_us > each.start_us
        for change in ((each.start_us, 1, each.gpus), (each.end_us, 0, -each.gpus))
    )
    held = most = 0
    for _, _, gpus in changes:
        held += gpus
        most = max(most, held)
    return most


def _assumptions(every_us: int | None, gpus: int, peak: int, *, given: bool) -> Iterable[str]:
    if every_us is None:
        yield "jobs do not save their state: all work of an attempt that was cut short is lost (--checkpoint-every 1h)"
    else:
        every = format_duration(every_us / US_PER_S)
        yield f"jobs save their state every {every}: an attempt that was cut short has lost half of that, or all it had"
    yield "time of jobs that their users cancelled is not counted as lost"
    if not given:
        yield f"the cluster has {gpus} GPUs, the most that were held at once; any others were idle (--cluster 4x8xH100)"
    elif peak > gpus:
        yield f"the export holds up to {peak} GPUs at once, more than the {gpus} of --cluster: idle time is too low"
