"""The verb `web`: the server's pages in a browser, logged in."""

import os
import sys
import webbrowser
from typing import Annotated

import typer

from cordee.answers.nodes import WebTicketView
from cordee.cli import terminal


def web(
    *,
    show: Annotated[bool, typer.Option("--print", help="Print the address, and open no browser.")] = False,
    home: terminal.Home = None,
    as_json: terminal.Json = False,
) -> None:
    """Open the server's pages in a browser; its address logs in once, within two minutes."""
    with terminal.connect(home) as client:
        ticket = client.ask(WebTicketView, "POST", "/v1/web-tickets")
    if as_json:
        terminal.print_json(ticket)
        return
    opened = not show and _has_screen() and webbrowser.open(ticket.url)
    print("opened in your browser:" if opened else "open it within two minutes, in one browser:")
    print(ticket.url)


def _has_screen() -> bool:
    """Return whether a browser would be seen: one for terminals would take this one over."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
