"""Sweeps as text and as a page, and their one line among the jobs."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cordee.answers.jobs import AttemptView, FailureView, JobView
from cordee.answers.sweeps import SweepDetailView, TrialView
from cordee.cli.jobs import _with_sweeps, earlier_failures, print_list
from cordee.cli.main import main
from cordee.cli.run import _section
from cordee.cli.sweep_text import page, print_sweep, summary
from cordee.errors import InputError, SpecError

STATES = ("done", "paused", "running", "failed")


def trial(number: int, metric: float | None) -> TrialView:
    return TrialView(
        number=number, job_id=f"lr-{number}-abcdef", values={"lr": 0.001 * number, "opt": "<sgd>"},
        state=STATES[number % 4], step=9, rung=number % 3, metric=metric, metric_step=9, gpu_us=7_200_000_000,
        micro_usd=4_000_000, why="exit code 3",
    )  # fmt: skip


def sweep(**others: Any) -> SweepDetailView:
    trials = [trial(1, 0.5), trial(2, 0.25), trial(3, None), trial(4, 0.75)]
    values = {name: {"log": name == "lr"} for name in ("lr", "opt")}
    fields: dict[str, Any] = {
        "sweep_id": "lr-abcdef", "name": "lr", "owner": "ada", "state": "running", "search": "random",
        "metric": "loss", "goal": "min", "target": 0.2, "rung_steps": [3, 9], "eta": 3, "total": 8, "max_running": 4,
        "counts": {"done": 1, "paused": 1, "running": 1, "failed": 1}, "best": trials[1], "declared_us": 1,
        "ended_us": None, "why": "", "note": "", "trials": trials, "gpu_us": 28_800_000_000, "micro_usd": 16_000_000,
        "target_micro_usd": None, "spec": {"sweep": {"values": values}},
    }  # fmt: skip
    return SweepDetailView(**fields | others)


def test_the_table_has_the_furthest_and_best_first_and_says_what_it_cost() -> None:
    console = Console(width=200, record=True, color_system=None)
    print_sweep(console, sweep(note="no trial has logged the metric"), show_all=False)
    lines = console.export_text().splitlines()
    assert lines[0] == "lr-abcdef is running: 4 of 8 trials started"
    assert lines[1] == "random search for the least loss, 8 trials; one in 3 goes on at steps 3"
    assert lines[2] == "best: loss 0.25 (trial 2, step 9): lr=0.002 opt=<sgd>"
    assert lines[3] == "spent: 8.00 GPU-hours, $16.00, $4.00 a trial; the target 0.2 is not reached"
    assert lines[4] == "note: no trial has logged the metric"
    rows = [line.split() for line in lines[5:] if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["2", "1", "4", "3"]


def test_a_narrow_table_cuts_no_cell_and_has_the_reasons_below() -> None:
    console = Console(width=60, record=True, color_system=None)
    print_sweep(console, sweep(), show_all=False)
    text = console.export_text()
    assert "…" not in text and "GPU-HOURS" not in text.splitlines()[4], text
    lines = text.splitlines()
    paused = next(at for at, line in enumerate(lines) if " paused " in line)
    assert lines[paused + 1].strip() == "waits at step 3: the best one in 3 goes on"
    failed = next(at for at, line in enumerate(lines) if " failed " in line)
    assert lines[failed + 1].strip() == "exit code 3"


def test_jobs_on_a_narrow_terminal_have_their_reasons_below() -> None:
    common = {
        "owner": "ada", "queue": "default", "tier": "standard", "gpus": 1, "gpu_name": None, "epoch": 1, "step": 970,
        "steps_total": 3000, "left_us": 5_000_000, "checkpoint_step": 960, "submitted_us": 5, "ended_us": None,
    }  # fmt: skip
    found = [
        JobView(job_id="gpt-abcdef", name="gpt", state="running", why="", **common),
        JobView(job_id="urgent-aesu2x", name="urgent", state="queued", why="it needs 4 GPUs; " * 4, **common),
        JobView(job_id="bert-j2hyfd", name="bert", state="done", why="finished", **common),
    ]
    console = Console(width=80, record=True, color_system=None)
    print_list(console, found)
    lines = console.export_text().splitlines()
    assert [line.split()[0] for line in lines[-4:]] == ["gpt-abcdef", "urgent-aesu2x", "it", "bert-j2hyfd"]
    assert "970 of 3000 (960 saved)" in lines[-1] and all(len(line) <= 80 for line in lines)


def test_why_tells_of_the_attempts_that_failed_before() -> None:
    def attempt(epoch: int, outcome: str | None, *tail: str) -> AttemptView:
        failure = FailureView(rank=0, exit_code=1, signal=None, tail=list(tail)) if tail else None
        return AttemptView(
            epoch=epoch, state="ended", leases={}, placed_us=1, notice_reason=None, ended_us=2, outcome=outcome,
            why="rank 0 exited with 1", failure=failure,
        )  # fmt: skip

    assert earlier_failures([attempt(1, "checkpointed"), attempt(2, None)]) == []
    found = earlier_failures(
        [attempt(1, "failed", "old"), attempt(2, "failed", "  ValueError: x", "hint: y"), attempt(3, None)]
    )
    assert found == ["2 earlier attempts failed, the newest: rank 0 exited with 1", "  ValueError: x"]


def test_the_page_draws_each_trial_with_a_result_and_escapes_what_it_shows() -> None:
    made = page(sweep())
    assert made.count('class="best"') == 2, "one drawing for wide pages and one for narrow ones"
    assert made.count("<title>trial ") == 6 and "<sgd>" not in made and "&lt;sgd&gt;" in made
    assert "GPU-hours" in made and "gpu-hours" not in made
    assert "Sweep lr" in page(sweep(trials=[], best=None, counts={}))


def test_the_trials_of_a_sweep_are_one_line_among_the_jobs() -> None:
    common = {
        "owner": "ada", "queue": "default", "tier": "preemptible", "gpus": 1, "gpu_name": None, "why": "", "epoch": 1,
        "step": 1, "checkpoint_step": None, "submitted_us": 5, "ended_us": None, "state": "running",
    }  # fmt: skip
    jobs = [JobView(job_id=f"lr-{at}-abcdef", name=f"lr-{at}", sweep="lr-abcdef", **common) for at in (1, 2)]
    other = JobView(job_id="gpt-abcdef", name="gpt", **common)
    found = _with_sweeps([jobs[0], other, jobs[1]], {"lr-abcdef": sweep()})
    assert [each.job_id for each in found] == ["lr-abcdef", "gpt-abcdef"]
    assert (found[0].gpus, found[0].why) == (2, f"8 trials: {summary(sweep())}")
    assert summary(sweep()) == "1 running, 1 paused, 1 done, 1 failed; best loss 0.25 (trial 2, step 9)"


def test_flags_of_a_sweep_need_its_values() -> None:
    assert _section(None, rungs=None) is None
    assert _section(["lr=1..5"], rungs="3..9", trials=None) == {"values": {"lr": "1..5"}, "rungs": "3..9"}
    with pytest.raises(InputError, match="--max-running needs --sweep"):
        _section(None, max_running=4)
    with pytest.raises(SpecError, match="--sweep: lr has values twice"):
        _section(["lr=1..5", "lr=2"])


def test_the_verb_sweep_begins_none_that_the_file_does_not_describe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text("name: one\nrun: python train.py\ngpus: 1\n")
    with pytest.raises(SystemExit) as left:
        main(["sweep", str(tmp_path / "job.yaml"), "--home", str(tmp_path / "home")])
    said = capsys.readouterr().err
    assert left.value.code == InputError.exit_code and "job.yaml has no section sweep" in said
    assert not (tmp_path / "home").exists(), "no server was started"
