"""The verb `connect`: use a server on another machine."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cordee.cli import terminal
from cordee.cli.terminal import Home, Json
from cordee.client import Client
from cordee.errors import HomeInUseError, InputError
from cordee.servers import ServerAddress, check_url, forget_remote, keep_remote
from cordee.tls import parse_fingerprint


def connect(
    url: Annotated[str | None, typer.Argument(help="URL of the server, as `cordee up --listen` prints it.")] = None,
    token: Annotated[str | None, typer.Argument(help="Your token, from the server's operator.")] = None,
    *,
    fingerprint: Annotated[
        str | None,
        typer.Option(help="SHA-256 of the server's certificate, if it is self-made; `cordee up --listen` prints it."),
    ] = None,
    forget: Annotated[bool, typer.Option("--forget", help="Stop using another machine's server.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Use the server at URL from now on: every verb goes there. Without URL, show which server is used."""
    folder = terminal.folder(home)
    if forget:
        if url is not None:
            raise InputError("--forget takes no URL", hint="cordee connect --forget")
        print("disconnected" if forget_remote(folder) else f"{folder} was not connected")
        return
    if url is not None:
        _connect(folder, url, token, fingerprint)
    elif fingerprint is not None:
        raise InputError("--fingerprint needs a URL and a token", hint="cordee connect URL TOKEN --fingerprint F")
    with terminal.connect(home) as client:
        health = client.health()
        if as_json:
            terminal.print_json({"url": client.url, "version": health.version})
        else:
            print(f"connected to {client.url} (Cordee {health.version})")


def _connect(folder: Path, url: str, token: str | None, fingerprint: str | None) -> None:
    """Ask the server once, then write its address into the home."""
    from cordee.control.spawn import is_owned

    if is_owned(folder):
        raise HomeInUseError(
            f"{folder} is the home of a server on this machine",
            hint="choose another folder with --home, or CORDEE_HOME, for the other server",
        )
    token = token or os.environ.get("CORDEE_TOKEN")
    if token is None:
        raise InputError("a token is needed", hint="cordee connect URL TOKEN, or export CORDEE_TOKEN")
    pinned = None if fingerprint is None else parse_fingerprint(fingerprint)
    address = ServerAddress(check_url(url), token, pinned)
    with Client(url=address.url, token=token, fingerprint=pinned) as client:
        servers = client.health().servers
    others = tuple(each for each in servers if each and each != address.url)
    keep_remote(folder, replace(address, others=others))
