"""The verb of nodes: list them, show one, or take one out of use and back."""

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.text import Text

from cordee.answers import NodeView
from cordee.cli import terminal
from cordee.cli.terminal import Home, Json
from cordee.client import Client
from cordee.errors import InputError, NotFoundError
from cordee.units import format_bytes, format_micro_usd, plural

ORDERS = {"cordon": Client.cordon, "drain": Client.drain, "uncordon": Client.uncordon}
REASONED = ("cordon", "drain")
"""Orders that need a reason."""


def nodes(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[[cordon|drain|uncordon] NODE]",
            help="Cordon a node (nothing new is placed there), drain it (its attempts also checkpoint and leave), "
            "or uncordon it; a name alone shows the node; else list nodes.",
        ),
    ] = None,
    *,
    why: Annotated[str, typer.Option(help="Reason of a cordon or drain, shown to everybody; required for both.")] = "",
    yes: terminal.Yes = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """List nodes, the attempts that hold their GPUs, and their prices; or show, cordon, drain or uncordon one."""
    words = what or []
    one = words[0] if len(words) == 1 and words[0] not in ORDERS else None
    if words and one is None and (words[0] not in ORDERS or len(words) != 2):
        raise InputError(
            f"unknown: nodes {' '.join(words)}",
            hint="cordee nodes, or cordee nodes [cordon|drain|uncordon] NODE",
        )
    if why and (not words or one is not None):
        raise InputError("--why needs cordon, drain or uncordon", hint="cordee nodes cordon NODE --why TEXT")
    if words and words[0] in REASONED and not why.strip():
        hint = f"cordee nodes {words[0]} {words[1]} --why 'disk errors'"
        raise InputError(f"{words[0]} needs a reason, which is shown to everybody", hint=hint)
    with terminal.connect(home) as client:
        terminal.warn(client)
        if words and words[0] == "drain" and terminal.may_ask() and not yes and not as_json:
            _consent(client, words[1])
        if words and one is None:
            found = [ORDERS[words[0]](client, words[1], why=why)]
        else:
            found = client.nodes() if one is None else [_named(one, client.nodes())]
    if as_json:
        terminal.print_json(found[0] if words else found)
    elif one is not None:
        for line in detail(found[0]):
            terminal.stdout().print(line, highlight=False, markup=False, soft_wrap=True)
    elif words:
        print(f"{found[0].name}: {node_state(found[0])}")
    else:
        show(found)


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


def _named(name: str, nodes: list[NodeView]) -> NodeView:
    found = next((node for node in nodes if node.name == name), None)
    if found is None:
        known = ", ".join(node.name for node in nodes[:5])
        raise NotFoundError(f"there is no node {name!r}", hint=f"known nodes: {known} (see cordee nodes)")
    return found


def show(found: list[NodeView]) -> None:
    """Print the table of nodes, with what is wrong with their GPUs."""
    placed, priced = any(node.domain for node in found), any(node.micro_usd_per_gpu_hour for node in found)
    heads = ["NODE", "STATE", "GPUS", "FREE", "HELD BY", "HOST"]
    heads += [head for head, shown in (("IN", placed), ("PRICE", priced)) if shown]
    rows = terminal.table(*heads, right=("FREE",), folds=("STATE", "GPUS", "HELD BY", "HOST", "IN"))
    for node in found:
        others = [f"others ({len(node.unavailable)})"] if node.unavailable else []
        cells: list[str | Text] = [
            node.name,
            terminal.state(node_state(node)),
            f"{node.gpus} x {node.gpu_name}",
            str(_free(node)),
            ", ".join([*(f"{holder} ({len(gpus)})" for holder, gpus in _held(node).items()), *others]) or "–",
            _host(node),
        ]
        rows.add_row(
            *cells, *(["/".join(node.domain) or "–"] if placed else []), *([_per_hour(node)] if priced else [])
        )
    console = terminal.stdout()
    console.print(rows)
    for node in found:
        if node.unavailable_why:
            console.print(f"{node.name}: {_reasons(node)}", highlight=False, markup=False)
    for source in sorted({node.price_source for node in found}):
        console.print(f"price: {source}", highlight=False, markup=False)


def detail(node: NodeView) -> Iterator[str]:
    """Yield the lines about one node."""
    yield f"{node.name}: {node_state(node)}{f': {node.down_why}' if node.down_why else ''}"
    lines = {
        "GPUs": f"{node.gpus} x {node.gpu_name}, {_free(node)} free",
        "held": ", ".join(f"{terminal.ranges(gpus)} by {holder}" for holder, gpus in _held(node).items()),
        "unavailable": _reasons(node) if node.unavailable_why else terminal.ranges(node.unavailable),
        "place": ", ".join(_place(node)),
        "host": _host(node),
        "capacity": node.capacity,
        "price": price(node),
        "software": ", ".join(node.software),
    }
    for name, text in lines.items():
        if text:
            yield f"  {name:<11} {text}"


def _held(node: NodeView) -> dict[str, list[int]]:
    """Return the GPUs that each attempt holds."""
    held: dict[str, list[int]] = {}
    for gpu, holder in node.used.items():
        held.setdefault(holder, []).append(gpu)
    return held


def _free(node: NodeView) -> int:
    return node.gpus - len(set(node.used) | set(node.unavailable)) if node.up else 0


def _reasons(node: NodeView) -> str:
    """Return why GPUs are unavailable, those with one reason together."""
    by_why: dict[str, list[int]] = {}
    for gpu, why in zip(node.unavailable, node.unavailable_why, strict=True):
        by_why.setdefault(why, []).append(gpu)
    return "; ".join(
        f"{'GPU' if len(gpus) == 1 else 'GPUs'} {terminal.ranges(gpus)} {why}" for why, gpus in by_why.items()
    )


def _place(node: NodeView) -> Iterator[str]:
    spans = node.island_gpus > node.gpus
    racks = node.domain[:-1] if spans else node.domain
    yield from (f"{kind} {name}" for kind, name in zip(("block", "rack")[-len(racks) :], racks, strict=False))
    if spans:
        yield f"island {node.domain[-1]} of {node.island_gpus} GPUs"
    elif node.island_gpus:
        yield f"islands of {plural(node.island_gpus, 'GPU')}"


def _host(node: NodeView) -> str:
    cores = [] if node.cpu_milli is None else [f"{node.cpu_milli / 1000:g} CPU"]
    return ", ".join([*cores, *([] if node.memory_bytes is None else [format_bytes(node.memory_bytes)])])


def _per_hour(node: NodeView) -> str:
    return f"{format_micro_usd(node.micro_usd_per_gpu_hour)}/GPU-h" if node.micro_usd_per_gpu_hour else "–"
