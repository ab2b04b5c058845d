"""`cordee top`: what the jobs and GPUs do now, on a screen that refreshes."""

import time
from typing import Annotated

import typer

from cordee.cli import terminal
from cordee.cli.terminal import Home, Json
from cordee.cli.top_text import screen

PERIOD_S = 2.0
_FRAME_ROWS = 6  # of the head of the table and the lines around it


def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Print one screen and leave.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Show jobs and GPUs live: step, loss, tokens a second, MFU, busy GPUs, memory, dollars an hour. Ctrl-C leaves."""
    console = terminal.stdout()
    with terminal.connect(home) as client:
        live = client.live()
        if as_json:
            terminal.print_json(live)
            return
        if once or not console.is_terminal:
            console.print(screen(live, console), highlight=False)
            return
        from rich.live import Live

        try:
            with Live(console=console, screen=True, auto_refresh=False) as shown:
                while True:
                    rows = console.height - _FRAME_ROWS - len(live.nodes)
                    shown.update(screen(live, console, rows), refresh=True)
                    time.sleep(PERIOD_S)
                    live = client.live()
        except KeyboardInterrupt:
            return
