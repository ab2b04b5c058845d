"""The cluster in virtual time through the real control plane: what agents and ranks would report, and nothing else."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from crowded_world import crowded

from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    Capacity,
    CheckpointCommitted,
    Event,
    Job,
    JobEnded,
    JobSubmitted,
    KillOrdered,
    Node,
    NodeDown,
    NoticeGiven,
    NoticeReason,
    Outcome,
    RankLeft,
    RanksEnded,
    Reported,
    Restored,
    SpanClass,
    Tier,
)
from cordee.ids import JobId
from cordee.schedule.gang import Work
from cordee.simulate.run import STILL_US, Run, Submission, run
from cordee.simulate.world import Outage

S = 1_000_000
WORK = Work(steps=100, step_us=10 * S, start_us=20 * S, every_us=200 * S, stall_us=5 * S, upload_us=7 * S)
PLAIN = Work(steps=100, step_us=10 * S, start_us=20 * S, every_us=None, handles_notice=False, reports=False)


def nodes(n: int = 2) -> list[Node]:
    return [
        Node(
            name=f"n{number}",
            epoch=1,
            gpu_name="H100",
            gpus=8,
            capacity=Capacity.SPOT,
            micro_usd_per_gpu_hour=3_600_000,
            price_source="a test",
        )
        for number in range(n)
    ]


def submission(name: str, work: Work, *, at_s: int = 0, tier: Tier = Tier.PREEMPTIBLE, grace_s: int = 30) -> Submission:
    job = Job(
        job_id=JobId(f"{name}-aaaaaa"), name=name, owner="o", gpus=16, tier=tier, grace_us=grace_s * S, protected=True
    )
    return Submission(at_us=at_s * S, job=job, work=work)


def of(result: Run, kind: type[Event], name: str = "a") -> list[Event]:
    return [event for event in result.log if isinstance(event, kind) and event.job_id == f"{name}-aaaaaa"]


def steps_done(result: Run, name: str = "a") -> Counter[int]:
    spans = [event for event in of(result, Reported, name) if event.span is SpanClass.USEFUL]
    return Counter(step for span in spans for step in range(span.first_step, span.first_step + span.steps))


def test_an_undisturbed_job_runs_every_step_once_and_its_last_checkpoint_covers_all() -> None:
    result = run(nodes(), [submission("a", WORK)])
    assert steps_done(result) == Counter(range(100))
    commits = of(result, CheckpointCommitted)
    assert [commit.step for commit in commits] == [20, 40, 60, 80, 100]
    assert [commit.generation for commit in commits] == [1, 2, 3, 4, 5]
    (ended,) = of(result, JobEnded)
    # 20 s to start, 100 steps of 10 s, 5 stalls of 5 s, and the last drain.
    assert (ended.state, ended.at_us) == ("done", (20 + 1000 + 25 + 7) * S)


def test_a_production_job_preempts_and_the_victim_repeats_nothing() -> None:
    preemptor = submission("b", Work(steps=10, step_us=S), at_s=303, tier=Tier.PRODUCTION)
    result = run(nodes(), [submission("a", WORK), preemptor])
    (notice,) = of(result, NoticeGiven)
    assert (notice.reason, notice.for_job, notice.at_us) == (NoticeReason.PREEMPT, "b-aaaaaa", 303 * S)
    assert [event.outcome for event in of(result, AttemptEnded)] == [Outcome.CHECKPOINTED, Outcome.FINISHED]
    left, finished = of(result, RankLeft)
    assert (left.how, left.step, left.at_us) == ("checkpointed", 28, 317 * S), "the step in progress is finished, saved"
    assert of(result, Restored)[1].step == 28
    assert (finished.how, finished.step) == ("finished", 100)
    assert steps_done(result) == Counter(range(100))
    assert of(result, AttemptPlaced, "b")[0].at_us == 317 * S


def test_a_script_that_ignores_its_notice_is_killed_at_the_deadline_and_all_it_held_is_lost() -> None:
    preemptor = submission("b", Work(steps=10, step_us=S), at_s=300, tier=Tier.PRODUCTION)
    result = run(nodes(), [submission("a", PLAIN), preemptor])
    (kill,) = of(result, KillOrdered)
    assert kill.at_us == 330 * S
    first, *_ = [row for row in result.ledger.rows(result.at_us) if row.job_id == "a-aaaaaa"]
    assert first.gpu_us.lost == first.gpu_us.held == 330 * 16 * S
    assert first.micro_usd.lost == 330 * 16 * 1000
    assert first.for_job == "b-aaaaaa"


def test_without_grace_the_kill_follows_the_notice_at_once() -> None:
    preemptor = submission("b", Work(steps=10, step_us=S), at_s=303, tier=Tier.PRODUCTION)
    result = run(nodes(), [submission("a", WORK, grace_s=0), preemptor])
    (notice,), (kill,) = of(result, NoticeGiven), of(result, KillOrdered)
    assert notice.at_us == notice.deadline_us == kill.at_us == of(result, AttemptPlaced, "b")[0].at_us == 303 * S
    killed, _ = of(result, AttemptEnded)
    assert killed.outcome is Outcome.KILLED and of(result, Restored)[1].step == 20  # the commit of 232 s
    assert of(result, JobEnded)[0].state == "done"


@pytest.mark.parametrize(("notice_s", "outcome"), [(0, Outcome.LOST), (30, Outcome.CHECKPOINTED)])
def test_the_cloud_takes_a_node_back(notice_s: int, outcome: Outcome) -> None:
    reclaim = Outage(at_us=500 * S, nodes=("n1",), notice_us=notice_s * S, back_us=60 * S)
    result = run(nodes(), [submission("a", WORK)], [reclaim])
    first, second = of(result, AttemptEnded)
    assert (first.outcome, second.outcome) == (outcome, Outcome.FINISHED)
    notices = of(result, NoticeGiven)
    assert [notice.reason for notice in notices] == ([NoticeReason.RECLAIM] if notice_s else [])
    repeated = sum(times - 1 for times in steps_done(result).values())
    assert (repeated == 0) == bool(notice_s)
    assert sorted(steps_done(result)) == list(range(100))
    assert of(result, AttemptPlaced)[1].at_us == 560 * S, "not before the replacement is there"
    rows = result.ledger.rows(result.at_us)
    assert (rows[0].gpu_us.lost > 0) == (notice_s == 0)


def test_a_run_with_endless_outages_waits_for_a_node_that_is_about_to_go() -> None:
    """Once it ended with the gang that had left under notice: its node was not down yet."""
    far = Outage(at_us=10**9 * S, nodes=("n1",), notice_us=30 * S, back_us=60 * S)
    reclaim = Outage(at_us=500 * S, nodes=("n1",), notice_us=120 * S, back_us=60 * S)
    result = run(nodes(), [submission("a", WORK)], iter([reclaim, far]))
    assert [event.outcome for event in of(result, AttemptEnded)] == [Outcome.CHECKPOINTED, Outcome.FINISHED]
    assert result.at_us < 2000 * S, "it does not wait for outages once its jobs have ended"


def test_a_run_with_endless_outages_ends_though_a_job_never_starts() -> None:
    def outages() -> Iterator[Outage]:
        for hour in count(1):  # one of the two nodes is always away
            yield Outage(at_us=3600 * hour * S, nodes=(f"n{hour % 2}",), notice_us=30 * S, back_us=3600 * S)

    result = run(nodes(), [submission("a", WORK, at_s=3590)], outages())
    assert of(result, AttemptPlaced) == [] and STILL_US < result.at_us < STILL_US + 2 * 3600 * S


def test_a_notice_that_is_too_short_for_the_save_is_as_good_as_none() -> None:
    reclaim = Outage(at_us=500 * S, nodes=("n0",), notice_us=8 * S, back_us=0)
    result = run(nodes(), [submission("a", WORK)], [reclaim])
    assert of(result, AttemptEnded)[0].outcome in (Outcome.KILLED, Outcome.LOST)
    assert of(result, Restored)[1].step == 40


def test_a_checkpoint_that_was_still_draining_when_the_node_went_does_not_count() -> None:
    # The first capture ends at 225 s and would be durable at 232 s.
    result = run(nodes(), [submission("a", WORK)], [Outage(at_us=230 * S, nodes=("n1",), back_us=0)])
    assert of(result, Restored)[1].step == 0
    assert [commit.step for commit in of(result, CheckpointCommitted)] == [20, 40, 60, 80, 100]


def test_nothing_new_is_placed_on_a_node_that_is_announced_to_go() -> None:
    reclaim = Outage(at_us=500 * S, nodes=("n1",), notice_us=100 * S)
    result = run(nodes(), [submission("a", WORK, at_s=450)], [reclaim])
    assert of(result, AttemptPlaced) == []
    assert [event.node for event in result.log if isinstance(event, NodeDown)] == ["n1"]


def test_every_microsecond_that_was_held_is_in_one_class() -> None:
    preemptor = submission("b", WORK, at_s=303, tier=Tier.PRODUCTION)
    result = run(nodes(), [submission("a", WORK), preemptor], [Outage(at_us=1000 * S, nodes=("n0",), back_us=9 * S)])
    for row in result.ledger.rows(result.at_us):
        assert row.ended_us is not None
        assert row.gpu_us.held == (row.ended_us - row.placed_us) * 16


def test_a_run_can_be_cut() -> None:
    result = run(nodes(), [submission("a", WORK)], until_us=500 * S)
    assert max(event.at_us for event in result.log) <= 500 * S
    assert of(result, JobEnded) == []


def crowded_log(hash_seed: int) -> str:
    """The digest of the log of a crowded, seeded world, made by a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("crowded_world.py")), "7"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed)},
    )
    return done.stdout.strip()


