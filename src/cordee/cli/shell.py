"""The verbs `exec`, `shell` and `port-forward`: a terminal, and ports, where a job runs."""

import asyncio
import os
import shlex
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cordee.cli import terminal
from cordee.cli.job_file import pairs
from cordee.cli.run import Capacity, Cpus, Env, Gpus, Memory, Name, Priority, Queue, Secret, Ship, Slots, Tier, submit
from cordee.cli.terminal import Home
from cordee.client import Client
from cordee.errors import CordeeError, InputError, NotFoundError, ServerError
from cordee.units import parse_duration_s
from cordee.workload.spec import JobSpec

if TYPE_CHECKING:
    from cordee.cli import tunnels

JobRef = Annotated[str, typer.Argument(metavar="JOB", help="Id or name of a job that runs.")]
Rank = Annotated[int, typer.Option(min=0, help="Rank whose node and environment the command gets.")]
IDLE_S_MIN = 60.0
_LOOK_S = 0.2
_HOST = "cordee.agent.shell_host"
Idle = Annotated[
    str, typer.Option(help="End after this time without input, if its GPUs (without any, its CPU) are idle too.")
]
Keep = Annotated[str, typer.Option(help="Stay for this time without a client, for --attach.")]
Attach = Annotated[str | None, typer.Option(metavar="JOB", help="Go back to a shell that lost its client.")]
_TERMINAL_ENV = ("TERM", "COLORTERM")


def exec(  # noqa: A001  the verb's name
    job: JobRef,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The command, after `--`.")],
    *,
    rank: Rank = 0,
    home: Home = None,
) -> None:
    """Run a command beside a job's ranks: in its folder, with its environment and its GPUs.

    It has a terminal if started from one, else pipes. It ends with the attempt; `cordee exec` returns its exit code.
    """
    from cordee.cli import tunnels

    screen = tunnels.Screen()
    with terminal.connect(home) as client:
        job_id = client.job(job).job_id
        opening = {"what": "exec", "rank": rank, "argv": command}
        if screen.is_tty:
            opening |= {"tty": True, "size": screen.size, "env": terminal_env()}
        raise SystemExit(asyncio.run(_exec(client, job_id, opening, screen)))


async def _exec(client: Client, job_id: str, opening: dict[str, object], screen: "tunnels.Screen") -> int:
    from cordee.cli import tunnels

    async with tunnels.opened(client, job_id, **opening) as websocket:
        with screen.raw():
            code, why = await tunnels.use(websocket, screen)
    return tunnels.exit_code(code, why, screen)


def terminal_env() -> dict[str, str]:
    """Return what a program must know of this terminal."""
    return {name: os.environ[name] for name in _TERMINAL_ENV if name in os.environ}


def shell(
    *,
    gpus: Gpus = "1",
    cpus: Cpus = None,
    memory: Memory = None,
    idle: Idle = "30m",
    keep: Keep = "10m",
    attach: Attach = None,
    name: Name = "shell",
    tier: Tier = None,
    queue: Queue = None,
    priority: Priority = None,
    capacity: Capacity = None,
    env: Env = None,
    secret: Secret = None,
    ship: Ship = None,
    slots: Slots = None,
    yes: terminal.Yes = False,
    home: Home = None,
) -> None:
    """Open a shell on a node: a job that waits, holds GPUs and is accounted like any other, and ends with its shell.

    It has this folder and this environment. `cordee shell` returns its exit code.
    """
    from cordee.cli import tunnels

    screen = tunnels.Screen()
    if not screen.is_tty:
        raise InputError("a shell needs a terminal", hint="for a command without one: cordee run -f -- COMMAND")
    if attach is not None:
        with terminal.connect(home) as client:
            job_id = _shell_of(client, attach)
            raise SystemExit(asyncio.run(_attach(client, job_id, screen)))
    flags = {
        "cpus": cpus, "memory": memory, "name": name, "tier": tier, "queue": queue, "priority": priority,
        "capacity": capacity,
    }  # fmt: skip
    spec = shell_spec(gpus or "1", idle, keep, pairs(env or ()) | terminal_env(), tuple(secret or ()), flags)
    job_id = submit(
        spec, home, unprotected=True, follow=False, ship=ship, slots=slots, ask=not yes, as_json=False, quiet=True
    )  # fmt: skip
    with terminal.connect(home) as client:
        try:
            _wait_for_start(client, job_id)
        except KeyboardInterrupt:
            client.stop(job_id, now=True)
            terminal.stderr().print(f"{job_id} was stopped", highlight=False)
            raise SystemExit(130) from None
        raise SystemExit(asyncio.run(_attach(client, job_id, screen)))


