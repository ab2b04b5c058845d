"""The verbs of queued jobs: stop, jobs, why, logs."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cordee.answers.files import FilesView
from cordee.answers.jobs import AttemptView, FailureView, JobDetailView, JobView
from cordee.answers.metrics import MetricsView
from cordee.answers.sweeps import SweepView
from cordee.cli import dry_run, measured, terminal
from cordee.cli.capture import copied_text, write_code
from cordee.cli.metrics_text import metrics_table, remarks
from cordee.cli.sweep_text import summary
from cordee.cli.terminal import Home, Json
from cordee.client import Client
from cordee.units import format_bytes, plural

ENDED_SHOWN = 10
NARROW_COLUMNS = 100
LONG_ID_CHARS = 24
_WRITTEN_NAMED = 3
_ENDED = ("done", "failed", "stopped")


JobRef = Annotated[str, typer.Argument(help="Id of a job, or its name if no other job has it.")]


def follow_to_end(client: Client, job_id: str) -> int:
    """Print a job's lines until it ends; return the exit code: 0 if it finished, else 1."""
    for line in client.logs(job_id, epoch=1, follow=True):
        print(line, flush=True)
    job = client.job(job_id)
    print_end(terminal.stderr(), job)
    return 0 if job.state == "done" else 1


def print_end(console: Console, job: JobDetailView) -> None:
    """Print how a job ended, with the last lines of the rank that failed first."""
    console.print(state_line(job.job_id, job.state, job.why), highlight=False, markup=False)
    if job.state == "failed" and job.attempts:
        _print_failure(console, job.attempts[-1].failure)


def state_line(job_id: str, state: str, why: str | None) -> str:
    """Return a job's state and its reason as a sentence.

    >>> state_line("a", "done", "finished"), state_line("a", "stopped", "stopped by ann")
    ('a finished', 'a was stopped by ann')
    >>> state_line("a", "failed", "exit code 1"), state_line("a", "queued", "it needs 2 GPUs")
    ('a failed: exit code 1', 'a is queued: it needs 2 GPUs')
    """
    if state == "done":
        return f"{job_id} finished"
    if state == "stopped" and why is not None and why.startswith("stopped by "):
        return f"{job_id} was {why}"
    verb = {"failed": "failed", "stopped": "was stopped"}.get(state, f"is {state}")
    return f"{job_id} {verb}: {why}" if why else f"{job_id} {verb}"


def _print_failure(console: Console, failure: FailureView | None) -> None:
    if failure is None:
        return
    how = f"exit code {failure.exit_code}" if failure.signal is None else f"signal {failure.signal}"
    rank = "a rank" if failure.rank is None else f"rank {failure.rank}"
    console.print(f"{rank} failed first ({how}):", highlight=False)
    for line in failure.tail:
        console.print(f"  {line}", highlight=False, markup=False)


