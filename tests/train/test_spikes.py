"""The guard of the loss: what it finds, what all ranks do about it, and that a run which went back resumes exactly."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cordee
from cordee.errors import CheckpointError, InputError
from cordee.event_json import decode
from cordee.events import CheckpointCommitted, RolledBack, SpikeFound
from cordee.train.checkpoint.rank_state import check_finite
from cordee.train.data.detours import Detours
from cordee.train.data.sampler import ElasticBatchSampler
from cordee.train.guard.detector import CONFIRM, WARM_UP, SpikeDetector
from runs import Runs, runs_of

# -- the detector ----------------------------------------------------------------------------------------------


def taken(detector: SpikeDetector, losses: list[float], first: int = 0) -> list[tuple[int, int]]:
    found = [detector.take(step, loss) for step, loss in enumerate(losses, first)]
    return [(each.step, each.seen) for each in found if each is not None]


def noisy(count: int, seed: int = 1) -> list[float]:
    draw = random.Random(seed)
    return [3.0 * math.exp(-at / 200) + draw.gauss(0, 0.1) for at in range(count)]


def test_noise_and_a_falling_loss_are_no_spike_and_a_jump_that_stays_is_one() -> None:
    for seed in range(20):
        assert taken(SpikeDetector(), noisy(600, seed)) == []
    detector = SpikeDetector()
    assert taken(detector, noisy(100)) == []
    assert taken(detector, [9.0, 9.0], 100) == [] and detector.is_suspicious
    assert taken(detector, [9.0], 102) == [(100, 102)] and CONFIRM == 3
    assert taken(detector, [9.0] * 100, 103) == [], "it is the usual range now"


def test_a_single_outlier_is_suspicious_and_forgotten() -> None:
    detector = SpikeDetector()
    losses = noisy(200)
    for at in (50, 80, 81, 120):
        losses[at] = 50.0
    assert taken(detector, losses) == [] and not detector.is_suspicious


def test_what_is_not_finite_is_a_spike_at_once_even_in_the_warm_up_and_is_told_once() -> None:
    for rank0 in (True, False):
        detector = SpikeDetector(finite=rank0)
        assert taken(detector, [1.0, math.nan, math.nan, math.inf, 1.0, math.inf]) == [(1, 1), (5, 5)]
        assert detector.is_suspicious
    assert taken(SpikeDetector(), [9.0**at for at in range(WARM_UP)]) == [], "nothing is usual yet"
    assert taken(SpikeDetector(finite=False), [*noisy(100), 9.0, 9.0, 9.0, 9.0]) == [], "the other ranks' own data"


def test_going_back_restores_the_usual_range() -> None:
    detector = SpikeDetector()
    taken(detector, noisy(100))
    before = detector.copy()
    assert taken(detector, [9.0] * 3, 100) == [(100, 102)]
    detector.back(before, 90)
    assert detector.usual()[0] == pytest.approx(before.usual()[0], rel=0.05)
    assert taken(detector, [*noisy(10, 2), 9.0, 9.0, 9.0], 90) == [(100, 102)]


# -- the order of the data -------------------------------------------------------------------------------------


def order(detours: Detours, batches: int) -> list[int]:
    return [detours.original(number) for number in range(batches)]


@settings(max_examples=60, database=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 18), st.integers(1, 5), st.booleans()), max_size=4))
def test_detours_leave_out_or_put_off_and_lose_nothing_else(taken: list[tuple[int, int, bool]]) -> None:
    detours, expected, passed = Detours(), list(range(40)), 0
    for ahead, count, later in taken:
        first = passed + ahead
        passed = first
        end = detours.end(20)
        if later and detours.put_off(first, count, end):
            moved = expected[first : first + count]
            expected = [*expected[:first], *expected[first + count : end], *moved, *expected[end:]]
        elif not later:
            detours.leave_out(first, count)
            expected = [*expected[:first], *expected[first + count :]]
        assert order(detours, 15) == expected[:15]
        assert detours.end(20) == sum(each < 20 for each in expected)
    assert order(Detours(detours.saved()), 15) == expected[:15]


def test_a_sampler_gives_the_batches_after_a_detour_and_keeps_it_in_its_state() -> None:
    def rest(sampler: ElasticBatchSampler) -> list[list[int]]:
        return list(sampler)

    plain = rest(ElasticBatchSampler(range(40), 4, seed=1))
    sampler = ElasticBatchSampler(range(40), 4, seed=1)
    sampler.position = 8
    sampler.detour(3, 2, reorder=False)
    assert rest(sampler) == [plain[2], *plain[5:]] and len(sampler) == 8
    again = ElasticBatchSampler(range(40), 4, seed=1)
    again.load_state_dict(sampler.state_dict())
    assert rest(again) == rest(sampler) and again.detours == 1
    later = ElasticBatchSampler(range(40), 4, seed=1)
    later.detour(3, 2, reorder=True)
    assert rest(later) == [*plain[:3], *plain[5:], plain[3], plain[4]]
    later.detour(9, 1, reorder=True)
    assert rest(later) == [*plain[:3], *plain[5:], plain[3]], "the end of an epoch cannot be put off"
    assert "detours" not in ElasticBatchSampler(range(40), 4).state_dict(), "as earlier versions wrote it"


# -- a job -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with runs_of(Path(__file__).with_name("spike_script.py")) as made:
        yield made


class Scene:
    """The folders of one job, and its attempts."""

    def __init__(self, runs: Runs, folder: Path, *argv: object) -> None:
        self._runs, self.folder = runs, folder
        self.out, self.spool = folder / "out", folder / "spool"
        for each in (self.out, self.spool):
            each.mkdir(parents=True)
        self._argv = ["--out", self.out, "--to", folder / "to", *argv]

    def run(self, world: int = 1, epoch: int = 1) -> list[int]:
        env = {"CORDEE_JOB": "test-abcdef", "CORDEE_EPOCH": str(epoch), "CORDEE_SPOOL": str(self.spool / str(epoch))}
        codes: list[int] = self._runs(*map(str, self._argv), world=world, env=env)
        return codes

    def steps(self, rank: int = 0) -> list[tuple[int, list[int], float]]:
        return [tuple(json.loads(line)) for line in (self.out / f"steps{rank}").read_text().splitlines()]

    def numbers(self) -> list[int]:
        return [step for step, *_ in self.steps()]

    def kept(self) -> list[list[int]]:
        """Return the samples of each step, of the last time that it was run."""
        return list({step: batch for step, batch, _ in self.steps()}.values())

    def weights(self) -> str:
        return (self.out / "end0").read_text()

    def events(self, kind: type, epoch: int = 1) -> list[Any]:
        lines = (self.spool / str(epoch) / "rank0.jsonl").read_text().splitlines()
        events = [decode(json.loads(line)["event"]) for line in lines]
        return [each for each in events if isinstance(each, kind)]


def batches(*numbers: int) -> list[list[int]]:
    sampler = ElasticBatchSampler(range(400), 8, seed=3)
    return [sorted(sampler.order.samples(8 * number, 8).tolist()) for number in numbers]


def test_a_nan_takes_the_job_back_before_it_without_those_batches_and_a_resume_is_exact(
    runs: Runs, tmp_path: Path
) -> None:
    scene = Scene(runs, tmp_path / "a", "--bad", "13", "--steps", "30")
    assert scene.run() == [0], runs.said()
    assert scene.numbers() == [*range(14), *range(10, 30)]
    assert scene.kept() == batches(*range(12), *range(14, 32)), "those of steps 12 and 13 were left out"
    assert all(math.isfinite(loss) for _, _, loss in scene.steps()[14:])
    [found], [back] = scene.events(SpikeFound), scene.events(RolledBack)
    assert (found.step, found.value, found.action) == (13, None, "rollback")
    assert (back.step, back.to_step, back.batches, back.reordered) == (14, 10, 2, False)
    assert "the loss of step 13 is nan: back from step 14 to step 10 (generation" in runs.said()
    assert "without the 2 batches of steps 12 to 13; time 1 of 3" in runs.said()
    broken = Scene(runs, tmp_path / "b", "--bad", "13", "--steps", "30", "--die", "11")
    assert broken.run() == [9] and broken.run(epoch=2) == [0], runs.said()
    assert broken.numbers() == [*range(14), 10, *range(10, 30)], "it died before the next checkpoint by steps"
    assert broken.events(RolledBack, epoch=2) == []
    assert broken.weights() == scene.weights()


def test_batches_that_are_put_off_come_at_the_end_of_their_epoch(runs: Runs, tmp_path: Path) -> None:
    scene = Scene(runs, tmp_path, "--bad", "13", "--on-spike", "reorder", "--steps", "48")
    assert scene.run() == [0], runs.said()
    assert scene.kept() == batches(*range(12), *range(14, 50)), "an epoch has 50 batches"
    [back] = scene.events(RolledBack)
    assert back.reordered and back.batches == 2


def test_a_job_goes_back_three_times_at_most_and_says_why_it_stops(runs: Runs, tmp_path: Path) -> None:
    scene = Scene(runs, tmp_path, "--bad", "7", "13", "19", "25", "--steps", "30")
    assert scene.run() == [61], runs.said()
    assert len(scene.events(RolledBack)) == 3
    assert "is nan, and it has gone back 3 times already; durable: step" in runs.said()


def test_a_job_that_is_told_to_stop_keeps_the_checkpoint_before_the_spike(runs: Runs, tmp_path: Path) -> None:
    scene = Scene(runs, tmp_path / "one", "--bad", "44", "--factor", "30", "--on-spike", "stop", "--steps", "50")
    assert scene.run() == [0], runs.said()
    assert scene.events(SpikeFound) == [], "one batch alone is no spike"
    several = [str(number) for number in range(43, 50)]
    scene = Scene(runs, tmp_path / "stays", "--bad", *several, "--factor", "30", "--on-spike", "stop", "--every", "1")
    assert scene.run() == [61]
    assert scene.numbers() == list(range(46))
    assert all(each.step <= 43 for each in scene.events(CheckpointCommitted)), "a later save had to wait"
    assert "it began in step 43, and the job was told to stop; durable: step" in runs.said()


@pytest.mark.gang
def test_weights_that_are_not_finite_at_the_end_are_no_failure_that_another_start_would_mend(
    runs: Runs, tmp_path: Path
) -> None:
    scene = Scene(runs, tmp_path / "one", "--bad", "13", "--on-spike", "warn", "--steps", "20")
    assert scene.run() == [61], runs.said()
    assert "the training has diverged: the final checkpoint, of step 20, failed; durable: step 10" in runs.said()
    gang = Scene(runs, tmp_path / "two", "--on-spike", "warn", "--steps", "8", "--alone", "1")
    assert gang.run(world=2) == [61, 61], "one rank's weights are enough"
    assert "another rank could not capture step 8" in runs.said()
    off = Scene(runs, tmp_path / "off", "--bad", "13", "--on-spike", "off", "--steps", "20")
    assert off.run() == [0], runs.said()


@pytest.mark.gang
def test_a_gang_goes_back_together_for_the_nan_of_one_rank(runs: Runs, tmp_path: Path) -> None:
    scene = Scene(runs, tmp_path, "--bad", "13", "--rank", "1", "--steps", "25")
    assert scene.run(world=2) == [0, 0], runs.said()
    steps = [[step for step, *_ in scene.steps(rank)] for rank in (0, 1)]
    assert steps[0] == steps[1] and len(steps[0]) > 25 and steps[0][-1] == 24
    joined = [
        sorted(a + b) for a, b in zip(*({s: b for s, b, _ in scene.steps(r)}.values() for r in (0, 1)), strict=True)
    ]
    assert (scene.out / "end0").read_text() == (scene.out / "end1").read_text()
    [back] = scene.events(RolledBack)
    assert back.to_step in (5, 10) and back.step >= 14
    assert joined == batches(*range(12), *range(back.step, back.step + 13)), "from step 12 until they met"


# -- bad input -------------------------------------------------------------------------------------------------


def test_weights_that_are_not_finite_are_not_saved() -> None:
    model = torch.nn.Linear(2, 2)
    check_finite({"model": model})
    mask = torch.nn.Parameter(torch.full((2,), -math.inf), requires_grad=False)
    model.register_parameter("mask", mask)
    check_finite({"model": model})
    with torch.no_grad():
        model.bias[1] = math.nan
    with pytest.raises(CheckpointError, match="1 of 2 weights are not finite, the first bias"):
        check_finite({"model": model})


def test_a_word_that_is_none_and_a_job_that_cannot_go_back_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="on_spike='back' is not possible"):
        cordee.job({}, on_spike="back")
    with pytest.raises(InputError, match="needs checkpoints"), cordee.job({}, on_spike="rollback"):
        pass
    job = cordee.job({"model": torch.nn.Linear(1, 1)}, to=tmp_path, on_spike="reorder")
    with pytest.raises(InputError, match=r"needs the loop of job\.steps"), job:
        job.begin(3)
