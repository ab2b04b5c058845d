"""Ranks that defer their reports change nothing: not a decision, and not a microsecond of the ledger."""

import pytest
from crowded_world import crowded

from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    CheckpointCommitted,
    Job,
    JobEnded,
    KillOrdered,
    Node,
    NoticeGiven,
    Reported,
    Tier,
)
from cordee.ids import JobId
from cordee.schedule.gang import Gang, Work
from cordee.schedule.policy import NAMED, Policy
from cordee.simulate.run import Submission, may_defer_reports, run
from cordee.simulate.world import Outage

S = 1_000_000
DECISIONS = (AttemptPlaced, NoticeGiven, KillOrdered, AttemptEnded, JobEnded)
NODES = [Node(name=f"n{n}", epoch=1, gpu_name="H100", gpus=8, micro_usd_per_gpu_hour=3_600_000) for n in range(2)]


@pytest.mark.parametrize("policy", ["cordee", "las"])
@pytest.mark.parametrize("seed", range(5))
def test_deferred_and_eager_reports_give_the_same_decisions_and_the_same_ledger(seed: int, policy: str) -> None:
    eager, deferred = (crowded(seed, defer_reports=defer, policy=NAMED[policy]) for defer in (False, True))
    assert [event for event in eager.log if isinstance(event, DECISIONS)] == [
        event for event in deferred.log if isinstance(event, DECISIONS)
    ], f"replay: crowded({seed}, policy=NAMED[{policy!r}])"
    assert eager.ledger.rows(eager.at_us) == deferred.ledger.rows(deferred.at_us)
    assert eager.ledger.totals(eager.at_us) == deferred.ledger.totals(deferred.at_us)
    assert len(deferred.log) < len(eager.log), "no report was deferred"


def job(name: str, gpus: int = 8, tier: Tier = Tier.STANDARD) -> Job:
    return Job(job_id=JobId(name), name=name, owner="o", gpus=gpus, tier=tier, protected=True)


def month(at_us: int = 0, **more: object) -> Submission:
    fields: dict[str, object] = {"steps": 30 * 86_400, "step_us": S, "start_us": 60 * S, "every_us": 1800 * S}
    fields |= {"stall_us": 0, "upload_us": 30 * S, "saves_at_end": False} | more
    return Submission(at_us=at_us, job=job("month"), work=Work(**fields))  # type: ignore[arg-type]


def test_a_gang_that_trains_for_a_month_reports_as_much_as_one_that_trains_for_an_hour() -> None:
    deferred = run(NODES, [month()], defer_reports=True)
    assert sum(isinstance(event, Reported) for event in deferred.log) == 2, "the restart, and a month of steps"
    (commit,) = [event for event in deferred.log if isinstance(event, CheckpointCommitted)]
    assert commit.generation == (30 * 86_400 - 1) // 1800 and commit.step == commit.generation * 1800
    assert commit.at_us == (60 + commit.step + 30) * S, "reported at the end, with its own time"


def test_a_run_that_is_cut_has_every_report_up_to_then() -> None:
    eager, deferred = (run(NODES, [month()], until_us=86_400 * S, defer_reports=defer) for defer in (False, True))
    assert eager.ledger.rows(86_400 * S) == deferred.ledger.rows(86_400 * S)
    assert deferred.ledger.rows(86_400 * S)[0].gpu_us.useful > 80_000 * 8 * S


@pytest.mark.parametrize("stall_s", [0, 7])
@pytest.mark.parametrize("gone_s", [59, 60, 1859, 1860, 1861, 1867, 1889, 1890, 1891, 1900, 5000])
def test_a_node_that_goes_takes_the_same_from_both(gone_s: int, stall_s: int) -> None:
    away = [Outage(at_us=gone_s * S, nodes=("n0",), back_us=100 * S)]
    given = [month(steps=9000, stall_us=stall_s * S)]
    eager, deferred = (run(NODES[:1], given, away, defer_reports=defer) for defer in (False, True))
    rows = eager.ledger.rows(eager.at_us)
    assert rows == deferred.ledger.rows(deferred.at_us)
    assert len(rows) == 2 and sum(row.steps - row.steps_repeated for row in rows) == 9000


def test_which_jobs_may_defer_their_reports() -> None:
    assert may_defer_reports(job("a"), Policy())
    assert not may_defer_reports(job("a"), Policy(notice=False)), "what no checkpoint covers is weighed"
    unsaved = Job(job_id=JobId("b"), name="b", owner="o", gpus=1, protected=True, grace_us=S, save_us=2 * S)
    assert not may_defer_reports(unsaved, Policy())
    assert not may_defer_reports(Job(job_id=JobId("c"), name="c", owner="o", gpus=1), Policy())


def test_fewer_gpus_take_longer_in_proportion() -> None:
    work = Work(steps=100, step_us=S, start_us=0, every_us=None, gpus=8, saves_at_end=False)
    assert Gang.start(work, 0, 4, epoch=1, step=0).leave_us == 200 * S
    assert Gang.start(work, 0, 8, epoch=1, step=0).leave_us == 100 * S
