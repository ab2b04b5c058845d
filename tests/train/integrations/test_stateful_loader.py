"""torchdata's StatefulDataLoader in the state of a job: the position in the middle of an epoch, with workers."""

from collections.abc import Iterator
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


def loader_of(workers: int) -> StatefulDataLoader:
    """Not with generator=: without workers torchdata 0.11 shuffles the epoch after a resume differently then."""
    torch.manual_seed(5)
    return StatefulDataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers)


def without_end(loader: StatefulDataLoader) -> Iterator[list[int]]:
    while True:
        for batch in loader:
            yield batch.tolist()


def train(to: Path, *, until: int, workers: int) -> dict[int, list[int]]:
    """What each step is given; a checkpoint after each third step, and none at the end of what is left early."""
    model = torch.nn.Linear(2, 1)
    loader = loader_of(workers)
    state: dict[str, Any] = {"model": model, "loader": loader}
    given = {}
    with cordee.job(state, to=to, every=3) as job:
        batches = without_end(loader)
        for step in job.steps(16):
            if step == until:
                break
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
