"""`cordee demo`: a job from its plan to its cost, and a cluster shared with a service, live and as one HTML report.

The numbers come from the planner, a live run, its ledger and the simulator; the demo fails if a claim does not hold.
"""

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import cordee
from cordee.cli.demo_text import Terminal
from cordee.demo.costs import show_costs
from cordee.demo.live import run_live
from cordee.demo.memory import show_memory
from cordee.demo.narrator import Narrator
from cordee.demo.stage import gateway, stage
from cordee.errors import InputError, MissingExtraError
from cordee.units import format_bytes, format_duration, format_micro_usd
from cordee.view.report import HtmlReport, report_html

NEEDS = ("torch", "fastapi", "sqlalchemy", "blake3", "xxhash")
SERVING_NEEDS = ("aiohttp", "httptools", "msgspec", "xllamacpp", "gguf", "tokenizers")
TRAINING, SERVING = "training", "serving"
TITLES = {TRAINING: "One job, planned, preempted and resumed", SERVING: "One cluster for training and serving"}
LEADS = {
    TRAINING: "A small model trained on this machine, was preempted by a more important job, and lost no step.",
    SERVING: "A training job made room for the traffic of a service and came back; a replica died under open streams.",
}
DRAWN_FROM = "This page is drawn from the plan, the logs of what ran, the ledgers and a simulation."
SERVING_HINT = "pip install 'cordee[serve]' tokenizers"
Fact = tuple[str, str]
"""A number of the report's head, and what it is."""


def demo(
    out: Annotated[Path, typer.Option(help="Path of the HTML report.")] = Path("demo/report.html"),
    act: Annotated[str | None, typer.Option(metavar="training|serving", help="Play one of the two acts only.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary homes of the live runs.")] = False,
    ranks: Annotated[int, typer.Option(min=2, hidden=True, help="Ranks of each gang.")] = 4,
    steps: Annotated[int, typer.Option(min=40, hidden=True, help="Steps of the preempted job.")] = 100,
) -> None:
    """Plan, train, preempt, resume, serve and account on this machine, and check every claim."""
    acts, missing = _acts(act)
    _check_installed()
    _check_writable(out)
    began_s = time.monotonic()
    terminal = Terminal()
    narrator = Narrator(terminal)
    facts: list[Fact] = []
    if TRAINING in acts:
        terminal.console.print(f"[bold]{TITLES[TRAINING]}[/bold] on this machine: about two minutes")
        facts += _play_training(narrator, keep=keep, ranks=ranks, steps=steps)
    if SERVING in acts:
        terminal.console.print(f"\n[bold]{TITLES[SERVING]}[/bold] on this machine: about a minute")
        facts += _play_serving(narrator, keep=keep, ranks=ranks)
    elif missing:
        terminal.paragraph(f"\nThe second act, on serving, is left out: it needs {', '.join(missing)} ({SERVING_HINT})")
    took = format_duration(time.monotonic() - began_s)
    n_claims = sum(len(section.claims) for section in narrator.sections)
    path = _write(out, _report(narrator, acts, facts, took, n_claims))
    terminal.console.print()
    terminal.paragraph(f"{n_claims} claims hold. It took {took}. The report: {path}", "bold")


def _acts(act: str | None) -> tuple[tuple[str, ...], list[str]]:
    """Return the acts to play, and the libraries for want of which the second one is left out.

    Raises:
        InputError: there is no such act.
        MissingExtraError: the libraries of the one that was asked for are not installed.
    """
    if act not in (None, TRAINING, SERVING):
        raise InputError(f"there is no act {act!r}", hint=f"the acts are {TRAINING} and {SERVING}")
    missing = [] if act == TRAINING else _missing(SERVING_NEEDS)
    if act == SERVING and missing:
        raise MissingExtraError(f"the act {SERVING} needs {', '.join(missing)}", hint=SERVING_HINT)
    if act is not None:
        return (act,), []
    return ((TRAINING,) if missing else (TRAINING, SERVING)), missing


def _play_training(narrator: Narrator, *, keep: bool, ranks: int, steps: int) -> list[Fact]:
    sizing = show_memory(narrator)
    with stage(narrator.screen, keep=keep, price_as="H100", ranks=ranks) as server:
        jobs = run_live(narrator, server, steps)
        seen = show_costs(narrator, server, jobs, sizing)
    return [
        (format_bytes(sizing.plan.state_bytes), f"to hold {sizing.plan.request.shape.name} in training"),
        ("0", "steps repeated after the preemption, weights bitwise equal"),
        (format_micro_usd(seen.plain.lost_micro_usd), "lost in 47 hours on 64 GPUs without checkpoints"),
        (
            format_micro_usd(seen.noticed_worst.micro_usd),
            "for a restart: the only loss of a job that handles its notice",
        ),
    ]


def _play_serving(narrator: Narrator, *, keep: bool, ranks: int) -> list[Fact]:
    from cordee.demo.serving import run_serving  # It imports libraries that may be missing.

    ranks -= ranks % 2  # It trains on half of them, too.
    with (
        stage(narrator.screen, keep=keep, price_as="H100", ranks=ranks, slots=ranks + 1) as server,
        gateway(server) as url,
    ):
        served = run_serving(narrator, server, url)
    return [
        ("0", f"tokens lost when a replica was killed under {served.streams} open streams"),
        (f"{ranks} → {ranks // 2} → {ranks}", "ranks of a training job that makes room for traffic and comes back"),
    ]


def _missing(needs: Sequence[str]) -> list[str]:
    return [name for name in needs if importlib.util.find_spec(name) is None]


def _check_installed() -> None:
    missing = _missing(NEEDS)
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


def _report(narrator: Narrator, acts: Sequence[str], facts: Sequence[Fact], took: str, n_claims: int) -> HtmlReport:
    footer = (
        f"{n_claims} claims were checked in {took}. Written by cordee {cordee.__version__} with `cordee demo`. "
        "This page loads nothing from elsewhere."
    )
    lead = " ".join(LEADS[act] for act in acts)
    return HtmlReport(TITLES[acts[0]], f"{lead} {DRAWN_FROM}", narrator.sections, facts, footer)


def _write(out: Path, report: HtmlReport) -> Path:
    out.write_text(report_html(report), encoding="utf-8")
    return out.absolute()
