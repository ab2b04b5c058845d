"""The verb `run`: a job or a sweep from flags, a YAML or a plan is checked, queued and, if asked, followed."""

import os
import signal
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cordee.answers.submissions import DryRunView, Submitted
from cordee.cli import sweep as sweeps
from cordee.cli import terminal
from cordee.cli.capture import capture_job, names_program
from cordee.cli.checkpoint_target import check_target
from cordee.cli.dry_run import DRAWS, Given, SpecOf, show_dry_run, times, with_flags
from cordee.cli.job_file import job_from_file, pairs, plan_of
from cordee.cli.jobs import follow_to_end
from cordee.cli.rehearse_text import summary
from cordee.cli.terminal import Home, Json
from cordee.client import Client
from cordee.errors import InputError, SpecError, UnitError
from cordee.servers import is_remote
from cordee.units import format_micro_usd, plural
from cordee.workload.environment import submitters_environment
from cordee.workload.launcher import launcher_of
from cordee.workload.spec import JobSpec
from cordee.workload.sweep import named_values

ASK_ABOVE_MICRO_USD_PER_HOUR = 100_000_000
_GOES_ON = (
    "starts-now",
    "starting",
    "running",
    "held-up",
    "leaving",
    "ended",
    "unknown-job",
)  # reasons that are no wait
_VARIED = ("tier", "queue")  # with the GPUs: what a dry run compares

