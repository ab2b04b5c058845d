"""The verbs of jobs: run, stop, jobs, why, logs."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cordee.cli import measured, rehearse, terminal
from cordee.cli.terminal import Home, Json
from cordee.client import AttemptView, Client, FailureView, JobDetailView, JobView, RehearsalView, Submitted
from cordee.errors import InputError, SpecError
from cordee.units import format_micro_usd
from cordee.workload.planned import Planned, read_plan
from cordee.workload.spec import JobSpec, parse_spec

ENDED_SHOWN = 10
NARROW_COLUMNS = 100
LONG_ID_CHARS = 24
FOUND_BY = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
ASK_ABOVE_MICRO_USD_PER_HOUR = 100_000_000

_GOES_ON = ("starts-now", "starting", "running", "held-up", "leaving", "ended")  # reasons that are no wait

_VARIED = ("tier", "queue")  # with the GPUs: what a dry run compares

JobRef = Annotated[str, typer.Argument(help="A job's id, or its name if only one job has it.")]


def run(
    what: Annotated[
        list[str], typer.Argument(metavar="job.yaml | -- COMMAND...", help="A job's YAML, or its command after `--`.")
    ],
    *,
    gpus: Annotated[str | None, typer.Option(help="The job's total: 4, 64xH100 or H100:64.")] = None,
    name: Annotated[str | None, typer.Option(help="Its name.", show_default="job")] = None,
    tier: Annotated[
        str | None, typer.Option(help="production, standard or preemptible.", show_default="standard")
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Its queue.", show_default="default")] = None,
    priority: Annotated[int | None, typer.Option(help="Within its tier; more is sooner.", show_default="0")] = None,
    capacity: Annotated[str | None, typer.Option(help="any, on-demand or spot.", show_default="any")] = None,
    launch: Annotated[str | None, typer.Option(help="auto, rank or node.", show_default="auto")] = None,
    checkpoint_to: Annotated[str | None, typer.Option(help="Where checkpoints go.")] = None,
    every: Annotated[
        str | None, typer.Option(help="How often: 30m, or auto. In steps: the script says so.", show_default="auto")
    ] = None,
    grace: Annotated[str | None, typer.Option(help="From notice to SIGKILL.", show_default="30s")] = None,
    limit_time: Annotated[str | None, typer.Option(help="Stop it after: 47h.")] = None,
    limit_cost: Annotated[str | None, typer.Option(help="Stop it after: $500.")] = None,
    model: Annotated[str | None, typer.Option(help="What it trains, so that admission knows whether it fits.")] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Run what `cordee plan --json` planned: GPUs, model, layout, interval.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="Of the plan: tp=8,pp=2.", show_default="its best")] = None,
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE, for its ranks. Not for secrets.")] = None,
    secret: Annotated[list[str] | None, typer.Option(help="NAME of a variable of yours that its ranks need.")] = None,
    unprotected: Annotated[
        bool, typer.Option("--unprotected", help="Accept a preemptible job without checkpoints.")
    ] = False,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow/--detach", "-f", help="Print its lines until it ends; the exit code is 0 if it is done, else 1."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Submit nothing; show when and where it would start, which jobs it preempts, and what it costs. "
            "Lists are compared.",
        ),
    ] = False,
    slots: Annotated[
        str | None, typer.Option(help="So many CPU slots in place of GPUs, if a server has to be started.")
    ] = None,
    yes: terminal.Yes = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Queue a job, and start a server if none runs."""
    flags = {
        "name": name,
        "tier": tier,
        "queue": queue,
        "priority": priority,
        "capacity": capacity,
        "launch": launch,
        "checkpoint_to": checkpoint_to,
        "checkpoint_every": every,
        "grace": grace,
        "limit_time": limit_time,
        "limit_cost": limit_cost,
        "model": model,
        "plan": None if plan is None else _plan_of(plan, layout),
    }
    if layout is not None and plan is None:
        raise InputError("--layout chooses from a plan", hint="give --plan plan.json with it")
    spec_of = _spec_of(what, gpus, flags | {"env": env, "secret": secret}, dry_run=dry_run)
    if dry_run:
        given = rehearse.Given(gpus, tier, queue, unprotected)
        rehearse.dry_run(spec_of, given, home=terminal.folder(home), as_json=as_json)
        return
    spec = spec_of(gpus, tier, queue)
    ask = terminal.may_ask() and not yes and not as_json
    submit(spec, terminal.folder(home), unprotected=unprotected, follow=follow, slots=slots, ask=ask, as_json=as_json)


