"""The verb `budget`: set, list and remove budgets of queues and users."""

from typing import Annotated, Any

import typer
from rich.table import Table

from cordee.answers.queues import BudgetView
from cordee.cli import terminal
from cordee.cli.terminal import Home, Json
from cordee.errors import InputError
from cordee.events import Budget
from cordee.units import US_PER_HOUR, US_PER_S, format_micro_usd, parse_duration_s, parse_micro_usd

budget = typer.Typer(add_completion=False, no_args_is_help=True)

Queue = Annotated[str | None, typer.Option(help="The queue, with those below it.", show_default=False)]
User = Annotated[str | None, typer.Option(help="The user, everywhere or in the queue.", show_default=False)]
Per = Annotated[str, typer.Option(metavar="month|total", help="Period: a calendar month in UTC, or in total.")]


@budget.command("set")
def set_(
    *,
    queue: Queue = None,
    user: User = None,
    per: Per = "month",
    cost: Annotated[str | None, typer.Option(help="Limit in dollars: $20,000.", show_default=False)] = None,
    gpu_time: Annotated[str | None, typer.Option(help="Limit of GPU time: 500h.", show_default=False)] = None,
    hard: Annotated[bool, typer.Option("--hard", help="Jobs over it wait; without it, messages are sent.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Running jobs save and leave before it is spent.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Set a budget; it replaces that of the same queue, user and period."""
    rules: dict[str, Any] = _whose(queue, user, per) | {"hard": hard, "stops": stop}
    if cost is not None:
        rules["micro_usd"] = parse_micro_usd(cost)
    if gpu_time is not None:
        rules["gpu_us"] = round(parse_duration_s(gpu_time) * US_PER_S)
    with terminal.connect(home) as client:
        found = client.money.set_budget(**rules)
    if as_json:
        terminal.print_json(found)
    else:
        terminal.stdout().print(table([found]))


@budget.command("ls")
def show(*, home: Home = None, as_json: Json = False) -> None:
    """List the budgets, with the amount spent of each and the forecast for the end of the month."""
    with terminal.connect(home) as client:
        found = client.money.budgets()
    if as_json:
        terminal.print_json(found)
    elif not found:
        print("no budget is set: cordee budget set --queue llm --cost '$20,000' --hard")
    else:
        terminal.stdout().print(table(found))


@budget.command("rm")
def remove(
    *,
    queue: Queue = None,
    user: User = None,
    per: Per = "month",
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Remove a budget."""
    with terminal.connect(home) as client:
        found = client.money.remove_budget(**_whose(queue, user, per))
    if as_json:
        terminal.print_json(found)
    else:
        print(f"the budget of {whose(found)} per {found.per} is removed")


def _whose(queue: str | None, user: str | None, per: str) -> dict[str, str]:
    if per not in ("month", "total"):
        raise InputError(f"a budget is per month or in total, not {per!r}", hint="--per month")
    return {key: value for key, value in (("queue", queue), ("user", user), ("per", per)) if value is not None}


def whose(found: BudgetView) -> str:
    """Return whose a budget is."""
    return Budget(queue=found.queue, user=found.user).whose


def table(found: list[BudgetView]) -> Table:
    """Return the budgets as a table: a row for money, and one for GPU time."""
    rows = terminal.table(
        "BUDGET",
        "PER",
        "SPENT",
        "OF",
        "",
        "MONTH'S END",
        "IF SPENT",
        right=("SPENT", "OF", "", "MONTH'S END"),
        folds=("BUDGET",),
    )
    for each in found:
        over = "a message" if not each.hard else "jobs wait and leave" if each.stops else "jobs wait"
        for spent, most, ahead, shown in (
            (each.spent_micro_usd, each.micro_usd, each.ahead_micro_usd, format_micro_usd),
            (each.spent_gpu_us, each.gpu_us, each.ahead_gpu_us, _gpu_hours),
        ):
            if most is not None:
                then = "–" if ahead is None else shown(ahead)
                rows.add_row(whose(each), each.per, shown(spent), shown(most), f"{spent / most:.0%}", then, over)
    return rows


def _gpu_hours(gpu_us: int) -> str:
    return f"{gpu_us / US_PER_HOUR:,.1f} GPU-h"