Command = Annotated[
    list[str], typer.Argument(metavar="job.yaml | -- COMMAND...", help="A job's YAML, or its command after `--`.")
]
Gpus = Annotated[str | None, typer.Option(help="GPUs of the job: 4, 64xH100 or H100:64; 0 for CPU cores only.")]
Cpus = Annotated[
    float | None, typer.Option(help="CPU cores of the whole job.", show_default="not counted; 1 without GPUs")
]
Memory = Annotated[str | None, typer.Option(help="Host memory of the whole job: 256GiB.", show_default="not counted")]
Name = Annotated[str | None, typer.Option(help="Name of the job.", show_default="job")]
Tier = Annotated[str | None, typer.Option(help="Tier: production, standard or preemptible.", show_default="standard")]
Queue = Annotated[str | None, typer.Option(help="Queue of the job.", show_default="default")]
Priority = Annotated[int | None, typer.Option(help="Priority within the tier; higher runs first.", show_default="0")]
Capacity = Annotated[str | None, typer.Option(help="Capacity: any, on-demand or spot.", show_default="any")]
Launch = Annotated[
    str | None,
    typer.Option(
        help="Start the command once per rank or once per node (torchrun): auto, rank or node.", show_default="auto"
    ),
]
To = Annotated[str | None, typer.Option(help="Folder or URL for checkpoints.")]
Every = Annotated[
    str | None,
    typer.Option(
        help="Time between checkpoints: 30m, or auto; an interval in steps is set in the script.", show_default="auto"
    ),
]
Grace = Annotated[
    str | None, typer.Option(help="Grace period before SIGKILL.", show_default="1.5 saves as rehearsed, else 30s")
]
LimitTime = Annotated[str | None, typer.Option(help="Stop the job after this run time: 47h.")]
LimitCost = Annotated[str | None, typer.Option(help="Stop the job after this cost: $500.")]
Retries = Annotated[
    str | None,
    typer.Option(
        help="Retries by cause, and by exit code: infrastructure=10,script=0,17=2.",
        show_default="three attempts in a row without a checkpoint end the job",
    ),
]
After = Annotated[
    list[str] | None,
    typer.Option(
        help="Start after this job or sweep has ended well: JOB; or JOB:any, JOB:failed. May be given again.",
        metavar="JOB[:ok|any|failed]",
    ),
]
NotBefore = Annotated[
    str | None, typer.Option(help="Do not start before this time: +2h, or '2026-11-24 06:00' (UTC, or with +01:00).")
]
Window = Annotated[
    str | None, typer.Option(help="Start in these hours only: 22:00-06:00, or '22:00-06:00 Europe/Berlin'.")
]
Model = Annotated[str | None, typer.Option(help="Model that the job trains; admission checks whether it fits.")]
Plan = Annotated[
    Path | None, typer.Option(help="File of `cordee plan --json`: sets GPUs, model, layout and checkpoint interval.")
]
LayoutText = Annotated[str | None, typer.Option(help="Layout of the plan: tp=8,pp=2.", show_default="the best")]
Env = Annotated[list[str] | None, typer.Option(help="Environment variable for the ranks, NAME=VALUE; not for secrets.")]
Secret = Annotated[
    list[str] | None, typer.Option(help="NAME of an environment variable to pass to the ranks as a secret.")
]
_SWEEP = "A sweep: trials of the job"
OnlySweep = Annotated[bool, typer.Option("--only-sweep", hidden=True, help="What `cordee sweep FILE` adds.")]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        help="Run trials with these values, {name} in the command: lr=1e-4..1e-2:log,seed=1..5,opt=adam,sgd.",
        metavar="NAME=VALUES",
        rich_help_panel=_SWEEP,
    ),
]
Search = Annotated[
    str | None,
    typer.Option(help="Way to draw values: grid, random or bayes.", show_default="auto", rich_help_panel=_SWEEP),
]
Trials = Annotated[
    int | None, typer.Option(help="Number of trials.", show_default="a whole grid, else 20", rich_help_panel=_SWEEP)
]
MaxRunning = Annotated[
    int | None, typer.Option(help="Trials that run or wait at a time.", show_default="4", rich_help_panel=_SWEEP)
]
Metric = Annotated[
    str | None,
    typer.Option(
        help="NAME of job.log(NAME=...) by which trials are compared.", show_default="loss", rich_help_panel=_SWEEP
    ),
]
Goal = Annotated[
    str | None,
    typer.Option(help="Which is better: min or max of the metric.", show_default="min", rich_help_panel=_SWEEP),
]
Rungs = Annotated[
    str | None,
    typer.Option(
        help="Compare trials at steps 100, 300, ... 2700, and go on with one in three: 100..2700:3.",
        show_default="each trial runs to its end",
        rich_help_panel=_SWEEP,
    ),
]
Target = Annotated[
    float | None, typer.Option(help="End the sweep when the metric reaches this value.", rich_help_panel=_SWEEP)
]
NotifyTo = Annotated[
    str | None, typer.Option("--notify", help="Destination of notifications, from notify.toml in the server's home.")
]
Unprotected = Annotated[bool, typer.Option("--unprotected", help="Accept a preemptible job without checkpoints.")]
Follow = Annotated[
    bool,
    typer.Option(
        "--follow/--detach", "-f", help="Print the job's output until it ends; exit with 0 if it finished, else 1."
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Submit nothing; show when and where the job would start, which jobs it preempts, and its cost. "
        "--gpus, --tier and --queue may be lists, whose variants are compared.",
    ),
]
Ship = Annotated[
    bool | None,
    typer.Option(
        "--ship/--live",
        help="Run a copy of this folder's code as it is now; or the folder itself, with later edits.",
        show_default="--ship",
    ),
]
Slots = Annotated[
    str | None, typer.Option(help="Number of CPU slots to use instead of GPUs, if a server has to be started.")
]