def stop(
    job: JobRef,
    *,
    now: Annotated[bool, typer.Option("--now", help="End it at once, without a checkpoint.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it has ended.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Ask a job, or all trials of a sweep, to end: each checkpoints first, unless --now."""
    with terminal.connect(home) as client:
        live = next((each for each in client.sweeps() if job in (each.sweep_id, each.name) and not each.ended_us), None)
        if live is not None:
            _stop_sweep(client, live.sweep_id, as_json)
            return
        number = client.health().log_number if wait else 0
        found = client.stop(job, now=now)
        if wait and found.ended_us is None:
            with terminal.waiting(f"{found.job_id} is {found.state}") as waiting:
                for _ in client.events(after=number, follow=True):
                    found = client.job(found.job_id)
                    waiting.now(f"{found.job_id} is {found.state}")
                    if found.ended_us is not None:
                        break
        if as_json:
            terminal.print_json(JobView(**{name: getattr(found, name) for name in JobView.model_fields}))
        elif found.ended_us is not None:
            print(state_line(found.job_id, found.state, found.why))
        else:
            print(
                f"{found.job_id} was asked to stop" + (" at once" if now else "; it has its grace period to checkpoint")
            )


def _stop_sweep(client: Client, sweep_id: str, as_json: bool) -> None:
    made = client.end_sweep(sweep_id)
    if as_json:
        terminal.print_json(made)
    else:
        left = sum(made.counts.get(state, 0) for state in ("running", "queued", "paused"))
        print(f"{sweep_id} was asked to stop: {plural(left, 'trial')} will save and leave")


def jobs(
    job: Annotated[str | None, typer.Argument(help="Show this job with its attempts; else list jobs.")] = None,
    *,
    show_all: Annotated[
        bool, typer.Option("--all", help=f"List all ended jobs, not only the last {ENDED_SHOWN}.")
    ] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Print the changes since its commit, as captured.")] = False,
    code_to: Annotated[Path | None, typer.Option(help="Write the captured code into this new folder.")] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """List jobs, or show one with its attempts."""
    with terminal.connect(home) as client:
        if diff or code_to is not None:
            write_code(client, job, diff=diff, to=code_to)
            return
        terminal.warn(client)
        if job is not None:
            found_job = client.job(job)
            _show(found_job, as_json)
            if not as_json and (drawn := client.metrics(found_job.job_id)).curves:
                _show_metrics(drawn)
            return
        found = client.jobs()
        sweeps = {each.sweep_id: each for each in client.sweeps()} if any(each.sweep for each in found) else {}
    if as_json:
        terminal.print_json(found)
        return
    found = _with_sweeps(found, sweeps)
    live = [each for each in found if each.ended_us is None]
    ended = [each for each in found if each.ended_us is not None]
    shown = live + (ended if show_all else ended[:ENDED_SHOWN])
    if not shown:
        print("no jobs yet; submit one: cordee run --gpus 4 -- python train.py")
        return
    console = terminal.stdout()
    narrow = console.width < NARROW_COLUMNS
    rows = _list(shown, narrow=narrow)
    if narrow:
        terminal.print_with_notes(
            console, rows, [each.why if each.why and each.why != "finished" else "" for each in shown]
        )
    else:
        console.print(rows)
    if len(shown) < len(found):
        console.print(f"older jobs not shown: {len(found) - len(shown)} (--all shows them)", highlight=False)


def _with_sweeps(found: list[JobView], sweeps: Mapping[str, SweepView]) -> list[JobView]:
    """Return the jobs with one line in the place of all trials of a sweep."""
    lines, seen = list[JobView](), set[str]()
    for each in found:
        sweep = sweeps.get(each.sweep or "")
        if sweep is None:
            lines.append(each)
        elif sweep.sweep_id not in seen:
            seen.add(sweep.sweep_id)
            trials = [job for job in found if job.sweep == sweep.sweep_id]
            held = sum(job.gpus for job in trials if job.state in ("running", "stopping"))
            line = {
                "job_id": sweep.sweep_id,
                "state": "done" if sweep.state == "ended" else sweep.state,
                "gpus": held or each.gpus,
                "epoch": 0,
                "step": None,
                "checkpoint_step": None,
                "submitted_us": sweep.declared_us,
                "ended_us": sweep.ended_us if sweep.state == "ended" else None,
                "why": f"{plural(sweep.total, 'trial')}: {summary(sweep)}",
            }
            lines.append(each.model_copy(update=line))
    return lines


def print_list(console: Console, shown: list[JobView]) -> None:
    """Print one line a job; on a narrow terminal its reason stands below."""
    narrow = console.width < NARROW_COLUMNS
    rows = _list(shown, narrow=narrow)
    if narrow:
        reasons = ["" if each.why == "finished" else each.why or "" for each in shown]
        terminal.print_with_notes(console, rows, reasons)
    else:
        console.print(rows)


def _list(shown: list[JobView], *, narrow: bool) -> Table:
    """Return the table of jobs; a narrow one leaves out tier, attempt and reason, which stands below its row."""
    cells: dict[str, list[str | Text]] = {
        "JOB": [each.job_id for each in shown],
        "STATE": [terminal.state(each.state) for each in shown],
        "TIER": [each.tier for each in shown],
        "GPUS": [str(each.gpus) for each in shown],
        "TRY": [str(each.epoch or "–") for each in shown],
        "STEP": [steps_text(each, narrow=narrow) for each in shown],
        "AGE": [terminal.since(each.submitted_us) for each in shown],
        "WHY": [each.why or "–" for each in shown],
    }
    if narrow:
        del cells["TIER"], cells["TRY"], cells["WHY"]
    folds = ["JOB"] if narrow and max(len(each.job_id) for each in shown) > LONG_ID_CHARS else ["WHY"]
    rows = terminal.table(*cells, right=("GPUS", "TRY", "STEP", "AGE"), folds=folds)
    for row in zip(*cells.values(), strict=True):
        rows.add_row(*row)
    return rows


def steps_text(job: JobView, *, narrow: bool = False) -> str:
    """Return the step that a job is at, and in brackets the one of its newest checkpoint; then the time left.

    A narrow text leaves out the time.
    """
    if job.step is None and job.checkpoint_step is None:
        return "–"
    of = "" if job.steps_total is None else f" of {job.steps_total}"
    saved = "" if job.checkpoint_step is None else f" ({job.checkpoint_step} saved)"
    left = "" if job.left_us is None or narrow else f", {terminal.since(0, job.left_us)} left"
    return f"{job.checkpoint_step if job.step is None else job.step}{of}{saved}{left}"


def files_line(files: FilesView) -> str:
    """Return the code of a job in words.

    >>> files_line(FilesView(files=3, size_bytes=2000, commit="1a2b3c4d", changed=True, files_changed=2, branch="main"))
    'commit 1a2b3c4 + 2 files changed, on main; 3 files, 2 kB'
    """
    size = f"{plural(files.files, 'file')}, {format_bytes(files.size_bytes)}"
    if files.commit is None:
        return f"{size}, of no git commit"
    copied = copied_text(files.commit, files.files_changed, files.files)
    return f"{copied}{f', on {files.branch}' if files.branch else ''}; {size}"


def _add_files(facts: Table, files: FilesView | None) -> None:
    """Add the lines about a job's code to its facts."""
    if files is None:
        return
    facts.add_row("code", files_line(files))
    if files.folder:
        facts.add_row("copied from", files.folder)
    if files.written and files.copy_folder is not None:
        more = f" and {len(files.written) - _WRITTEN_NAMED} more" if len(files.written) > _WRITTEN_NAMED else ""
        facts.add_row("has written", f"{', '.join(files.written[:_WRITTEN_NAMED])}{more} in {files.copy_folder}")


def _show(job: JobDetailView, as_json: bool) -> None:
    if as_json:
        terminal.print_json(job)
        return
    console = terminal.stdout()
    facts = terminal.table("", "", folds=("",))
    facts.show_header = False
    command = job.spec["run"]
    facts.add_row("job", job.job_id)
    facts.add_row("state", terminal.state(job.state))
    facts.add_row("why", job.why or "–")
    cores = "" if job.gpus else f", on {job.spec.get('cpus') or 1:g} CPU cores"
    facts.add_row("gpus", f"{job.gpus} x {job.gpu_name}" if job.gpu_name else f"{job.gpus}{cores}")
    facts.add_row("tier, queue", f"{job.tier}, {job.queue}")
    facts.add_row("owner", job.owner)
    facts.add_row("run", command if isinstance(command, str) else " ".join(command))
    _add_files(facts, job.files)
    if job.estimate is not None and job.estimate.layout:
        facts.add_row("layout", job.estimate.layout)
    facts.add_row("step", steps_text(job))
    facts.add_row("submitted", f"{terminal.since(job.submitted_us)} ago")
    if job.ended_us is not None:
        took = terminal.since(job.submitted_us, job.ended_us)
        facts.add_row("ended", f"{terminal.since(job.ended_us)} ago, {took} after it was submitted")
    for each in job.estimate_missed:
        facts.add_row("off plan", Text(each, "yellow"))
    console.print(facts)
    if job.measured:
        console.print(measured.comparisons(job.measured))
    if job.attempts:
        rows = terminal.table("TRY", "STATE", "ON", "RAN", "NOTICE", "WHY", right=("TRY", "RAN"), folds=("WHY",))
        for attempt in job.attempts:
            rows.add_row(
                str(attempt.epoch),
                terminal.state(attempt.outcome or attempt.state),
                _where(attempt),
                terminal.since(attempt.placed_us, attempt.ended_us),
                attempt.notice_reason or "–",
                attempt.why or "–",
            )
        console.print(rows)
        for attempt in job.attempts:
            if attempt.refused:
                records = plural(attempt.refused, "record")
                line = f"attempt {attempt.epoch}: {records} of its ranks refused: {attempt.refused_why}"
                console.print(line, highlight=False, markup=False)
    if job.state == "failed":
        print_end(console, job)


def _show_metrics(found: MetricsView) -> None:
    console = terminal.stdout()
    console.print(metrics_table(found, console.width))
    for line in remarks(found):
        console.print(line, highlight=False, markup=False)


def _where(attempt: AttemptView) -> str:
    return ", ".join(f"{node}:{terminal.ranges(gpus)}" if gpus else node for node, gpus in attempt.leases.items())


def why(job: JobRef, *, home: Home = None, as_json: Json = False) -> None:
    """Explain a job's state, and forecast when it starts and ends."""
    with terminal.connect(home) as client:
        terminal.warn(client)
        answer = client.why(job, draws=dry_run.DRAWS)
        attempts = [] if as_json or answer.state in _ENDED else client.job(answer.job_id).attempts
    if as_json:
        terminal.print_json(answer)
        return
    console = terminal.stdout()
    print(state_line(answer.job_id, answer.state, answer.text.removeprefix(f"{answer.state}: ")))
    if answer.state == "failed":
        _print_failure(console, answer.failure)
    for line in earlier_failures(attempts):
        console.print(line, highlight=False, markup=False)
    if answer.blocking:
        print(f"blocked by: {', '.join(answer.blocking)}")
    if answer.forecast is not None:
        print(dry_run.forecast_line(answer.forecast))
    elif answer.left_us is not None:
        print(f"ends in {terminal.since(0, answer.left_us)}, by the time of its own steps")
    if answer.until_us is not None:
        left = terminal.since(0, max(0, answer.until_us - time.time_ns() // 1000))
        print(f"at the latest in {left}")
    for each in answer.estimate_missed:
        console.print(f"off plan: {each}", highlight=False, markup=False)
    if answer.measured:
        console.print(measured.comparisons(answer.measured))


def earlier_failures(attempts: Sequence[AttemptView]) -> list[str]:
    """Return the failures of a job that goes on, in words: how many, and the last line of the newest one."""
    failed = [each for each in attempts if each.outcome == "failed"]
    if not failed:
        return []
    newest = failed[-1]
    lines = [line.strip() for line in newest.failure.tail] if newest.failure is not None else []
    last = next((line for line in reversed(lines) if line and not line.startswith("hint:")), "")
    count = plural(len(failed), "earlier attempt")
    return [f"{count} failed, the newest: {newest.why}", *([f"  {last}"] if last else [])]


def logs(
    job: JobRef,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the output until the job ends.")] = False,
    rank: Annotated[int | None, typer.Option(help="Print the output of this rank only.", show_default="all")] = None,
    attempt: Annotated[
        int | None,
        typer.Option(
            "--try", help="Print the output of this attempt; with --follow, of later ones too.", show_default="newest"
        ),
    ] = None,
    tail: Annotated[int | None, typer.Option(help="Print the last N lines of each rank.", show_default="all")] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Print the output of a job's ranks."""
    with terminal.connect(home) as client:
        for line in client.logs(job, epoch=attempt, rank=rank, tail=tail, follow=follow):
            print(json.dumps({"line": line}) if as_json else line, flush=follow)