def test_the_same_seed_gives_the_same_bytes_whatever_the_hash_seed() -> None:
    first, second = crowded_log(1), crowded_log(2)
    assert first == second
    number_of_events, digest = first.split()
    assert int(number_of_events) > 500
    assert len(digest) == 64


@pytest.mark.parametrize("seed", range(20))
def test_in_any_crowd_no_gpu_is_held_twice_no_job_is_lost_and_the_ledger_adds_up(seed: int) -> None:
    result = crowded(seed)
    held: dict[tuple[str, int], str] = {}
    leases = {}
    for event in result.log:
        if isinstance(event, AttemptPlaced):
            leases[event.job_id] = event.leases
            for lease in event.leases:
                for gpu in lease.gpus:
                    assert (lease.node, gpu) not in held, f"seed {seed}: {lease.node}:{gpu} is leased twice"
                    held[lease.node, gpu] = event.job_id
        elif isinstance(event, RanksEnded):
            for lease in leases[event.job_id]:
                if lease.node == event.node:
                    for gpu in lease.gpus:
                        assert held.pop((lease.node, gpu)) == event.job_id
    submitted = {event.job.job_id for event in result.log if isinstance(event, JobSubmitted)}
    ended = [event.job_id for event in result.log if isinstance(event, JobEnded)]
    assert submitted == set(ended) and len(ended) == len(submitted) == 40
    assert not held
    for row in result.ledger.rows(result.at_us):
        assert row.ended_us is not None
        assert row.gpu_us.held == (row.ended_us - row.placed_us) * row.gpus or row.outcome is Outcome.LOST