def run(
    what: Command,
    *,
    gpus: Gpus = None,
    cpus: Cpus = None,
    memory: Memory = None,
    name: Name = None,
    tier: Tier = None,
    queue: Queue = None,
    priority: Priority = None,
    capacity: Capacity = None,
    launch: Launch = None,
    checkpoint_to: To = None,
    every: Every = None,
    grace: Grace = None,
    limit_time: LimitTime = None,
    limit_cost: LimitCost = None,
    retries: Retries = None,
    after: After = None,
    not_before: NotBefore = None,
    window: Window = None,
    model: Model = None,
    plan: Plan = None,
    layout: LayoutText = None,
    env: Env = None,
    secret: Secret = None,
    sweep: Sweep = None,
    only_sweep: OnlySweep = False,
    search: Search = None,
    trials: Trials = None,
    max_running: MaxRunning = None,
    metric: Metric = None,
    goal: Goal = None,
    rungs: Rungs = None,
    target: Target = None,
    notify: NotifyTo = None,
    unprotected: Unprotected = False,
    follow: Follow = False,
    dry_run: DryRun = False,
    ship: Ship = None,
    slots: Slots = None,
    yes: terminal.Yes = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Queue a job, or a sweep of jobs, and start a server if none runs."""
    flags: dict[str, Any] = {
        "name": name, "tier": tier, "queue": queue, "priority": priority, "capacity": capacity, "launch": launch,
        "checkpoint_to": checkpoint_to, "checkpoint_every": every, "grace": grace, "limit_time": limit_time,
        "limit_cost": limit_cost, "retries": retries, "after": after, "model": model, "notify_to": notify,
        "not_before": None if not_before is None else terminal.moment(not_before), "window": window,
        "cpus": cpus, "memory": memory, "plan": None if plan is None else plan_of(plan, layout),
    }  # fmt: skip
    more = {"search": search, "trials": trials, "max_running": max_running, "metric": metric, "goal": goal}
    if (section := _section(sweep, **more, rungs=rungs, target=target)) is not None:
        flags["sweep"] = section
    if layout is not None and plan is None:
        raise InputError("--layout needs --plan", hint="add --plan plan.json")
    spec_of = _spec_of(what, gpus, flags | {"env": env, "secret": secret}, dry_run=dry_run)
    if dry_run:
        show_dry_run(spec_of, Given(gpus, tier, queue, unprotected), home=home, as_json=as_json)
        return
    spec = _sweep_of(spec_of(gpus, tier, queue), what) if only_sweep else spec_of(gpus, tier, queue)
    if spec.service is not None:
        from cordee.cli.services import declare

        declare(spec, home, ship=ship, slots=slots, follow=follow, as_json=as_json)
        return
    ask = terminal.may_ask() and not yes and not as_json
    submit(spec, home, unprotected=unprotected, follow=follow, ship=ship, slots=slots, ask=ask, as_json=as_json)


def _sweep_of(spec: JobSpec, what: list[str]) -> JobSpec:
    """Return the job of `cordee sweep FILE`, which has to be a sweep."""
    if spec.sweep is None:
        hint = f"add --sweep lr=1e-4..1e-2:log, or queue it as one job: cordee run {what[0]}"
        raise InputError(f"{what[0]} has no section sweep", hint=hint)
    return spec


def _section(texts: list[str] | None, **others: Any) -> dict[str, Any] | None:
    """Return the section `sweep` as people write it; None if no flag asks for one."""
    given = {name: value for name, value in others.items() if value is not None}
    if texts is None:
        if given:
            flag = "--" + next(iter(given)).replace("_", "-")
            raise InputError(f"{flag} needs --sweep", hint="add --sweep lr=1e-4..1e-2:log, or use a job file")
        return None
    try:
        return {"values": named_values(texts)} | given
    except UnitError as error:
        raise SpecError(f"--sweep: {error.message}", hint=error.hint) from None


def _spec_of(what: list[str], gpus: str | None, flags: dict[str, Any], *, dry_run: bool) -> SpecOf:
    """Return the job as a function of GPUs, tier and queue: from the flags, or from its file.

    Only a dry run may change those of a file.
    """
    if _is_file(what, None if dry_run else gpus):
        given = [each for each, value in flags.items() if value is not None and not (dry_run and each in _VARIED)]
        if given:
            flag = "--" + given[0].removeprefix("checkpoint_e").replace("_", "-").replace("very", "every")
            raise InputError(f"{flag} cannot be combined with a job file", hint=f"write it into {what[0]}")
        spec = job_from_file(Path(what[0]))
        return lambda *changes: with_flags(spec, *changes) if dry_run else spec
    if gpus is None and flags["plan"] is None:
        raise SpecError("a command needs --gpus", hint="cordee run --gpus 4 -- python train.py")
    env, secrets = pairs(flags.pop("env") or ()), tuple(flags.pop("secret") or ())

    def from_flags(gpus: str | None, tier: str | None, queue: str | None) -> JobSpec:
        more = flags | {"tier": tier, "queue": queue}
        return JobSpec.from_flags(run=what, gpus=gpus, env=env, secrets=secrets, **more)

    return from_flags


def job_of(what: list[str], gpus: str | None, flags: dict[str, Any]) -> JobSpec:
    """Return the job of a file, or of a command and its flags."""
    tier, queue = flags.get("tier"), flags.get("queue")
    return _spec_of(what, gpus, flags, dry_run=False)(gpus, tier, queue)


def submit(
    spec: JobSpec,
    home: Path | None,
    *,
    unprotected: bool,
    follow: bool,
    ship: bool | None,
    slots: str | None,
    ask: bool,
    as_json: bool,
    quiet: bool = False,
) -> str:
    """Check what can be checked here, start a server if none runs, send files, queue the job, print and return its id.

    With `follow` the process exits when the job has ended. With `quiet` the server's notes on the job are left out.
    """
    here, said = prepared(spec, home, slots)
    remote, console = is_remote(home), terminal.stderr()
    with terminal.connect(home) as client:
        if ask and here.sweep is None:
            _consent(here, client.dry_run(here.model_dump(mode="json"), unprotected=unprotected))
        here, copied = capture_job(client, here, ship=ship, remote=remote)
        if here.sweep is not None:
            return _declare_sweep(client, here, unprotected=unprotected, follow=follow, as_json=as_json)
        made = client.submit(here.model_dump(mode="json"), unprotected=unprotected)
        if as_json:
            terminal.print_json(made)
        else:
            job = made.job
            print(f"{job.job_id} {job.state}: {_submitted(here, made)}; {_rehearsed(here, made)}")
            _say_what_it_waits_for(console, client, job.job_id)
        for note in [*(() if quiet else made.notes), *copied, *said]:
            console.print(f"note: {note}", highlight=False)
        if follow:
            try:
                raise SystemExit(follow_to_end(client, made.job.job_id))
            except KeyboardInterrupt:
                console.print(f"the job continues: cordee logs -f {made.job.job_id}", highlight=False)
                raise SystemExit(128 + signal.SIGINT) from None
        return made.job.job_id


def prepared(spec: JobSpec, home: Path | None, slots: str | None) -> tuple[JobSpec, list[str]]:
    """Return the job with this folder and environment, and what to say of them; start a server if none runs.

    Raises:
        ScriptError: its program is not there.
        SpecError: a secret is not in the environment.
    """
    from cordee.control.admission import check_program
    from cordee.control.spawn import ensure_server, running

    here = spec.model_copy(update={"cwd": spec.cwd or str(Path.cwd())})
    remote = is_remote(home)
    # Ranks run in the environment of this shell, whichever shell started the server.
    found = submitters_environment(os.environ, named={*here.env, *here.secrets}, remote=remote)
    here = here.model_copy(update={"env": {**found.env, **here.env}})
    if not (remote and names_program(here)):  # the node has it, or says that it has not
        check_program(here)
    if not remote:
        check_target(here, Path(here.cwd or "."))
    Client.check_secrets(here.secrets, os.environ)
    if not remote and running(folder := terminal.folder(home)) is None:
        with terminal.waiting(f"starting a server on {folder}"):
            ensure_server(folder, slots=slots)
    return here, found.notes()


def _declare_sweep(client: Client, spec: JobSpec, *, unprotected: bool, follow: bool, as_json: bool) -> str:
    """Create a sweep, print and return its id; follow it if asked. Ctrl-C ends the following only."""
    made = client.declare_sweep(spec.model_dump(mode="json"), unprotected=unprotected)
    if as_json:
        terminal.print_json(made)
    else:
        sweeps.print_declared(made)
    if follow:
        try:
            raise SystemExit(sweeps.follow_to_end(client, made.sweep_id))
        except KeyboardInterrupt:
            said = f"the sweep continues: cordee sweep show {made.sweep_id}"
            terminal.stderr().print(said, highlight=False)
            raise SystemExit(128 + signal.SIGINT) from None
    return made.sweep_id


def _submitted(spec: JobSpec, made: Submitted) -> str:
    """Return GPUs, processes, tier, queue and price of a job, as its first line shows them."""
    job = made.job
    price = f", {format_micro_usd(made.micro_usd_per_hour)} an hour" if made.micro_usd_per_hour else ""
    return f"{_held(spec)}{_processes(spec)}, {job.tier}, queue {job.queue}{price}"


def _held(spec: JobSpec) -> str:
    """Return what a job asks for.

    >>> _held(JobSpec(run="python train.py", gpus=2)), _held(JobSpec(run="python prepare.py", gpus=0, cpus=2))
    ('2 GPUs', '2 CPU cores')
    """
    cores = spec.cpus or 1
    return plural(spec.gpus, "GPU") if spec.gpus else f"{cores:g} CPU core{'' if cores == 1 else 's'}"


def _rehearsed(spec: JobSpec, made: Submitted) -> str:
    """Return whether a job is known to survive a notice."""
    if made.rehearsed is not None:
        return summary(made.rehearsed, time.time_ns() // 1000)
    return "unprotected" if spec.checkpoint.to is None else "not rehearsed"


def _processes(spec: JobSpec) -> str:
    """Return how many processes the job starts, where it is not one: each trains a model if the script is not made so.

    >>> _processes(JobSpec(run="python train.py", gpus=2)), _processes(JobSpec(run="torchrun train.py", gpus=2))
    (', starts 2 processes', '')
    """
    each_gpu = spec.launch == "rank" or (spec.launch == "auto" and launcher_of(spec.run) is None)
    return f", starts {spec.gpus} processes" if each_gpu and spec.gpus > 1 else ""


def _say_what_it_waits_for(console: Console, client: Client, job_id: str) -> None:
    """Say why a job that was just queued does not start at once, and when it is expected to, if it does not."""
    answer = client.why(job_id)
    if answer.reason in _GOES_ON:
        return
    ahead = client.why(job_id, draws=DRAWS).forecast
    starts = "" if ahead is None else f"; {times(ahead.start, ahead, 'starts')}"
    console.print(f"note: {answer.text}{starts} (`cordee why {job_id}`)", highlight=False, markup=False)


def _consent(spec: JobSpec, seen: DryRunView) -> None:
    """Ask for consent to a job that is expensive or that preempts others."""
    facts = []
    if seen.micro_usd_per_hour > ASK_ABOVE_MICRO_USD_PER_HOUR:
        facts.append(f"it costs up to {format_micro_usd(seen.micro_usd_per_hour)} an hour")
    for victim in seen.victims:
        loss = format_micro_usd(victim.expected_loss_micro_usd)
        facts.append(f"it preempts {victim.job_id} of {victim.owner}, which is expected to lose {loss}")
    if facts:
        starts = "it starts now" if seen.starts_now else f"it starts later: {seen.text}"
        facts.append(f"{_held(spec)}{_processes(spec)}; {starts}")
        terminal.ask(facts, "queue it?")


def _is_file(what: list[str], gpus: str | None) -> bool:
    return gpus is None and len(what) == 1 and what[0].endswith((".yaml", ".yml"))
