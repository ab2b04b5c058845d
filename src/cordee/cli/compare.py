"""`cordee compare`: runs beside each other."""

from pathlib import Path
from typing import Annotated

import typer

from cordee.cli import terminal
from cordee.cli.compare_text import comparison_page, print_comparison
from cordee.cli.plan_more import write_page
from cordee.cli.terminal import Home, Json
from cordee.compared import ComparedRun, common_curves, differences, labels
from cordee.errors import InputError

RUNS_MAX = 8


def compare(
    jobs: Annotated[list[str], typer.Argument(metavar="A B [C...]", help="Ids or names of jobs.")],
    *,
    html: Annotated[Path | None, typer.Option(help="Write a page with charts of the common metrics.")] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Compare jobs: settings that differ, time, cost, tokens a second, and the curves of their common metrics."""
    if not 2 <= len(jobs) <= RUNS_MAX:
        raise InputError(f"{len(jobs)} jobs cannot be compared", hint=f"name 2 to {RUNS_MAX}: cordee compare A B")
    with terminal.connect(home) as client:
        runs = [ComparedRun(client.job(job), client.metrics(job), client.job_cost(job)) for job in jobs]
    if html is not None:
        write_page(html, comparison_page(runs))
    if as_json:
        terminal.print_json(
            {
                "jobs": [run.job.job_id for run in runs],
                "labels": labels(runs),
                "differences": [{"name": each.name, "values": each.values} for each in differences(runs)],
                "run_us": [run.run_us for run in runs],
                "cost": [run.cost for run in runs],
                "common_curves": common_curves(runs),
                "metrics": [run.metrics for run in runs],
            }
        )
    else:
        print_comparison(runs)
