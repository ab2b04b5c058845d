"""The tables of `cordee cost --from`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.table import Table

from cordee.account.elsewhere import CUT_SHORT, ENDS, OtherCost, OtherRow
from cordee.cli import terminal
from cordee.simulate.answer import LeftOut, duration_of
from cordee.simulate.what_if import Outcome, WhatIf
from cordee.units import US_PER_HOUR, US_PER_S, format_duration, format_micro_usd, plural

_NARROW = 110  # columns of a terminal below which some columns are left out
_WIDE = 140  # from here on each end has a column
_LABELS = {"out_of_memory": "no memory", "node_fail": "node fail"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherCostAnswer:
    """The JSON of `cordee cost --from`."""

    export: str
    cost: OtherCost
    what_if: WhatIf | None
    left_out: tuple[LeftOut, ...]
    remarks: tuple[str, ...]
    price_sources: tuple[str, ...]


def print_other_cost(answer: OtherCostAnswer) -> None:
    """Print the table of an export, what was lost, idle and waited for, and what was assumed."""
    console, found = terminal.stdout(), answer.cost
    days = " to ".join(f"{datetime.fromtimestamp(at // US_PER_S, UTC):%Y-%m-%d %H:%M}" for at in _bounds(found))
    attempts = plural(found.total.attempts, "attempt")
    _print(f"{answer.export}: {plural(found.total.jobs, 'job')}, {attempts}, {days} UTC, GPU-hours")
    console.print(_table(found, console.width))
    for line in _losses(found):
        _print(line)
    if answer.what_if is not None:
        console.print(_what_if_table(answer.what_if, console.width))
        for line in _gain(answer.what_if):
            _print(line)
    for line in (*found.assumptions, *(answer.what_if.assumptions if answer.what_if else ())):
        _print(f"assumed: {line}")
    for left in (*answer.left_out, *(answer.what_if.left_out if answer.what_if else ())):
        at = f" (first: line {left.line:,})" if left.line else ""
        _print(f"left out: {plural(left.rows, 'row')}, {left.kind}{at}")
    for line in (*answer.remarks, *(f"price: {source}" for source in answer.price_sources)):
        _print(line)


def _print(line: str) -> None:
    terminal.stdout().print(line, highlight=False, markup=False)


def _bounds(found: OtherCost) -> tuple[int, int]:
    return found.from_us, found.to_us


def _table(found: OtherCost, width: int) -> Table:
    shown = [end for end in ENDS if found.total.gpu_us[end]]
    short = tuple(end for end in shown if end in CUT_SHORT)
    groups: list[tuple[str, ...]] = [(end,) for end in shown if end not in CUT_SHORT]
    groups += [(end,) for end in short] if width >= _WIDE else [short] if short else []
    heads = [_LABELS.get(group[0], group[0]).upper() if len(group) == 1 else "CUT SHORT" for group in groups]
    numbers = [*(["JOBS"] if width >= _NARROW else []), *heads, "HELD", "LOST"]
    numbers += [*(["COST"] if width >= _NARROW else []), "COST OF LOST"]
    table = terminal.table(found.by.upper(), *numbers, right=numbers)
    for column in table.columns[1:] if table.box is not None else ():
        column.header = str(column.header).replace(" ", "\n", 1)
    for row in found.rows:
        table.add_row(*_cells(row, groups, width))
    if len(found.rows) > 1:
        table.add_section()
        table.add_row(*_cells(found.total, groups, width))
    return table


def _cells(row: OtherRow, groups: Sequence[tuple[str, ...]], width: int) -> list[str]:
    hours = [_hours(sum(row.gpu_us[end] for end in group)) for group in groups]
    cost, lost = (format_micro_usd(each) if each else "–" for each in (row.held_micro_usd, row.lost_micro_usd))
    is_wide = width >= _NARROW
    jobs, costs = ([f"{row.jobs:,}"], [cost]) if is_wide else ([], [])
    return [row.key, *jobs, *hours, _hours(row.held_gpu_us), _hours(row.lost_gpu_us), *costs, lost]


def _hours(gpu_us: int) -> str:
    hours = gpu_us / US_PER_HOUR
    return "–" if not gpu_us else f"{hours:,.0f}" if hours >= 100 else f"{hours:,.1f}" if hours >= 1 else f"{hours:.2f}"


def _amount(gpu_us: int, micro_usd: int, of_us: int, of: str) -> str:
    dollars = f", {format_micro_usd(micro_usd)}" if micro_usd else ""
    part = f" ({100 * gpu_us / of_us:.1f} % of {of})" if of_us else ""
    return f"{_hours(gpu_us)} GPU-h{dollars}{part}"


def _losses(found: OtherCost) -> Iterator[str]:
    total = found.total
    causes = [f"{_LABELS.get(end, end)} {_hours(total.gpu_us[end])}" for end in CUT_SHORT if total.gpu_us[end]]
    if causes:
        lost = _amount(total.lost_gpu_us, total.lost_micro_usd, total.held_gpu_us, "what was held")
        yield f"lost: {lost}; held by attempts that were cut short: {', '.join(causes)}"
    capacity = found.gpus * (found.to_us - found.from_us)
    yield f"idle: {_amount(found.idle_gpu_us, found.idle_micro_usd, capacity, plural(found.gpus, 'GPU'))}"
    mean, p99 = format_duration(total.wait_mean_s), format_duration(total.wait_p99_s)
    yield f"waiting: {_hours(total.waiting_gpu_us)} GPU-h; a start took {mean} on average, {p99} at the 99th percentile"


def _what_if_table(found: WhatIf, width: int) -> Table:
    rows = [_outcome(each) for each in (found.log, *found.replayed)]
    shown = [head for head in rows[0] if width >= _NARROW or head not in ("AWAY", "PREEMPTED", "END", "COST")]
    table = terminal.table("SCHEDULER", *shown, right=shown)
    for each, cells in zip((found.log, *found.replayed), rows, strict=True):
        table.add_row(each.name, *(cells[head] for head in shown))
    return table


def _outcome(each: Outcome) -> dict[str, str]:
    return {
        "WAIT": duration_of(each.wait_s, lambda wait_s: wait_s.mean),
        "P99 WAIT": duration_of(each.wait_s, lambda wait_s: wait_s.p99),
        "AWAY": duration_of(each.away_s, lambda away_s: away_s.mean),
        "END": format_duration(each.makespan_s),
        "PREEMPTED": f"{each.preemptions:,}",
        "IDLE": _hours(each.idle_gpu_us),
        "HELD": _hours(each.held_gpu_us),
        "LOST": _hours(each.lost_gpu_us),
        "COST": format_micro_usd(each.held_micro_usd) if each.held_micro_usd else "–",
        "COST OF LOST": format_micro_usd(each.lost_micro_usd) if each.lost_micro_usd else "–",
    }


def _gain(found: WhatIf) -> Iterator[str]:
    """Yield a line for each replay: hours, dollars and waits against the log."""
    for each in found.replayed:
        held_us, usd = each.held_gpu_us - found.log.held_gpu_us, each.held_micro_usd - found.log.held_micro_usd
        waits = ""
        if each.wait_s is not None and found.log.wait_s is not None:
            wait_s = each.wait_s.mean - found.log.wait_s.mean
            longer = "shorter" if wait_s <= 0 else "longer"
            waits = f"; a mean wait would have been {format_duration(abs(wait_s))} {longer}"
        dollars = f" ({format_micro_usd(abs(usd))})" if usd else ""
        gpu_hours = f"{_hours(abs(held_us))} GPU-h{dollars} {'less' if held_us <= 0 else 'more'}"
        yield f"{each.name} would have held {gpu_hours} for the same {plural(found.jobs, 'job')}{waits}"
