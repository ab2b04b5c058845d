"""`cordee figures`: figures that are quoted in the field, worked out again, and how some contradict themselves."""

import textwrap

from rich.text import Text

from cordee.cli import terminal
from cordee.cli.plan_text import console
from cordee.plan.published import figures as all_figures
from cordee.workload.load import load_shape


def figures(as_json: terminal.Json = False) -> None:
    """Recompute figures that are often quoted, and show which hold and which contradict themselves."""
    found = all_figures(load_shape("llama-3-70b"), load_shape("llama-3-405b"))
    if as_json:
        terminal.print_json(found)
        return
    out = console()
    for figure in found:
        sign, style = ("holds", "green") if figure.holds else ("does not", "red")
        out.print(Text.assemble((f"{sign:<9}", style), (figure.statement, "bold")), soft_wrap=False)
        for line in (*textwrap.wrap(figure.computed, out.width - 10), *textwrap.wrap(figure.because, out.width - 10)):
            out.print("         " + line, style="dim", no_wrap=True)
