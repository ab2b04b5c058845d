"""The verbs that say when a job runs: pause, resume, hold, requeue, prioritize."""

from collections.abc import Callable
from pathlib import Path

from cordee.answers.jobs import JobView
from cordee.answers.sweeps import SweepView
from cordee.cli import terminal
from cordee.cli.jobs import JobRef
from cordee.cli.terminal import Home, Json
from cordee.client import Client
from cordee.units import plural

_MOVING = ("running", "stopping")


def pause(job: JobRef, *, home: Home = None, as_json: Json = False) -> None:
    """Pause a job or a sweep: it saves, gives its GPUs back, and waits until it is resumed."""

    def text(found: JobView) -> str:
        if found.state not in _MOVING:
            return f"{found.job_id} is paused; cordee resume {found.job_id} lets it start"
        keeps = "it saves" if saves else "it writes no checkpoint, so it will start again from its beginning;"
        return f"{found.job_id} was asked to pause: {keeps} and gives its GPUs back"

    with terminal.connect(home) as client:
        if _sweep(client, job, Client.pause_sweep, as_json):
            return
        found = client.pause(job)
        saves = found.state not in _MOVING or client.job(found.job_id).spec["checkpoint"]["to"] is not None
    _print(found, text, as_json)


def resume(job: JobRef, *, home: Home = None, as_json: Json = False) -> None:
    """Let a paused or held job, or a paused sweep, go on."""
    with terminal.connect(home) as client:
        if not _sweep(client, job, Client.resume_sweep, as_json):
            _print(client.resume(job), lambda found: f"{found.job_id} may start again", as_json)


def hold(job: JobRef, *, home: Home = None, as_json: Json = False) -> None:
    """Keep a job from starting until it is resumed; one that runs goes on, and does not start again."""

    def text(found: JobView) -> str:
        if found.state in _MOVING:
            return f"{found.job_id} goes on; once it has left its GPUs it does not start again until it is resumed"
        return f"{found.job_id} is held; cordee resume {found.job_id} lets it start"

    _order(Client.hold, job, home, text, as_json)


def requeue(job: JobRef, *, home: Home = None, as_json: Json = False) -> None:
    """Send a job to the end of its queue; a running one saves first, one that has ended runs again."""

    def text(found: JobView) -> str:
        if found.state in _MOVING:
            return f"{found.job_id} was asked to leave: it saves, and goes to the end of queue {found.queue}"
        return f"{found.job_id} waits at the end of queue {found.queue}"

    _order(Client.requeue, job, home, text, as_json)


def prioritize(job: JobRef, *, home: Home = None, as_json: Json = False) -> None:
    """Send a waiting job to the top of its queue (the operator), or before its owner's other jobs (its owner)."""
    _order(
        Client.prioritize, job, home, lambda found: f"{found.job_id} goes first in queue {found.queue}", as_json
    )  # fmt: skip


def _order(
    order: Callable[[Client, str], JobView], job: str, home: Path | None, text: Callable[[JobView], str], as_json: bool
) -> None:
    with terminal.connect(home) as client:
        found = order(client, job)
    _print(found, text, as_json)


def _print(found: JobView, text: Callable[[JobView], str], as_json: bool) -> None:
    if as_json:
        terminal.print_json(JobView(**{name: getattr(found, name) for name in JobView.model_fields}))
    else:
        print(text(found))


def _sweep(client: Client, ref: str, order: Callable[[Client, str], SweepView], as_json: bool) -> bool:
    """Carry an order out for a sweep of this id or name; return whether there is one that goes on."""
    live = next((each for each in client.sweeps() if ref in (each.sweep_id, each.name) and not each.ended_us), None)
    if live is None:
        return False
    made = order(client, live.sweep_id)
    if as_json:
        terminal.print_json(made)
    elif made.state == "paused":
        running = made.counts.get("running", 0)
        print(f"{made.sweep_id} was asked to pause: {plural(running, 'trial')} will save and leave")
    else:
        print(f"{made.sweep_id} goes on")
    return True
