"""The verb `port-forward`: a port of this machine leads to one on the node of a job's rank."""

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING, Annotated

import typer

from cordee import frames
from cordee.cli import terminal
from cordee.cli.terminal import Home
from cordee.client import Client
from cordee.errors import CordeeError, InputError

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

LOOK_S = 2.0
_HOST = "127.0.0.1"
_PORT = re.compile(r"(?:(\d{1,5}):)?(\d{1,5})")

JobRef = Annotated[str, typer.Argument(metavar="JOB", help="Id or name of a job that runs.")]
Ports = Annotated[
    list[str],
    typer.Argument(metavar="[LOCAL:]PORT...", help="Port on the node; LOCAL is the port on this machine, if another."),
]
Rank = Annotated[int, typer.Option(min=0, help="Rank to whose node the ports belong.")]


def port_forward(job: JobRef, ports: Ports, *, rank: Rank = 0, home: Home = None) -> None:
    """Reach ports of a job from this machine, such as a notebook's or TensorBoard's, until Ctrl-C or its attempt's end.

    Each connection to 127.0.0.1:LOCAL goes through the server to 127.0.0.1:PORT on the node.
    """
    pairs = [parse_port(text) for text in ports]
    with terminal.connect(home) as client:
        try:
            raise SystemExit(asyncio.run(_forward(client, job, pairs, rank)))
        except KeyboardInterrupt:
            raise SystemExit(0) from None


def parse_port(text: str) -> tuple[int, int]:
    """Return the port of this machine and that of the node.

    >>> parse_port("8888"), parse_port("9000:8888")
    ((8888, 8888), (9000, 8888))

    Raises:
        InputError: it is no port.
    """
    found = _PORT.fullmatch(text)
    if found is None or not all(0 < int(each) < 65_536 for each in found.groups() if each is not None):
        raise InputError(f"{text!r} is not a port", hint="write 8888, or 9000:8888 for another port of this machine")
    return int(found[1] or found[2]), int(found[2])


async def _forward(client: Client, ref: str, pairs: list[tuple[int, int]], rank: int) -> int:
    """Listen on all ports until the attempt has ended; return the exit code."""
    job = client.job(ref)
    async with contextlib.AsyncExitStack() as stack:
        for local, remote in pairs:
            opening = {"what": "port", "rank": rank, "port": remote}
            await _probe(client, job.job_id, opening)

            async def serve(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, opening: dict[str, object] = opening
            ) -> None:
                await _carry(client, job.job_id, opening, reader, writer)

            try:
                server = await asyncio.start_server(serve, _HOST, local)
            except OSError as error:
                raise InputError(
                    f"port {local} of this machine cannot be used: {error.strerror or error}",
                    hint=f"choose another one: cordee port-forward {ref} {local + 1}:{remote}",
                ) from error
            await stack.enter_async_context(server)
            _say(f"{_HOST}:{local} leads to port {remote} of {job.job_id}, rank {rank}; Ctrl-C ends it")
        return await _until_it_ends(client, job.job_id, job.epoch)


async def _probe(client: Client, job_id: str, opening: dict[str, object]) -> None:
    """Open a connection once, to learn at once what is refused; a port that nothing listens on yet may come later."""
    from cordee.cli import tunnels

    try:
        async with tunnels.opened(client, job_id, **opening):
            pass
    except tunnels.TunnelEndedError as ended:
        _say(f"{ended.message}; connections are passed on as soon as something does")


async def _until_it_ends(client: Client, job_id: str, epoch: int) -> int:
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            now = await asyncio.to_thread(client.job, job_id)
        except CordeeError as error:
            _say(f"{error.message}; asking again")
            continue
        ended = next((each.outcome for each in now.attempts if each.epoch == epoch), None)
        if ended is not None or now.epoch != epoch:
            _say(f"{job_id}.{epoch} has ended ({ended})")
            return 0 if now.state == "done" else 1


async def _carry(
    client: Client,
    job_id: str,
    opening: dict[str, object],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Carry one connection, each side to its own end."""
    from cordee.cli import tunnels

    try:
        async with tunnels.opened(client, job_id, **opening) as websocket:
            sending = asyncio.create_task(_send(websocket, reader))
            try:
                async for message in websocket:
                    frame = frames.read(message)
                    if frame.channel == frames.DATA:
                        writer.write(frame.data)
                        await writer.drain()
                    elif "eof" in frame.control:
                        writer.write_eof()
                    elif "end" in frame.control:
                        _say(str(frame.control["end"]))
                        break
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
    except CordeeError as error:
        _say(error.message)
    except (OSError, ValueError):
        pass  # the connection on this machine broke
    finally:
        writer.close()


async def _send(websocket: "ClientConnection", reader: asyncio.StreamReader) -> None:
    try:
        while chunk := await reader.read(frames.CHUNK_BYTES):
            await websocket.send(frames.data(chunk))
        await websocket.send(frames.control(eof=True))
    except OSError:
        await websocket.close()  # the connection on this machine was reset


def _say(text: str) -> None:
    terminal.stderr().print(text, highlight=False, markup=False)
