"""`cordee experts` over several windows of loads: what the controller would have done after each of them.

For one window see `experts.py`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from cordee.cli.plan_text import console, indented, title
from cordee.errors import InputError
from cordee.plan.experts import Placement, Policy, Seen, Watch, mapping, observe
from cordee.plan.experts.shape import Floats

SAYS = {"hold": "leaves it", "watch": "waits: will it last?", "rest": "rests", "move": "moves"}


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """One window: its balance as it was served, and what the controller did after it."""

    name: str
    balance: float
    seen: Seen

    @property
    def moved_slots(self) -> int:
        """Slots that change after this window."""
        return self.seen.rebalance.moved_slots if self.seen.rebalance and self.seen.action == "move" else 0


def follow(
    names: list[Path], loads: list[Floats], placement: Placement, policy: Policy
) -> tuple[list[Window], Placement]:
    """All windows in order, and the placement that serves after the last.

    Raises:
        InputError: a window is not of the first one's layers and experts.
    """
    watch, windows = Watch(placement), list[Window]()
    for path, counted in zip(names, loads, strict=True):
        if counted.shape != loads[0].shape:
            sizes = [f"{shape[0]} layers x {shape[1]} experts" for shape in (counted.shape, loads[0].shape)]
            raise InputError(
                f"{path.name} has {sizes[0]}, {names[0].name} {sizes[1]}", hint="give windows of one model"
            )
        balance = float(watch.placement.balance(counted).mean())
        watch, seen = observe(watch, counted, policy)
        windows.append(Window(path.name, balance, seen))
    return windows, watch.placement


def print_stream(windows: list[Window], policy: Policy, slots: int) -> None:
    """A line for each window."""
    out = console()
    out.print(f"{len(windows)} windows of loads, in this order", style="bold")
    title(out, "Controller", "balance of each window as it was served")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    for name in ("  window", "balance", "lost", "slots moved", "then it"):
        table.add_column(name, justify="left" if name in ("  window", "then it") else "right", overflow="fold")
    for one in windows:
        moved = f"{one.moved_slots:,} ({one.moved_slots / slots:.0%})" if one.moved_slots else ""
        style = "green" if one.seen.action == "move" else ""
        said = SAYS[one.seen.action]
        if one.seen.action == "watch" and one.seen.rebalance is not None:
            said = "stays: no move pays"
        cells = (f"{one.balance:.4f}", f"{one.seen.lost:.1%}", moved, said)
        table.add_row("  " + one.name, *cells, style=style)
    out.print(table)
    out.print()
    indented(
        out,
        f"Lost is the experts' time above the bound, beyond noise. It moves once more than {policy.start:.0%} is lost "
        f"in {policy.patience} windows, forgets below {policy.stop:.0%}, and rests for {policy.rest} windows after.",
    )


def stream_json(windows: list[Window], placement: Placement) -> dict[str, Any]:
    """Every window, version 1; `placement` serves after the last, and is what `--from` takes."""
    return {
        "version": 1,
        "windows": [
            {
                "name": one.name,
                "balance": one.balance,
                "lost": one.seen.lost,
                "drift": one.seen.drift,
                "action": one.seen.action,
                "says": one.seen.rebalance.says if one.seen.rebalance else None,
                "moved_slots": one.moved_slots,
                "moved_bytes": one.seen.rebalance.moved_bytes if one.moved_slots and one.seen.rebalance else 0,
            }
            for one in windows
        ],
        "placement": mapping(placement, "deepseek"),
    }
