"""`cordee rag serve` and `cordee rag profile`: a knowledge base with an engine on this machine."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cordee.cli import terminal
from cordee.cli.rag_text import MemoryDocument, ProfileDocument, forecast_table, memory_line, profile_lines
from cordee.errors import InputError, MissingExtraError
from cordee.units import parse_bytes, parse_bytes_per_s, parse_rate_per_s

if TYPE_CHECKING:
    from cordee.events import RagChanged
    from cordee.serve.policy.rag_forecast import MemoryPlan, RagProfile
    from cordee.serve.rag.index import RagIndex
    from cordee.serve.rag.setup import RagOptions

Folder = Annotated[Path, typer.Argument(metavar="INDEX", help="Folder of the index.")]
Model = Annotated[
    str, typer.Option("--generator", metavar="MODEL", help="A .gguf file or a folder; or http://HOST:PORT/v1#MODEL.")
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="Memory for engine, KV cache and partitions.",
        show_default="half of what is free",
    ),
]
Probes = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Nearest partitions to search.", show_default="all")
]
Slots = Annotated[
    int | None,
    typer.Option(min=1, max=256, metavar="N", help="Slots of an engine of its own.", show_default="as profiled"),
]
Context = Annotated[int, typer.Option(min=256, metavar="TOKENS", help="Tokens of each slot.")]
Top = Annotated[int, typer.Option(min=1, max=100, help="Number of passages in a prompt.")]
StoreLimit = Annotated[
    str | None, typer.Option(metavar="RATE", help="Read partitions no faster than this.", show_default="no limit")
]
Flags = Annotated[
    list[str] | None, typer.Option("--flag", metavar="NAME=VALUE", help="Setting of an engine of its own.")
]


def serve(
    index: Folder,
    *,
    generator: Model,
    name: Annotated[str | None, typer.Option(help="The model is rag/NAME.", show_default="the folder's name")] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address for clients or a gateway.")
    ] = "127.0.0.1:8490",
    memory: Budget = None,
    probes: Probes = None,
    slots: Slots = None,
    context: Context = 4096,
    top: Top = 5,
    store_limit: StoreLimit = None,
    rate: Annotated[str, typer.Option(metavar="RATE", help="Requests for which memory is planned.")] = "1/s",
    flag: Flags = None,
) -> None:
    """Serve an index with an engine as model rag/NAME by OpenAI's API, until Ctrl-C."""
    options = _options(generator, memory, probes, slots, context, store_limit, flag, rate)
    with _libraries():
        from cordee.serve.rag.index import RagIndex
        from cordee.serve.rag.profile import load
        from cordee.serve.rag.setup import planned
    found, profile = RagIndex(index), load(index, generator)
    plan = planned(options, found, profile)
    say = terminal.stderr()
    say.print(memory_line(MemoryDocument.of(plan)), highlight=False, markup=False)
    if profile is None:
        hint = f"memory is divided by a guess: cordee rag profile {index} --generator {generator} measures it"
        say.print(hint, highlight=False, markup=False)
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"{listen!r} is not an address", hint="write --listen HOST:PORT")
    asyncio.run(_serve(found, options, plan, profile, name or index.resolve().name, host.strip("[]"), int(port), top))


async def _serve(
    index: "RagIndex",
    options: "RagOptions",
    plan: "MemoryPlan",
    profile: "RagProfile | None",
    name: str,
    host: str,
    port: int,
    top: int,
) -> None:
    from aiohttp import web

    from cordee.serve.rag.server import RagApp
    from cordee.serve.rag.setup import Changes, running

    changes, stop = Changes(index.folder, _say_change), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with running(index, options, plan, profile, name, changes) as rag:
        runner = web.AppRunner(RagApp(rag, name, top).app(), access_log=None, shutdown_timeout=30.0)
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise InputError(
                f"cannot listen on {host}:{port}: {error.strerror}", hint="give another --listen"
            ) from error
        print(f"http://{host}:{runner.addresses[0][1]}/v1", flush=True)
        terminal.stderr().print(f"serving rag/{name}; Ctrl-C ends it", highlight=False, markup=False)
        await stop.wait()
        await runner.cleanup()


def profile(
    index: Folder,
    *,
    generator: Model,
    memory: Budget = None,
    probes: Probes = None,
    slots: Slots = None,
    context: Context = 4096,
    top: Top = 5,
    output: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Tokens of an answer.")] = 64,
    store_limit: StoreLimit = None,
    rate: Annotated[
        list[str] | None, typer.Option(metavar="RATE", help="Predict the latency at this rate; repeatable.")
    ] = None,
    check: Annotated[
        float, typer.Option(min=0, metavar="S", help="Then try each rate for this many seconds, and compare.")
    ] = 0.0,
    flag: Flags = None,
    as_json: terminal.Json = False,
) -> None:
    """Measure loads, searches and answers on this machine; divide the memory by them, and predict latencies."""
    rates = [parse_rate_per_s(each) for each in rate or ["1/s"]]
    options = _options(generator, memory, probes, slots, context, store_limit, flag, f"{rates[-1]:f}/s")
    with _libraries():
        from cordee.serve.rag.index import RagIndex
        from cordee.serve.rag.predict import predictions
        from cordee.serve.rag.profile import ProfileLoad, measure, save
        from cordee.serve.rag.setup import planned
    found = RagIndex(index)
    with terminal.waiting("reading the index") as waiting:
        made = measure(found, options, ProfileLoad(output, top), waiting.now)
        path = save(found, made, options)
        plan = planned(options, found, made)
        compared = asyncio.run(
            predictions(found, options, plan, made, rates, check, ProfileLoad(output, top), waiting.now)
        )
    document = ProfileDocument.of(made, plan, compared, path)
    if as_json:
        terminal.print_json(document)
        return
    console = terminal.stdout()
    for line in profile_lines(document):
        console.print(line, highlight=False, markup=False)
    console.print(forecast_table(document.rates))


def _options(
    generator: str,
    memory: str | None,
    probes: int | None,
    slots: int | None,
    context: int,
    store_limit: str | None,
    flag: list[str] | None,
    rate: str,
) -> "RagOptions":
    with _libraries():
        from cordee.serve.rag.setup import RagOptions, check_generator

    check_generator(generator)
    flags: dict[str, str | int] = {}
    for each in flag or ():
        name, _, value = each.partition("=")
        flags[f"--{name.lstrip('-').replace('_', '-')}"] = int(value) if value.isdigit() else value
    return RagOptions(
        generator,
        None if memory is None else parse_bytes(memory),
        probes,
        slots,
        context,
        None if store_limit is None else parse_bytes_per_s(store_limit),
        parse_rate_per_s(rate),
        flags,
    )


@contextmanager
def _libraries() -> Iterator[None]:
    """Say which extra is missing where a library is."""
    try:
        yield
    except ModuleNotFoundError as error:
        hint = "pip install 'cordee[rag,serve]'"
        raise MissingExtraError(f"{error.name} is not installed", hint=hint) from error


def _say_change(event: "RagChanged") -> None:
    before = "" if event.before is None else f"{event.before} -> "
    step = "" if event.after is None else f" {before}{event.after}"
    terminal.stderr().print(f"{event.what}{step}: {event.why}", highlight=False, markup=False)
