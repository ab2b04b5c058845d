"""The verb of nodes: list them, or take one out of use and back."""

from typing import Annotated

import typer

from cordee.answers import NodeView
from cordee.cli import terminal
from cordee.cli.terminal import Home, Json
from cordee.client import Client
from cordee.errors import InputError
from cordee.units import format_micro_usd, plural

ORDERS = {"cordon": Client.cordon, "drain": Client.drain, "uncordon": Client.uncordon}
REASONED = ("cordon", "drain")
"""Orders that need a reason."""


def nodes(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[cordon|drain|uncordon NODE]",
            help="Cordon a node (nothing new is placed there), drain it (its attempts also checkpoint and leave), "
            "or uncordon it; else list nodes.",
        ),
    ] = None,
    *,
    why: Annotated[str, typer.Option(help="Reason of a cordon or drain, shown to everybody; required for both.")] = "",
    yes: terminal.Yes = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """List nodes, the attempts that hold their GPUs, and their prices; or cordon, drain or uncordon one."""
    words = what or []
    if words and (words[0] not in ORDERS or len(words) != 2):
        raise InputError(
            f"unknown: nodes {' '.join(words)}", hint="cordee nodes, or cordee nodes cordon|drain|uncordon NODE"
        )
    if why and not words:
        raise InputError("--why needs cordon, drain or uncordon", hint="cordee nodes cordon NODE --why TEXT")
    if words and words[0] in REASONED and not why.strip():
        hint = f"cordee nodes {words[0]} {words[1]} --why 'disk errors'"
        raise InputError(f"{words[0]} needs a reason, which is shown to everybody", hint=hint)
    with terminal.connect(home) as client:
        terminal.warn(client)
        if words and words[0] == "drain" and terminal.may_ask() and not yes and not as_json:
            _consent(client, words[1])
        found = [ORDERS[words[0]](client, words[1], why=why)] if words else client.nodes()
    if as_json:
        terminal.print_json(found[0] if words else found)
    elif words:
        print(f"{found[0].name}: {node_state(found[0])}")
    else:
        _print(found)


def node_state(node: NodeView) -> str:
    """Return the state of a node as people read it."""
    if node.cordoned_by is None:
        return "up" if node.up else "down"
    attempts = len(set(node.used.values()))
    left = f"{plural(attempts, 'attempt')} left"
    word = "cordoned" if not node.drains else f"draining, {left}," if attempts else "drained"
    reason = f": {node.cordon_why}" if node.cordon_why else ""
    return f"{'' if node.up else 'down, '}{word} by {node.cordoned_by}{reason}"


def price(node: NodeView) -> str:
    """Return the price of a GPU of the node, with its source."""
    return f"{_per_hour(node)} ({node.price_source})" if node.micro_usd_per_gpu_hour else node.price_source


def _consent(client: Client, name: str) -> None:
    """Ask for consent to end the attempts that run on a node."""
    attempts = sorted({holder for node in client.nodes() if node.name == name for holder in node.used.values()})
    if attempts:
        terminal.ask([f"{attempt} checkpoints and leaves {name}" for attempt in attempts], f"drain {name}?")


def _print(found: list[NodeView]) -> None:
    folds = ("STATE", "HELD BY")
    rows = terminal.table("NODE", "STATE", "GPUS", "FREE", "HELD BY", "PRICE", right=("FREE",), folds=folds)
    for node in found:
        held: dict[str, int] = {}
        for holder in node.used.values():
            held[holder] = held.get(holder, 0) + 1
        free = node.gpus - len(set(node.used) | set(node.unavailable)) if node.up else 0
        others = [f"others ({len(node.unavailable)})"] if node.unavailable else []
        rows.add_row(
            node.name,
            terminal.state(node_state(node)),
            f"{node.gpus} x {node.gpu_name}",
            str(free),
            ", ".join([*(f"{holder} ({count})" for holder, count in held.items()), *others]) or "–",
            _per_hour(node),
        )
    console = terminal.stdout()
    console.print(rows)
    for source in sorted({node.price_source for node in found}):
        console.print(f"price: {source}", highlight=False, markup=False)


def _per_hour(node: NodeView) -> str:
    return f"{format_micro_usd(node.micro_usd_per_gpu_hour)}/GPU-h" if node.micro_usd_per_gpu_hour else "–"
