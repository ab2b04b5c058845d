"""Verbs about nodes that join by a token: print one, join, leave."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cordee.answers.nodes import Leaving
from cordee.cli import terminal
from cordee.cli.terminal import Home, Json
from cordee.client import Client
from cordee.errors import InputError, NoServerError, ServerError
from cordee.hardware.labels import parse_label
from cordee.servers import check_url, read_join_token
from cordee.units import US_PER_S, format_duration, parse_duration_s, plural

if TYPE_CHECKING:
    from cordee.agent.settings import AgentSettings

_LOOK_S = 0.2
_WELCOME_S = 30.0

Folder = Annotated[Path | None, typer.Option(help="Folder of the machine's agent.", show_default="~/.cordee/agent")]


def token(
    *,
    uses: Annotated[int, typer.Option(help="Number of nodes that may join with it.", min=1)] = 1,
    valid_for: Annotated[str, typer.Option("--for", help="Time until it expires: 1h, 7d.")] = "1h",
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Print the command with which a machine joins as a node."""
    for_s = round(parse_duration_s(valid_for))
    if for_s < 1:
        raise InputError(f"a join token for {valid_for} lets nobody in", hint="give --for 1h, or 7d")
    with terminal.connect(home) as client:
        made = client.join_token(uses=uses, for_s=for_s)
    if as_json:
        terminal.print_json(made)
        return
    print(f"cordee nodes join {made.url} {made.token}")
    until = datetime.fromtimestamp(made.expires_us / US_PER_S).astimezone()
    nodes = "one node" if uses == 1 else plural(uses, "node")
    note = f"run it on the machine; good for {nodes} in {format_duration(for_s)}, until {until:%Y-%m-%d %H:%M}"
    terminal.stderr().print(note, highlight=False)


def join(
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="URL of the server, from `cordee nodes token`.")
    ] = None,
    join_token: Annotated[str | None, typer.Argument(metavar="TOKEN", help="The join token printed there.")] = None,
    *,
    name: Annotated[str | None, typer.Option(help="Name of the node.", show_default="the host's")] = None,
    slots: Annotated[int | None, typer.Option(help="Number of CPU slots to offer in place of GPUs.", min=1)] = None,
    label: Annotated[list[str] | None, typer.Option(help="A fact about the machine, such as rack=r7.")] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Address at which ranks on other nodes reach this one.", show_default="towards the server"),
    ] = None,
    folder: Folder = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Run the agent in this process.")] = False,
    as_json: Json = False,
) -> None:
    """Make this machine a node of a server. Without URL, start its agent again, after a reboot."""
    from cordee.agent.gpus import discover
    from cordee.agent.settings import AgentSettings, is_running, machine_id
    from cordee.control.spawn import check_installed

    check_installed()
    place = _folder(folder)
    if is_running(place):
        running = AgentSettings.read(place)
        raise InputError(
            f"this machine is node {running.node} already: an agent runs on {place}",
            hint="`cordee nodes leave --here` ends it; a second node of one machine needs a --folder of its own",
        )
    if url is None:
        if (name, slots, label, address) != (None, None, None, None):
            raise InputError("options of a node need the URL and a token", hint="cordee nodes join URL TOKEN --name N")
        settings = _settings(place)
    elif join_token is None:
        raise InputError("a join token is needed", hint="copy the whole line of `cordee nodes token`")
    else:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        labels = dict(map(parse_label, label or ()))
        wanted = name or socket.gethostname().partition(".")[0]
        joined = Client.join(check_url(url), join_token, name=wanted, machine=machine_id(place))
        settings = AgentSettings(
            node=joined.node,
            token=joined.token,
            # The address that was dialled is one that this machine reaches.
            servers=tuple(dict.fromkeys([check_url(url), *joined.servers])),
            fingerprint=read_join_token(join_token)[1],
            labels=labels,
            slots=slots,
            address=address,
        )
        settings.write(place)
    devices = discover(settings.slots)
    argv = [sys.executable, "-m", "cordee.agent.keeper", "--folder", str(place)]
    if foreground:
        sys.stdout.flush()
        os.execv(argv[0], argv)
    _start(argv, place, settings.servers[0])
    if as_json:
        terminal.print_json({"node": settings.node, "server": settings.servers[0], "gpus": devices.count})
    else:
        print(f"{settings.node} has joined {settings.servers[0]}: {devices.count} x {devices.gpu_name}")


