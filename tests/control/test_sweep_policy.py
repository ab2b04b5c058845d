"""The policy of sweeps over the fold of the log: bounds, promotions, ends, and the same after a replay."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.control.codec import codec
from cordee.control.sweeps.policy import at_rung, decide, reached_target
from cordee.control.sweeps.trial_spec import trial_id, trial_spec
from cordee.control.trials import SavedSweeps, Sweep, Sweeps, Trial
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    Event,
    Job,
    JobEnded,
    JobPaused,
    JobResumed,
    JobSubmitted,
    Lease,
    MetricsLogged,
    Outcome,
    RankLeft,
    SweepDeclared,
    SweepEnded,
)
from cordee.workload.spec import JobSpec

ID = "lr-abcdef"


def spec_of(**section: Any) -> JobSpec:
    values = {"lr": "1e-4..1e-2:log", "seed": "1..100"}
    return JobSpec.from_flags(
        run="train --lr {lr} --seed {seed}",
        gpus="1",
        name="lr",
        checkpoint_to="/ckpt",
        sweep={"values": values, "trials": 9, "rungs": "1..9:3"} | section,
    )


@dataclass
class World:
    """A sweep whose trials a test plays, event by event."""

    spec: JobSpec
    events: list[Event] = field(default_factory=list)
    sweeps: Sweeps = field(default_factory=Sweeps)

    def __post_init__(self) -> None:
        self.apply(SweepDeclared(at_us=1, sweep=ID, by="ada", spec=self.spec.model_dump_json()))

    @property
    def sweep(self) -> Sweep:
        return self.sweeps.sweeps[ID]

    def apply(self, *events: Event) -> None:
        for event in events:
            self.events.append(event)
            self.sweeps.apply(event)

    def follow(self) -> bool:
        """Do what the policy decides; return whether the sweep goes on."""
        found, section = decide(self.sweep), self.sweep.section
        for number in (*found.resume, *found.promote):
            trial = self.sweep.trials[number]
            if number in found.promote:
                self.check_promotion(trial)
            self.apply(JobResumed(at_us=1, job_id=trial.job_id, by="its sweep", why=""))
        for _ in range(found.start):
            number = len(self.sweep.trials) + 1
            made = trial_spec(self.spec, number, section.point(number))
            job = Job(job_id=trial_id(ID, self.spec, number), name="lr", owner="ada", gpus=1, sweep=ID, trial=number)
            self.apply(JobSubmitted(at_us=1, job=job, spec=made.model_dump_json()))
        if found.end is not None:
            self.apply(SweepEnded(at_us=1, sweep=ID, by="its sweep", why=found.end))
        assert sum(each.is_live for each in self.sweep.trials.values()) <= section.max_running
        return found.end is None

    def check_promotion(self, trial: Trial) -> None:
        section, trials = self.sweep.section, list(self.sweep.trials.values())
        assert section.rungs is not None and trial.is_at_rung and trial.metric is not None
        ranked = at_rung(trials, section, len(trial.rungs) - 1)
        top = ranked[: len(ranked) // section.rungs.eta]
        last = not any(each.is_live for each in trials) and len(trials) == section.total
        assert trial in top or (last and trial is next(each for each in ranked if each.is_at_rung))

    def start(self, trial: Trial) -> dict[str, Any]:
        epoch = trial.epoch + 1
        leases = (Lease(node="n", gpus=(0,)),)
        self.apply(AttemptPlaced(at_us=1, job_id=trial.job_id, epoch=epoch, leases=leases))
        return {"at_us": 1, "job_id": trial.job_id, "epoch": epoch}

    def run(self, trial: Trial, value: float | None, *, fails: bool = False, preempted: bool = False) -> None:
        """Run a trial to its next rung, or to its end; or it fails, or leaves before the rung."""
        common = self.start(trial)
        if fails:
            self.apply(AttemptEnded(**common, outcome=Outcome.FAILED, why="exit code 1"))
            self.apply(JobEnded(at_us=1, job_id=trial.job_id, state="failed", why="exit code 1"))
            return
        steps = self.sweep.section.rung_steps
        rung = next(step for step in steps if step > (0 if not trial.rungs else steps[len(trial.rungs) - 1]))
        step = rung - 1 if preempted else rung
        self.apply(MetricsLogged(**common, rank=0, step=step, names=("loss",), values=(value,)))
        over = rung == steps[-1] and not preempted
        self.apply(RankLeft(**common, rank=0, how="finished" if over else "checkpointed", step=step))
        outcome = Outcome.FINISHED if over else Outcome.CHECKPOINTED
        self.apply(AttemptEnded(**common, outcome=outcome, why=""))
        if over:
            self.apply(JobEnded(at_us=1, job_id=trial.job_id, state="done", why="finished"))
        else:
            self.apply(JobPaused(at_us=1, job_id=trial.job_id, why="it left with a checkpoint by itself"))

    def live(self) -> list[Trial]:
        return [each for each in self.sweep.trials.values() if each.is_live]

    def play(self, losses: Iterator[float]) -> None:
        """Run the sweep to its end, the oldest trial first."""
        while self.follow():
            self.run(self.live()[0], next(losses))


VALUES = st.floats(-10, 10) | st.none()
HOW = st.sampled_from([*["runs"] * 6, "fails", "preempted"])
TURNS = st.lists(st.tuples(st.integers(0, 10), VALUES, HOW), max_size=60)


@settings(max_examples=60)
@given(TURNS, st.integers(1, 5), st.integers(2, 4), st.sampled_from(["min", "max"]), st.integers(1, 12))
def test_it_keeps_its_bounds_promotes_the_best_and_goes_on_the_same_after_a_replay(
    turns: list[tuple[int, float | None, str]], most: int, eta: int, goal: str, trials: int
) -> None:
    world = World(spec_of(max_running=most, rungs=f"1..16:{eta}", goal=goal, trials=trials))
    for which, value, how in turns:
        if not world.follow():
            break
        live = world.live()
        world.run(live[which % len(live)], value, fails=how == "fails", preempted=how == "preempted")
    again = Sweeps()
    for event in world.events:
        again.apply(event)
    saved = codec(SavedSweeps)
    restored = Sweeps.restored(saved.decode(json.loads(json.dumps(saved.encode(world.sweeps.saved())))))
    for other in (again, restored):
        assert other.sweeps == world.sweeps.sweeps
        assert world.sweep.ended_us is not None or decide(other.sweeps[ID]) == decide(world.sweep)


@settings(max_examples=30)
@given(st.integers(1, 30), st.integers(2, 4), st.integers(1, 6))
def test_every_sweep_ends_and_its_best_trial_reaches_the_last_rung(trials: int, eta: int, most: int) -> None:
    world = World(spec_of(trials=trials, rungs=f"2..20:{eta}", max_running=most))
    world.play(float(at * 7919 % 101) for at in range(10_000))
    assert any(each.state == "done" for each in world.sweep.trials.values())
    assert len(world.sweep.trials) == trials
    best = world.sweep.best
    assert best is not None and world.sweep.why == f"all {trials} trials are over"
    assert best.state == "done", "a lucky value of a few steps is not the best of the sweep"


def test_of_nine_trials_three_go_on_and_one_of_them_ends() -> None:
    world = World(spec_of())
    order = iter([5.0, 3.0, 8.0, 1.0, 9.0, 2.0, 7.0, 6.0, 4.0] + [0.5] * 20)
    world.play(order)
    reached = sorted(len(each.rungs) for each in world.sweep.trials.values())
    assert reached.count(3) >= 1 and reached.count(1) >= 5
    assert sum(each.epoch for each in world.sweep.trials.values()) < 9 * 2


def test_the_same_sweep_draws_the_same_values_and_another_seed_others() -> None:
    one, other = spec_of().sweep, spec_of(seed=1).sweep
    assert one is not None and other is not None
    assert [one.point(number) for number in range(1, 6)] == [one.point(number) for number in range(1, 6)]
    assert one.point(1) != other.point(1)
    points = [one.point(number)["lr"] for number in range(1, 400)]
    assert all(1e-4 <= lr <= 1e-2 for lr in points if isinstance(lr, float))
    assert 0.4 < sum(lr < 1e-3 for lr in points if isinstance(lr, float)) / len(points) < 0.6


def test_a_target_ends_the_sweep() -> None:
    world = World(spec_of(rungs=None, target=0.5))
    losses = iter([3.0, 0.7, 0.4])

    def run() -> None:
        trial = world.live()[0]
        common = world.start(trial)
        world.apply(MetricsLogged(**common, rank=0, step=5, names=("acc", "loss"), values=(0.1, next(losses))))

    for _ in range(3):
        assert world.follow()
        run()
    assert not world.follow()
    assert world.sweep.why == "trial 1: loss 0.4 reached the target 0.5"


def test_the_best_trial_is_at_the_highest_rung_and_the_target_counts_anywhere() -> None:
    world = World(spec_of(trials=3, rungs="2..8:2", max_running=1, target=0.1))
    for value in (0.5, 0.9, 0.7, 0.6):
        assert world.follow()
        world.run(world.live()[0], value)
    found = {each.number: (len(each.rungs), each.metric) for each in world.sweep.trials.values()}
    assert found == {1: (2, 0.7), 2: (1, 0.9), 3: (1, 0.6)}
    assert world.sweep.best is world.sweep.trials[1]
    world.apply(MetricsLogged(**world.start(world.sweep.trials[3]), rank=0, step=3, names=("loss",), values=(0.05,)))
    assert world.sweep.best is world.sweep.trials[1]
    assert reached_target(world.sweep) is world.sweep.trials[3]


def test_a_trial_that_crashes_counts_for_nothing_and_the_sweep_goes_on() -> None:
    world = World(spec_of(rungs=None, trials=3, max_running=1))
    for at in range(3):
        assert world.follow()
        trial = world.live()[0]
        if at == 1:
            world.run(trial, None, fails=True)
            continue
        common = world.start(trial)
        world.apply(MetricsLogged(**common, rank=0, step=5, names=("loss",), values=(float(3 - at),)))
        world.apply(AttemptEnded(**common, outcome=Outcome.FINISHED, why=""))
        world.apply(JobEnded(at_us=1, job_id=trial.job_id, state="done", why="finished"))
    assert not world.follow()
    assert [each.state for each in world.sweep.trials.values()] == ["done", "failed", "done"]
    assert world.sweep.best is world.sweep.trials[3]


def test_a_diverged_trial_is_the_worst_of_its_rung() -> None:
    world = World(spec_of(trials=3, max_running=3))
    for value in (None, 5.0, 4.0):
        world.follow()
        world.run(world.live()[0], value)
    world.follow()
    assert [each.number for each in world.live()] == [3]


@pytest.mark.parametrize("words", ["train --lr {lr} --n '{other}'", ["train", "--lr={lr}"]])
def test_a_trial_is_the_job_with_its_values_in_the_command_and_in_its_environment(words: Any) -> None:
    spec = spec_of().model_copy(update={"run": words if isinstance(words, str) else tuple(words)})
    made = trial_spec(spec, 3, {"lr": 0.5, "seed": 2})
    assert made.run in ("train --lr 0.5 --n '{other}'", ("train", "--lr=0.5"))
    assert (made.name, made.sweep, made.tier) == ("lr-3", None, "preemptible")
    assert json.loads(made.env["CORDEE_TRIAL"]) == {"lr": 0.5, "seed": 2} and made.env["CORDEE_RUNGS"] == "1,3,9"