def shell_spec(
    gpus: str, idle: str, keep: str, env: dict[str, str], secrets: tuple[str, ...], flags: dict[str, Any]
) -> JobSpec:
    """Return the job of a shell: one process on one node, which is neither started again nor queued again.

    Raises:
        InputError: a time or a flag cannot be used.
    """
    idle_s, keep_s = parse_duration_s(idle), parse_duration_s(keep)
    if idle_s < IDLE_S_MIN:
        raise InputError(
            f"--idle {idle} is below a minute: the shell would end before its warning was read",
            hint="the shortest is --idle 1m; 30m is the default",
        )
    program = shlex.quote(os.environ.get("SHELL") or "bash")
    run = f'exec "$CORDEE_PYTHON" -E -P -m {_HOST} --idle {idle_s:g} --keep {keep_s:g} {program}'
    within: dict[str, Any] = (
        {} if gpus in ("0", "1") or gpus.startswith("0.") or ":0." in gpus else {"place_within": "node"}
    )
    return JobSpec.from_flags(
        run=run, gpus=gpus, env=env, secrets=secrets, launch="node", on_preempt_then="stop",
        retries="infrastructure=0,script=0", **within, **flags,
    )  # fmt: skip


def _shell_of(client: Client, ref: str) -> str:
    """Return the id of a job that is a shell.

    Raises:
        NotFoundError: there is none, or it has ended.
        InputError: it is another job.
    """
    job = client.job(ref)
    if _HOST not in str(job.spec["run"]):
        raise InputError(f"{job.job_id} is no shell", hint=f"cordee exec {job.job_id} -- bash")
    if job.ended_us is not None:
        raise NotFoundError(f"the shell {job.job_id} has ended: {job.why}", hint="open another one: cordee shell")
    return job.job_id


def _wait_for_start(client: Client, job_id: str) -> None:
    """Wait until the shell runs.

    Raises:
        ServerError: it ended before.
    """
    with terminal.waiting("waiting for the shell to start; Ctrl-C gives it up"):
        while True:
            job = client.job(job_id)
            if job.ended_us is not None:
                raise ServerError(f"{job_id} ended before its shell began: {job.why}", hint=f"cordee logs {job_id}")
            if job.state == "running" and client.why(job_id).reason != "starting":
                return
            time.sleep(_LOOK_S)


def _what_follows(client: Client, job_id: str) -> str:
    """Return a clause about a shell whose tunnel has ended: it goes on, or why it does not."""
    try:
        job = client.job(job_id)
        if job.state == "running" and client.why(job_id).reason == "running":
            return f"; the shell stays for a while: cordee shell --attach {job_id}"
        return f" ({job.why})" if job.why else ""
    except CordeeError:
        return f"; it stays for a while if its node is there: cordee shell --attach {job_id}"


async def _attach(client: Client, job_id: str, screen: "tunnels.Screen") -> int:
    from cordee.cli import tunnels

    async with tunnels.opened(client, job_id, what="shell", size=screen.size) as websocket:
        with screen.raw():
            code, why = await tunnels.use(websocket, screen)
    if code is None:
        why += await asyncio.to_thread(_what_follows, client, job_id)
    return tunnels.exit_code(code, why, screen)
