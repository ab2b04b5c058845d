"""The order of jobs is one of their proportions: all times four times as long give the same decisions."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cordee.events import AttemptPlaced, NoticeGiven
from cordee.schedule.policy import Policy
from cordee.schedule.state.history import LADDER
from cordee.simulate.cluster import cluster
from cordee.simulate.run import run
from cordee.simulate.traces import Tally
from cordee.simulate.traces.job import TraceJob
from cordee.simulate.workload import Costs, submissions
from cordee.units import US_PER_S

LONG_S = 3_000_000
LEARNT, JOBS = 40, 40


def jobs(load: float, times: int) -> Iterator[TraceJob]:
    """Yield long jobs from which the history learns, and then jobs of all lengths at this load of 16 GPUs."""
    rng = random.Random(5)
    drawn = [(0.0, 1, LONG_S * (1 + number / 100)) for number in range(LEARNT)]
    at_s = 5.0 * LONG_S
    for _ in range(JOBS):
        gpus, run_s = rng.choice((1, 2, 4, 8)), LONG_S * rng.lognormvariate(-2, 1.5)
        at_s += rng.expovariate(1) * 0.42 * LONG_S * 3.75 / 16 / load  # means of the run times and of the GPUs
        drawn.append((at_s, gpus, run_s))
    for number, (submit_s, gpus, run_s) in enumerate(drawn):
        yield TraceJob(
            job_id=f"j{number}",
            submit_us=times * round(submit_s) * US_PER_S,
            gpus=gpus,
            duration_us=times * round(run_s) * US_PER_S,
            line=number,
        )


def decisions(load: float, times: int, patience: float | None) -> list[tuple[str, str]]:
    """Return the order of starts and notices; what a preemption costs, and the rules that weigh it, grow as well."""
    rules = Policy(patience=patience)
    policy = replace(
        rules,
        levels_gpu_us=tuple(times * 1000 * each for each in LADDER[:3]),
        preempt_after_us=times * 1000 * rules.preempt_after_us,
        time_slice_us=times * 100 * rules.time_slice_us,
    )
    hour_us = times * 3600 * US_PER_S
    costs = Costs(every_us=50 * hour_us, save_us=hour_us, restart_us=hour_us, grace_us=hour_us)
    nodes = cluster("2x8")
    log = run(
        nodes, submissions(jobs(load, times), nodes, Tally("x"), costs=costs), policy=policy, defer_reports=True
    ).log
    kinds = AttemptPlaced | NoticeGiven
    return [(type(event).__name__, event.job_id.partition("-")[0]) for event in log if isinstance(event, kinds)]


@pytest.mark.parametrize("load", [0.7, 1.5])
def test_times_that_are_four_times_as_long_give_the_same_order_once_the_history_has_learnt(load: float) -> None:
    """The patience and the levels follow from the jobs that ended."""
    order = decisions(load, 1, 0.5)
    assert order == decisions(load, 4, 0.5)
    assert order != decisions(load, 1, None), "jobs have waited so long that patience counted"
