"""The verbs about worlds that are not there: simulate (a trace under several policies), replay (a log under another
one)."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cordee.cli import terminal
from cordee.cli.simulate_text import (
    Answer,
    MovedJob,
    PolicyAnswer,
    ReplayAnswer,
    ReplayedPolicy,
    answer_of,
    print_answer,
    print_replay,
)
from cordee.control.prices import priced
from cordee.errors import InputError
from cordee.events import Node, Queue
from cordee.hardware.load import load_catalogue
from cordee.simulate.cluster import Chance, cluster, spot_series, vc_clusters
from cordee.simulate.compare import Kept, Result, Scenario, check
from cordee.simulate.compare import simulate as simulate_one
from cordee.simulate.observed import Seen, observe
from cordee.simulate.policies import Named, chosen
from cordee.simulate.replay import Replayed, as_it_was, audit
from cordee.simulate.replay import replay as replay_one
from cordee.simulate.synthetic import Synthetic
from cordee.simulate.traces import Tally, open_trace
from cordee.simulate.traces.log import is_log, read_log
from cordee.units import US_PER_S, parse_duration_s
from cordee.workload.queues import parse_queues

SYNTHETIC = "synthetic"
MOVED = 5
"""Jobs that are named where a policy would have moved many."""


def simulate(
    trace: Annotated[str, typer.Argument(help="A trace file, a folder of tables, a Cordee home, or `synthetic`.")],
    *,
    cluster_: Annotated[str, typer.Option("--cluster", help="Nodes x GPUs, 80x8 or 80x8xH100; or a table of nodes.")],
    policy: Annotated[str, typer.Option(help="Names, with commas between.")] = "house,fifo",
    seed: Annotated[int, typer.Option(help="Of all that is left to chance.")] = 0,
    jobs: Annotated[int | None, typer.Option(help="So many jobs at most.", show_default="all")] = None,
    from_: Annotated[str, typer.Option("--from", help="Jobs submitted from then on, such as 30d.")] = "0s",
    for_: Annotated[str | None, typer.Option("--for", help="For so long.", show_default="to the end")] = None,
    until: Annotated[str | None, typer.Option(help="Cut the runs then.", show_default="all jobs have ended")] = None,
    failures: Annotated[
        str | None, typer.Option(help="Node failures a node-day, and how long: 0.0038 or 0.0038/4h.")
    ] = None,
    spot: Annotated[
        str | None, typer.Option(help="A series ms,op,node; or reclaims a node-hour: 0.1 or 0.1/10m.")
    ] = None,
    notice: Annotated[str, typer.Option(help="How long before a reclaim it is told.")] = "120s",
    queues: Annotated[Path | None, typer.Option(help="The tree of queues, YAML.")] = None,
    tiers: Annotated[str | None, typer.Option(help="Production,standard,preemptible in a hundred, drawn.")] = None,
    vc_nodes: Annotated[
        Path | None, typer.Option("--vc-clusters", help="Nodes of each virtual cluster, a table.")
    ] = None,
    load: Annotated[float, typer.Option(help="synthetic: GPUs asked for, as a share.")] = 0.8,
    diurnal: Annotated[float, typer.Option(help="synthetic: how far arrivals swing over a day, 0 to 1.")] = 0.0,
    price_as: Annotated[str, typer.Option(help="Account GPUs of no known kind at this one's price, or none.")] = "H100",
    form: Annotated[
        str | None, typer.Option("--format", help="Of the trace.", show_default="told by its content")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="A bad row is an error.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the comparison as one page.")] = None,
    chrome: Annotated[
        Path | None, typer.Option("--chrome-trace", help="Write who held the first nodes when, as a Chrome trace.")
    ] = None,
    as_json: terminal.Json = False,
) -> None:
    """Run a trace under several policies, by the very code that schedules, and say how each did."""
    named = chosen(_words(policy))
    nodes = _priced(cluster(cluster_), price_as)
    scenario = _scenario(
        trace,
        nodes,
        form=form,
        synthetic=Synthetic(jobs=jobs or 10_000, diurnal=diurnal).at_load(sum(node.gpus for node in nodes), load),
        seed=seed,
        strict=strict,
        limit=jobs,
        vcs=tuple(vc_clusters(vc_nodes).items()) if vc_nodes else (),
        tiers=_tiers(tiers),
        window_us=_window(from_, for_),
        until_us=None if until is None else _us(until),
        chances=_failures(failures),
    )
    if spot is not None:
        scenario = _with_spot(scenario, spot, _us(notice))
    if queues is not None:
        scenario = replace(scenario, queues=_queues(queues))
    tally, total = check(scenario)
    if total == 0:
        hint = _left_out(tally) or "look at --from, --for"
        raise InputError(f"{scenario.name} has no job for this cluster", hint=hint)
    results = [_run(scenario, each, total) for each in named]
    answer = answer_of(scenario, tally, total, results)
    _write(html, chrome, scenario, answer, results)
    if as_json:
        print(json.dumps(_plain(Answer, answer), indent=2))
        return
    print_answer(answer)
    if html is not None:
        terminal.stderr().print(f"the page: {html.absolute()}", highlight=False, markup=False)


def _write(
    html: Path | None, chrome: Path | None, scenario: Scenario, answer: Answer, results: Sequence[Result]
) -> None:
    """The page and the trace, where they are asked for."""
    if html is not None:
        from cordee.cli.simulate_page import page

        html.write_text(page(scenario, answer, results), encoding="utf-8")
    if chrome is not None:
        from cordee.cli.plan_more import write_page
        from cordee.cli.simulate_trace import trace_text

        write_page(chrome, trace_text(results))


def replay(
    log: Annotated[Path, typer.Argument(help="A Cordee home, its database, or JSON lines of its log.")],
    *,
    policy: Annotated[str, typer.Option(help="Names, with commas between.")] = "house,fifo",
    baseline: Annotated[str, typer.Option(help="The policy that the log ran under.")] = "house",
    as_json: terminal.Json = False,
) -> None:
    """Decide a live log again under another policy, and say what would have changed."""
    named, (base,) = chosen(_words(policy)), chosen([baseline])
    if not is_log(log):
        raise InputError(f"{log} is no log of Cordee's", hint="give a home, its cordee.db or JSON lines of its log")
    seen = observe(read_log(log))
    if not seen.jobs:
        raise InputError(f"{log} holds no job", hint="there is nothing to decide again")
    checked, was = audit(seen.log, base.policy), as_it_was(seen)
    answer = ReplayAnswer(
        log=str(log),
        jobs=len(seen.jobs),
        moments=checked.moments,
        decisions=checked.decisions,
        differences=tuple(each.number for each in checked.differences),
        was=_policy_answer("as it was", "the log itself", was),
        replayed=tuple(_replayed(seen, each, was) for each in named),
    )
    if as_json:
        print(json.dumps(_plain(ReplayAnswer, answer), indent=2))
    else:
        print_replay(answer)


def _replayed(seen: Seen, named: Named, was: Replayed) -> ReplayedPolicy:
    done = replay_one(seen, named.policy, estimates=named.estimates)
    moved = []
    for job_id in sorted(was.waits_us.keys() | done.waits_us.keys()):
        before_us, after_us = was.waits_us.get(job_id), done.waits_us.get(job_id)
        if abs(_later_us(before_us, after_us)) >= US_PER_S:
            moved.append((_later_us(before_us, after_us), job_id, before_us, after_us))
    most = sorted(moved, key=lambda each: (-abs(each[0]), each[1]))[:MOVED]
    return ReplayedPolicy(
        answer=_policy_answer(named.name, named.says, done, named.estimates),
        sooner=sum(later_us < 0 for later_us, *_ in moved),
        later=sum(later_us > 0 for later_us, *_ in moved),
        moved=tuple(
            MovedJob(job_id=job_id, was_s=_in_s(before_us), would_be_s=_in_s(after_us))
            for _, job_id, before_us, after_us in most
        ),
    )


def _later_us(before_us: int | None, after_us: int | None) -> int:
    """How much later; who does not start at all starts after everybody."""
    never_us = 1 << 62
    return (never_us if after_us is None else after_us) - (never_us if before_us is None else before_us)


def _in_s(value_us: int | None) -> float | None:
    return None if value_us is None else value_us / US_PER_S


def _policy_answer(name: str, says: str, done: Replayed, estimates: bool = False) -> PolicyAnswer:
    return PolicyAnswer(
        policy=name,
        says=says,
        knows_run_times=estimates,
        summary=done.summary,
        lost_gpu_hours=done.summary.lost_gpu_hours,
        lost_micro_usd=done.summary.lost_micro_usd,
        events=done.events,
        errors=done.errors,
    )


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _run(scenario: Scenario, named: Named, total: int) -> Result:
    with _bar(named.name, total) as progress:
        return simulate_one(scenario, named, progress)


@contextmanager
def _bar(name: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """How far it is, on terminals only."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=terminal.stderr(), transient=True) as shown:
        task = shown.add_task(f"{name:<10}", total=total)
        yield lambda done: shown.update(task, completed=done)


