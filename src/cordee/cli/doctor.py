"""The verb `doctor`: examine this machine, or show what the agents say of theirs."""

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from cordee.agent.calibration import files
from cordee.agent.findings import Finding, State, host_findings, write_speed
from cordee.agent.gpus import discover
from cordee.agent.probes import probe_findings
from cordee.answers.nodes import NodeView
from cordee.cli import terminal
from cordee.cli.nodes import CLOCK_OFF_S, node_state
from cordee.errors import InputError, NotFoundError
from cordee.hardware.load import load_catalogue
from cordee.planning import home_gpus
from cordee.units import US_PER_S, plural
from cordee.view.faults import LEMON, NodeFault, faults_of, is_sick, lemon_faults

_STYLES = {"ok": "green", "warn": "yellow", "bad": "bold red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The JSON of `cordee doctor`: the worst state of all, and each finding."""

    state: str
    findings: tuple[Finding, ...]


def doctor(
    nodes: Annotated[
        list[str] | None, typer.Argument(metavar="[NODE]...", help="Show what the agents of these nodes report.")
    ] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Show what the agents of all nodes report.")] = False,
    drain: Annotated[bool, typer.Option("--drain", help="With nodes: drain those with a bad finding.")] = False,
    to: Annotated[
        str,
        typer.Option(help="Folder to which checkpoints are written; its speed is measured.", show_default="this one"),
    ] = ".",
    slots: Annotated[int | None, typer.Option(help="Examine this many CPU slots, even if there are GPUs.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the matrix product and the all-reduce.")] = False,
    home: terminal.Home = None,
    as_json: terminal.Json = False,
) -> None:
    """Examine this machine: driver, GPUs, a product and an all-reduce, disk, limits, clock; or what agents report.

    Exits with 1 if a finding is bad.
    """
    if drain and not (nodes or every):
        raise InputError("--drain needs nodes", hint="cordee doctor --all --drain")
    if nodes or every:
        found = _reported(nodes or [], home, drain=drain)
    else:
        found = tuple(_findings(Path(to).expanduser().absolute(), slots, terminal.folder(home), quick=quick))
    worst = max((each.state for each in found), key=list(_STYLES).index)
    if as_json:
        terminal.print_json(Examination(state=worst, findings=found))
    else:
        _print(found)
    if worst == "bad":
        raise typer.Exit(1)


def _findings(to: Path, slots: int | None, home: Path, *, quick: bool) -> Iterator[Finding]:
    devices = discover(slots)
    yield from devices.findings()
    if not quick:
        with terminal.waiting("a product, and an all-reduce"):
            gpus = devices.count if devices.real else 0
            yield from probe_findings(devices.gpu_name, gpus, load_catalogue(gpu_files=home_gpus()))
    yield write_speed(to)
    yield from host_findings(to)
    yield from calibration_findings(home, socket.gethostname())


def calibration_findings(home: Path, host: str) -> Iterator[Finding]:
    """Yield when each of this host's devices was calibrated, and what of it has changed since then."""
    found = files.kept(home, host)
    if not found:
        yield Finding("calibration", "ok", "none: plans take the catalogue's figures")
    for each in found:
        figure = f"of {each.as_of}" + (f"; changed since: {', '.join(each.changed)}" if each.changed else "")
        hint = "run `cordee calibrate` again" if each.changed else ""
        yield Finding(f"calibration of {each.name}", "warn" if each.changed else "ok", figure, hint=hint)


def _reported(names: Sequence[str], home: Path | None, *, drain: bool) -> tuple[Finding, ...]:
    """Return the findings that the agents' reports and the log give of nodes; drain the bad ones if that is asked."""
    with terminal.connect(home) as client:
        known = {node.name: node for node in client.nodes()}
        unknown = sorted(set(names) - known.keys())
        if unknown:
            raise NotFoundError(f"there is no node {unknown[0]!r}", hint="`cordee nodes` lists them")
        faults = faults_of(event for _, event in client.events())
        found: list[Finding] = []
        for name in names or sorted(known):
            findings = list(node_findings(known[name], faults.get(name, [])))
            found += [replace(each, check=f"{name}: {each.check}") for each in findings]
            bad = [f"{each.check} {each.figure}" for each in findings if each.state == "bad"]
            if drain and bad and known[name].cordoned_by is None:
                client.drain(name, why=f"doctor: {'; '.join(bad)}"[:900])
                found.append(Finding(f"{name}: drained", "warn", "; ".join(bad), hint=f"cordee nodes uncordon {name}"))
    return tuple(found)


def node_findings(node: NodeView, faults: Sequence[NodeFault]) -> Iterator[Finding]:
    """Yield what is known of a node without asking it."""
    if not node.up or not node.reachable:
        yield Finding("agent", "bad", node_state(node), "up", "look at its agent.log, and at the machine")
    else:
        yield Finding("agent", "ok", node_state(node))
    for gpu, why in zip(node.unavailable, node.unavailable_why, strict=False):
        state: State = "bad" if is_sick(why) else "warn"
        yield Finding(
            f"GPU {gpu}", state, why, "available", "" if state == "warn" else "see `cordee nodes` for jobs there"
        )
    off_s = node.clock_off_us / US_PER_S
    if abs(off_s) >= CLOCK_OFF_S:
        yield Finding(
            "clock", "warn", f"{off_s:+.1f} s against the server's", f"{CLOCK_OFF_S:g} s", "start chronyd there"
        )
    if node.refused:
        yield Finding("reports", "warn", f"{node.refused} refused", "none", "see server.log")
    if count := lemon_faults(faults):
        hint = f"drain it, have it repaired, and uncordon it: `cordee nodes {node.name}` shows its history"
        yield Finding("a lemon", "bad", f"{plural(count, 'fault')}, the last: {faults[-1].why}", f"under {LEMON}", hint)
    elif faults and not faults[-1].is_settled:
        yield Finding("faults", "warn", f"{len(faults)}, the last: {faults[-1].why}", "none")


def _print(found: tuple[Finding, ...]) -> None:
    console = terminal.stdout()
    table = terminal.table("", "CHECK", "FOUND", "EXPECTED", folds=("CHECK", "FOUND", "EXPECTED"))
    for each in found:
        table.add_row(Text(each.state, style=_STYLES[each.state]), each.check, each.figure, each.expected)
    console.print(table)
    for each in found:
        if each.hint:
            console.print(f"{each.check}: {each.hint}", highlight=False, markup=False)
