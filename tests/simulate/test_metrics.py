"""The metrics of a run follow from its log, as worked out by hand."""

from dataclasses import replace

import pytest

from cordee.account import Ledger
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    Event,
    Job,
    JobEnded,
    Node,
    NoticeGiven,
    NoticeReason,
    Outcome,
    RanksEnded,
    Reported,
    SpanClass,
    Tier,
)
from cordee.ids import JobId
from cordee.schedule.gang import Work
from cordee.schedule.policy import NAMED
from cordee.simulate.metrics import Metrics, Summary, spread
from cordee.simulate.run import Run, Submission, run

S = 1_000_000
HOUR = 3600 * S
NODE = Node(name="n0", epoch=1, gpu_name="H100", gpus=8, micro_usd_per_gpu_hour=3_600_000)


def given(name: str, gpus: int, at_s: int, run_s: int, **more: object) -> Submission:
    job = Job(job_id=JobId(name), name=name, owner="o", gpus=gpus, protected=True, **more)  # type: ignore[arg-type]
    work = Work(
        steps=run_s, step_us=S, start_us=60 * S, first_start_us=0, stall_us=0, upload_us=30 * S, saves_at_end=False
    )
    return Submission(at_us=at_s * S, job=job, work=work)


def played(nodes: list[Node], jobs: list[Submission]) -> Run:
    """Run in the order of arrival; only tiers preempt, so that the metrics do not depend on our own policy."""
    return run(nodes, jobs, policy=replace(NAMED["fit"], victims="dollars"))


def measured(done: Run) -> tuple[Metrics, Summary]:
    metrics, ledger = Metrics(), Ledger()
    for event in done.log:
        metrics.apply(event)
        ledger.apply(event)
    return metrics, metrics.summary((ledger, done.at_us))


def test_times_of_two_jobs_one_after_the_other() -> None:
    _, summary = measured(played([NODE], [given("a", 8, 100, 1000), given("b", 8, 100, 500)]))
    assert (summary.jobs, summary.ended, summary.preemptions, summary.lost) == (2, 2, 0, ())
    assert (summary.jct_s.mean, summary.jct_s.p50, summary.jct_s.max) == (1250, 1000, 1500)
    assert (summary.wait_s.mean, summary.wait_s.max, summary.away_s.max) == (500, 1000, 1000)
    assert summary.makespan_s == 1500
    assert summary.held_fraction == summary.goodput == 1, "nothing counts before the first job came"
    assert summary.slowdown_max == 3
    assert summary.slowdown_jain == pytest.approx((1 + 3) ** 2 / (2 * (1 + 9)))


def test_a_preemption_costs_a_save_and_a_restart_and_is_counted_by_cause() -> None:
    big = given("big", 8, 1000, 600, tier=Tier.PRODUCTION)
    metrics, summary = measured(played([NODE], [given("small", 8, 0, 7200, tier=Tier.PREEMPTIBLE), big]))
    assert summary.preemptions == 1 and summary.notices == {"preempt": 1}
    (lost,) = summary.lost
    assert (lost.cause, lost.redone_gpu_us, lost.save_gpu_us) == ("preempt", 0, 30 * 8 * S)
    assert lost.micro_usd == 30 * 8 * 1000 == summary.lost_micro_usd
    assert summary.lost_gpu_hours == pytest.approx(30 * 8 / 3600)
    assert summary.restart_gpu_us == 60 * 8 * S
    assert summary.goodput == pytest.approx(7800 / (7800 + 30 + 60))
    assert list(metrics.jct_us) == [630 * S, (7200 + 30 + 600 + 60) * S]


def test_work_that_is_done_again_is_counted_once_in_slowdown() -> None:
    unsaved = Work(steps=2000, step_us=S, start_us=0, every_us=None, handles_notice=False)
    first = Submission(
        at_us=0, job=Job(job_id=JobId("a"), name="a", owner="o", gpus=8, tier=Tier.PREEMPTIBLE), work=unsaved
    )
    _, summary = measured(played([NODE], [first, given("b", 8, 970, 100, tier=Tier.PRODUCTION)]))
    (lost,) = summary.lost
    assert (lost.cause, lost.redone_gpu_us) == ("preempt", 1000 * 8 * S)
    assert summary.kills == 1
    assert summary.slowdown_max == pytest.approx(3100 / 2000)


