"""The tick on the real store, with an executor that a test plays: order, faults, repetition, replay."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stage import GPT, JOB, NODE, PROD, URGENT, Agents, Scene

from cordee.control.ports import Pending
from cordee.control.tick import Control
from cordee.errors import StoreError
from cordee.events import (
    AttemptPlaced,
    Estimate,
    EstimateMissed,
    Event,
    JobEnded,
    KillOrdered,
    Measured,
    NodeUp,
    NoticeGiven,
    NoticeReason,
    Outcome,
    RanksEnded,
    RanksStarted,
    Reported,
    ServerUp,
    SpanClass,
)
from cordee.ids import JobId
from cordee.schedule import Policy, enact


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.store.close()


def test_a_job_is_placed_started_and_ended(scene: Scene) -> None:
    scene.control.submit(JOB, "{}")
    scene.control.tick()
    assert [type(order.command) for order in scene.agents.orders] == [AttemptPlaced]
    assert scene.store.pending() == []
    scene.ended(GPT, 1, Outcome.FINISHED)
    scene.control.tick()
    [over] = scene.of(JobEnded)
    assert isinstance(over, JobEnded)
    assert over.state == "done"
    assert scene.control.state.attempts == {}


def test_a_preemption(scene: Scene) -> None:
    """A production job preempts a preemptible one and runs; then the first goes on."""
    scene.control.submit(JOB, "{}")
    scene.control.tick()
    scene.control.submit(URGENT, "{}")
    scene.control.tick()
    [notice] = scene.of(NoticeGiven)
    assert isinstance(notice, NoticeGiven)
    assert (notice.job_id, notice.reason, notice.for_job) == (GPT, NoticeReason.PREEMPT, PROD)
    scene.ended(GPT, 1, Outcome.CHECKPOINTED)
    scene.control.tick()
    assert scene.control.state.attempts.keys() == {PROD}
    scene.ended(PROD, 1, Outcome.FINISHED)
    scene.control.tick()
    assert scene.control.state.attempts[GPT].epoch == 2


def test_nothing_changes_when_the_store_refuses(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise StoreError("the disk is full")

    state, number = scene.control.state.snapshot(), scene.control.number
    with monkeypatch.context() as patch:
        patch.setattr(scene.store, "commit", refuse)
        with pytest.raises(StoreError):
            scene.control.submit(JOB, "{}")
        scene.agents.report(RanksStarted(at_us=scene.time.us, job_id=GPT, epoch=1, node="local"))
        with pytest.raises(StoreError):
            scene.control.tick()
    assert scene.control.state.snapshot() == state
    assert scene.control.number == number
    assert len(scene.agents.acknowledged) == 1, "only the NodeUp, before the fault"
    scene.control.submit(JOB, "{}")
    scene.control.tick()
    assert scene.control.state.attempts.keys() == {GPT}


def test_a_repeated_report_changes_nothing(scene: Scene) -> None:
    scene.control.submit(JOB, "{}")
    scene.control.tick()
    scene.agents.report(RanksStarted(at_us=scene.time.us, job_id=GPT, epoch=1, node="local"))
    again = list(scene.agents.waiting)
    scene.control.tick()
    length = len(scene.log())
    scene.agents.waiting = again
    scene.control.tick()
    assert len(scene.log()) == length
    scene.restart()
    scene.agents.waiting = again
    scene.control.tick()
    assert len(scene.of(RanksStarted)) == 1


def test_a_report_about_a_job_that_this_log_never_saw_only_moves_the_mark(scene: Scene) -> None:
    scene.agents.report(RanksStarted(at_us=scene.time.us, job_id=JobId("old-abcdef"), epoch=1, node="local"))
    scene.control.tick()
    assert scene.of(RanksStarted) == []
    assert scene.store.marks(["node/local/1"])["node/local/1"] == 2
    assert scene.agents.waiting == []


def test_an_order_is_repeated_until_it_is_confirmed(scene: Scene) -> None:
    scene.agents.answers = False
    scene.control.submit(JOB, "{}")
    scene.control.tick()
    scene.control.tick()
    scene.restart()
    scene.control.tick()
    assert len(scene.agents.orders) == 3
    assert len({order.number for order in scene.agents.orders}) == 1
    scene.agents.answers = True
    scene.control.tick()
    scene.control.tick()
    assert len(scene.agents.orders) == 4
    assert len(scene.of(AttemptPlaced)) == 1


def test_the_orders_of_another_server_are_not_given(scene: Scene) -> None:
    """A leader that was frozen wakes up in its tick, and reads what its successor has written."""
    successor = Control(clock=scene.time, store=scene.store, executor=(agents := Agents()))
    agents.answers = False
    successor.submit(JOB, "{}")
    successor.tick()
    assert [order.command.job_id for order in agents.orders] == [GPT]
    scene.control.tick()
    assert scene.agents.orders == [] and len(scene.store.pending()) == 1


def test_an_agent_that_hangs_keeps_nobody_waiting(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def hang(pending: Pending) -> bool:
        client = threading.Thread(target=lambda: asked.append(scene.control.changed.acquire(timeout=60)))
        client.start()
        client.join()
        return False

    monkeypatch.setattr(scene.agents, "carry_out", hang)
    scene.control.submit(JOB, "{}")
    scene.control.tick()
    assert asked == [True]


def test_reason_for_waiting_ends_with_its_attempt(scene: Scene) -> None:
    scene.control.submit(JOB, "{}")
    scene.control.tick()
    scene.ended(GPT, 1, Outcome.LOST)
    scene.control.tick()
    assert [(row["epoch"], row["state"], row["why"]) for row in scene.store.jobs()] == [(2, "running", "")]
    assert scene.store.attempts(GPT)[0]["why"]


def test_a_stop_goes_from_notice_to_kill(scene: Scene) -> None:
    scene.control.submit(JOB, "{}")
    scene.control.tick()
    scene.control.stop(GPT, by="ada")
    wake_at_us = scene.control.tick()
    [notice] = scene.of(NoticeGiven)
    assert isinstance(notice, NoticeGiven)
    assert wake_at_us == notice.deadline_us
    scene.time.us = notice.deadline_us
    scene.control.tick()
    assert len(scene.of(KillOrdered)) == 1
    scene.ended(GPT, 1, Outcome.KILLED)
    scene.control.tick()
    assert [event.state for event in scene.of(JobEnded) if isinstance(event, JobEnded)] == ["stopped"]


def test_a_shutdown_places_nothing_until_the_next_up(scene: Scene) -> None:
    scene.control.submit(JOB, "{}")
    scene.control.tick()
    scene.control.shut_down()
    scene.control.tick()
    scene.ended(GPT, 1, Outcome.CHECKPOINTED)
    scene.control.tick()
    assert scene.control.state.attempts == {}
    scene.restart()
    scene.control.tick()
    assert scene.control.state.attempts[GPT].epoch == 2


def test_replaying_the_log_gives_the_same_state_and_ledger(scene: Scene) -> None:
    scene.control.submit(JOB, "{}")
    scene.control.tick()
    span = Reported(at_us=scene.time.us, job_id=GPT, epoch=1, span=SpanClass.USEFUL, from_us=scene.time.us - 5, steps=2)
    scene.agents.report(span, source="gpt-abcdef.1/rank0")
    scene.control.submit(URGENT, "{}")
    scene.control.tick()
    scene.ended(GPT, 1, Outcome.CHECKPOINTED)
    scene.control.tick()
    again = Control(clock=scene.time, store=scene.store, executor=scene.agents)
    assert again.state.snapshot() == scene.control.state.snapshot()
    assert again.ledger.rows(scene.time.us) == scene.control.ledger.rows(scene.time.us)
    assert again.number == scene.control.number


def test_the_logs_time_goes_neither_back_nor_ahead_of_the_clock(scene: Scene) -> None:
    scene.control.submit(JOB, "{}")
    scene.control.tick()
    last_us = scene.log()[-1].at_us
    start = RanksStarted(at_us=5, job_id=GPT, epoch=1, node="local")
    scene.agents.report(start)
    scene.agents.report(RanksEnded(at_us=10**18, job_id=GPT, epoch=1, node="local", outcome=Outcome.FINISHED))
    scene.control.tick()
    assert scene.of(RanksStarted) == [replace(start, at_us=last_us)]
    [ended] = scene.of(RanksEnded)
    assert last_us <= ended.at_us <= scene.time.us


def test_reports_of_ranks_keep_their_own_time(scene: Scene) -> None:
    """A span that was worked while no server ran must not grow by the time that it waited for one."""
    scene.control.submit(JOB, "{}")
    scene.control.tick()
    from_us = scene.time.us
    span = Reported(at_us=from_us + 10, job_id=GPT, epoch=1, span=SpanClass.USEFUL, from_us=from_us, steps=1)
    scene.time.us += 1000
    scene.restart()
    scene.agents.report(span, source="gpt-abcdef.1/rank0")
    scene.control.tick()
    assert scene.of(Reported) == [span]
    [row] = scene.control.ledger.rows(scene.time.us)
    assert row.gpu_us.useful == 4 * 10


def test_a_rank_cannot_drag_the_log_into_the_future(scene: Scene) -> None:
    scene.control.submit(JOB, "{}")
    scene.control.tick()
    span = Reported(at_us=10**18, job_id=GPT, epoch=1, span=SpanClass.USEFUL, from_us=scene.time.us, steps=1)
    scene.agents.report(span, source="gpt-abcdef.1/rank0")
    scene.control.tick()
    assert scene.control.ledger.at_us <= scene.time.us


def test_an_error_on_one_job_is_reported_and_stops_no_other(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = ((PROD, ValueError("a bug")),)
    monkeypatch.setattr("cordee.control.tick.enact", lambda *given: enact(*given)._replace(errors=errors))
    scene.control.submit(JOB, "{}")
    scene.control.tick()
    assert scene.control.errors == errors
    assert scene.control.state.attempts.keys() == {GPT}


def test_the_log_records_a_restart_of_the_server(scene: Scene) -> None:
    scene.restart()
    assert len(scene.of(ServerUp)) == 2


def test_the_patience_of_a_server_holds_from_its_start_to_the_next(scene: Scene) -> None:
    patient = Control(clock=scene.time, store=scene.store, executor=scene.agents, patience=2.0)
    assert patient.state.policy == Policy(), "until it is in the log"
    patient.up()
    patient.tick()
    assert patient.state.policy == replace(Policy(), patience=2.0)
    assert [each.patience for each in scene.of(ServerUp) if isinstance(each, ServerUp)] == [None, 2.0]
    follower = Control(clock=scene.time, store=scene.store, executor=scene.agents)
    assert follower.state.policy == patient.state.policy
    follower.up()
    assert follower.state.policy == Policy()


def test_a_report_that_comes_again_is_acknowledged_again(scene: Scene) -> None:
    """The server died before the acknowledgement, or the acknowledgement was lost."""
    scene.control.submit(JOB, "{}")
    scene.control.tick()
    scene.ended(GPT, 1, Outcome.FINISHED)
    repeated = list(scene.agents.waiting)
    scene.control.tick()
    number = scene.control.number
    scene.agents.waiting = repeated
    scene.control.tick()
    assert scene.agents.waiting == []
    assert scene.control.number == number


def test_a_job_off_its_estimate_is_said_once_even_after_a_restart(scene: Scene) -> None:
    plan = Estimate(
        layout="fsdp4", gpus=4, peak_bytes=80, gpu_memory_bytes=90, step_us=10, step_us_low=8, step_us_high=12
    )
    scene.control.submit(replace(JOB, estimates=(plan,)), "{}")
    scene.control.tick()
    [order] = scene.agents.orders
    assert order.estimate == plan
    for n in range(3):
        now = scene.time.us
        scene.agents.report(Measured(at_us=now, job_id=GPT, epoch=1, rank=0, step=20, peak_bytes=60 + n, step_us=20))
        scene.control.tick()
        scene.restart()
    [missed] = scene.of(EstimateMissed)
    assert isinstance(missed, EstimateMissed)
    assert missed.quantity == "step time"
    assert scene.store.jobs(GPT)[0]["why"] == missed.why
    assert (found := scene.control.measurements.of(GPT)) is not None
    assert found.peak_bytes == 62


def test_a_commit_whose_answer_was_lost_is_found_in_the_log(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when PostgreSQL is restarted within a COMMIT: the state must not lack what the log has."""
    commit = scene.store.commit
    lost: list[int] = []

    def lose(events: Sequence[Event], **more: Any) -> None:
        commit(events, **more)
        if len(lost) < 3:
            lost.append(len(events))
            raise StoreError("the connection was cut")

    monkeypatch.setattr(scene.store, "commit", lose)
    with pytest.raises(StoreError):
        scene.control.submit(JOB, "{}")
    with pytest.raises(StoreError):
        scene.control.tick()  # its decision is lost too
    scene.agents.report(NodeUp(at_us=scene.time.us, node=replace(NODE, name="other")), source="node/other/1")
    with pytest.raises(StoreError):
        scene.control.tick()  # and a report
    scene.control.tick()
    assert len(lost) == 3
    assert [type(event).__name__ for event in scene.log()[2:]] == ["JobSubmitted", "AttemptPlaced", "NodeUp"]
    assert scene.control.number == len(scene.log())
    assert GPT in scene.control.state.attempts and "other" in scene.control.state.nodes.records
    replayed = Control(clock=scene.time, store=scene.store, executor=scene.agents)
    assert replayed.ledger.totals(scene.time.us) == scene.control.ledger.totals(scene.time.us)
