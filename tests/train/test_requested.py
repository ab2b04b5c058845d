"""What a script asks of its job: a checkpoint now, the best one kept, an early end; and the line about the training."""

import logging
from pathlib import Path

import pytest
import torch

import cordee
from cordee.errors import InputError
from cordee.storage.files import FileBlobs
from cordee.storage.generations import best_of
from cordee.storage.log import live_commits, pins, read_entries
from cordee.train.report import ProgressLine

LOSSES = [5.0, 4.0, 4.5, 3.0, 3.5, 2.0, 2.5, 1.0]


def train(to: Path | None, until: int, *, patience: int = 99) -> list[int]:
    """Ask for a checkpoint of each step that is better than all before; the steps that ran."""
    state, ran = {"n": torch.zeros(1)}, []
    with cordee.job(state, to=to, every=1000) as job:
        for step in job.steps(until):
            state["n"] += 1
            ran.append(step)
            job.save(best=LOSSES[step])
            if LOSSES[step] > min(LOSSES[: step + 1]) and step >= patience:
                job.stop()
    return ran


def steps_of(to: Path) -> dict[int, int]:
    """The step of each live generation."""
    return {entry.index: entry.fields["step"] for entry in live_commits(read_entries(FileBlobs(to)))}


def test_the_best_checkpoint_stays_over_attempts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "cordee"):
        train(tmp_path, 5)
        entries, steps = read_entries(FileBlobs(tmp_path)), steps_of(tmp_path)
        generation, value = best_of(entries) or (0, 0.0)
        assert (steps[generation], value) == (4, 3.0), "before step 4: step 3 had the lowest loss"
        assert pins(entries) == {generation: "best"}
        LOSSES[5] = 3.2  # not better than what the earlier attempt kept
        assert train(tmp_path, 7) == [5, 6]
    entries, steps = read_entries(FileBlobs(tmp_path)), steps_of(tmp_path)
    generation, value = best_of(entries) or (0, 0.0)
    assert (steps[generation], value) == (7, 2.5), "the final checkpoint is the best one"
    assert "best so far: 2.5, kept as best (step 7)" in caplog.text


def test_an_early_end_keeps_the_last_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "cordee"):
        assert train(tmp_path, 8, patience=2) == [0, 1, 2]
    assert max(steps_of(tmp_path).values()) == 3
    assert "no final checkpoint" not in caplog.text
    assert train(None, 8, patience=2) == [0, 1, 2], "an unprotected job too"


def test_a_checkpoint_now(tmp_path: Path) -> None:
    with cordee.job({"n": 0}, to=tmp_path, every=1000, keep=9) as job:
        for step in job.steps(9):
            if step in (2, 5):
                job.save()
                job._saving.finish(60.0)
    assert sorted(steps_of(tmp_path).values()) == [3, 6, 9]


@pytest.mark.parametrize(
    ("total", "saved", "tokens", "loss", "text"),
    [
        (60, 36, 20_480, 2.31137, "step 41 of 60  loss 2.3114  2.00 steps/s  4,096 tokens/s  9.5 s left  saved 36"),
        (None, None, 0, None, "step 41  2.00 steps/s"),
    ],
)
def test_the_line_about_the_training(total, saved, tokens, loss, text) -> None:
    line = ProgressLine()
    line.steps_total, line.saved_step, line.tokens = total, saved, tokens
    for step in range(31, 41):
        line.stepped(step + 1, None)
    assert line.text(41, loss, 5.0) == text


def test_later_checkpoints_are_lines_for_the_verbose(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "cordee"), cordee.job({"n": 0}, to=tmp_path, every=2) as job:
        for _ in job.steps(6):
            pass
    said = [each.levelno for each in caplog.records if each.message.startswith("checkpoint ")]
    assert said == [logging.INFO, logging.DEBUG, logging.DEBUG]


def test_the_best_by_a_metric_stays_and_a_break_ends_with_a_checkpoint(tmp_path: Path) -> None:
    state = {"n": torch.zeros(1)}
    with cordee.job(state, to=tmp_path, every=1000, keep_best="val/loss") as job:
        for step in job.steps(8):
            state["n"] += 1
            if step % 2:
                job.log(**{"val/loss": {1: 3.0, 3: 2.0, 5: 4.0}.get(step, 5.0)})
            if step == 6:
                break
    entries, steps = read_entries(FileBlobs(tmp_path)), steps_of(tmp_path)
    generation, value = best_of(entries) or (0, 0.0)
    assert (steps[generation], value) == (4, 2.0)
    assert max(steps.values()) == 7 and state["n"] == 7, "the step that was left counts as done"
    with pytest.raises(InputError, match="keep_best='a b' cannot be a metric"):
        cordee.job({}, keep_best="a b")
