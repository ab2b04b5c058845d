"""`cordee demo`: one job through the wall, told as it happens and written as one HTML report.

Nothing in it is staged: the numbers come from the planner, a live run, its ledger and the simulator, and it fails
if one of its claims does not hold.
"""

import importlib.util
import time
from pathlib import Path
from typing import Annotated

import typer

import cordee
from cordee.cli.story.bill import Bill, tell_bill
from cordee.cli.story.live import tell_live
from cordee.cli.story.money import tell_money
from cordee.cli.story.stage import stage
from cordee.cli.story.teller import Teller
from cordee.errors import InputError, MissingExtraError
from cordee.simulate.story import Story
from cordee.units import format_bytes, format_duration, format_micro_usd
from cordee.view.report import Report, report_html

NEEDS = ("torch", "fastapi", "sqlalchemy", "blake3", "xxhash")
TITLE = "One job through the wall"


def demo(
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("demo/report.html"),
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary home of the live run.")] = False,
    ranks: Annotated[int, typer.Option(min=2, hidden=True, help="Of each gang.")] = 4,
    steps: Annotated[int, typer.Option(min=40, hidden=True, help="Of the job that is pushed.")] = 100,
) -> None:
    """Plan, start, push, resume and bill a real training job on this machine, and check every claim."""
    _check_installed()
    _check_writable(out)
    began_s = time.monotonic()
    teller = Teller()
    teller.console.print(f"[bold]{TITLE}[/bold]  plan, gang, push, resume, bill: about two minutes")
    bill = tell_bill(teller)
    with stage(teller, keep=keep, price_as="H100", ranks=ranks) as stood:
        cast = tell_live(teller, stood, steps)
        story = tell_money(teller, stood, cast, bill)
    took = format_duration(time.monotonic() - began_s)
    n_claims = sum(len(section.claims) for section in teller.sections)
    path = _write(out, _report(teller, bill, story, took, n_claims))
    teller.console.print()
    teller.say(f"{n_claims} claims hold. It took {took}. The report: {path}", "bold")


def _check_installed() -> None:
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"the demo trains a real model and needs {', '.join(missing)}",
            hint="pip install 'cordee[all]' torch, or run `make demo` in a clone",
        )


def _check_writable(out: Path) -> None:
    """Two minutes are not spent on a report that has no place."""
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


def _report(teller: Teller, bill: Bill, story: Story, took: str, n_claims: int) -> Report:
    facts = [
        (format_bytes(bill.plan.state_bytes), f"to hold {bill.plan.request.shape.name} in training"),
        ("0", "steps repeated after the push, weights bitwise equal"),
        (format_micro_usd(story.plain.lost_micro_usd), "lost in 47 hours on 64 GPUs without checkpoints"),
        (
            format_micro_usd(story.noticed_worst.micro_usd),
            "restart: all that the same reclaim takes from a job that handles its notice",
        ),
    ]
    lead = (
        "A small model was trained on this machine, pushed aside by a more important job, and went on as if "
        "nothing had happened. This page is drawn from the plan, the run's log, its ledger and a simulation."
    )
    footer = (
        f"{n_claims} claims were checked in {took}. Written by cordee {cordee.__version__} with `cordee demo`. "
        "This page loads nothing from elsewhere."
    )
    return Report(TITLE, lead, teller.sections, facts, footer)


def _write(out: Path, report: Report) -> Path:
    out.write_text(report_html(report), encoding="utf-8")
    return out.absolute()