def _spec_of(what: list[str], gpus: str | None, flags: dict[str, Any], *, dry_run: bool) -> rehearse.SpecOf:
    """Return the job as a function of GPUs, tier and queue: from the flags, or from its file.

    Only a dry run may change those of a file.
    """
    if _is_file(what, None if dry_run else gpus):
        given = [each for each, value in flags.items() if value is not None and not (dry_run and each in _VARIED)]
        if given:
            flag = "--" + given[0].removeprefix("checkpoint_e").replace("_", "-").replace("very", "every")
            raise InputError(f"{flag} is for a job without a file", hint=f"write it into {what[0]}")
        spec = _from_file(Path(what[0]))
        return lambda *changes: rehearse.with_flags(spec, *changes) if dry_run else spec
    if gpus is None and flags["plan"] is None:
        raise SpecError("a command needs --gpus", hint="cordee run --gpus 4 -- python train.py")
    env, secrets = _pairs(flags.pop("env") or ()), tuple(flags.pop("secret") or ())

    def from_flags(gpus: str | None, tier: str | None, queue: str | None) -> JobSpec:
        more = flags | {"tier": tier, "queue": queue}
        return JobSpec.from_flags(run=what, gpus=gpus, env=env, secrets=secrets, **more)

    return from_flags


def submit(
    spec: JobSpec, home: Path, *, unprotected: bool, follow: bool, slots: str | None, ask: bool, as_json: bool
) -> None:
    """Check what can be checked here, start a server if none runs, queue the job and print its id."""
    from cordee.control.admission import check_program
    from cordee.control.spawn import ensure_server, running

    here = spec.model_copy(update={"cwd": spec.cwd or str(Path.cwd())})
    # Ranks find the programs and libraries of this shell, whichever shell started the server.
    found_here = {name: os.environ[name] for name in FOUND_BY if name in os.environ}
    here = here.model_copy(update={"env": found_here | here.env})
    check_program(here)
    Client.check_secrets(here.secrets, os.environ)
    console = terminal.stderr()
    if running(home) is None:
        with terminal.waiting(f"starting a server on {home}"):
            ensure_server(home, slots=slots)
    with Client(home) as client:
        if ask:
            _consent(client.rehearse(here.model_dump(mode="json"), unprotected=unprotected))
        made = client.submit(here.model_dump(mode="json"), unprotected=unprotected)
        if as_json:
            terminal.print_json(made)
        else:
            job = made.job
            print(f"{job.job_id} {job.state}: {_submitted(made)}")
            _say_what_it_waits_for(console, client, job.job_id)
        for note in made.notes:
            console.print(f"note: {note}", highlight=False)
        if follow:
            try:
                raise SystemExit(follow_to_end(client, made.job.job_id))
            except KeyboardInterrupt:
                console.print(f"the job goes on: cordee logs -f {made.job.job_id}", highlight=False)
                raise SystemExit(128 + signal.SIGINT) from None


def _submitted(made: Submitted) -> str:
    """Return GPUs, tier, queue and price of a job, as its first line shows them."""
    job = made.job
    price = f", {format_micro_usd(made.micro_usd_per_hour)} an hour" if made.micro_usd_per_hour else ""
    return f"{_gpus(job.gpus)}, {job.tier}, queue {job.queue}{price}"


