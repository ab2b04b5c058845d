"""Chains over the API: what is refused, what people see, and what a sweep and a service do when they are paused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_scene import OTHER, SPEC, Api

from cordee.answers.jobs import JobView
from cordee.answers.nodes import ReservationView
from cordee.client import Client
from cordee.control.fold import Fold
from cordee.control.snapshot import loaded, taken
from cordee.errors import DependencyError, ForbiddenError, InputError, NotFoundError, SpecError
from cordee.events import JobPrioritized, Outcome
from cordee.ids import JobId
from cordee.schedule.policy import Policy
from cordee.workload.spec import JobSpec, parse_spec


@pytest.fixture
def other(api: Api) -> Iterator[Client]:
    with Client(url=api.url, token=OTHER) as client:
        yield client


def submit(api: Api, name: str, by: Client | None = None, **more: Any) -> str:
    made = (by or api.client).submit(SPEC | {"name": name} | more).job.job_id
    api.scene.control.tick()
    return made


def end(api: Api, job_id: str, outcome: Outcome) -> JobView:
    for _ in range(3):
        record = api.scene.control.state.jobs[JobId(job_id)]
        if not record.phase.ended:
            api.scene.ended(JobId(job_id), record.epoch, outcome)
            api.scene.control.tick()
            api.scene.time.us += 3_000_000  # the pause before a third try
            api.scene.control.tick()
    return api.client.job(job_id)


def states(api: Api) -> dict[str, str]:
    return {each.name: each.state for each in api.client.jobs()}


def test_a_chain_is_seen_and_goes_on_when_its_first_job_has_ended(api: Api) -> None:
    first = submit(api, "prep")
    submit(api, "train", after="prep")
    submit(api, "tidy", after=["train:failed"])
    assert states(api) == {"prep": "running", "train": "waiting", "tidy": "waiting"}
    assert api.client.job("train").why == f"waits until {first} has ended well"
    why = api.client.why("train", draws=2)
    assert (why.reason, why.blocking) == ("waits-for-jobs", [first])
    assert why.forecast is not None and why.forecast.start.p50_us is not None, "it starts when the other has ended"
    end(api, first, Outcome.FINISHED)
    assert states(api) == {"prep": "done", "train": "running", "tidy": "waiting"}
    end(api, api.client.job("train").job_id, Outcome.FINISHED)
    assert api.client.job("tidy").why.endswith(" ended well, and this one was to start after it failed")
    assert submit(api, "next", after=["prep", "train:any"]) and states(api)["next"] == "running"


def test_a_dependency_that_cannot_come_true_is_refused_with_its_name(api: Api) -> None:
    failed = end(api, submit(api, "prep"), Outcome.FAILED)
    assert failed.state == "failed"
    before = api.scene.control.number
    for after, error, text in (
        ("prep", DependencyError, f"{failed.job_id} failed, and x was to start after it ended well"),
        ("x", DependencyError, "x would start after itself"),
        ("nobody", NotFoundError, "there is no job 'nobody'"),
        ("prep:well", SpecError, "after"),
    ):
        with pytest.raises(error, match=text):
            api.client.submit(SPEC | {"name": "x", "after": [after]})
    assert api.scene.control.number == before
    api.client.requeue("prep")
    submit(api, "x", after="prep")
    assert states(api)["x"] == "waiting"


def test_hold_pause_resume_and_requeue_over_the_api(api: Api) -> None:
    first, second = submit(api, "a"), submit(api, "b")
    assert (api.client.hold("b").state, api.client.hold("a").state) == ("queued", "running")
    api.scene.control.tick()
    assert states(api) == {"a": "running", "b": "held"}
    assert f"`cordee resume {second}` lets it start again" in api.client.why("b").text
    assert api.client.pause("a").state == "running"
    api.scene.control.tick()
    assert api.client.job("a").attempts[-1].notice_reason == "pause"
    api.scene.ended(JobId(first), 1, Outcome.CHECKPOINTED)
    api.scene.control.tick()
    assert states(api) == {"a": "paused", "b": "held"}
    fold = api.scene.control.fold
    assert loaded(taken(fold), Policy(), fold.number).state.snapshot() == fold.state.snapshot()
    again = Fold(Policy())
    assert not again.apply(api.scene.store.events()) and again.state.snapshot() == fold.state.snapshot()
    for name in "ab":
        api.client.resume(name)
    api.scene.control.tick()
    assert sorted(states(api).values()) == ["queued", "running"]
    api.client.stop(second)
    end(api, second, Outcome.FINISHED)
    with pytest.raises(InputError, match=rf"(?s){second} is \w+: nobody holds.*requeue"):
        api.client.resume("b")
    with pytest.raises(InputError, match="cannot be paused"):
        api.client.pause("b")
    assert api.client.requeue("b").ended_us is None
    api.scene.control.tick()
    assert states(api) == {"a": "running", "b": "queued"}


def test_an_owner_prioritizes_own_jobs_and_an_operator_any(api: Api, other: Client) -> None:
    submit(api, "run")
    for name, by in (("a", None), ("x", other), ("b", None), ("y", other)):
        submit(api, name, by)
    with pytest.raises(ForbiddenError, match="is ada's: only ada and operators of default"):
        other.prioritize("a")
    other.prioritize("y")
    other.prioritize("y")
    [asked] = api.scene.of(JobPrioritized)
    assert isinstance(asked, JobPrioritized) and asked.place_of == api.client.job("x").job_id
    api.client.prioritize("b")
    waiting = api.scene.control.state.waiting
    order = sorted(waiting.job_ids(), key=waiting.place)
    assert [each.split("-")[0] for each in order] == ["b", "a", "y", "x"]
    with pytest.raises(InputError, match="is running: only a job that waits"):
        api.client.prioritize("run")


def test_a_paused_sweep_starts_and_promotes_no_trial_until_it_is_resumed(api: Api, tmp_path: Path) -> None:
    values = {"values": {"lr": "0.1,0.2,0.3"}, "max_running": 1}
    spec = JobSpec.from_flags(run="true {lr}", gpus="1", name="lr", checkpoint_to=str(tmp_path), sweep=values)

    def turn() -> None:
        for _ in range(3):
            api.scene.control.tick()
            api.sweeps.controller.step()
        api.scene.control.tick()

    api.client.declare_sweep(spec.model_dump(mode="json"))
    turn()
    assert api.client.pause_sweep("lr").state == "paused"
    turn()
    trial = JobId(api.client.sweep("lr").trials[0].job_id)
    assert api.client.job(trial).attempts[-1].notice_reason == "pause"
    api.scene.ended(trial, 1, Outcome.FINISHED)
    turn()
    assert (len(api.client.sweep("lr").trials), api.client.sweep("lr").why) == (1, "paused by ada")
    assert api.client.resume_sweep("lr").state == "running"
    turn()
    assert len(api.client.sweep("lr").trials) == 2
    submit(api, "best", after="lr")
    assert states(api)["best"] == "waiting"
    api.client.end_sweep("lr")
    turn()
    end(api, api.client.sweep("lr").trials[1].job_id, Outcome.KILLED)
    turn()
    assert states(api)["best"] == "running", "one trial is done"
    with pytest.raises(InputError, match="has ended: stopped by ada"):
        api.client.pause_sweep("lr")


def test_a_replica_of_a_service_is_not_paused(api: Api) -> None:
    spec = parse_spec("run: serve\ngpus: 1\nname: chat\nservice: {engine: command}").model_dump(mode="json")
    api.client.declare(spec | {"run": ["true"]})
    api.services.controller.step()
    [replica] = api.client.jobs()
    with pytest.raises(InputError, match=r"(?s)is a replica of the service chat.*cordee serve scale chat 0"):
        api.client.pause(replica.job_id)


def test_the_job_file_and_the_flag_name_jobs_to_start_after() -> None:
    assert parse_spec("run: a\ngpus: 1\nafter: prep").after == ("prep",)
    assert parse_spec("run: a\ngpus: 1\nafter: [prep:any, b-x7f2qk]").after == ("prep:any", "b-x7f2qk")
    with pytest.raises(SpecError, match=r"after"):
        parse_spec("run: a\ngpus: 1\nafter: [prep:sometimes]")
    with pytest.raises(SpecError, match="after is for a job that trains"):
        parse_spec("run: serve\ngpus: 1\nafter: a\nservice: {engine: command}")


def test_maintenance_is_booked_listed_refused_and_cancelled(api: Api) -> None:
    now_us = api.scene.time.us
    hour = 3_600_000_000
    made = api.client.book_maintenance("local", from_us=now_us + hour, until_us=now_us + 2 * hour, why="firmware")
    assert (made.node, made.by, made.began) == ("local", "ada", False)
    assert api.client.maintenance() == [made]
    for begin, end, text in ((3, 3, "cannot begin"), (1.5, 4, f"booked as {made.booking}")):
        with pytest.raises(InputError, match=text):
            api.client.book_maintenance(
                "local", from_us=now_us + round(begin * hour), until_us=now_us + round(end * hour), why="x"
            )
    with pytest.raises(NotFoundError, match="no node 'nowhere'"):
        api.client.book_maintenance("nowhere", from_us=now_us, until_us=now_us + hour, why="x")
    api.scene.time.us += hour
    api.scene.control.tick()
    assert api.client.nodes()[0].cordon_why.endswith(": firmware") and api.client.maintenance()[0].began
    assert api.client.cancel_maintenance(made.booking).booking == made.booking
    assert api.client.nodes()[0].cordoned_by is None and api.client.maintenance() == []
    with pytest.raises(NotFoundError, match="no maintenance 'm0'"):
        api.client.cancel_maintenance("m0")


def test_only_the_owner_and_the_operator_ask_for_something(api: Api, other: Client) -> None:
    submit(api, "a")
    before = api.scene.control.number
    for ask, what in (
        (other.pause, "pause"),
        (other.hold, "hold"),
        (other.resume, "resume"),
        (other.requeue, "requeue"),
    ):
        with pytest.raises(ForbiddenError, match=f"is ada's: only ada and operators of default may {what} it"):
            ask("a")
    begin = api.scene.time.us
    with pytest.raises(ForbiddenError, match="bob may not book maintenance"):
        other.book_maintenance("local", from_us=begin, until_us=begin + 10**9, why="x")
    assert api.scene.control.number == before
    booked = api.client.book_maintenance("local", from_us=begin, until_us=begin + 10**9, why="x")
    with pytest.raises(ForbiddenError, match="bob may not cancel maintenance"):
        other.cancel_maintenance(booked.booking)
    submit(api, "own", other)
    assert other.hold("own").name == other.resume("own").name == "own"
    api.client.hold("own")
    with pytest.raises(ForbiddenError, match="ada, an operator, holds own-"):
        other.resume("own")
    assert api.client.resume("own").name == "own"


def test_a_node_that_was_cordoned_stays_so_when_its_maintenance_is_cancelled(api: Api) -> None:
    begin = api.scene.time.us
    api.client.cordon("local", why="broken fan")
    booked = api.client.book_maintenance("local", from_us=begin, until_us=begin + 10**9, why="firmware")
    api.scene.control.tick()
    record = api.scene.control.state.nodes.records["local"]
    assert (record.cordon_why, record.leave_us) == ("broken fan", begin)
    api.client.cancel_maintenance(booked.booking)
    api.scene.control.tick()
    record = api.scene.control.state.nodes.records["local"]
    assert (record.cordoned_by, record.cordon_why, record.leave_us) == ("ada", "broken fan", None)


def test_a_window_of_an_unknown_zone_is_refused(api: Api) -> None:
    with pytest.raises(InputError, match="'Nowhere' is not a time zone"):
        api.client.submit(SPEC | {"window": "22:00-06:00 Nowhere"})
    submit(api, "a", window="00:00-23:59 +00:00")
    assert states(api)["a"] == "running"


def test_reservations_are_made_listed_refused_and_cancelled(api: Api, other: Client) -> None:
    now_us = api.scene.time.us
    hour = 3_600_000_000

    def reserve(begin: float, end: float, **more: object) -> ReservationView:
        times = {"from_us": now_us + round(begin * hour), "until_us": now_us + round(end * hour)}
        return api.client.reserve(**({"nodes": ["local"], "queue": "eval"} | times | more))

    made = reserve(1, 2, why="tests")
    assert (made.nodes, made.queue, made.user, made.by, made.began) == (["local"], "eval", None, "ada", False)
    assert api.client.reservations() == [made]
    [text] = api.client.nodes()[0].reserved
    assert text.startswith("for queue eval from ") and text.endswith(f"({made.reservation})")
    for order, says in (
        ({"begin": 3, "end": 3}, "nothing can be reserved"),
        ({"begin": 1.5, "end": 4, "user": "bob", "queue": None},
         "local cannot be reserved for user bob .*: it is reserved for queue eval"),
        ({"begin": 1.5, "end": 4, "nodes": [], "gpus": 1}, "no kind of GPU has 1 GPU"),
        ({"begin": 3, "end": 4, "gpus": 1}, "either nodes or a number of GPUs"),
        ({"begin": 3, "end": 4, "user": "bob"}, "not for both"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=says):
            reserve(**order)
    with pytest.raises(NotFoundError, match="no node 'nowhere'"):
        reserve(3, 4, nodes=["nowhere"])
    own = reserve(3, 4, nodes=[], gpus=1, queue=None)
    assert (own.nodes, own.user) == (["local"], "ada")
    theirs = {"nodes": ["local"], "from_us": now_us + 5 * hour, "until_us": now_us + 6 * hour}
    made_by_other = other.reserve(**theirs)
    assert made_by_other.user == made_by_other.by != "ada"
    with pytest.raises(ForbiddenError, match="for queue eval by operators only, and you are"):
        other.reserve(**theirs, queue="eval")
    with pytest.raises(ForbiddenError, match=f"{made.reservation} is cancelled"):
        other.cancel_reservation(made.reservation)
    api.scene.time.us += hour
    api.scene.control.tick()
    assert api.client.reservations()[0].began
    assert api.client.cancel_reservation(made.reservation).reservation == made.reservation
    assert len(api.client.reservations()) == 2
    with pytest.raises(InputError, match="nothing can be reserved"):
        reserve(0, 3)  # it began an hour ago
    with pytest.raises(NotFoundError, match="no reservation 'r0'"):
        api.client.cancel_reservation("r0")


def test_times_in_a_job_file() -> None:
    spec = parse_spec("run: a\ngpus: 1\nnot_before: '1970-01-01 00:01'\nwindow: 22:00-06:00 Europe/Berlin")
    assert (spec.not_before_us, spec.window) == (60_000_000, "22:00-06:00 Europe/Berlin")
    for line, text in (
        ("not_before: soon", "'soon' is not a time"),
        ("window: 22-6", "'22-6' is not a window"),
        ("stop_at_end: true", "stop_at_end needs window"),
        ("window: 22:00-22:10\nstop_at_end: true\non_preempt: {grace: 10m}", "the window of 10m leaves no time"),
    ):
        with pytest.raises(SpecError, match=text):
            parse_spec(f"run: a\ngpus: 1\n{line}")
