"""Whoever fetches batches ahead of the loop: a resumed run skips no sample, or says that it may."""

import logging
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from test_job import environment
from torch.utils.data import DataLoader, Dataset

import cordee
from cordee.errors import InputError
from cordee.train.checkpoint import rank_state
from forks import run

STEPS = 16

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own


class Numbers(Dataset):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> int:
        return int(index)


Batches = Iterator[torch.Tensor]
Loop = Callable[[cordee.ElasticBatchSampler, DataLoader, Iterator[int]], Iterable[tuple[int, list[torch.Tensor]]]]


def in_the_step(sampler: cordee.ElasticBatchSampler, loader: DataLoader, steps: Iterator[int]):
    batches = sampler.batches(loader)
    for step in steps:
        yield step, [next(batches) for _ in range(sampler.micro_batches)]


def before_the_step(sampler: cordee.ElasticBatchSampler, loader: DataLoader, steps: Iterator[int]):
    for batch, step in zip(sampler.batches(loader), steps):
        yield step, [batch]


def fetched_ahead(sampler: cordee.ElasticBatchSampler, loader: DataLoader, steps: Iterator[int]):
    """As a loop does that copies the next batch to the GPU while it trains on this one."""
    batches = sampler.batches(loader)
    ready = [next(batches)]
    for step in steps:
        taken = []
        for _ in range(sampler.micro_batches):
            ready.append(next(batches))
            taken.append(ready.pop(0))
        yield step, taken


def looked_at_first(sampler: cordee.ElasticBatchSampler, loader: DataLoader, steps: Iterator[int]):
    """One batch tells the shapes, and is not trained on."""
    next(sampler.batches(loader))
    return in_the_step(sampler, loader, steps)


class _LeftEarly(Exception):
    """Ends a loop without the checkpoint that `break` makes."""


def train(to: Path, loop: Loop, *, until: int, workers: int, micro: int = 6) -> dict[int, list[int]]:
    """The samples of each step; a checkpoint after each third step, and none at the end of what is left early."""
    sampler = cordee.ElasticBatchSampler(Numbers(), 6, micro_batch_max=micro)
    loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers)
    given: dict[int, list[int]] = {}
    state = {"model": torch.nn.Linear(2, 1), "data": sampler}
    with suppress(_LeftEarly), cordee.job(state, to=to, every=3) as job:
        for step, batches in loop(sampler, loader, job.steps(STEPS)):
            if step == until:
                raise _LeftEarly
            given[step] = torch.cat(batches).tolist()
    return given


@pytest.mark.parametrize(
    ("loop", "workers", "micro"),
    [
        (in_the_step, 0, 3),
        (before_the_step, 2, 6),
        (fetched_ahead, 2, 6),
        (fetched_ahead, 0, 3),
        (looked_at_first, 0, 6),
    ],
)
def test_a_resumed_run_is_given_what_comes_next(
    tmp_path: Path, loop: Loop, workers: int, micro: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole = train(tmp_path / "whole", loop, until=99, workers=workers, micro=micro)
    assert len({tuple(samples) for samples in whole.values()}) == STEPS
    first = train(tmp_path / "to", loop, until=10, workers=workers, micro=micro)  # 5 batches are an epoch
    rest = train(tmp_path / "to", loop, until=99, workers=workers, micro=micro)
    assert next(iter(rest)) == 9
    assert first | rest == whole
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_save_in_a_warm_up_skips_nothing_that_was_fetched_ahead(tmp_path: Path) -> None:
    """The attempt is killed in its first step, so that a timed save before the loop is what is left."""
    command = [sys.executable, str(Path(__file__).with_name("ahead_script.py")), str(tmp_path / "to")]
    ((code, said, errors),) = run([[*command, "killed"]], [environment()], 60)
    assert code == -signal.SIGKILL and said.split() == ["0", "0"], said + errors
    ((code, said, errors),) = run([command], [environment()], 60)
    assert code == 0 and "resumed at step 0" in errors, errors
    assert said.split() == ["0", "0", "1", "6", "2", "12", "3", "18"], "steps, and the first sample of each"


def test_a_thread_that_fetches_ahead_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """How far ahead it is at a save nobody knows."""
    asked = threading.Semaphore(0)
    fetched: queue.Queue[torch.Tensor] = queue.Queue()

    def by_a_thread(sampler: cordee.ElasticBatchSampler, loader: DataLoader, steps: Iterator[int]):
        batches = sampler.batches(loader)

        def fetch() -> None:
            while True:
                asked.acquire()
                fetched.put(next(batches))

        ready: list[torch.Tensor] = []
        for step in steps:
            if step == 0:
                threading.Thread(target=fetch, daemon=True).start()
                asked.release(3)
                ready += [fetched.get() for _ in range(3)]  # it is ahead by three, however slow the thread is
            asked.release()
            ready.append(fetched.get())
            yield step, [ready.pop(0)]

    with caplog.at_level(logging.WARNING, "cordee"):
        train(tmp_path, by_a_thread, until=99, workers=0)
    (warning,) = [each.message for each in caplog.records if "batches" in each.message]
    assert "global batches in" in warning and "Wrap sampler.batches() around it" in warning


def test_batches_taken_before_the_job_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    sampler = cordee.ElasticBatchSampler(Numbers(), 6)
    rank_state.enter({"data": sampler})
    assert not caplog.records
    next(sampler.batches(DataLoader(Numbers(), batch_sampler=sampler)))
    rank_state.enter({"data": sampler})
    assert "1 micro-batches were taken before the job was entered" in caplog.text


def test_batches_of_an_earlier_job_are_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sampler = cordee.ElasticBatchSampler(Numbers(), 6)
    loader = DataLoader(Numbers(), batch_sampler=sampler)
    for name in ("one", "two"):
        with cordee.job({"data": sampler}, to=tmp_path / name, every=100) as job:
            for _, _ in in_the_step(sampler, loader, job.steps(4)):
                pass
    assert sampler.position == 2 * 4 * 6
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_loader_beside_its_sampler_would_count_twice(tmp_path: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    sampler = cordee.ElasticBatchSampler(Numbers(), 6)
    state = {"data": sampler, "loader": stateful(Numbers(), batch_sampler=sampler)}
    with (
        pytest.raises(
            InputError, match="'loader' reads from an ElasticBatchSampler, which has the position in the data"
        ),
        cordee.job(state, to=tmp_path),
    ):
        pass
