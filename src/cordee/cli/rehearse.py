"""The verb `rehearse`: some steps of the real job, a notice in their middle, and the same steps after the resume."""

import shutil
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from cordee.answers.submissions import RehearsalStarted, RehearsalView
from cordee.cli import terminal
from cordee.cli.capture import capture_job
from cordee.cli.job_file import plan_of
from cordee.cli.jobs import print_end
from cordee.cli.rehearse_text import measured
from cordee.cli.run import (
    Command,
    Env,
    Launch,
    LayoutText,
    Model,
    Name,
    Plan,
    Queue,
    Secret,
    Ship,
    Slots,
    Tier,
    To,
    job_of,
    prepared,
)
from cordee.cli.terminal import Home, Json
from cordee.client import Client
from cordee.errors import CordeeError, InputError, SpecError, UnitError
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    CheckpointCommitted,
    Event,
    JobEnded,
    Measured,
    NoticeGiven,
    RehearsalEnded,
    Restored,
    StepsRehearsed,
)
from cordee.servers import is_remote
from cordee.units import US_PER_S, format_duration, parse_duration_s, plural
from cordee.workload.rehearsal import REPLAYED, STEPS

WAIT_S = 600.0
_END_S, _LOOK_S = 30.0, 0.1  # for the ranks of a rehearsal that is stopped

Gpus = Annotated[
    str | None,
    typer.Option(
        help="GPUs of the rehearsal, for a job file; of the job, for a command.",
        show_default="the fewest on which the plan says that the model fits, else all of the job's",
    ),
]
Steps = Annotated[int, typer.Option(help="Steps before the notice.", min=1)]
Replay = Annotated[int, typer.Option(help="Steps that the resumed run repeats.", min=1, max=200)]
Limit = Annotated[str, typer.Option(help="Longest run time of the rehearsal.")]
Wait = Annotated[str, typer.Option(help="Longest wait for GPUs.")]


