"""`python -m cordee.serve.gateway`: a gateway as a process of its own."""

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cordee.errors import CordeeError, InputError, MissingExtraError
from cordee.servers import ServerAddress, check_url, default_home, find_server, fingerprint_of_environment

if TYPE_CHECKING:
    from cordee.serve.gateway.gateway import Gateway

GRACE_S = 30.0
"""Time that open requests have after SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayArguments:
    """The arguments of a gateway's process.

    Attributes:
        listen: HOST:PORT.
        server: the server's URL; None: the one of `home`, or of the environment.
        home: the server's folder.
        routes: a file of routes in place of a server.
        name: unique among the gateways of a server; None: the host's and the port.
        spool: folder of usage that is not reported yet; None: in the home.
        hold: seconds that a request waits for a first replica.
        resume: seconds without any replica after which a stream is given up.
        report_every: seconds between two reports of usage.
        idle: seconds after which a client's connection without a request is closed.
        client_connections: open ones of one address; None: half of what the system allows.
        open_bytes: of the bodies of all open requests.
        log_requests: log a line for each request.
        log_prompts: log it with its prompt.
    """

    listen: str = "127.0.0.1:8480"
    server: str | None = None
    home: Path | None = None
    routes: Path | None = None
    name: str | None = None
    spool: Path | None = None
    hold: float = 600.0
    resume: float = 60.0
    report_every: float = 30.0
    idle: float = 120.0
    client_connections: int | None = None
    open_bytes: int = 1_000_000_000
    log_requests: bool = False
    log_prompts: bool = False


def main(words: list[str] | None = None) -> int:
    """Run a gateway until SIGTERM or SIGINT."""
    given = GatewayArguments(**vars(_parser().parse_args(words)))
    try:
        run(given, lambda url: print(url, flush=True))
    except CordeeError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cordee.serve.gateway", description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:8480", metavar="HOST:PORT")
    parser.add_argument("--server", metavar="URL", help="of the server; its token is in CORDEE_TOKEN")
    parser.add_argument("--home", type=Path, help="of the server (default: ~/.cordee)")
    parser.add_argument("--routes", type=Path, metavar="FILE", help="routes as JSON in place of a server")
    parser.add_argument("--name", help="unique among the gateways of a server (default: HOST-PORT)")
    parser.add_argument(
        "--spool", type=Path, metavar="DIR", help="usage that is not reported yet (default: in the home)"
    )
    parser.add_argument(
        "--hold", type=float, default=600.0, metavar="S", help="wait for a first replica (default: 600)"
    )
    parser.add_argument("--resume", type=float, default=60.0, metavar="S", help="wait for another one (default: 60)")
    parser.add_argument("--report-every", type=float, default=30.0, metavar="S", help="usage (default: 30)")
    parser.add_argument(
        "--idle", type=float, default=120.0, metavar="S", help="close a silent client's connection (default: 120)"
    )
    parser.add_argument(
        "--client-connections", type=int, metavar="N", help="of one address (default: half of what the system allows)"
    )
    parser.add_argument(
        "--open-bytes", type=int, default=1_000_000_000, metavar="N", help="of all open requests (default: 10^9)"
    )
    parser.add_argument("--log-requests", action="store_true", help="a line for each request, without its prompt")
    parser.add_argument("--log-prompts", action="store_true", help="with its prompt")
    return parser


def run(given: GatewayArguments, on_ready: Callable[[str], None]) -> None:
    """Run a gateway until SIGTERM or SIGINT; `on_ready` gets its URL once it listens.

    Raises:
        InputError: not an address.
        MissingExtraError: its libraries are not installed.
        NoServerError: no server is known.
    """
    try:
        from cordee.serve.gateway.gateway import Gateway, Settings
    except ImportError as error:
        raise MissingExtraError(f"{error.name} is not installed", hint="pip install 'cordee[serve]'") from error
    host, _, port = given.listen.rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"{given.listen!r} is not an address", hint="write --listen HOST:PORT")
    address = None if given.routes else _address(given)
    name = given.name or f"{socket.gethostname()}-{port}"
    home = given.home or (address.home if address else None) or default_home()
    settings = Settings(
        name, given.spool or home / "gateways" / name,
        hold_s=given.hold, resume_s=given.resume, report_s=given.report_every,
        open_bytes=given.open_bytes, idle_s=given.idle, client_connections=given.client_connections,
        log_requests=given.log_requests or given.log_prompts, log_prompts=given.log_prompts,
    )  # fmt: skip
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    _raise_file_limit()

    async def work() -> None:
        find = None if address is None else lambda: _address(given)
        await _serve(Gateway(settings), host.strip("[]"), int(port), given.routes, find, on_ready)

    with contextlib.suppress(KeyboardInterrupt):
        try:
            import uvloop
        except ImportError:  # Windows has none.
            asyncio.run(work())
        else:
            uvloop.run(work())


async def _serve(
    gateway: "Gateway",
    host: str,
    port: int,
    routes: Path | None,
    find: Callable[[], ServerAddress] | None,
    on_ready: Callable[[str], None],
) -> None:
    from cordee.serve.gateway.app import App
    from cordee.serve.gateway.link import ServerLink, follow_file

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    link = ServerLink(gateway, find) if find is not None else None
    work: list[Callable[[], Awaitable[None]]] = [gateway.attention.measure, gateway.health.watch, gateway.tick]
    work.append(link.run if link is not None else lambda: follow_file(gateway, routes or Path()))
    tasks = [asyncio.create_task(_keep(each)) for each in work]
    protocol = App(gateway).server()
    try:
        server = await loop.create_server(protocol, host, port, backlog=4096, reuse_address=True)
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}", hint="give another --listen") from error
    url = f"http://{host}:{server.sockets[0].getsockname()[1]}"
    if link is not None:
        link.url = url
    on_ready(url)
    await stop.wait()
    server.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GRACE_S):
            while gateway.open:
                await asyncio.sleep(0.05)
    await protocol.shutdown(1.0)
    if link is not None:
        with contextlib.suppress(Exception):
            await link.report_once(final=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    gateway.usage.close()


async def _keep(work: Callable[[], Awaitable[None]]) -> None:
    """Do a work that never ends; a fault in it ends no open request."""
    while True:
        try:
            await work()
        except Exception:
            logging.exception("a part of the gateway failed, and starts again")
        await asyncio.sleep(1.0)


def _address(given: GatewayArguments) -> ServerAddress:
    if given.server:
        token = os.environ.get("CORDEE_TOKEN", "")
        return ServerAddress(check_url(given.server), token, fingerprint_of_environment())
    return find_server(given.home)


def _raise_file_limit() -> None:
    """Allow as many connections as the system lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
