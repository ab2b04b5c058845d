"""torchdata's StatefulDataLoader in the state of a job: the position in the middle of an epoch, with workers."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import cordee
from cordee.errors import CheckpointError

# torchdata 0.11 calls what torch 2.13 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, i: int) -> int:
        return i


def loader_of(workers: int, *, generator: torch.Generator | None = None) -> StatefulDataLoader:
    torch.manual_seed(5)
    return StatefulDataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers, generator=generator)


def without_end(loader: StatefulDataLoader) -> Iterator[list[int]]:
    while True:
        for batch in loader:
            yield batch.tolist()


class _LeftEarly(Exception):
    """Ends a loop without the checkpoint that `break` makes."""


def train(to: Path, *, until: int, workers: int) -> dict[int, list[int]]:
    """What each step is given; a checkpoint after each third step, and none at the end of what is left early."""
    model = torch.nn.Linear(2, 1)
    loader = loader_of(workers)
    state: dict[str, Any] = {"model": model, "loader": loader}
    given = {}
    with suppress(_LeftEarly), cordee.job(state, to=to, every=3) as job:
        batches = without_end(loader)
        for step in job.steps(16):
            if step == until:
                raise _LeftEarly
            given[step] = next(batches)
    return given


@pytest.mark.parametrize("workers", [0, 2])
def test_the_place_in_an_epoch_comes_back(tmp_path: Path, workers: int, caplog: pytest.LogCaptureFixture) -> None:
    whole = train(tmp_path / "whole", until=99, workers=workers)
    assert "goes on alone" not in caplog.text, "the workers hold the uploader's pipe open"
    assert len(whole) == 16 and len({tuple(batch) for batch in whole.values()}) == 16
    first = train(tmp_path / "to", until=10, workers=workers)  # 6 batches are an epoch
    rest = train(tmp_path / "to", until=99, workers=workers)
    assert next(iter(rest)) == 9
    assert first | rest == whole


@pytest.mark.parametrize(("before", "now"), [(0, 2), (2, 1)])
def test_another_number_of_workers_is_refused_with_both(tmp_path: Path, before: int, now: int) -> None:
    train(tmp_path, until=4, workers=before)
    with pytest.raises(CheckpointError, match=f"'loader' is that of {before} workers, and it has {now}"):
        train(tmp_path, until=99, workers=now)
    assert train(tmp_path, until=5, workers=before), "what was refused has changed nothing"


def endless(loader: StatefulDataLoader, first: Iterator[Any] | None = None) -> Iterator[Any]:
    while True:
        yield from first or iter(loader)
        first = None


def losses(to: Path, *, until: int, where: str, workers: int, owned: bool) -> dict[int, float]:
    """The loss of each step of a model with dropout, which shows any other draw; a checkpoint each third step."""
    loader = loader_of(workers, generator=torch.Generator().manual_seed(7) if owned else None)
    model, dropout = torch.nn.Linear(4, 1), torch.nn.Dropout(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    first = iter(loader) if where == "before" else None
    found = {}
    state = {"model": model, "optimizer": optimizer, "data": loader}
    with suppress(_LeftEarly), cordee.job(state, to=to, every=3) as job:
        batches = endless(loader, iter(loader) if where == "inside" else first)
        for step in job.steps(16):
            if step == until:
                raise _LeftEarly
            inputs = dropout(next(batches).float().repeat(4, 1).T)
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found[step] = loss.item()
    return found


@pytest.mark.parametrize(
    ("where", "workers", "owned"),
    [
        pytest.param("before", 0, True, marks=pytest.mark.soak),
        ("inside", 0, False),
        pytest.param("lazily", 0, False, marks=pytest.mark.soak),
        ("before", 2, False),
        ("lazily", 2, True),
    ],
)
def test_a_resume_is_exact_wherever_the_iterator_is_made(
    tmp_path: Path, where: str, workers: int, owned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """`owned`: the loader has a generator of its own, which torchdata alone restores only for the epoch that runs."""
    whole = losses(tmp_path / "whole", until=99, where=where, workers=workers, owned=owned)
    first = losses(tmp_path / "to", until=10, where=where, workers=workers, owned=owned)
    rest = losses(tmp_path / "to", until=99, where=where, workers=workers, owned=owned)
    assert next(iter(rest)) == 9
    assert first | rest == whole
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_batch_taken_before_the_first_step_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        caplog.clear()
        loader = loader_of(0)
        with cordee.job({"data": loader}, to=tmp_path, every=2) as job:
            for _, step in zip(endless(loader), job.steps(9), strict=False):
                if step == job.start_step + 3:
                    break
        assert "1 batch of 'data' was taken before the first step" in caplog.text