def _scenario(trace: str, nodes: tuple[Node, ...], *, form: str | None, synthetic: Synthetic, **more: Any) -> Scenario:
    if trace == SYNTHETIC:

        def draw(tally: Tally) -> Iterator[Any]:
            for job in synthetic.draw(more["seed"]):
                tally.jobs += 1
                yield job

        return Scenario(jobs=draw, name=f"{synthetic.jobs:,} synthetic jobs", nodes=nodes, **more)
    opened = open_trace(Path(trace).expanduser(), form)
    return Scenario(jobs=Kept(opened.jobs), name=opened.path.name, nodes=nodes, **more)


def _priced(nodes: tuple[Node, ...], price_as: str) -> tuple[Node, ...]:
    """With the catalogue's price of their kind, or of the one that stands for it."""
    catalogue = load_catalogue()
    found = []
    for node in nodes:
        own = priced(node, catalogue)
        if not own.micro_usd_per_gpu_hour and price_as != "none":
            own = replace(priced(replace(node, gpu_name=price_as), catalogue), gpu_name=node.gpu_name)
        found.append(own)
    return tuple(found)


def _failures(text: str | None) -> tuple[Chance, ...]:
    if text is None:
        return ()
    rate, back = _rate(text, "--failures", "4h")
    return (Chance(per_node_day=rate, back_us=back),)


