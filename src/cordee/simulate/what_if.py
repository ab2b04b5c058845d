"""The log of another scheduler, replayed under Cordee's: waits, losses, dollars and idle time, beside those of the log.

A job needs the time of its last attempt, and what its earlier ones had saved; one that failed or was cancelled does so
again. Nodes fail when they did. What the log does not hold is assumed, and the answer says so.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cordee.account.elsewhere import OtherAttempt, lost_of
from cordee.events import Node
from cordee.simulate.answer import LeftOut, PolicyResult, comparison
from cordee.simulate.compare import Scenario, count_jobs, simulate
from cordee.simulate.metrics import Spread, spread
from cordee.simulate.policies import NamedPolicy
from cordee.simulate.traces.job import Tally, TraceJob
from cordee.simulate.workload import Costs
from cordee.simulate.world import Outage
from cordee.units import US_PER_HOUR, US_PER_S, format_duration, plural

REPAIR_US = 4 * US_PER_HOUR
_BY_CLUSTER = ("node_fail", "preempted", "requeued")
"""The ends that are not the job's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A log or its replay, in the same measures.

    Attributes:
        wait_s: from submission to the first start.
        away_s: the whole time of a job without GPUs, until its end.
        held_gpu_us: GPU time held.
        lost_gpu_us: work that preemptions, requeues and node failures lost; saves on notice too.
        preemptions: attempts that left for another job; of Slurm also those that were requeued.
        idle_gpu_us: GPU time until the last end that no job held.
    """

    name: str
    wait_s: Spread | None
    away_s: Spread | None
    makespan_s: float
    held_gpu_us: int
    held_micro_usd: int
    lost_gpu_us: int
    lost_micro_usd: int
    preemptions: int
    idle_gpu_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The log, and its replay under each policy."""

    jobs: int
    nodes: int
    gpus: int
    log: Outcome
    replayed: tuple[Outcome, ...]
    policies: tuple[PolicyResult, ...]
    left_out: tuple[LeftOut, ...]
    assumptions: tuple[str, ...]


def what_if(
    attempts: Sequence[OtherAttempt],
    nodes: tuple[Node, ...],
    policies: Sequence[NamedPolicy],
    *,
    name: str,
    every_us: int | None,
) -> WhatIf:
    """Replay a log under policies.

    Args:
        attempts: of the log.
        nodes: of the cluster, with their prices.
        policies: of the replay.
        name: of the log.
        every_us: the interval at which the log's jobs saved their state; None: they did not.
    """
    histories = _histories(attempts)
    preemptible = frozenset(each.partition for each in attempts if each.end == "preempted")
    zero_us = min((each[0].submit_us for each in histories.values()), default=0)
    jobs = sorted(
        (_job(history, zero_us, preemptible, every_us) for history in histories.values()),
        key=lambda job: (job.submit_us, job.line),
    )

    def read(tally: Tally) -> Iterator[TraceJob]:
        tally.jobs += len(jobs)
        return iter(jobs)

    outages = tuple(_outages(attempts, nodes, zero_us))
    scenario = Scenario(jobs=read, name=name, nodes=nodes, outages=outages)
    tally, total = count_jobs(scenario)
    results = [simulate(scenario, each) for each in policies]
    answer = comparison(scenario, tally, total, results)
    rate = nodes[0].micro_usd_per_gpu_hour
    return WhatIf(
        jobs=total,
        nodes=len(nodes),
        gpus=answer.gpus,
        log=_logged(histories, answer.gpus, rate, every_us),
        replayed=tuple(_replayed(each, answer.gpus) for each in answer.policies),
        policies=answer.policies,
        left_out=answer.left_out,
        assumptions=tuple(_assumptions(scenario.costs, len(outages), preemptible, every_us)),
    )


def _histories(attempts: Iterable[OtherAttempt]) -> dict[str, list[OtherAttempt]]:
    """Return the attempts that held GPUs, by job, in order."""
    found: dict[str, list[OtherAttempt]] = {}
    for each in sorted(attempts, key=lambda each: (each.submit_us, each.line)):
        if each.start_us is not None and each.end_us > each.start_us:
            found.setdefault(each.job_id, []).append(each)
    return found


def _held_us(each: OtherAttempt) -> int:
    return each.end_us - (each.end_us if each.start_us is None else each.start_us)


