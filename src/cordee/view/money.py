"""Who held how much GPU time, for what, and what it cost: one bar and one row for each line of a ledger."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cordee.units import MICRO_USD, US_PER_HOUR, format_micro_usd
from cordee.view.markup import num, text

CLASSES = ("useful", "checkpoint", "restart", "stall", "lost", "unreported")


@dataclass(frozen=True, slots=True)
class MoneyRow:
    """One line of a bill.

    Attributes:
        label: whose it is.
        gpu_us: GPU time by class, in microseconds times GPUs.
        micro_usd: what the held time cost; None where the GPUs have no price.
    """

    label: str
    gpu_us: Mapping[str, int]
    micro_usd: int | None = None

    @property
    def held_us(self) -> int:
        """The sum of the classes."""
        return sum(self.gpu_us.values())


def money_html(rows: Sequence[MoneyRow]) -> str:
    """Bars of shares and a table of the amounts; classes that nobody has are left out."""
    shown = [name for name in CLASSES if any(row.gpu_us.get(name, 0) for row in rows)]
    priced = any(row.micro_usd is not None for row in rows)
    head = "".join(f'<th><i class="dot {name}"></i>{name}</th>' for name in shown)
    body = "".join(_row(row, shown, priced) for row in rows)
    return (
        '<div class="wide"><table class="money"><thead><tr><th></th><th class="share">GPU time</th>'
        f"{head}<th>held</th>{'<th>cost</th>' if priced else ''}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(row: MoneyRow, shown: Sequence[str], priced: bool) -> str:
    cells = "".join(f"<td>{text(gpu_time(row.gpu_us.get(name, 0)))}</td>" for name in shown)
    cost = "no price" if row.micro_usd is None else format_micro_usd(row.micro_usd)
    return (
        f'<tr><th scope="row">{text(row.label)}</th><td class="share">{_bar(row)}</td>{cells}'
        f"<td><b>{text(gpu_time(row.held_us))}</b></td>{f'<td><b>{text(cost)}</b></td>' if priced else ''}</tr>"
    )


def _bar(row: MoneyRow) -> str:
    held_us = max(1, row.held_us)
    parts = "".join(
        f'<i class="{name}" style="width:{num(100 * row.gpu_us.get(name, 0) / held_us)}%" '
        f'title="{name} {num(100 * row.gpu_us.get(name, 0) / held_us)} %"></i>'
        for name in CLASSES
        if row.gpu_us.get(name, 0)
    )
    return f'<div class="stack">{parts}</div>'


def gpu_time(gpu_us: int) -> str:
    """GPU time as people say it: GPU-hours where there are many, else GPU-seconds.

    >>> gpu_time(3_008 * 3_600_000_000), gpu_time(90_000_000), gpu_time(0)
    ('3,008 GPU-h', '90.0 GPU-s', '–')
    """
    if gpu_us == 0:
        return "–"
    if gpu_us >= US_PER_HOUR:
        hours = gpu_us / US_PER_HOUR
        return f"{hours:,.0f} GPU-h" if hours >= 100 else f"{hours:.2f} GPU-h"
    return f"{gpu_us / 1_000_000:,.1f} GPU-s"


def cases_html(cases: Sequence[tuple[str, str, int, int]], *, worst_micro_usd: int) -> str:
    """Bars of dollars to one scale: (what, why, lost and restart in micro-dollars)."""
    rows = []
    for what, why, lost_micro_usd, restart_micro_usd in cases:
        amount = format_micro_usd(lost_micro_usd + restart_micro_usd)
        share = 100 / max(1, worst_micro_usd)
        rows.append(
            f'<div class="case"><p><b>{text(what)}</b><span>{text(why)}</span></p>'
            f'<div class="stack">{_dollars("lost", lost_micro_usd, share)}'
            f"{_dollars('restart', restart_micro_usd, share)}<b>{text(amount)}</b></div></div>"
        )
    return f'<div class="cases">{"".join(rows)}</div>'


def _dollars(name: str, micro_usd: int, share: float) -> str:
    # A fifth of the width is left for the amount that stands behind the bar.
    width = 0.8 * micro_usd * share
    return f'<i class="{name}" style="width:{num(width)}%" title="{name} ${micro_usd / MICRO_USD:,.2f}"></i>'
