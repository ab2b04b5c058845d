"""Hugging Face's Trainer with two more lines: what was pushed aside ends as what was not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runs import Runs, runs_of

STEPS = 39


@pytest.fixture(scope="module")
def run() -> Iterator[Runs]:
    with runs_of(Path(__file__).with_name("huggingface_script.py")) as runs:
        yield runs


def attempt(run: Runs, out: Path, *argv: str, world: int = 1) -> list[int]:
    codes: list[int] = run("--out", str(out), *argv, world=world)
    return codes


def end_of(out: Path, rank: int = 0) -> dict[str, Any]:
    end: dict[str, Any] = json.loads((out / f"end{rank}.json").read_text())
    return end


@pytest.fixture(scope="module")
def uninterrupted(run: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted")
    assert attempt(run, out) == [0], run.said()
    assert end_of(out)["step"] == end_of(out)["steps_total"] == STEPS
    assert end_of(out)["saved by the Trainer"], "without a destination the Trainer's own checkpoints stay"
    return out


def test_two_notices_cost_no_step_and_no_bit(run: Runs, uninterrupted: Path, tmp_path: Path) -> None:
    out, to = tmp_path / "out", str(tmp_path / "to")
    assert attempt(run, out, "--to", to, "--kill", "0:7") == [75], run.said()  # in the middle of an epoch of 13 steps
    assert attempt(run, out, "--to", to, "--kill", "0:26") == [75], run.said()  # at the end of one
    assert not (out / "end0.json").exists(), "a line after the loop has run"
    assert attempt(run, out, "--to", to) == [0], run.said()
    expected = end_of(uninterrupted)
    assert len(expected.pop("saved by the Trainer")) > 0
    end = end_of(out)
    assert end.pop("saved by the Trainer") == [], "everything is saved twice"
    assert end == expected
    assert attempt(run, out, "--to", to) == [0], "what is done is not done again"
    assert end_of(out)["weights"] == expected["weights"]


def test_a_stream_is_drawn_again_up_to_its_place(run: Runs, tmp_path: Path) -> None:
    whole, out, to = tmp_path / "whole", tmp_path / "out", str(tmp_path / "to")
    assert attempt(run, whole, "--stream", "--max-steps", "30") == [0], run.said()
    assert attempt(run, out, "--stream", "--max-steps", "30", "--to", to, "--kill", "0:11") == [75], run.said()
    assert attempt(run, out, "--stream", "--max-steps", "30", "--to", to) == [0], run.said()
    assert {**end_of(out), "saved by the Trainer": 0} == {**end_of(whole), "saved by the Trainer": 0}


@pytest.mark.gang
@pytest.mark.parametrize(
    "argv", [pytest.param([], id="ddp"), pytest.param(["--fsdp", "2"], id="fsdp", marks=pytest.mark.soak)]
)
def test_notice_at_one_of_two_ranks(run: Runs, tmp_path: Path, argv: list[str]) -> None:
    whole, out, to = tmp_path / "whole", tmp_path / "out", str(tmp_path / "to")
    assert attempt(run, whole, *argv, world=2) == [0, 0], run.said()
    assert attempt(run, out, *argv, "--to", to, "--kill", "1:7", world=2) == [75, 75], run.said()
    assert attempt(run, out, *argv, "--to", to, world=2) == [0, 0], run.said()
    assert bool(end_of(out)["sharded"]) == bool(argv)
    for rank in (0, 1):
        assert {**end_of(out, rank), "saved by the Trainer": 0} == {**end_of(whole, rank), "saved by the Trainer": 0}


def test_two_places_to_go_on_from_are_refused(run: Runs, tmp_path: Path) -> None:
    assert attempt(run, tmp_path, "--to", str(tmp_path / "to"), "--resume-from", "checkpoint-4") == [1]
    assert "resume_from_checkpoint='checkpoint-4', but the job resumes from its own checkpoints" in run.said()
    assert not (tmp_path / "to").exists(), "what was refused has opened nothing"