def _gpus(count: int) -> str:
    """Return a number of GPUs.

    >>> _gpus(1), _gpus(2)
    ('1 GPU', '2 GPUs')
    """
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def _say_what_it_waits_for(console: Console, client: Client, job_id: str) -> None:
    """Say why a job that was just queued does not start at once, if it does not."""
    answer = client.why(job_id)
    if answer.gpus_needed and answer.reason not in _GOES_ON:
        console.print(f"note: {answer.text}; `cordee why {job_id}` shows when it starts", highlight=False, markup=False)


def _consent(seen: RehearsalView) -> None:
    """Ask for consent to a job that is expensive or that preempts others."""
    facts = []
    if seen.micro_usd_per_hour > ASK_ABOVE_MICRO_USD_PER_HOUR:
        facts.append(f"it costs up to {format_micro_usd(seen.micro_usd_per_hour)} an hour")
    for victim in seen.victims:
        loss = format_micro_usd(victim.expected_loss_micro_usd)
        facts.append(f"it preempts {victim.job_id} of {victim.owner}, which is expected to lose {loss}")
    if facts:
        terminal.ask(facts, "queue it?")


def follow_to_end(client: Client, job_id: str) -> int:
    """Print a job's lines until it ends; return the exit code: 0 if it is done, else 1."""
    for line in client.logs(job_id, epoch=1, follow=True):
        print(line, flush=True)
    job = client.job(job_id)
    print_end(terminal.stderr(), job)
    return 0 if job.state == "done" else 1