def test_fragmented_is_what_lies_free_while_a_gang_of_that_size_waits() -> None:
    nodes = [NODE, Node(name="n1", epoch=1, gpu_name="H100", gpus=8)]
    jobs = [given("a", 4, 0, 1000), given("b", 4, 0, 1000, gpu_name="H100"), given("c", 8, 0, 400)]
    _, fits = measured(played(nodes, jobs))
    assert fits.fragmented == 0
    _, whole = measured(played([NODE], [given("a", 6, 0, 1000), given("b", 4, 0, 1000)]))
    assert whole.fragmented == 0, "two GPUs are free, and nobody of that size waits"


def test_a_job_that_never_started_waited_until_the_end() -> None:
    """Otherwise a policy looks better for each job that it never starts."""
    jobs = [given("a", 8, 100, 1000), given("b", 8, 200, 500), given("c", 8, 300, 500)]
    jobs[2] = replace(jobs[2], stop_us=400 * S)
    done = run([NODE], jobs, policy=NAMED["fifo"], until_us=700 * S)
    metrics, summary = measured(done)
    assert summary.unstarted == 2
    assert (summary.wait_s.mean, summary.wait_s.max) == (pytest.approx((0 + 500 + 100) / 3, abs=1), 500)
    metrics.add(measured(done)[0])
    both = metrics.summary((done.ledger, done.at_us), (done.ledger, done.at_us))
    assert (both.unstarted, both.wait_s.mean) == (4, summary.wait_s.mean)


def test_a_job_that_has_not_ended_counts_until_the_end_of_the_run() -> None:
    """Otherwise a policy that ends only short jobs has the shortest mean."""
    jobs = [given("a", 8, 100, 200), given("b", 8, 150, 1000)]
    metrics, summary = measured(run([NODE], jobs, policy=NAMED["fifo"], until_us=700 * S))
    assert (summary.ended, summary.unended, summary.unstarted) == (1, 1, 0) and len(metrics.jct_us) == 1
    assert (summary.jct_s.mean, summary.jct_s.max, summary.away_s.max) == ((200 + 550) / 2, 550, 150)
    assert summary.slowdown_max == pytest.approx(550 / 400)
    _, cut = measured(run([NODE], jobs, policy=NAMED["fifo"], until_us=200 * S))
    assert (cut.ended, cut.unended, cut.jct_s, cut.away_s) == (0, 2, None, None)
    assert cut.slowdown_p99 is cut.slowdown_max is cut.slowdown_jain is None


def test_distributions() -> None:
    assert spread([]) is None
    summary = spread([each * S for each in range(100, 0, -1)])
    assert (summary.mean, summary.p50, summary.p99, summary.max) == (50.5, 50, 99, 100)


def test_clusters_of_their_own_are_added() -> None:
    parts = [played([NODE], [given(name, 8, at_s, run_s)]) for name, at_s, run_s in (("a", 0, 100), ("b", 50, 300))]
    metrics, _ = measured(parts[0])
    metrics.add(measured(parts[1])[0])
    summary = metrics.summary(*((part.ledger, part.at_us) for part in parts))
    assert (summary.jobs, summary.ended, summary.jct_s.mean, summary.makespan_s) == (2, 2, 200, 350)
    assert summary.useful_gpu_us == 400 * 8 * S and summary.held_fraction == 1


def test_metrics_accept_a_garbled_log() -> None:
    who = {"job_id": JobId("x"), "epoch": 1}
    strange: list[Event] = [
        RanksEnded(at_us=1, node="n", outcome=Outcome.LOST, **who),
        AttemptEnded(at_us=2, outcome=Outcome.LOST, why="", **who),
        NoticeGiven(at_us=3, reason=NoticeReason.DRAIN, deadline_us=9, **who),
        Reported(at_us=4, span=SpanClass.USEFUL, from_us=1, **who),
        AttemptPlaced(at_us=5, leases=(), **who),
        JobEnded(at_us=6, job_id=JobId("x"), state="done", why=""),
    ]
    metrics = Metrics()
    for event in strange:
        metrics.apply(event)
    summary = metrics.summary((Ledger(), 10))
    assert (summary.jobs, summary.ended, summary.makespan_s) == (0, 0, 0)
