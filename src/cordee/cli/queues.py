"""`cordee queues`: show the tree of queues, or set it from a file."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cordee.answers.queues import BudgetRules, QueuesView, QueueView
from cordee.cli import terminal
from cordee.cli.terminal import Home, Json
from cordee.errors import InputError, SpecError
from cordee.units import US_PER_HOUR, format_micro_usd, plural
from cordee.workload.queues import parse_budgets, parse_queues

_MILLI = 1000
_BILLION = 10**9


def queues(
    what: Annotated[
        list[str] | None, typer.Argument(metavar="[set FILE]", help="Set the queues from a file; else show them.")
    ] = None,
    *,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Show the tree of queues (quota, GPUs held, borrowed and lent, waiting jobs), or set it."""
    words = what or []
    if words and (words[0] != "set" or len(words) != 2):
        raise InputError(f"unknown: queues {' '.join(words)}", hint="cordee queues, or cordee queues set queues.yaml")
    text = "" if not words else _text(Path(words[1]))
    wanted = None if not words else parse_queues(text, source=words[1])
    limits = None if not words else parse_budgets(text, source=words[1])
    budgets = None if limits is None else [BudgetRules.of(each) for each in limits]
    with terminal.connect(home) as client:
        terminal.warn(client)
        seen = client.queues() if wanted is None else client.set_queues(wanted, budgets)
    if as_json:
        terminal.print_json(seen)
        return
    console = terminal.stdout()
    console.print(_tree(seen))
    for line in _remarks(seen):
        console.print(line, highlight=False, markup=False)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise SpecError(f"{path} cannot be read: {reason}", hint="cordee queues set queues.yaml") from None


def _tree(seen: QueuesView) -> Table:
    """Return the tree; limits are remarks below it, so that 80 columns are enough."""
    weights = any(queue.weight != 1 for queue in seen.queues)
    heads = ["QUOTA", "HELD", "BORROWED", "LENDS", *(["WEIGHT"] if weights else []), "FAIR SHARE", "RUN", "WAIT"]
    table = terminal.table("QUEUE", *heads, right=heads, folds=("QUEUE",))
    for queue in seen.queues:
        table.add_row(
            "  " * queue.depth + queue.name,
            str(queue.quota_gpus) if queue.quota_gpus else "–",
            _gpus(queue.held_gpu_milli),
            _gpus(queue.borrowed_gpu_milli),
            "no" if not queue.lend else _gpus(queue.lends_gpu_milli),
            *([str(queue.weight)] if weights else []),
            f"{queue.fair_share_ppb / _BILLION:.1%}" if queue.fair_share_ppb else "–",
            str(queue.running_jobs or "–"),
            f"{queue.waiting_jobs} ({_gpus(queue.waiting_gpu_milli)})" if queue.waiting_jobs else "–",
        )
    return table


def _remarks(seen: QueuesView) -> list[str]:
    outer = [queue for queue in seen.queues if queue.parent is None]
    held, guaranteed = sum(queue.held_gpu_milli for queue in outer), sum(queue.quota_gpus for queue in outer)
    lines = [f"{_gpus(held) if held else 0} of {_gpus(seen.gpu_milli)} GPUs are held; quotas sum to {guaranteed}"]
    if guaranteed * _MILLI > seen.gpu_milli:
        lines[0] += ", more than there are now"
    for queue in seen.queues:
        lines += [f"{queue.name}: {limit}" for limit in _limits(queue)]
    return lines


def _limits(queue: QueueView) -> list[str]:
    limits = []
    if queue.limit_gpus is not None:
        limits.append(f"holds {queue.held_gpu_milli / _MILLI:g} of at most {plural(queue.limit_gpus, 'GPU')}")
    if queue.gpu_us_per_day is not None:
        used, most = (queue.day_gpu_us or 0) / US_PER_HOUR, queue.gpu_us_per_day / US_PER_HOUR
        limits.append(f"{used:.3g} of {most:g} GPU-h used in the last 24 h")
    if queue.micro_usd_per_day is not None:
        used_usd, most_usd = format_micro_usd(queue.day_micro_usd or 0), format_micro_usd(queue.micro_usd_per_day)
        limits.append(f"{used_usd} of {most_usd} used in the last 24 h")
    if queue.user_gpus is not None:
        users = ", ".join(f"{user} {_gpus(milli)}" for user, milli in queue.users_gpu_milli.items()) or "none"
        limits.append(f"at most {plural(queue.user_gpus, 'GPU')} a user; held: {users}")
    return limits


def _gpus(milli: int) -> str:
    return f"{milli / _MILLI:g}" if milli else "–"
