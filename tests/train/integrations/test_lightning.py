"""Lightning with one callback more: what was pushed aside ends as what was not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runs import Runs, runs_of


@pytest.fixture(scope="module")
def run() -> Iterator[Runs]:
    with runs_of(Path(__file__).with_name("lightning_script.py")) as runs:
        yield runs


def attempt(run: Runs, out: Path, *argv: str, world: int = 1) -> list[int]:
    codes: list[int] = run("--out", str(out), *argv, world=world)
    return codes


def end_of(out: Path, rank: int = 0) -> dict[str, Any]:
    end: dict[str, Any] = json.loads((out / f"end{rank}.json").read_text())
    return end


def same(out: Path, whole: Path, rank: int = 0) -> None:
    """Everything, and the losses from where the last attempt began."""
    end, expected = end_of(out, rank), end_of(whole, rank)
    losses, all_losses = end.pop("losses"), expected.pop("losses")
    assert end == expected
    assert 0 < len(losses) < len(all_losses) and losses.items() <= all_losses.items()


@pytest.mark.parametrize(
    ("kills", "argv"),
    [
        # Samples that draw from the rank's generator; where validation has just run; two batches a step.
        pytest.param([8, 35], ["--data", "plain", "--validate", "4", "--accumulate", "2"], id="plain"),
        # A loader that knows its place; `test_notice_at_one_of_two_ranks` has one too.
        pytest.param(
            [9, 26],
            ["--data", "stateful", "--workers", "2", "--max-steps", "45"],
            id="stateful",
            marks=pytest.mark.soak,
        ),
        # No length, an order of its own, and samples that draw from a worker's generator.
        pytest.param([5, 40], ["--data", "stream", "--workers", "1", "--validate", "5"], id="stream"),
    ],
)
def test_two_notices_cost_no_step_and_no_bit(run: Runs, tmp_path: Path, kills: list[int], argv: list[str]) -> None:
    whole, out, to = tmp_path / "whole", tmp_path / "out", str(tmp_path / "to")
    assert attempt(run, whole, *argv) == [0], run.said()
    known = None if "stream" in argv else end_of(whole)["step"]
    assert end_of(whole)["steps_total"] == known, "a stream has no length"
    for batch in kills:
        assert attempt(run, out, *argv, "--to", to, "--kill", f"0:{batch}") == [75], run.said()
    assert not (out / "end0.json").exists(), "a line after the loop has run"
    assert attempt(run, out, *argv, "--to", to) == [0], run.said()
    same(out, whole)


@pytest.mark.gang
@pytest.mark.parametrize(
    "how", [pytest.param([], id="ddp"), pytest.param(["--fsdp"], id="fsdp", marks=pytest.mark.soak)]
)
def test_notice_at_one_of_two_ranks(run: Runs, tmp_path: Path, how: list[str]) -> None:
    whole, out, to = tmp_path / "whole", tmp_path / "out", str(tmp_path / "to")
    argv = ["--data", "stateful", "--validate", "4", *how]
    assert attempt(run, whole, *argv, world=2) == [0, 0], run.said()
    assert attempt(run, out, *argv, "--to", to, "--kill", "1:17", world=2) == [75, 75], run.said()
    assert attempt(run, out, *argv, "--to", to, world=2) == [0, 0], run.said()
    assert bool(end_of(out)["sharded"]) == bool(how)
    for rank in (0, 1):
        same(out, whole, rank)
    assert attempt(run, out, *argv, "--to", to, world=2) == [0, 0], "what is done is not done again"
    assert end_of(out)["weights"] == end_of(whole)["weights"] and not end_of(out)["losses"]


def test_a_callback_that_would_be_lost_is_refused(run: Runs, tmp_path: Path) -> None:
    assert attempt(run, tmp_path, "--to", str(tmp_path / "to"), "--average") == [1]
    assert "EMAWeightAveraging keeps its state in Lightning's own checkpoint" in run.said()
    assert not (tmp_path / "to").exists(), "what was refused has opened nothing"


def test_the_trainer_of_the_other_package_is_refused(run: Runs, tmp_path: Path) -> None:
    assert attempt(run, tmp_path, "--to", str(tmp_path / "to"), "--other-package") == [1]
    assert "this Trainer comes from pytorch_lightning" in run.said()
