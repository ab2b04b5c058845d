"""`cordee demo`: one job from its plan to its cost, shown as it happens and written as one HTML report.

The numbers come from the planner, a live run, its ledger and the simulator; the demo fails if a claim does not hold.
"""

import importlib.util
import time
from pathlib import Path
from typing import Annotated

import typer

import cordee
from cordee.cli.demo_text import Terminal
from cordee.demo.costs import show_costs
from cordee.demo.live import run_live
from cordee.demo.memory import Sizing, show_memory
from cordee.demo.narrator import Narrator
from cordee.demo.reclaim import ReclaimLosses
from cordee.demo.stage import stage
from cordee.errors import InputError, MissingExtraError
from cordee.units import format_bytes, format_duration, format_micro_usd
from cordee.view.report import HtmlReport, report_html

NEEDS = ("torch", "fastapi", "sqlalchemy", "blake3", "xxhash")
TITLE = "One job, planned, preempted and resumed"


def demo(
    out: Annotated[Path, typer.Option(help="Path of the HTML report.")] = Path("demo/report.html"),
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary home of the live run.")] = False,
    ranks: Annotated[int, typer.Option(min=2, hidden=True, help="Ranks of each gang.")] = 4,
    steps: Annotated[int, typer.Option(min=40, hidden=True, help="Steps of the preempted job.")] = 100,
) -> None:
    """Plan, train, preempt, resume and account a real job on this machine, and check every claim."""
    _check_installed()
    _check_writable(out)
    began_s = time.monotonic()
    terminal = Terminal()
    narrator = Narrator(terminal)
    terminal.console.print(f"[bold]{TITLE}[/bold] on this machine: about two minutes")
    sizing = show_memory(narrator)
    with stage(terminal, keep=keep, price_as="H100", ranks=ranks) as server:
        jobs = run_live(narrator, server, steps)
        seen = show_costs(narrator, server, jobs, sizing)
    took = format_duration(time.monotonic() - began_s)
    n_claims = sum(len(section.claims) for section in narrator.sections)
    path = _write(out, _report(narrator, sizing, seen, took, n_claims))
    terminal.console.print()
    terminal.paragraph(f"{n_claims} claims hold. It took {took}. The report: {path}", "bold")


def _check_installed() -> None:
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"the demo trains a real model and needs {', '.join(missing)}",
            hint="pip install 'cordee[all]' torch, or run `make demo` in a clone",
        )


def _check_writable(out: Path) -> None:
    """Refuse a path that cannot be written before two minutes are spent."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        is_new = not out.exists()
        out.open("ab").close()
        if is_new:
            out.unlink()
    except OSError as error:
        raise InputError(
            f"the report cannot be written to {out}: {error.strerror}",
            hint="give a path with --out, as in: cordee demo --out /tmp/report.html",
        ) from None


def _report(narrator: Narrator, sizing: Sizing, seen: ReclaimLosses, took: str, n_claims: int) -> HtmlReport:
    facts = [
        (format_bytes(sizing.plan.state_bytes), f"to hold {sizing.plan.request.shape.name} in training"),
        ("0", "steps repeated after the preemption, weights bitwise equal"),
        (format_micro_usd(seen.plain.lost_micro_usd), "lost in 47 hours on 64 GPUs without checkpoints"),
        (
            format_micro_usd(seen.noticed_worst.micro_usd),
            "for a restart: the only loss of a job that handles its notice",
        ),
    ]
    lead = (
        "A small model was trained on this machine, preempted by a more important job, and resumed with no step lost. "
        "This page is drawn from the plan, the run's log, its ledger and a simulation."
    )
    footer = (
        f"{n_claims} claims were checked in {took}. Written by cordee {cordee.__version__} with `cordee demo`. "
        "This page loads nothing from elsewhere."
    )
    return HtmlReport(TITLE, lead, narrator.sections, facts, footer)


def _write(out: Path, report: HtmlReport) -> Path:
    out.write_text(report_html(report), encoding="utf-8")
    return out.absolute()
