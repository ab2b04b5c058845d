"""`cordee serve tune`: try what the plan says pays on one replica beside a service, and keep what does."""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from cordee.answers.services import ReplicaView, ServiceView
from cordee.cli import terminal
from cordee.cli.job_file import pairs
from cordee.cli.services import plain_flag
from cordee.cli.terminal import Home, Json
from cordee.cli.tune_text import TuningDocument, print_tuning, setting_line, trial_line, update_words
from cordee.client import Client
from cordee.control.services.planned import replica_plan
from cordee.errors import CordeeError, InputError
from cordee.events import Node
from cordee.plan.serving.request import Traffic
from cordee.plan.serving.tuning import Change, TuningBase, changes
from cordee.serve.policy.tuning import Measured, Tuning, TuningRules, merged_flags
from cordee.serve.policy.tuning import tune as tune_engine
from cordee.serve.tuning.load import Lengths, read_prompts
from cordee.serve.tuning.replica import TuningReplica
from cordee.serve.tuning.session import LoadOptions, Session
from cordee.units import MICRO_USD, parse_duration_s, plural
from cordee.workload.service import Flag, flag_name
from cordee.workload.spec import JobSpec

ROUNDS_MIN = 3

Service = Annotated[str, typer.Argument(metavar="SERVICE", help="Name of the service.", show_default=False)]
Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help='JSON lines of real requests: {"messages": [...]} or {"prompt": "..."}.',
        show_default="generated, with the service's mean lengths",
    ),
]  # fmt: skip
Try = Annotated[
    list[str] | None,
    typer.Option("--try", metavar="NAME=VALUE", help="Try this setting of the engine as well; several: A=1,B=2."),
]
Draft = Annotated[str | None, typer.Option(metavar="MODEL", help="A draft model to try for speculation.")]
Concurrency = Annotated[
    int | None,
    typer.Option(min=1, help="Requests that are open at a time.", show_default="twice the slots, 32 at most"),
]
Requests = Annotated[
    int | None, typer.Option(min=1, help="Requests of a round.", show_default="four times the open ones")
]
Rounds = Annotated[int, typer.Option(min=ROUNDS_MIN, help="Rounds that each setting is measured in.")]
AllowLossy = Annotated[
    bool, typer.Option("--allow-lossy", help="Keep changes that alter answers too: weights or KV cache in fewer bits.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Measure only; the service stays as it is.")]
Ready = Annotated[str, typer.Option("--ready-in", help="Time in which a replica must become ready.")]


