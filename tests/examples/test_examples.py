"""Every stage of the examples: pushed aside and started again, it ends with the loss of a run that was not."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runs import Runs, runs_of

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture(scope="module")
def run() -> Iterator[Runs]:
    with runs_of(Path(__file__).with_name("example.py")) as runs:
        yield runs


def losses_of(lines: list[str]) -> dict[int, float]:
    found = (re.search(r"step (\d+): loss (\d+\.\d+)", line) for line in lines)
    return {int(each[1]): float(each[2]) for each in found if each}


def attempt(
    run: Runs, name: str, to: Path, *, world: int = 1, notice: str | None = None
) -> tuple[list[int], dict[int, float]]:
    told = {"CORDEE_CHECKPOINT_TO": str(to), "CORDEE_CHECKPOINT_EVERY": "3600"}
    codes = run(str(EXAMPLES / name), world=world, notice=notice, env=told)
    return codes, losses_of(run.lines)


def test_the_plain_loop_learns(run: Runs, tmp_path: Path) -> None:
    codes, losses = attempt(run, "01_plain_loop.py", tmp_path)
    assert codes == [0] and losses[99] < losses[0] - 1, run.said()


@pytest.mark.parametrize(
    ("name", "world", "notice"),
    [
        ("02_cordee.py", 1, "step 40:"),
        pytest.param("03_sharded.py", 2, "step 40:", marks=[pytest.mark.gang, pytest.mark.soak]),
        pytest.param("04_elastic.py", 1, "step 40:", marks=pytest.mark.soak),
        pytest.param("05_pipeline.py", 2, "step 40:", marks=[pytest.mark.gang, pytest.mark.soak]),
        # The Trainer's own line, of step 20.
        pytest.param("06_huggingface.py", 1, "'loss'", marks=pytest.mark.soak),
        pytest.param("07_lightning.py", 1, "step 40:", marks=pytest.mark.soak),
    ],
)
def test_a_stage_survives(run: Runs, tmp_path: Path, name: str, world: int, notice: str) -> None:
    codes, whole = attempt(run, name, tmp_path / "whole", world=world)
    assert codes == [0] * world, run.said()
    to = tmp_path / "to"
    codes, before = attempt(run, name, to, world=world, notice=notice)
    assert codes == [75] * world, run.said()
    codes, after = attempt(run, name, to, world=world)
    assert codes == [0] * world, run.said()
    assert max(after) == max(whole) and not before.keys() & after.keys(), "a step was repeated"
    assert before | after == whole


@pytest.mark.gang
def test_the_elastic_stage_goes_on_with_other_ranks(run: Runs, tmp_path: Path) -> None:
    codes, whole = attempt(run, "04_elastic.py", tmp_path / "whole")
    assert codes == [0], run.said()
    codes, _ = attempt(run, "04_elastic.py", tmp_path / "to", world=2, notice="step 40:")
    assert codes == [75, 75], run.said()
    codes, after = attempt(run, "04_elastic.py", tmp_path / "to")
    assert codes == [0], run.said()
    assert after == pytest.approx({step: whole[step] for step in after}, abs=1e-4)


def test_the_batch_script_is_a_script() -> None:
    subprocess.run(["bash", "-n", str(EXAMPLES / "08_sbatch.sh")], check=True)


def test_the_map_names_every_stage() -> None:
    text = (EXAMPLES / "README.md").read_text()
    for each in EXAMPLES.glob("0*"):
        assert each.name in text, each.name
