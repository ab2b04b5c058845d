"""The verbs of the server: up, down."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from cordee.answers.nodes import NodeView
from cordee.answers.view import HealthView
from cordee.cli import terminal
from cordee.cli.nodes import price
from cordee.cli.terminal import Home, Json
from cordee.client import Client
from cordee.errors import InputError, NoServerError
from cordee.imports import uncollected
from cordee.units import parse_duration_s, plural

_LOOK_S = 0.05

Lease = Annotated[
    str | None,
    typer.Option(
        help="Time after which a node without contact ends its ranks; then they start elsewhere.",
        show_default="as before, else 30s",
    ),
]
Machines = Annotated[
    str | None,
    typer.Option(
        metavar="MACHINES",
        help="local; none: nodes join by themselves; "
        "ray: the nodes of the Ray cluster that this machine belongs to (ray:HOST:PORT, ray://...); "
        "slurm: whole nodes of a Slurm cluster, asked for while jobs wait.",
        show_default="as before, else local",
    ),
]
Gateway = Annotated[
    str | None,
    typer.Option(
        metavar="PORT",
        help="Run a gateway for services beside the server: 8480, HOST:PORT, auto (a free port) or off.",
        show_default="as before, else off",
    ),
]
LogFormat = Annotated[
    str | None,
    typer.Option(metavar="json|text", help="Format of the server's log.", show_default="as before, else json"),
]
Partition = Annotated[str | None, typer.Option(help="With --on slurm: the partition.", show_default="Slurm's default")]
NodesMax = Annotated[int, typer.Option(help="With --on slurm: the number of nodes, at most.", min=1)]
Idle = Annotated[str, typer.Option(help="With --on slurm: give a node back that is idle for this long.")]
Sbatch = Annotated[
    str, typer.Option(help="With --on slurm: more options of sbatch, such as '--account=a --time=12:00:00'.")
]
Database = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="PostgreSQL that keeps the log, or sqlite.", show_default="as before, else sqlite"
    ),
]


Certificate = Annotated[Path | None, typer.Option(help="PEM certificate for --listen.", show_default="a self-made one")]
Artifacts = Annotated[
    str | None,
    typer.Option(
        metavar="TO",
        help="Folder or URL (s3://, gs://, az://) for the chunks of artifacts.",
        show_default="as before, else in the home",
    ),
]
MaxGrace = Annotated[
    str | None,
    typer.Option(help="Longest grace period that a rehearsal may set.", show_default="as before, else 10m"),
]


Patience = Annotated[
    str | None,
    typer.Option(
        help="Wait after which a job goes first, as a multiple of the run time of long jobs, or default (0.5).",
        show_default="as before, else default",
    ),
]


def up(
    *,
    slots: Annotated[
        str | None,
        typer.Option(help="Number of CPU slots to use instead of GPUs, or auto.", show_default="as before, else auto"),
    ] = None,
    price_as: Annotated[
        str | None,
        typer.Option(help="GPU whose price is charged for each slot, or none.", show_default="as before, else none"),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address at which other machines reach the server, over TLS, such as 0.0.0.0:8470; or off.",
            show_default="as before, else off",
        ),
    ] = None,
    certificate: Certificate = None,
    key: Annotated[Path | None, typer.Option(help="PEM key of the certificate.")] = None,
    database: Database = None,
    standby: Annotated[
        bool, typer.Option("--standby", help="Stand by, and take over when the leader on this database is gone.")
    ] = False,
    on: Machines = None,
    lease: Lease = None,
    gateway: Gateway = None,
    log_format: LogFormat = None,
    partition: Partition = None,
    nodes: NodesMax = 1,
    idle: Idle = "5m",
    sbatch: Sbatch = "",
    max_grace: MaxGrace = None,
    artifacts: Artifacts = None,
    patience: Patience = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Serve in this process.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Start a server; jobs of an earlier one continue."""
    from cordee.control.patience import parse_patience
    from cordee.control.spawn import start_server

    folder = terminal.folder(home)
    if patience is not None:
        parse_patience(patience)  # before anything starts
    _keep(folder, max_grace, artifacts)
    options: dict[str, Any] = {
        "slots": slots,
        "price_as": price_as,
        "listen": listen,
        "certificate": certificate,
        "key": key,
        "database": database,
        "standby": standby,
        "on": _machines(on, partition, nodes, idle, sbatch),
        "lease": lease,
        "gateway": gateway,
        "log_format": log_format,
        "patience": patience,
    }
    if foreground:
        _serve(folder, options)
        return
    with terminal.waiting(f"starting a server on {folder}"):
        health = start_server(folder, **options)
    if as_json:
        terminal.print_json(health)
    else:
        _describe(health, folder, slots)