def leave(
    node: Annotated[str | None, typer.Argument(metavar="NODE", help="Name of a node that joined.")] = None,
    *,
    here: Annotated[bool, typer.Option("--here", help="The node of this machine; needs no user's token.")] = False,
    folder: Folder = None,
    yes: terminal.Yes = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Let a node go: its attempts checkpoint and leave, then its agent ends and its token is void."""
    if here == (node is not None):
        raise InputError("name a node, or say --here", hint="cordee nodes leave gpu-1, or cordee nodes leave --here")
    if node is None:
        last = _leave_here(_folder(folder))
    else:
        with terminal.connect(home) as client:
            if terminal.may_ask() and not yes and not as_json:
                consent_to_evict(client, node, "let it go")
            last = _leave(client, node)
    if as_json:
        terminal.print_json(last)
    else:
        print(f"{last.node} has left")


def consent_to_evict(client: Client, name: str, what: str) -> None:
    """Ask for consent to end the attempts that run on a node."""
    attempts = sorted({holder for node in client.nodes() if node.name == name for holder in node.used.values()})
    if attempts:
        terminal.ask([f"{attempt} checkpoints and leaves {name}" for attempt in attempts], f"{what}: {name}?")


def _start(argv: Sequence[str], folder: Path, url: str) -> None:
    """Start an agent that outlives this process, and wait until a server has welcomed it."""
    from cordee.agent.settings import AgentState

    (folder / "state.json").unlink(missing_ok=True)
    with (folder / "agent.log").open("ab") as log:
        agent = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
        )
    deadline = time.monotonic() + _WELCOME_S
    with terminal.waiting(f"starting an agent on {folder}"):
        while (state := AgentState.read(folder)) is None or state.state == "away":
            if agent.poll() is not None:
                raise ServerError(f"the agent ended with exit code {agent.returncode}", hint=f"see {folder}/agent.log")
            if time.monotonic() > deadline:
                agent.terminate()
                why = "it did not start" if state is None else state.why
                raise NoServerError(
                    f"no server at {url} has welcomed the agent within {_WELCOME_S:.0f} s: {why}",
                    hint=f"`cordee nodes join` without URL tries again; the agent's log is {folder}/agent.log",
                )
            time.sleep(_LOOK_S)
    if state.state == "refused":
        agent.terminate()
        raise ServerError(state.why, hint=state.hint)
    agent.returncode = 0  # it outlives this process on purpose; avoids the ResourceWarning


def _leave_here(folder: Path) -> Leaving:
    """Leave with the token of the machine's own agent, and wait until that has ended."""
    from cordee.agent.settings import is_running

    settings = _settings(folder)
    if not settings.servers:
        raise InputError(f"{settings.node} did not join: a server on this machine starts its agent", hint="cordee down")
    url, *others = settings.servers
    with Client(url=url, others=others, token=settings.token, fingerprint=settings.fingerprint) as client:
        last = _leave(client, settings.node, as_node=True)
    with terminal.waiting("its agent is ending"):
        while is_running(folder):
            time.sleep(_LOOK_S)
    (folder / "agent.json").unlink(missing_ok=True)
    return last


def _settings(folder: Path) -> "AgentSettings":
    from cordee.agent.settings import AgentSettings

    if not (folder / "agent.json").exists():
        raise InputError(
            f"this machine has not joined: {folder} has no agent.json",
            hint="cordee nodes join URL TOKEN; on the server, `cordee nodes token` prints the whole line",
        )
    return AgentSettings.read(folder)


def _leave(client: Client, name: str, *, as_node: bool = False) -> Leaving:
    """Ask until no attempt holds the node."""
    last = client.leave(name, as_node=as_node)
    with terminal.waiting(f"{name} is leaving") as wait:
        while last.attempts:
            wait.now(f"{plural(last.attempts, 'attempt is', 'attempts are')} leaving {name}, within the grace period")
            time.sleep(_LOOK_S)
            last = client.leave(name, as_node=as_node)
    return last


def _folder(folder: Path | None) -> Path:
    return (folder or Path("~/.cordee/agent")).expanduser().absolute()
