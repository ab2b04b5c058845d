"""`cordee experts` over several windows of loads: the actions of the controller, window by window.

The answer for one window is in `experts.py`.
"""

from rich.table import Table

from cordee.cli.plan_text import console, indented, title
from cordee.plan.experts import RebalancePolicy
from cordee.plan.experts.answer import ControllerWindow

ACTIONS = {"hold": "holds", "watch": "watches whether it lasts", "rest": "rests", "move": "moves"}


def print_stream(windows: list[ControllerWindow], policy: RebalancePolicy, slots: int) -> None:
    """Print one line for each window."""
    out = console()
    out.print(f"{len(windows)} windows of loads, in this order", style="bold")
    title(out, "Controller", "balance of each window under the placement in use")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    for name in ("  window", "balance", "excess", "slots moved", "action"):
        table.add_column(name, justify="left" if name in ("  window", "action") else "right", overflow="fold")
    for one in windows:
        moved = f"{one.moved_slots:,} ({one.moved_slots / slots:.0%})" if one.moved_slots else ""
        style = "green" if one.observation.action == "move" else ""
        action = ACTIONS[one.observation.action]
        if one.observation.action == "watch" and one.observation.rebalance is not None:
            action = "holds: no move pays"
        cells = (f"{one.balance:.4f}", f"{one.observation.excess:.1%}", moved, action)
        table.add_row("  " + one.name, *cells, style=style)
    out.print(table)
    out.print()
    indented(
        out,
        f"Excess is expert time above the bound, beyond noise. The controller moves replicas after {policy.patience} "
        f"windows above {policy.start:.0%}, counts again from zero below {policy.stop:.0%}, and rests for "
        f"{policy.rest} windows.",
    )
