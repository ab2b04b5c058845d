"""`cordee serve gateway`: a gateway of one's own, on this machine, before the services of a server."""

from pathlib import Path
from typing import Annotated

import typer

from cordee.cli import terminal
from cordee.cli.terminal import Home
from cordee.errors import InputError


def gateway(
    *,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address for clients; it speaks HTTP, TLS is your load balancer's.")
    ] = "127.0.0.1:8480",
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="URL of the server; its token is in CORDEE_TOKEN.",
            show_default="the server of the home",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Unique among the gateways of a server.", show_default="this host's and the port")
    ] = None,
    routes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read the routes from this JSON file instead of a server.")
    ] = None,
    spool: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for usage that is not reported yet.", show_default="in the home"),
    ] = None,
    hold: Annotated[float, typer.Option(metavar="S", help="Seconds that a request waits for a first replica.")] = 600.0,
    resume: Annotated[
        float, typer.Option(metavar="S", help="Seconds that a stream waits for another replica when its own fails.")
    ] = 60.0,
    report_every: Annotated[float, typer.Option(metavar="S", help="Seconds between two reports of usage.")] = 30.0,
    idle: Annotated[
        float, typer.Option(metavar="S", help="Close a client's connection without a request after so many seconds.")
    ] = 120.0,
    client_connections: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Open connections from one address, at most.", show_default="half of the system's limit"
        ),
    ] = None,
    open_bytes: Annotated[
        int, typer.Option(metavar="N", help="Bytes of the bodies of all open requests, at most.")
    ] = 1_000_000_000,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="Log a line for each request, without its prompt.")
    ] = False,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Log a line for each request, with its prompt.")
    ] = False,
    home: Home = None,
) -> None:
    """Run a gateway, an OpenAI API in front of a server's services; Ctrl-C lets open requests be answered first."""
    from cordee.serve.gateway.__main__ import GRACE_S, GatewayArguments, run

    if server is not None and routes is not None:
        raise InputError("--server and --routes were given", hint="give one of the two")
    given = GatewayArguments(
        listen=listen, server=server, home=home, routes=routes, name=name, spool=spool, hold=hold, resume=resume,
        report_every=report_every, idle=idle, client_connections=client_connections, open_bytes=open_bytes,
        log_requests=log_requests, log_prompts=log_prompts,
    )  # fmt: skip

    def ready(url: str) -> None:
        print(f"{url}/v1", flush=True)
        source = f"the routes in {routes}" if routes is not None else f"the services of {server or 'the server'}"
        ends = f"Ctrl-C ends it when its open requests are answered, after {GRACE_S:.0f} s at the latest"
        terminal.stderr().print(f"a gateway to {source}; {ends}", highlight=False, markup=False)

    run(given, ready)
