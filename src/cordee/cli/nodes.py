"""The verbs of nodes: list them, show one, take one out of use and back; those about joining are in `join.py`."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.text import Text
from typer.core import TyperGroup

import cordee
from cordee.answers.nodes import NodeView
from cordee.cli import maintenance, terminal
from cordee.cli.join import consent_to_evict, join, leave, token
from cordee.cli.terminal import Home, Json
from cordee.client import Client
from cordee.errors import InputError, NotFoundError
from cordee.near import meant
from cordee.units import US_PER_S, format_bytes, format_micro_usd, plural
from cordee.view.faults import NodeFault, faults_of, lemon_faults

_FAULTS_SHOWN = 10
CLOCK_OFF_S = 2.0  # a smaller offset of an agent's clock is not worth a line


class _Nodes(TyperGroup):
    """The verbs of nodes; anything else lists them, or names the one to show."""

    def parse_args(self, ctx: object, args: list[str]) -> list[str]:
        known = bool(args) and args[0] in (*self.commands, "--help", "-h")
        return super().parse_args(cast(typer.Context, ctx), args if known else ["list", *args])


nodes = typer.Typer(cls=_Nodes, add_completion=False)

Name = Annotated[str | None, typer.Argument(metavar="NODE", show_default=False)]
Why = Annotated[str, typer.Option(help="The reason, shown to everybody; required.", show_default=False)]
From = Annotated[
    str | None,
    typer.Option(
        "--from", help="Book maintenance instead: when it begins, +2h or '2026-11-24 06:00' (UTC, or +01:00)."
    ),
]
For = Annotated[str | None, typer.Option("--for", help="With --from: how long the maintenance lasts: 4h.")]
Note = Annotated[str, typer.Option(help="A remark for the log.", show_default=False)]


@nodes.command("list")
def show_nodes(
    names: Annotated[list[str] | None, typer.Argument(metavar="NODE", help="Show this node.")] = None,
    *,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """List nodes, the attempts that hold their GPUs, and their prices; or show one. `list` may be left out."""
    words = names or []
    if len(words) > 1:
        raise _unknown(*words)
    with terminal.connect(home) as client:
        terminal.warn(client)
        found = [_named(words[0], client.nodes())] if words else client.nodes()
        faults = faults_of(event for _, event in client.events()).get(words[0], []) if words and not as_json else []
    if as_json:
        terminal.print_json(found[0] if words else found)
    elif not found:
        print("no node has joined yet: cordee nodes token")
    elif words:
        for line in detail(found[0]):
            terminal.stdout().print(line, highlight=False, markup=False, soft_wrap=True)
        for line in history(faults):
            terminal.stdout().print(line, highlight=False, markup=False, soft_wrap=True)
    else:
        show(found)


@nodes.command()
def cordon(node: Name = None, *, why: Why = "", home: Home = None, as_json: Json = False) -> None:
    """Cordon a node: nothing new is placed there."""
    _order(Client.cordon, "cordon", node, why, home, as_json)


@nodes.command()
def drain(
    node: Name = None,
    *,
    why: Why = "",
    begin: From = None,
    lasts: For = None,
    yes: terminal.Yes = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Drain a node: cordon it, and let its attempts checkpoint and leave; with --from and --for, for maintenance."""
    if begin is not None or lasts is not None:
        maintenance.book(node, why, begin, lasts, home, as_json)
        return
    ask = terminal.may_ask() and not yes and not as_json
    _order(Client.drain, "drain", node, why, home, as_json, ask=ask)


@nodes.command()
def uncordon(node: Name = None, *, why: Note = "", home: Home = None, as_json: Json = False) -> None:
    """Put a node back into use."""
    _order(Client.uncordon, "uncordon", node, why, home, as_json)


nodes.command("maintenance")(maintenance.show)
nodes.command()(maintenance.cancel)
nodes.command()(token)
nodes.command()(join)
nodes.command()(leave)


def _order(
    order: Callable[..., NodeView], verb: str, name: str | None, why: str, home: Path | None, as_json: bool,
    *, ask: bool = False,
) -> None:  # fmt: skip
    if name is None:
        raise InputError(f"{verb} needs the name of a node", hint="`cordee nodes` lists them")
    if verb != "uncordon" and not why.strip():
        hint = f"cordee nodes {verb} {name} --why 'disk errors'"
        raise InputError(f"{verb} needs a reason, which is shown to everybody", hint=hint)
    with terminal.connect(home) as client:
        terminal.warn(client)
        if ask:
            consent_to_evict(client, name, "drain")
        found = order(client, name, why=why)
    if as_json:
        terminal.print_json(found)
    else:
        print(f"{found.name}: {node_state(found)}")