def rehearse(
    what: Command,
    *,
    gpus: Gpus = None,
    steps: Steps = STEPS,
    replay: Replay = REPLAYED,
    limit: Limit = "10m",
    wait: Wait = "10m",
    name: Name = None,
    tier: Tier = None,
    queue: Queue = None,
    launch: Launch = None,
    checkpoint_to: To = None,
    model: Model = None,
    plan: Plan = None,
    layout: LayoutText = None,
    env: Env = None,
    secret: Secret = None,
    ship: Ship = None,
    slots: Slots = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Run some steps of a job, give it notice, and check that it goes on as if nothing had happened."""
    flags = {
        "name": name, "tier": tier, "queue": queue, "launch": launch, "checkpoint_to": checkpoint_to, "model": model,
        "plan": None if plan is None else plan_of(plan, layout),
    }  # fmt: skip
    is_file = len(what) == 1 and what[0].endswith((".yaml", ".yml"))
    spec = job_of(what, None if is_file else gpus, flags | {"env": env, "secret": secret})
    here, _ = prepared(spec, home, slots)
    how: dict[str, Any] = {"gpus": _number(gpus) if is_file and gpus else None, "steps": steps, "replayed": replay}
    with terminal.connect(home) as client:
        here, _ = capture_job(client, here, ship=ship, remote=is_remote(home))
        number = client.health().log_number
        made = client.rehearse(here.model_dump(mode="json"), **how, limit_s=_seconds(limit, "--limit"))
        if not as_json:
            print(f"{made.job.job_id} rehearses {spec.name} on {plural(made.job.gpus, 'GPU')}: {made.why_gpus}")
        watch = Watch(client, home, made, steps, replay)
        try:
            watch.follow(number, _seconds(wait, "--wait"))
        except KeyboardInterrupt:
            terminal.stderr().print(f"{made.job.job_id}: ending", highlight=False)
            raise SystemExit(128 + signal.SIGINT) from None
        finally:
            watch.clean_up()
        found = next(each for each in client.rehearsals() if each.job_id == made.job.job_id)
        if as_json:
            terminal.print_json(found)
        else:
            _show(client, spec.name, found)
    raise SystemExit(0 if found.passed else 1)


def _number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise InputError(
            f"--gpus {text} is not a number of GPUs", hint="give a number; the job file names the kind of GPU"
        )
    return int(text)


def _seconds(text: str, flag: str) -> float:
    try:
        return parse_duration_s(text)
    except UnitError as error:
        raise SpecError(f"{flag}: {error.message}", hint=error.hint) from None


@dataclass(slots=True)
class Watch:
    """A rehearsal that is followed to its end.

    Attributes:
        client: of its server.
        home: the server's, as it was given.
        made: the rehearsal.
        steps, replayed: before its notice and after its save.
        to: destination of its checkpoints; None: not known.
        ended: whether its job has ended.
    """

    client: Client
    home: Path | None
    made: RehearsalStarted
    steps: int
    replayed: int
    to: str | None = field(init=False)
    ended: bool = field(init=False, default=False)
    _noticed: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        from cordee.storage.destination import absolute, below

        spec = self.made.spec
        to, cwd = spec["checkpoint"]["to"], spec["cwd"]
        self.to = below(absolute(to, cwd), self.job_id) if to and cwd else None

    @property
    def job_id(self) -> str:
        """Return the id of the rehearsal's job."""
        return self.made.job.job_id

    def follow(self, number: int, wait_s: float) -> None:
        """Show its progress until it has a result and its job has ended; end it if it waits for longer than this."""
        timer = threading.Timer(wait_s, self._end_if_it_waits)
        timer.daemon = True
        timer.start()
        concluded = False
        try:
            with terminal.waiting(f"{self.job_id} waits for GPUs") as waiting:
                for _, event in self.client.events(after=number, follow=True):
                    if getattr(event, "job_id", None) != self.job_id:
                        continue
                    if isinstance(event, AttemptPlaced):
                        timer.cancel()
                    said = self._progress(event)
                    if said is not None:
                        waiting.now(f"{self.job_id}: {said}")
                    concluded = concluded or isinstance(event, RehearsalEnded)
                    if concluded and self.ended:
                        return
        finally:
            timer.cancel()

    def _end_if_it_waits(self) -> None:
        with terminal.connect(self.home) as client, suppress(CordeeError):
            if client.job(self.job_id).state == "queued":
                client.stop(self.job_id, now=True)

    def _progress(self, event: Event) -> str | None:
        """Return what to say of an event; None: nothing."""
        match event:
            case AttemptPlaced(epoch=1):
                return f"starts on {', '.join(lease.node for lease in event.leases)}"
            case AttemptPlaced():
                return "starts again"
            case Restored(step=0):
                return f"runs {plural(self.steps, 'step')}"
            case Restored():
                return f"resumed at step {event.step}; repeats {plural(self.replayed, 'step')}"
            case Measured() if event.step_us is not None and event.rank == 0:
                return f"step {event.step}, {format_duration(event.step_us / US_PER_S)} each"
            case NoticeGiven():
                self._noticed = True
                return "has its notice, and saves"
            case CheckpointCommitted() if self._noticed:
                took = format_duration((event.stall_us + event.upload_us) / US_PER_S)
                return f"saved step {event.step} in {took}; runs on for {plural(self.replayed, 'step')}"
            case StepsRehearsed():
                self.to = event.to
            case AttemptEnded():
                return f"left: {event.why}"
            case JobEnded():
                self.ended = True
        return None

    def clean_up(self) -> None:
        """End what still runs, and remove the rehearsal's checkpoints, which nobody needs."""
        from cordee.storage.destination import level_urls

        if not self.ended:
            self.client.stop(self.job_id, now=True)
            until_s = time.monotonic() + _END_S
            while self.client.job(self.job_id).ended_us is None and time.monotonic() < until_s:
                time.sleep(_LOOK_S)
        for place in level_urls(self.to) if self.to else ():
            self._remove(place)

    def _remove(self, place: str) -> None:
        from cordee.storage.destination import is_remote, open_blobs
        from cordee.storage.files import folder_of

        if not place.rstrip("/").endswith(self.job_id):
            return  # a folder that the job shares with others
        try:
            if not is_remote(place):
                shutil.rmtree(folder_of(place), ignore_errors=True)
                with suppress(OSError):  # others' checkpoints are in it
                    folder_of(place).parent.rmdir()
                return
            blobs = open_blobs(place)
            for key in list(blobs.list("")):
                blobs.delete(key)
        except (CordeeError, OSError) as error:
            terminal.stderr().print(f"note: {place} is left there: {error}", highlight=False, markup=False)


# -- words ---------------------------------------------------------------------------------------------------


def _show(client: Client, name: str, found: RehearsalView) -> None:
    console = terminal.stdout()
    verdict = Text("passed", "bold green") if found.passed else Text("failed", "bold red")
    console.print(Text(f"{name} ") + verdict + Text(f" its rehearsal: {found.why}"), highlight=False)
    facts = terminal.table("", "", folds=("",))
    facts.show_header = False
    for what, text in measured(found).items():
        facts.add_row(what, text)
    if facts.row_count:
        console.print(facts)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    if not found.passed:
        job = client.job(found.job_id)
        if job.state == "failed":
            print_end(terminal.stderr(), job)
        tries = " and ".join(f"cordee logs {found.job_id} --try {each.epoch}" for each in job.attempts)
        terminal.stderr().print(f"its output: {tries or f'cordee logs {found.job_id}'}", highlight=False)