def print_end(console: Console, job: JobDetailView) -> None:
    """Print how a job ended, with the last lines of the rank that failed first."""
    console.print(f"{job.job_id} is {job.state}: {job.why}", highlight=False, markup=False)
    if job.state == "failed" and job.attempts:
        _print_failure(console, job.attempts[-1].failure)


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
    now: Annotated[bool, typer.Option("--now", help="Do not wait for a checkpoint.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when it has ended.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Ask a job to end: it checkpoints first, unless --now."""
    with terminal.connect(home) as client:
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
            print(f"{found.job_id} is {found.state}: {found.why}")
        else:
            print(
                f"{found.job_id} was asked to end" + (" at once" if now else "; it has its grace period to checkpoint")
            )


def jobs(
    job: Annotated[str | None, typer.Argument(help="One job, with its attempts.")] = None,
    *,
    show_all: Annotated[bool, typer.Option("--all", help=f"More than the last {ENDED_SHOWN} that ended.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """List jobs, or show one with its attempts."""
    with terminal.connect(home) as client:
        terminal.warn(client)
        if job is not None:
            _show(client.job(job), as_json)
            return
        found = client.jobs()
    if as_json:
        terminal.print_json(found)
        return
    live = [each for each in found if each.ended_us is None]
    ended = [each for each in found if each.ended_us is not None]
    shown = live + (ended if show_all else ended[:ENDED_SHOWN])
    if not shown:
        print("no jobs yet: cordee run --gpus 4 -- python train.py")
        return
    console = terminal.stdout()
    console.print(_list(shown, narrow=console.width < NARROW_COLUMNS))
    if len(shown) < len(found):
        console.print(f"{len(found) - len(shown)} older jobs: --all", highlight=False)


def _list(shown: list[JobView], *, narrow: bool) -> Table:
    """Return the table of jobs; a narrow one leaves out tier and attempt, since ids are copied and `why` is read."""
    cells: dict[str, list[str | Text]] = {
        "JOB": [each.job_id for each in shown],
        "STATE": [terminal.state(each.state) for each in shown],
        "TIER": [each.tier for each in shown],
        "GPUS": [str(each.gpus) for each in shown],
        "TRY": [str(each.epoch or "–") for each in shown],
        "STEP": [_steps(each) for each in shown],
        "AGE": [terminal.since(each.submitted_us) for each in shown],
        "WHY": [each.why or "–" for each in shown],
    }
    folds = ["WHY"]
    if narrow:
        del cells["TIER"], cells["TRY"]
        folds += ["JOB"] if max(len(each.job_id) for each in shown) > LONG_ID_CHARS else []
    rows = terminal.table(*cells, right=("GPUS", "TRY", "STEP", "AGE"), folds=folds)
    for row in zip(*cells.values(), strict=True):
        rows.add_row(*row)
    return rows


def _steps(job: JobView) -> str:
    """Return the step that a job is at, and in brackets the one of its newest checkpoint."""
    if job.step is None and job.checkpoint_step is None:
        return "–"
    saved = "" if job.checkpoint_step is None else f" ({job.checkpoint_step} saved)"
    return f"{job.checkpoint_step if job.step is None else job.step}{saved}"


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
    facts.add_row("gpus", f"{job.gpus} x {job.gpu_name}" if job.gpu_name else str(job.gpus))
    facts.add_row("tier, queue", f"{job.tier}, {job.queue}")
    facts.add_row("owner", job.owner)
    facts.add_row("run", command if isinstance(command, str) else " ".join(command))
    if job.layout is not None:
        facts.add_row("layout", job.layout)
    facts.add_row("step", _steps(job))
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
                records = "1 record" if attempt.refused == 1 else f"{attempt.refused} records"
                line = f"try {attempt.epoch}: {records} of its ranks refused: {attempt.refused_why}"
                console.print(line, highlight=False, markup=False)
    if job.state == "failed":
        print_end(console, job)


def _where(attempt: AttemptView) -> str:
    return ", ".join(f"{node}:{terminal.ranges(gpus)}" for node, gpus in attempt.leases.items())


def why(job: JobRef, *, home: Home = None, as_json: Json = False) -> None:
    """Say why a job is where it is."""
    with terminal.connect(home) as client:
        terminal.warn(client)
        answer = client.why(job, draws=rehearse.DRAWS)
    if as_json:
        terminal.print_json(answer)
        return
    console = terminal.stdout()
    text = answer.text if answer.text.startswith(answer.state) else f"{answer.state}: {answer.text}"
    print(f"{answer.job_id} is {text}")
    if answer.state == "failed":
        _print_failure(console, answer.failure)
    if answer.blocking:
        print(f"blocked by: {', '.join(answer.blocking)}")
    if answer.left_us is not None:
        print(f"ends in {terminal.since(0, answer.left_us)} at the pace of its own steps")
    elif answer.forecast is not None:
        print(rehearse.forecast_line(answer.forecast))
    if answer.until_us is not None:
        left = terminal.since(0, max(0, answer.until_us - time.time_ns() // 1000))
        print(f"at the latest in: {left}")
    for each in answer.estimate_missed:
        console.print(f"off plan: {each}", highlight=False, markup=False)
    if answer.measured:
        console.print(measured.comparisons(answer.measured))


def logs(
    job: JobRef,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    rank: Annotated[int | None, typer.Option(help="Of this rank only.", show_default="all")] = None,
    attempt: Annotated[
        int | None, typer.Option("--try", help="Of this attempt; followed, from it on.", show_default="newest")
    ] = None,
    tail: Annotated[int | None, typer.Option(help="The last lines of each rank.", show_default="all")] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Print what a job's ranks wrote."""
    with terminal.connect(home) as client:
        for line in client.logs(job, epoch=attempt, rank=rank, tail=tail, follow=follow):
            print(json.dumps({"line": line}) if as_json else line, flush=follow)


def _plan_of(path: Path, layout: str | None = None) -> Planned:
    """Read a plan that `cordee plan --json` printed."""
    return read_plan(_read(path, "give the file of `cordee plan --json`"), source=str(path), layout=layout)


def _is_file(what: list[str], gpus: str | None) -> bool:
    return gpus is None and len(what) == 1 and what[0].endswith((".yaml", ".yml"))


def _from_file(path: Path) -> JobSpec:
    text = _read(path, "give the path of a job's YAML")
    return parse_spec(text, source=str(path), plan_of=lambda plan: _plan_of(path.parent / plan))


def _read(path: Path, hint: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecError(f"{path} cannot be read: {reason}", hint=hint) from None


def _pairs(texts: list[str] | tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise SpecError(f"--env {text} is not NAME=VALUE", hint=f"write --env {text}=...")
        pairs[name] = value
    return pairs