def _serve(folder: Path, options: dict[str, Any]) -> None:
    """Serve in this process."""
    from cordee.control.spawn import check_installed, check_not_connected

    check_installed()
    check_not_connected(folder)
    with uncollected():
        from cordee.control.server import serve
        from cordee.control.start_options import Options

    serve(folder, Options(**options), on_ready=lambda url: print(f"the server runs at {url}", flush=True))


def _machines(on: str | None, partition: str | None, nodes: int, idle: str, sbatch: str) -> str | None:
    """Return the machines that `--on` and the options of its engine name."""
    if on == "slurm":
        from cordee.control.engines.slurm import SlurmRequest

        return str(SlurmRequest(partition=partition, nodes=nodes, idle_s=parse_duration_s(idle), sbatch=sbatch))
    if partition is not None or sbatch:
        raise InputError("--partition and --sbatch are for a Slurm cluster", hint="add --on slurm")
    return on


def _keep(folder: Path, max_grace: str | None, artifacts: str | None) -> None:
    """Keep options that the server reads at each request among those of the home."""
    from cordee.control.home import Home as Folder

    if max_grace is not None:
        Folder(folder).keep_settings({"grace_max": f"{parse_duration_s(max_grace):g}s"})
    if artifacts is not None:
        from cordee.storage.destination import absolute, open_blobs

        to = absolute(artifacts, str(Path.cwd()))
        open_blobs(to)
        Folder(folder).keep_settings({"artifacts": to})


def _describe(health: HealthView, folder: Path, slots: str | None) -> None:
    """Print what a server that has just started offers and runs; `slots` are those that were asked for."""
    if health.role == "standby":
        print(f"{health.home} stands by (pid {health.pid}); {health.servers[0]} leads")
        return
    with Client(folder) as client:
        nodes, live = client.nodes(), [job for job in client.jobs() if job.ended_us is None]
    print(f"the server runs on {health.home} (pid {health.pid})")
    _print_nodes(nodes, folder, slots)
    if health.listens is not None:
        _say_how_to_connect(health)
    print(f"its pages: {client.url}; `cordee web` opens them, logged in")
    if live:
        print(f"{plural(len(live), 'job continues', 'jobs continue')}: cordee jobs")


def _print_nodes(nodes: list[NodeView], folder: Path, slots: str | None) -> None:
    """Print the nodes, and which of them keep another number of slots than `up` asked for."""
    if not nodes:
        print("no node yet: `cordee nodes token` prints how a machine joins")
    for node in nodes:
        print(f"node {node.name}: {node.gpus} x {node.gpu_name}, {price(node)}")
        started_here = (folder / "nodes" / node.name).exists()
        if started_here and slots is not None and slots.isdecimal() and node.up and node.gpus != int(slots):
            # Its agent outlived the server that started it, and its ranks may run.
            note = (
                f"note: {node.name} keeps its old number of slots ({node.gpus}) until its agent ends; "
                "run `cordee down`, then `cordee up`"
            )
            terminal.stderr().print(note, highlight=False)


def _say_how_to_connect(health: HealthView) -> None:
    """Print the commands with which other machines use the server and join it."""
    pinned = f" --fingerprint {health.fingerprint}" if health.fingerprint else ""
    print(f"other machines reach it at {health.listens}")
    print("to add a node:    cordee nodes token")
    print("to use it there, with a TOKEN of the home's file `tokens`:")
    print(f"  cordee connect {health.listens} TOKEN{pinned}")


def down(*, yes: terminal.Yes = False, home: Home = None, as_json: Json = False) -> None:
    """Checkpoint and requeue every job, then end the server; jobs continue after the next `up`."""
    from cordee.control.spawn import is_owned

    with terminal.connect(home) as client:
        if terminal.may_ask() and not yes and not as_json:
            _consent(client)
        last = client.down()
        with terminal.waiting(_leaving(last)) as wait:
            while True:
                try:
                    last = client.health()
                except NoServerError:
                    break
                wait.now(_leaving(last))
                time.sleep(_LOOK_S)
            wait.now("the server is ending")
            while client.home is not None and is_owned(client.home):
                time.sleep(_LOOK_S)
    if as_json:
        terminal.print_json(last)
    else:
        print("the server is down; queued and running jobs continue after `cordee up`")


def _consent(client: Client) -> None:
    """Ask for consent to end attempts that run."""
    facts = []
    for job in client.jobs():
        if job.state in ("running", "stopping"):
            saves = client.job(job.job_id).spec["checkpoint"]["to"] is not None
            what = "leaves with a checkpoint" if saves else "writes no checkpoint and starts again from step 0"
            facts.append(f"{job.job_id} of {job.owner} {what}")
    if facts:
        terminal.ask(facts, "end the server?")


def _leaving(health: HealthView) -> str:
    if health.live_attempts == 0:
        return "no job runs: the server is ending"
    jobs = plural(health.live_attempts, "job is", "jobs are")
    return f"{jobs} leaving, with the grace period to checkpoint"
