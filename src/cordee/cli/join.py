"""Verbs about nodes that join by a token: print one, leave."""

import time
from datetime import datetime
from typing import Annotated

import typer

from cordee.answers import Leaving
from cordee.cli import terminal
from cordee.cli.terminal import Home, Json
from cordee.client import Client
from cordee.units import US_PER_S, format_duration, parse_duration_s, plural

_LOOK_S = 0.2


def token(
    *,
    uses: Annotated[int, typer.Option(help="Number of nodes that may join with it.", min=1)] = 1,
    valid_for: Annotated[str, typer.Option("--for", help="Time until it expires: 1h, 7d.")] = "1h",
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Print the command with which a machine joins as a node."""
    for_s = round(parse_duration_s(valid_for))
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


def leave(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name of a node that joined.")],
    *,
    yes: terminal.Yes = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Let a node go: its attempts checkpoint and leave, then its agent ends and its token is void."""
    with terminal.connect(home) as client:
        if terminal.may_ask() and not yes and not as_json:
            consent_to_evict(client, node, "let it go")
        last = _leave(client, node)
    if as_json:
        terminal.print_json(last)
    else:
        print(f"{node} has left")


def consent_to_evict(client: Client, name: str, what: str) -> None:
    """Ask for consent to end the attempts that run on a node."""
    attempts = sorted({holder for node in client.nodes() if node.name == name for holder in node.used.values()})
    if attempts:
        terminal.ask([f"{attempt} checkpoints and leaves {name}" for attempt in attempts], f"{what}: {name}?")


def _leave(client: Client, name: str, *, as_node: bool = False) -> Leaving:
    """Ask until no attempt holds the node."""
    last = client.leave(name, as_node=as_node)
    with terminal.waiting(f"{name} is leaving") as wait:
        while last.attempts:
            wait.now(f"{plural(last.attempts, 'attempt is', 'attempts are')} leaving {name}, within the grace period")
            time.sleep(_LOOK_S)
            last = client.leave(name, as_node=as_node)
    return last
