"""The verbs of sweeps: list, show. `cordee run` declares one, `cordee stop` ends it."""

import time
from pathlib import Path
from typing import Annotated

import typer

from cordee.answers.sweeps import SweepDetailView, SweepView
from cordee.cli import terminal
from cordee.cli.plan_more import write_page
from cordee.cli.sweep_text import page, print_list, print_sweep
from cordee.cli.terminal import Home, Json
from cordee.client import Client
from cordee.control.sweeps.picture import best_text, rungs_text, values_text

_LOOK_S = 0.5

sweep = typer.Typer(no_args_is_help=True)


@sweep.command("list")
def list_sweeps(home: Home = None, as_json: Json = False) -> None:
    """List all sweeps."""
    with terminal.connect(home) as client:
        found = client.sweeps()
    if as_json:
        terminal.print_json(found)
    elif found:
        print_list(terminal.stdout(), found)
    else:
        print("no sweeps yet; begin one: cordee run --gpus 1 --sweep lr=1e-4..1e-2:log -- python train.py --lr {lr}")


@sweep.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Id of a sweep, or the name of the newest.")],
    *,
    html: Annotated[Path | None, typer.Option(help="Write a page with parallel coordinates.")] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Show all trials.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Show a sweep: its trials with their values and metric, the best one, and what it has cost."""
    with terminal.connect(home) as client:
        found = client.sweep(name)
    if html is not None:
        write_page(html, page(found))
    if as_json:
        terminal.print_json(found)
    else:
        print_sweep(terminal.stdout(), found, show_all=show_all)


def print_declared(made: SweepView) -> None:
    """Print the id of a new sweep, and what it does."""
    print(f"{made.sweep_id} {made.state}: {rungs_text(made)}, {made.max_running} at a time")
    for note in made.notes:
        terminal.stderr().print(f"note: {note}", highlight=False, markup=False)


def follow_to_end(client: Client, sweep_id: str) -> int:
    """Print each change of a trial until the sweep ends; return the exit code: 0 if a trial has a result, else 1."""
    seen: dict[int, str] = {}
    while True:
        found = client.sweep(sweep_id)
        for line in _changes(found, seen):
            print(line, flush=True)
        if found.state == "ended":
            print_sweep(terminal.stderr(), found, show_all=False)
            return 0 if found.best is not None else 1
        time.sleep(_LOOK_S)


def _changes(found: SweepDetailView, seen: dict[int, str]) -> list[str]:
    """Return a line for each trial whose state has changed, and note it."""
    lines = []
    for each in found.trials:
        state = f"{each.state} {each.rung}"
        if seen.get(each.number) != state:
            seen[each.number] = state
            result = f", {best_text(found, each)}" if each.metric is not None else ""
            lines.append(f"trial {each.number} {each.state}: {values_text(each.values)}, step {each.step}{result}")
    return lines