def _with_spot(scenario: Scenario, text: str, notice_us: int) -> Scenario:
    if Path(text).exists():
        nodes, outages = spot_series(Path(text), scenario.nodes, notice_us)
        return replace(scenario, nodes=nodes, outages=tuple(outages))
    rate, back = _rate(text, "--spot", "10m")
    chance = Chance(per_node_day=24 * rate, back_us=back, notice_us=notice_us, why="reclaimed by the cloud")
    return replace(scenario, chances=(*scenario.chances, chance))


def _rate(text: str, flag: str, back: str) -> tuple[float, int]:
    rate, _, away = text.partition("/")
    try:
        value = float(rate)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise InputError(
            f"{flag} {text!r} is no rate", hint=f"write a rate, and how long they are away: {flag} 0.1/{back}"
        )
    return value, _us(away or back)


def _tiers(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    shares = [word.strip() for word in text.split(",")]
    if len(shares) != 3 or not all(share.isdecimal() for share in shares) or sum(map(int, shares)) == 0:
        raise InputError(
            f"--tiers {text!r} is not three shares", hint="production,standard,preemptible: --tiers 10,60,30"
        )
    return tuple(map(int, shares))


def _window(from_: str, for_: str | None) -> tuple[int, int | None]:
    start_us = _us(from_)
    return start_us, None if for_ is None else start_us + _us(for_)


def _us(text: str) -> int:
    return 0 if text in ("0", "0s") else round(parse_duration_s(text) * US_PER_S)


def _queues(path: Path) -> tuple[Queue, ...]:
    try:
        return parse_queues(path.read_text(encoding="utf-8"), source=str(path))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", hint="give a tree of queues, YAML") from error


def _left_out(tally: Tally) -> str:
    return "; ".join(f"{count:,} rows left out: {kind}" for kind, count in tally.kinds.items())


def _plain(shape: Any, answer: Any) -> Any:
    return TypeAdapter(shape).dump_python(answer, mode="json")