def _unknown(*words: str) -> InputError:
    return InputError(
        f"unknown: nodes {' '.join(words)}",
        hint="cordee nodes, or cordee nodes [cordon|drain|uncordon|token|join|leave]",
    )


def node_state(node: NodeView) -> str:
    """Return the state of a node as people read it."""
    if node.cordoned_by is None:
        return "down" if not node.up else "up" if node.reachable else "unreachable"
    attempts = len(set(node.used.values()))
    left = f"{plural(attempts, 'attempt')} left"
    word = "cordoned" if not node.drains else f"draining, {left}," if attempts else "drained"
    reason = f": {node.cordon_why}" if node.cordon_why else ""
    return f"{'' if node.up else 'down, '}{word} by {node.cordoned_by}{reason}"


def price(node: NodeView) -> str:
    """Return the price of a GPU of the node, with its source."""
    return f"{_per_hour(node)} ({node.price_source})" if node.micro_usd_per_gpu_hour else node.price_source


def _named(name: str, nodes: list[NodeView]) -> NodeView:
    found = next((node for node in nodes if node.name == name), None)
    if found is None:
        hint = meant(name, (node.name for node in nodes)) + "`cordee nodes` lists them"
        raise NotFoundError(f"there is no node {name!r}", hint=hint)
    return found


def show(found: list[NodeView]) -> None:
    """Print the table of nodes, with what is wrong with their GPUs."""
    placed, priced = any(node.domain for node in found), any(node.micro_usd_per_gpu_hour for node in found)
    heads = ["NODE", "STATE", "GPUS", "FREE", "HELD BY", "HOST"]
    heads += [head for head, shown in (("IN", placed), ("PRICE", priced)) if shown]
    rows = terminal.table(*heads, right=("FREE",), folds=("NODE", "STATE", "GPUS", "HELD BY", "HOST", "IN"))
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
        for text in node.reserved:
            console.print(f"{node.name}: reserved {text}", highlight=False, markup=False)
        if node.unavailable_why:
            console.print(f"{node.name}: {_reasons(node)}", highlight=False, markup=False)
        other = next((each for each in node.software if each.startswith("cordee ")), None)
        if node.up and other not in (None, f"cordee {cordee.__version__}"):
            console.print(f"{node.name}: {other}, here {cordee.__version__}", highlight=False, markup=False)
    for source in sorted({node.price_source for node in found}):
        console.print(f"price: {source}", highlight=False, markup=False)


def detail(node: NodeView) -> Iterator[str]:
    """Yield the lines about one node."""
    yield f"{node.name}: {node_state(node)}{f': {node.down_why}' if node.down_why else ''}"
    lines = {
        "GPUs": f"{node.gpus} x {node.gpu_name}, {_free(node)} free",
        "held": ", ".join(f"{terminal.ranges(gpus)} by {holder}" for holder, gpus in _held(node).items()),
        "unavailable": _reasons(node) if node.unavailable_why else terminal.ranges(node.unavailable),
        "reserved": "; ".join(node.reserved),
        "place": ", ".join(_place(node)),
        "host": _host(node),
        "capacity": node.capacity,
        "price": price(node),
        "software": ", ".join(node.software),
        "clock": _clock(node),
        "refused": f"{plural(node.refused, 'report')} (see server.log)" if node.refused else "",
    }
    for name, text in lines.items():
        if text:
            yield f"  {name:<11} {text}"


def history(faults: Sequence[NodeFault]) -> Iterator[str]:
    """Yield the last faults of a node, and whether it is a lemon."""
    if count := lemon_faults(faults):
        yield f"  a lemon: {plural(count, 'fault')}; hint: drain it, have it repaired, and uncordon it"
    for fault in faults[-_FAULTS_SHOWN:]:
        yield f"  {'fault':<11} {terminal.since(fault.at_us)} ago: {fault.why}"


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


def _clock(node: NodeView) -> str:
    off_s = node.clock_off_us / US_PER_S
    side = "ahead of" if off_s > 0 else "behind"
    return f"{abs(off_s):.1f} s {side} the server's; its times are corrected" if abs(off_s) >= CLOCK_OFF_S else ""


def _per_hour(node: NodeView) -> str:
    return f"{format_micro_usd(node.micro_usd_per_gpu_hour)}/GPU-h" if node.micro_usd_per_gpu_hour else "–"
