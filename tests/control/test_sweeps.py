"""Sweeps over the API, with agents that a test plays: trials start, pause at rungs, are promoted and end."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from api_scene import Api

from cordee.answers.sweeps import SweepDetailView, TrialView
from cordee.control.fold import Fold
from cordee.control.snapshot import loaded, taken
from cordee.control.sweeps.bayes import propose
from cordee.control.sweeps.controller import SweepController
from cordee.control.trials import Sweep, Trial, TrialState
from cordee.errors import InputError, NotFoundError, SpecError, TooLargeError
from cordee.events import (
    JobEnded,
    JobPaused,
    JobResumed,
    JobSubmitted,
    MetricsLogged,
    Outcome,
    RankLeft,
    RanksEnded,
    SweepEnded,
)
from cordee.ids import JobId
from cordee.schedule.policy import Policy
from cordee.workload.spec import JobSpec

S = 1_000_000


def sweep(folder: Path, **section: Any) -> dict[str, Any]:
    values = {"lr": "0.1,0.2,0.3,0.4"}
    spec = JobSpec.from_flags(
        run="true {lr}", gpus="1", name="lr", checkpoint_to=str(folder), sweep={"values": values} | section
    )
    return spec.model_dump(mode="json")


@dataclass
class World:
    """A server whose trials a test plays, on one node of four slots."""

    api: Api

    def turn(self, seconds: float = 0.0) -> None:
        self.api.scene.time.us += round(seconds * S)
        for _ in range(4):
            self.api.scene.control.tick()
            self.api.sweeps.controller.step()
        self.api.scene.control.tick()

    def view(self) -> SweepDetailView:
        return self.api.client.sweep("lr")

    def states(self) -> list[str]:
        return [each.state for each in self.view().trials]

    def trial(self, number: int) -> TrialView:
        return self.view().trials[number - 1]

    def report(self, number: int, kind: Any, **fields: Any) -> None:
        job_id = JobId(self.trial(number).job_id)
        epoch = self.api.scene.control.state.jobs[job_id].epoch
        event = kind(at_us=self.api.scene.time.us, job_id=job_id, epoch=epoch, rank=0, **fields)
        self.api.scene.agents.report(event, source=f"{job_id}.{epoch}/rank0")

    def log(self, number: int, step: int, **metrics: float | None) -> None:
        self.report(number, MetricsLogged, step=step, names=tuple(metrics), values=tuple(metrics.values()))

    def end(self, number: int, step: int, outcome: Outcome) -> None:
        how = {Outcome.CHECKPOINTED: "checkpointed", Outcome.FINISHED: "finished"}.get(outcome)
        if how is not None:
            self.report(number, RankLeft, how=how, step=step)
        job_id = JobId(self.trial(number).job_id)
        epoch, now_us = self.api.scene.control.state.jobs[job_id].epoch, self.api.scene.time.us
        ended = RanksEnded(at_us=now_us, job_id=job_id, epoch=epoch, node="local", outcome=outcome)
        self.api.scene.agents.report(ended)
        self.turn(1)


@pytest.fixture
def world(api: Api) -> Iterator[World]:
    yield World(api)


def test_trials_are_ordinary_jobs_with_their_values_and_a_place_in_the_sweep(world: World, tmp_path: Path) -> None:
    made = world.api.client.declare_sweep(sweep(tmp_path, max_running=2))
    assert (made.state, made.total, made.search, made.counts) == ("running", 4, "grid", {})
    world.turn()
    submitted = [event for event in world.api.scene.of(JobSubmitted) if isinstance(event, JobSubmitted)]
    assert [each.job.trial for each in submitted] == [1, 2]
    job, spec = submitted[0].job, json.loads(submitted[0].spec)
    assert (job.sweep, job.name, job.owner, job.tier, job.pauses) == (
        made.sweep_id,
        "lr-1",
        "ada",
        "preemptible",
        False,
    )
    assert (spec["run"], spec["sweep"], spec["env"]["CORDEE_TRIAL"]) == ("true 0.1", None, '{"lr": 0.1}')
    assert world.states() == ["running", "running"]
    assert {each.sweep for each in world.api.client.jobs()} == {made.sweep_id}


def test_a_grid_goes_through_all_trials_a_crash_ends_none_but_its_own_and_the_best_is_said(
    world: World, tmp_path: Path
) -> None:
    world.api.client.declare_sweep(sweep(tmp_path, max_running=2, metric="acc", goal="max"))
    world.turn()
    for number, value in ((1, 0.5), (2, None), (3, 0.9), (4, 0.7)):
        if value is None:
            for _ in range(3):
                world.end(number, 0, Outcome.FAILED)
                world.turn(3)
        else:
            world.log(number, 10, acc=value, loss=1.0)
            world.turn()
            world.end(number, 10, Outcome.FINISHED)
    view = world.view()
    with pytest.raises(NotFoundError, match=rf"'{view.name}' is a sweep, not a job\nhint: `cordee sweep show"):
        world.api.client.why(view.name)
    assert world.states() == ["done", "failed", "done", "done"]
    assert (view.state, view.why) == ("ended", "all 4 trials are over")
    assert view.best is not None and (view.best.number, view.best.values) == (3, {"lr": 0.3})
    assert view.micro_usd == sum(each.micro_usd or 0 for each in view.trials) > 0
    assert all(each.gpu_us for each in view.trials)


def test_at_a_rung_a_trial_holds_no_gpu_and_the_best_goes_on_from_its_bytes(world: World, tmp_path: Path) -> None:
    world.api.client.declare_sweep(sweep(tmp_path, max_running=4, rungs="3..9:3"))
    world.turn()
    for number, loss in ((1, 4.0), (2, 3.0), (3, 2.0)):
        world.log(number, 3, loss=loss)
        world.end(number, 3, Outcome.CHECKPOINTED)
    assert world.states() == ["paused", "paused", "running", "running"], "trial 3 is the best of three"
    held = world.api.scene.control.state.attempts
    assert {world.trial(number).job_id for number in (3, 4)} == set(held)
    assert world.api.client.why(world.trial(1).job_id).reason == "paused"
    [resumed] = world.api.scene.of(JobResumed)
    assert isinstance(resumed, JobResumed) and resumed.why == "promoted at rung 1, step 3"
    world.log(3, 9, loss=1.0)
    world.turn()
    world.end(3, 9, Outcome.FINISHED)
    world.log(4, 3, loss=9.0)
    world.end(4, 3, Outcome.CHECKPOINTED)
    assert (world.view().state, world.states()) == ("ended", ["stopped", "stopped", "done", "stopped"])
    assert len(world.api.scene.of(JobPaused)) == 4
    [row] = [each for each in world.api.client.jobs() if each.job_id == world.trial(1).job_id]
    assert (row.state, row.why) == ("stopped", "stopped by its sweep")


def test_one_that_leaves_before_a_rung_goes_on_at_once(world: World, tmp_path: Path) -> None:
    world.api.client.declare_sweep(sweep(tmp_path, max_running=1, rungs="3..9:3"))
    world.turn()
    world.end(1, 2, Outcome.CHECKPOINTED)
    assert (world.states(), world.trial(1).rung) == (["running"], 0)


def test_a_server_that_starts_again_goes_on_the_same(world: World, tmp_path: Path) -> None:
    world.api.client.declare_sweep(sweep(tmp_path, max_running=2, rungs="3..9:3"))
    world.turn()
    world.log(1, 3, loss=1.0)
    world.end(1, 3, Outcome.CHECKPOINTED)
    control = world.api.scene.control
    before = control.fold.sweeps.sweeps
    fold = loaded(taken(control.fold), Policy(), control.number)
    assert fold.sweeps.sweeps == before
    replayed = Fold(Policy())
    replayed.apply(world.api.scene.store.events())
    assert replayed.sweeps.sweeps == before
    number = control.number
    world.api.sweeps.controller = SweepController(world.api.operations)
    world.turn()
    assert control.number == number, "a new controller has nothing to do that the old one had not done"


def test_stopping_a_sweep_stops_its_trials_and_its_paused_ones_too(world: World, tmp_path: Path) -> None:
    world.api.client.declare_sweep(sweep(tmp_path, max_running=2, rungs="3..9:3"))
    world.turn()
    world.log(1, 3, loss=1.0)
    world.end(1, 3, Outcome.CHECKPOINTED)
    assert world.api.client.end_sweep("lr").why == "stopped by ada"
    world.turn()
    assert world.view().state == "stopping" and world.trial(1).state == "stopped"
    for number in (2, 3):
        world.end(number, 1, Outcome.CHECKPOINTED)
    assert (world.view().state, world.states()) == ("ended", ["stopped"] * 3)
    assert world.api.client.end_sweep("lr").why == "stopped by ada"
    assert len(world.api.scene.of(SweepEnded)) == 1


def test_a_metric_that_no_trial_logs_is_said_with_those_that_are(world: World, tmp_path: Path) -> None:
    world.api.client.declare_sweep(sweep(tmp_path, metric="val_loss"))
    world.turn()
    assert world.view().note == ""
    world.log(1, 3, loss=1.0)
    world.turn()
    world.end(1, 3, Outcome.FINISHED)
    said = "no trial has logged the metric val_loss: they log loss; in the loop, call job.log(val_loss=...)"
    assert world.view().note == said


def test_what_cannot_be_a_sweep_is_refused_and_changes_nothing(world: World, tmp_path: Path) -> None:
    number = world.api.scene.control.number
    with pytest.raises(TooLargeError, match="the job needs 5 GPUs"):
        world.api.client.declare_sweep(sweep(tmp_path) | {"gpus": 5})
    with pytest.raises(SpecError, match="is a job: it has no section `sweep`"):
        world.api.client.declare_sweep(sweep(tmp_path) | {"sweep": None})
    with pytest.raises(SpecError, match="is a sweep, not a job"):
        world.api.client.submit(sweep(tmp_path))
    with pytest.raises(InputError, match="max_running"):
        made = sweep(tmp_path)
        world.api.client.declare_sweep(made | {"sweep": made["sweep"] | {"max_running": 0}})
    with pytest.raises(NotFoundError, match="there is no sweep 'lr'"):
        world.view()
    assert world.api.scene.control.number == number


def test_a_refused_trial_is_tried_again_and_the_sweep_says_why(world: World, tmp_path: Path) -> None:
    script = tmp_path / "go"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    made = sweep(tmp_path / "ckpt", max_running=1) | {"run": "./go {lr}", "cwd": str(tmp_path)}
    world.api.client.declare_sweep(made)
    script.unlink()
    world.turn()
    assert world.view().why.startswith("'./go' is not an executable") and not world.view().trials
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    world.turn(11)
    assert (world.view().why, world.states()) == ("", ["running"])


def test_bayes_proposes_the_same_for_the_same_results_and_nearer_to_the_best() -> None:
    pytest.importorskip("optuna")
    spec = JobSpec.from_flags(
        run="true",
        gpus="1",
        name="lr",
        sweep={"values": {"x": "0.0..1.0", "n": "1..8", "opt": "adam,sgd"}, "search": "bayes", "trials": 40},
    )

    def run(n: int) -> list[Trial]:
        found = Sweep("lr-abcdef", "ada", spec.model_dump_json(), 1)
        for number in range(1, n + 1):
            values = propose(found, number)
            loss = (float(values["x"]) - 0.3) ** 2 + (values["opt"] == "sgd")
            found.trials[number] = Trial(number, JobId(f"t-{number}"), values, TrialState.DONE, metric=loss)
        return list(found.trials.values())

    one, other = run(25), run(25)
    assert [each.values for each in one] == [each.values for each in other]
    late = [each for each in one if each.number > 15]
    assert sum(each.metric or 0 for each in late) < sum(each.metric or 0 for each in one[:10])


def test_a_job_that_ends_stays_ended_and_a_pause_is_no_wait(world: World, tmp_path: Path) -> None:
    world.api.client.declare_sweep(sweep(tmp_path, max_running=1, rungs="3..9:3"))
    world.turn()
    world.log(1, 3, loss=1.0)
    world.end(1, 3, Outcome.CHECKPOINTED)
    state = world.api.scene.control.state
    record = state.jobs[JobId(world.trial(1).job_id)]
    world.turn(100)
    assert record.phase == "paused" and record.waits_since_us - record.waits_from_us < 2 * S
    queues = world.api.client.queues()
    assert (queues.queues[0].running_jobs, queues.queues[0].waiting_jobs) == (1, 0)
    world.api.client.end_sweep("lr")
    world.turn()
    assert JobEnded in {type(event) for event in world.api.scene.log()}