def _job(history: Sequence[OtherAttempt], zero_us: int, preemptible: frozenset[str], every_us: int | None) -> TraceJob:
    first, last = history[0], history[-1]
    saved_us = sum(_held_us(each) - lost_of(_held_us(each), every_us) for each in history[:-1])
    work_us = max(saved_us + _held_us(last), *(_held_us(each) for each in history))
    return TraceJob(
        job_id=first.job_id,
        submit_us=first.submit_us - zero_us,
        gpus=max(each.gpus for each in history),
        duration_us=work_us,
        line=first.line,
        user=first.user,
        vc=first.account or first.partition,
        status=last.end,
        gpu_name=first.gpu_name or None,
        tier="preemptible" if first.partition in preemptible else "",
        time_limit_us=first.limit_us,
    )


def _outages(attempts: Iterable[OtherAttempt], nodes: Sequence[Node], zero_us: int) -> Iterator[Outage]:
    """Yield an outage for each node failure of the log, of a node that stands for the one that failed."""
    failed = sorted({(each.end_us, each.node) for each in attempts if each.end == "node_fail"})
    names = {name: number for number, name in enumerate(sorted({name for _, name in failed if name}))}
    for number, (at_us, name) in enumerate(failed):
        node = nodes[names.get(name, number) % len(nodes)]
        yield Outage(at_us=max(0, at_us - zero_us), nodes=(node.name,), back_us=REPAIR_US, why="node failed in the log")


def _logged(histories: Mapping[str, list[OtherAttempt]], gpus: int, rate: int, every_us: int | None) -> Outcome:
    waits = [each[0].start_us - each[0].submit_us for each in histories.values() if each[0].start_us is not None]
    away = [each[-1].end_us - each[0].submit_us - sum(map(_held_us, each)) for each in histories.values()]
    attempts = [each for history in histories.values() for each in history]
    held = sum(_held_us(each) * each.gpus for each in attempts)
    lost = sum(lost_of(_held_us(each), every_us) * each.gpus for each in attempts if each.end in _BY_CLUSTER)
    begin_us = min((each.submit_us for each in attempts), default=0)
    length_us = max((each.end_us for each in attempts), default=begin_us) - begin_us
    return Outcome(
        name="the log",
        wait_s=spread(waits),
        away_s=spread(away),
        makespan_s=length_us / US_PER_S,
        held_gpu_us=held,
        held_micro_usd=held * rate // US_PER_HOUR,
        lost_gpu_us=lost,
        lost_micro_usd=lost * rate // US_PER_HOUR,
        preemptions=sum(each.end in ("preempted", "requeued") for each in attempts),
        idle_gpu_us=max(0, gpus * length_us - held),
    )


def _replayed(result: PolicyResult, gpus: int) -> Outcome:
    summary = result.summary
    held = round(summary.useful_gpu_us / summary.goodput) if summary.goodput else 0
    return Outcome(
        name=result.policy,
        wait_s=summary.wait_s,
        away_s=summary.away_s,
        makespan_s=summary.makespan_s,
        held_gpu_us=held,
        held_micro_usd=summary.held_micro_usd,
        lost_gpu_us=round(result.lost_gpu_hours * US_PER_HOUR),
        lost_micro_usd=result.lost_micro_usd,
        preemptions=summary.preemptions,
        idle_gpu_us=max(0, round(gpus * summary.makespan_s * US_PER_S) - held),
    )


def _assumptions(costs: Costs, outages: int, preemptible: frozenset[str], every_us: int | None) -> Iterator[str]:
    every, save = (format_duration(value / US_PER_S) for value in (costs.every_us, costs.save_us))
    restart = format_duration(costs.restart_us / US_PER_S)
    yield f"replay: every job saves each {every} and on notice, which takes {save}, and starts again in {restart}"
    saved = "and what its earlier ones had saved" if every_us is not None else "and nothing of its earlier ones"
    yield f"replay: a job needs the time of its last attempt {saved}; what failed, was cancelled or ran ends likewise"
    if preemptible:
        names = ", ".join(sorted(name or "–" for name in preemptible))
        yield f"replay: jobs of a partition in which one was preempted ({names}) are preemptible, all others standard"
    else:
        yield "replay: all jobs are of the standard tier, since none was preempted in the log"
    repair = format_duration(REPAIR_US / US_PER_S)
    if outages:
        yield f"replay: {plural(outages, 'node failure')} at the times of the log, each of one node for {repair}"
    yield "replay: placement knows no other constraint of the log (features, licences, reservations, dependencies)"
