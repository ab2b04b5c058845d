"""GPU time by class, and its cost: one bar and one row for each line of a ledger."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cordee.units import MICRO_USD, US_PER_HOUR, format_micro_usd
from cordee.view.markup import CLASSES, num
from cordee.view.page import part

__all__ = ["CLASSES", "MoneyRow", "cases_html", "gpu_time", "money_html"]


@dataclass(frozen=True, slots=True)
class MoneyRow:
    """One line of a ledger.

    Attributes:
        label: the job, user or queue that held it.
        gpu_us: GPU time by class, in microseconds times GPUs.
        micro_usd: what the held time cost; None where the GPUs have no price.
    """

    label: str
    gpu_us: Mapping[str, int]
    micro_usd: int | None = None

    @property
    def held_us(self) -> int:
        """Return the sum of the classes."""
        return sum(self.gpu_us.values())


def money_html(rows: Sequence[MoneyRow]) -> str:
    """Return a bar and the amounts of each row; classes of which no row has any are left out."""
    shown = [name for name in CLASSES if any(row.gpu_us.get(name, 0) for row in rows)]
    priced = any(row.micro_usd is not None for row in rows)
    return part("money", shown, [_row(row, shown) for row in rows], priced)


def _row(row: MoneyRow, shown: Sequence[str]) -> dict[str, object]:
    percent = 100 / max(1, row.held_us)
    return {
        "label": row.label,
        "parts": [(name, num(row.gpu_us[name] * percent)) for name in CLASSES if row.gpu_us.get(name, 0)],
        "amounts": [gpu_time(row.gpu_us.get(name, 0)) for name in shown],
        "held": gpu_time(row.held_us),
        "cost": "no price" if row.micro_usd is None else format_micro_usd(row.micro_usd),
    }


def gpu_time(gpu_us: int) -> str:
    """Return GPU time in GPU-hours where it has at least one, else in GPU-seconds.

    >>> gpu_time(3_008 * 3_600_000_000), gpu_time(90_000_000), gpu_time(0)
    ('3,008 GPU-h', '90.0 GPU-s', '–')
    >>> gpu_time(40_000)
    '<0.1 GPU-s'
    """
    if gpu_us == 0:
        return "–"
    if gpu_us >= US_PER_HOUR:
        hours = gpu_us / US_PER_HOUR
        return f"{hours:,.0f} GPU-h" if hours >= 100 else f"{hours:.2f} GPU-h"
    return f"{gpu_us / 1_000_000:,.1f} GPU-s" if gpu_us >= 50_000 else "<0.1 GPU-s"


def cases_html(cases: Sequence[tuple[str, str, int, int]], *, worst_micro_usd: int) -> str:
    """Return bars of dollars to one scale, each of (what, why, lost and restart in micro-dollars)."""
    percent = 80 / max(1, worst_micro_usd)  # a fifth of the width is left for the amount behind the bar
    rows = [
        {
            "what": what,
            "why": why,
            "bars": [
                (name, num(micro_usd * percent), f"${micro_usd / MICRO_USD:,.2f}")
                for name, micro_usd in (("lost", lost_micro_usd), ("restart", restart_micro_usd))
            ],
            "amount": format_micro_usd(lost_micro_usd + restart_micro_usd),
        }
        for what, why, lost_micro_usd, restart_micro_usd in cases
    ]
    return part("cases", rows)