def tune(
    service: Service,
    *,
    prompts: Prompts = None,
    with_setting: Try = None,
    draft: Draft = None,
    concurrency: Concurrency = None,
    requests: Requests = None,
    rounds: Rounds = 5,
    allow_lossy: AllowLossy = False,
    dry_run: DryRun = False,
    ready_in: Ready = "15m",
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Measure changes of a service's engine settings on one replica beside it, and apply those that pay."""
    with _leaving_on_sigterm(), terminal.connect(home) as client:
        before = _live(client, service)
        spec = JobSpec.model_validate(before.spec)
        lengths, source = _lengths(client, service)
        given = () if prompts is None else tuple(read_prompts(prompts, lengths.output_tokens))
        source = source if prompts is None else f"{plural(len(given), 'prompt')} of {prompts}"
        own = [_own(text, lossless=not allow_lossy) for text in with_setting or ()]
        assert spec.service is not None, "only services are listed"
        options = LoadOptions(lengths, given, concurrency, requests, rounds)
        with _replica(home, spec, ready_in) as replica:
            session = Session(replica, options, _prices(client, spec))
            measure = partial(_measured, session)
            unchanged = measure("unchanged", {})
            _say(f"{service}: {session.concurrency} requests open at a time, {rounds} rounds; {source}")
            _say(setting_line("unchanged", unchanged))
            base = _base(client, spec, session, options, unchanged, draft)
            rules = TuningRules(spec.service.slo, allow_lossy)
            found = tune_engine(
                unchanged, [*own, *changes(base)], measure, rules, lambda trial: _say(trial_line(trial))
            )
        revision, problem = None, None
        if found.flags and not dry_run:
            try:
                revision = _declare(client, before, spec, found)
            except CordeeError as error:
                problem = error
    document = TuningDocument.of(service, found, revision)
    if as_json:
        terminal.print_json(document)
    else:
        print_tuning(document, dry_run=dry_run)
    if problem is not None:
        raise problem


@contextmanager
def _replica(home: Path | None, spec: JobSpec, ready_in: str) -> Iterator[TuningReplica]:
    """Keep a replica beside the service; on Ctrl-C say that this is all that ends."""
    try:
        with TuningReplica(lambda: terminal.connect(home), spec, parse_duration_s(ready_in)) as replica:
            yield replica
    except KeyboardInterrupt:
        _say(f"{spec.name} stays as it is; {spec.name}-tune has ended")
        raise


def _measured(session: Session, name: str, flags: Mapping[str, Flag]) -> Measured:
    with terminal.waiting(f"{name}: starting a replica") as waiting:
        return session.measure(name, flags, waiting.now)


def _live(client: Client, name: str) -> ServiceView:
    """Return a service that runs."""
    found = client.service(name)
    if found.state == "ended":
        raise InputError(f"the service {name} has ended", hint="start it again: cordee serve run")
    if not found.spec["service"]["model"]:
        raise InputError(
            f"{name} runs a command of its own, whose settings are not known",
            hint="tune what runs on vllm, llama.cpp or transformers",
        )
    return found


def _lengths(client: Client, service: str) -> tuple[Lengths, str]:
    """Return the mean lengths of the requests that a service has served, and a text about them."""
    rows = (row.tokens for row in client.usage("service").rows if row.key == service)
    tokens = next((each for each in rows if each.requests and each.output), None)
    if tokens is None:
        found, source = Lengths(), "it has served none yet"
    else:
        sums = (tokens.input, tokens.cached, tokens.output)
        found = Lengths(*(max(1, round(each / tokens.requests)) for each in sums))
        source = f"the mean of {tokens.requests:,} that it has served"
    of_tokens = f"{found.input_tokens:,} tokens ({found.cached_tokens:,} cached) and {found.output_tokens:,} of answer"
    return found, f"made-up prompts of {of_tokens}: {source}"


def _base(
    client: Client, spec: JobSpec, session: Session, options: LoadOptions, unchanged: Measured, draft: str | None
) -> TuningBase:
    """Return what the changes are chosen by: the replica, its plan, and the load as it was measured."""
    assert session.first is not None and session.first.engine is not None and spec.service is not None
    answered = sum(each.requests - each.failed for each in unchanged.rounds)
    lengths = options.lengths
    load = Traffic(
        input_tokens=max(1, round(sum(each.input_tokens for each in unchanged.rounds) / answered)),
        output_tokens=max(1, round(sum(each.output_tokens for each in unchanged.rounds) / answered)),
        concurrency=session.concurrency,
        cached_fraction=0.0 if options.prompts else min(0.99, lengths.cached_tokens / lengths.input_tokens),
    )
    nodes = [Node(name=each.name, epoch=each.epoch, gpu_name=each.gpu_name, gpus=each.gpus) for each in client.nodes()]
    return TuningBase(
        session.first.engine,
        {flag_name(name): value for name, value in spec.service.flags.items()},
        load,
        unchanged.slots,
        unchanged.kv_tokens,
        replica_plan(spec, nodes),
        draft,
        real_prompts=bool(options.prompts),
    )


def _prices(client: Client, spec: JobSpec) -> Callable[[ReplicaView], float | None]:
    """Return a function from a replica to its dollars an hour; None where its node has no price."""
    prices = {each.name: each.micro_usd_per_gpu_hour / MICRO_USD for each in client.nodes()}
    gpus = spec.gpus * spec.gpu_milli / 1000
    return lambda replica: prices.get(replica.node or "", 0.0) * gpus or None


def _own(text: str, *, lossless: bool) -> Change:
    """Return a change that the user wants tried."""
    flags = {flag_name(name): plain_flag(value) for name, value in pairs(text.split(","), "--try").items()}
    return Change(text, flags, lossless)


def _declare(client: Client, before: ServiceView, spec: JobSpec, found: Tuning) -> int:
    """Update the service to the settings that are kept, and return its revision.

    Raises:
        CordeeError: somebody has changed it since the tuning began, or the server refuses the update.
    """
    assert spec.service is not None, "only services are tuned"
    now, flags = client.service(before.name), merged_flags(spec.service.flags, found.flags)
    if (now.revision, now.spec) != (before.revision, before.spec):
        raise InputError(
            f"{before.name} was changed while it was tuned: it has revision {now.revision}, not {before.revision}",
            hint=f"keep it by hand: {update_words(before.name, found.flags)}",
        )
    changed = spec.model_copy(update={"service": spec.service.model_copy(update={"flags": flags})})
    return client.declare(changed.model_dump(mode="json")).revision


def _say(text: str) -> None:
    terminal.stderr().print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _leaving_on_sigterm() -> Iterator[None]:
    """End the verb on SIGTERM as on Ctrl-C: its replica leaves."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
