"""The verbs in virtual time: simulate (a trace under several policies) and replay (a log under other policies)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.progress import MofNCompleteColumn

from cordee.cli import terminal
from cordee.cli.plan_more import write_page
from cordee.cli.simulate_services import (
    LoadTime,
    Rate,
    Requests,
    ServiceFile,
    Split,
    Target,
    Wanted,
    WarmUp,
    simulate_together,
)
from cordee.cli.simulate_text import print_comparison, print_recommendation, print_replay
from cordee.control.prices import priced
from cordee.errors import CatalogueError, InputError
from cordee.events import Node, Queue
from cordee.hardware.catalog import Catalogue
from cordee.hardware.load import load_catalogue
from cordee.planning import home_gpus, home_prices
from cordee.simulate.answer import PolicyComparison, comparison, replayed
from cordee.simulate.cluster import OutageRate, cluster, cut_by_jobs, spot_series, vc_clusters
from cordee.simulate.compare import CachedJobs, Result, Scenario, count_jobs
from cordee.simulate.compare import simulate as simulate_one
from cordee.simulate.frontier import (
    FRONTIER,
    SAMPLES_MIN,
    Recommendation,
    block_us,
    recommendation,
    resampled,
    samples_for,
)
from cordee.simulate.knee import can_be_chosen, knee, weighed
from cordee.simulate.observed import newest, observe
from cordee.simulate.policies import POLICIES, NamedPolicy, named_policies
from cordee.simulate.synthetic import Synthetic
from cordee.simulate.traces import NAMES, Tally, open_trace
from cordee.simulate.traces.log import is_log, read_log
from cordee.units import US_PER_S, parse_duration_s, plural
from cordee.workload.queues import parse_queues

SYNTHETIC = "synthetic"
DEFAULT = "cordee,fifo"
UNNAMED_GPU = "GPU"  # of a cluster such as 80x8


Trace = Annotated[str, typer.Argument(help="A trace file, a folder of tables, a Cordee home, or `synthetic`.")]
ClusterText = Annotated[str, typer.Option("--cluster", help="Nodes x GPUs, 80x8 or 80x8xH100; or a table of nodes.")]
Seed = Annotated[int, typer.Option(help="Seed of all random draws.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Number of jobs to run at most.", show_default="all")]
From = Annotated[str, typer.Option("--from", help="Leave out jobs submitted before this time: 30d.")]
For = Annotated[
    str | None, typer.Option("--for", help="Length of the window of submissions.", show_default="to the end")
]
Notice = Annotated[str, typer.Option(help="Time from the notice of a reclaim to the reclaim.")]
QueuesFile = Annotated[Path | None, typer.Option("--queues", help="YAML file with the tree of queues.")]
Tiers = Annotated[str | None, typer.Option(help="Percentages of production,standard,preemptible jobs: 10,60,30.")]
Load = Annotated[float, typer.Option(help="With `synthetic`: requested GPU time divided by the cluster's.")]
Diurnal = Annotated[float, typer.Option(help="With `synthetic`: variation of arrivals over a day, 0 to 1.")]
Form = Annotated[
    str | None,
    typer.Option("--format", help=f"Format of the trace: {', '.join(NAMES)}.", show_default="by its content"),
]
Strict = Annotated[bool, typer.Option("--strict", help="Treat a bad row as an error.")]
Html = Annotated[Path | None, typer.Option(help="Write an HTML report.")]
_POLICIES_HELP = f"Policies, separated by commas, or `cordee:2` with a patience: {', '.join(POLICIES)}."
Policies = Annotated[str, typer.Option(help=_POLICIES_HELP)]
SomePolicies = Annotated[
    str | None, typer.Option("--policy", help=_POLICIES_HELP, show_default=f"{DEFAULT}; those of --frontier")
]
VcNodes = Annotated[Path | None, typer.Option("--vc-clusters", help="CSV file of virtual clusters and their nodes.")]
Until = Annotated[
    str | None, typer.Option(help="Time at which the simulation stops.", show_default="the last job's end")
]
Failures = Annotated[
    str | None, typer.Option(help="Node failures per node-day, and the length of an outage: 0.0038 or 0.0038/4h.")
]
Spot = Annotated[
    str | None,
    typer.Option(help="Spot reclaims: a CSV file with columns ms,op,node, or reclaims per node-hour: 0.1 or 0.1/10m."),
]
PriceAs = Annotated[
    str | None,
    typer.Option(help="GPU whose price stands for GPUs without one, or none.", show_default="H100 if unnamed"),
]
Frontier = Annotated[
    bool,
    typer.Option("--frontier", help="Compare patiences of `cordee` with other policies; --html draws them."),
]
Recommend = Annotated[
    bool,
    typer.Option(
        "--recommend", help="As --frontier; say which patience suits the trace, with the spread over resampled traces."
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(min=1, max=100, help="With --recommend: resampled traces.", show_default="4 to 20, by the jobs"),
]
Chrome = Annotated[
    Path | None, typer.Option("--chrome-trace", help="Write the attempts on the first nodes as a Chrome trace.")
]


def simulate(
    context: typer.Context,
    trace: Trace,
    *,
    cluster_: ClusterText,
    policy: SomePolicies = None,
    seed: Seed = 0,
    jobs: Jobs = None,
    from_: From = "0s",
    for_: For = None,
    until: Until = None,
    failures: Failures = None,
    spot: Spot = None,
    notice: Notice = "120s",
    queues: QueuesFile = None,
    tiers: Tiers = None,
    vc_nodes: VcNodes = None,
    load: Load = 0.8,
    diurnal: Diurnal = 0.0,
    price_as: PriceAs = None,
    form: Form = None,
    strict: Strict = False,
    requests: Requests = None,
    service: ServiceFile = None,
    rate: Rate = "20/s",
    split: Split = None,
    warm_up: WarmUp = "24h",
    load_time: LoadTime = "90s",
    target: Target = 0.8,
    frontier: Frontier = False,
    recommend: Recommend = False,
    samples: Samples = None,
    html: Html = None,
    chrome: Chrome = None,
    as_json: terminal.Json = False,
) -> None:
    """Run a trace of jobs under several policies with the production scheduler, and compare them.

    AWAY MAX is the longest total time that a job was without GPUs; JAIN is Jain's fairness index of slowdowns
    (1: all jobs are slowed down equally); FRAG is GPU time that was free while a gang of at most that size waited.

    With --requests and --service, run the jobs and a service on one cluster, beside two clusters of the same size.
    """
    with_service = requests is not None or service is not None
    _check_used(context, trace, spot=spot is not None, with_service=with_service)
    _check_together(frontier=frontier, recommend=recommend, samples=samples, chrome=chrome, with_service=with_service)
    policies = _policies(policy, several=frontier or recommend)
    nodes = _priced(cluster(cluster_), price_as)
    scenario = _scenario(
        trace,
        nodes,
        form=form,
        synthetic=_synthetic(jobs or 10_000, diurnal, load, seed, nodes) if trace == SYNTHETIC else None,
        seed=seed,
        strict=strict,
        limit=jobs,
        vcs=_vcs(vc_nodes, nodes) if vc_nodes else (),
        tiers=_tiers(tiers),
        window_us=_window(from_, for_),
        until_us=None if until is None else _us(until),
        outage_rates=_failures(failures),
        queues=() if queues is None else _queues(queues),
    )
    if spot is not None:
        scenario = _with_spot(scenario, spot, _us(notice))
    if with_service:
        wanted = Wanted(requests, service, rate, split, _us(warm_up), _us(load_time), target, price_as)
        simulate_together(scenario, policies[0], wanted, html=html, as_json=as_json)
        return
    _compare(scenario, policies, _Wanted(html, chrome, as_json, recommend, samples))


def _synthetic(jobs: int, diurnal: float, load: float, seed: int, nodes: Sequence[Node]) -> Synthetic:
    if not 0 < load <= 100:
        raise InputError(f"--load {load:g} is no load", hint="give a number above 0, up to 100: --load 0.8")
    if not 0 <= diurnal <= 1:
        raise InputError(f"--diurnal {diurnal:g} is no variation", hint="give a number from 0 to 1: --diurnal 0.5")
    return Synthetic(jobs=jobs, diurnal=diurnal).at_load(sum(node.gpus for node in nodes), load, seed)


def _vcs(path: Path, nodes: Sequence[Node]) -> tuple[tuple[str, int], ...]:
    found = vc_clusters(path)
    wanted = sum(found.values())
    if not 0 < wanted <= len(nodes):
        raise InputError(
            f"the virtual clusters of {path} have {plural(wanted, 'node')} in all, and --cluster has {len(nodes):,}",
            hint="give --cluster as many nodes, or the virtual clusters fewer",
        )
    return tuple(found.items())


def _policies(names: str | None, *, several: bool) -> list[NamedPolicy]:
    """Return the policies of these names; None: those of a frontier if `several` patiences are compared.

    Raises:
        InputError: there is no such policy, or none of several has a patience that a server can run.
    """
    policies = named_policies(FRONTIER if names is None and several else _names(names or DEFAULT))
    if several and not any(map(can_be_chosen, policies)):
        hint = "add some: --policy cordee:0.5,cordee:2,2d-las"
        raise InputError("none of the policies is cordee with a patience", hint=hint)
    return policies


class _Wanted(NamedTuple):
    """The answer that is asked for, and its files."""

    html: Path | None
    chrome: Path | None
    as_json: bool
    recommend: bool
    samples: int | None


def _check_used(context: typer.Context, trace: str, *, spot: bool, with_service: bool) -> None:
    """Refuse an option that says nothing without another one.

    Raises:
        InputError: it was given, and the other was not.
    """
    services = ("rate", "split", "warm_up", "load_time", "target")
    needs = {
        **dict.fromkeys(("load", "diurnal"), (trace == SYNTHETIC, "the trace `synthetic`")),
        "notice": (spot, "--spot"),
        **dict.fromkeys(services, (with_service, "--requests and --service")),
    }
    for name, (there, other) in needs.items():
        source = context.get_parameter_source(name)
        if not there and source is not None and source.name != "DEFAULT":
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"{flag} needs {other}", hint=f"leave out {flag}, or simulate with {other}")


def _check_together(
    *, frontier: bool, recommend: bool, samples: int | None, chrome: Path | None, with_service: bool
) -> None:
    """Refuse options of which one would be ignored.

    Raises:
        InputError: an option says nothing beside the others.
    """
    if frontier and recommend:
        raise InputError("--recommend compares the policies of --frontier as well", hint="give one of the two")
    if samples is not None and not recommend:
        raise InputError("--samples needs --recommend", hint="add --recommend, or leave it out")
    if with_service:
        options = {"--frontier": frontier, "--recommend": recommend, "--chrome-trace": chrome is not None}
        for name in (name for name, given in options.items() if given):
            raise InputError(f"{name} does not work with --requests", hint=f"leave out {name}, or --requests")


def _counted(scenario: Scenario) -> tuple[Tally, int]:
    """Count the jobs.

    Raises:
        InputError: there is none for this cluster.
    """
    tally, total = count_jobs(scenario)
    if total == 0:
        hint = _left_out(tally) or "check --from and --for"
        raise InputError(f"{scenario.name} has no job for this cluster", hint=hint)
    return tally, total


def _compare(scenario: Scenario, policies: Sequence[NamedPolicy], wanted: _Wanted) -> None:
    """Run each policy, on resampled traces too if asked for, and write what is asked for."""
    tally, total = _counted(scenario)
    results = [_run(scenario, each, total) for each in policies]
    answer = comparison(scenario, tally, total, results)
    if wanted.recommend and knee([(each.policy, each.summary) for each in results]) is None:
        hint = "give a longer --until, or leave it out"
        raise InputError("no job ended, so no policy can be recommended", hint=hint)
    advice = _recommendation(scenario, answer, results, total, wanted) if wanted.recommend else None
    _write(wanted, scenario, answer, results, advice)
    if wanted.as_json:
        terminal.print_json(advice or answer)
    elif advice is not None:
        print_recommendation(advice)
    else:
        print_comparison(answer)


def _recommendation(
    scenario: Scenario, answer: PolicyComparison, results: Sequence[Result], total: int, wanted: _Wanted
) -> Recommendation:
    """Run the policies that a server can run on resampled traces, and say which one suits the trace."""
    able = [each.policy for each in results if can_be_chosen(each.policy)]
    drawn = []
    count = samples_for(total) if wanted.samples is None else wanted.samples
    for index in range(count):
        again = resampled(scenario, scenario.seed + index)
        of = f" {index + 1}/{count}"
        drawn.append([_run(again, each, total, of) for each in able])
        if index + 1 >= SAMPLES_MIN and all(map(_same, [results, *drawn])):
            break  # the choice among equals needs no more
    return recommendation(answer, results, drawn, block_us(scenario))


def _write(
    wanted: _Wanted,
    scenario: Scenario,
    answer: PolicyComparison,
    results: Sequence[Result],
    advice: Recommendation | None,
) -> None:
    """Write the page and the Chrome trace, where they are asked for."""
    if wanted.html is not None:
        from cordee.simulate.page import comparison_page

        write_page(wanted.html, comparison_page(scenario, answer, results, advice))
    if wanted.chrome is not None:
        from cordee.simulate.chrome_trace import simulation_chrome_trace

        write_page(wanted.chrome, simulation_chrome_trace(results))


def replay(
    log: Annotated[Path, typer.Argument(help="A Cordee home, its database, or its log as JSON lines.")],
    *,
    policy: Policies = DEFAULT,
    baseline: Annotated[str, typer.Option(help="Policy that the log ran under.")] = "cordee",
    last: Annotated[
        str | None, typer.Option(help="Leave out jobs that ended longer ago than this: 7d.", show_default="all")
    ] = None,
    as_json: terminal.Json = False,
) -> None:
    """Replay a server's log under another policy, and compare."""
    policies, (base,) = named_policies(_names(policy)), named_policies([baseline])
    if not is_log(log):
        raise InputError(f"{log} is not a log of Cordee", hint="give a home, its cordee.db or JSON lines of its log")
    observed = observe(read_log(log) if last is None else newest(read_log(log), _us(last)))
    if not observed.jobs:
        raise InputError(f"{log} has no job", hint="run a job first, or give another log")
    answer = replayed(str(log), observed, policies, base, whole=last is None)
    if as_json:
        terminal.print_json(answer)
    else:
        print_replay(answer)


def _names(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _same(results: Sequence[Result]) -> bool:
    return len({weighed(each.summary) for each in results if can_be_chosen(each.policy)}) == 1


def _run(scenario: Scenario, named: NamedPolicy, total: int, of: str = "") -> Result:
    with terminal.progress(f"{named.name + of:<10}", total, MofNCompleteColumn()) as progress:
        return simulate_one(scenario, named, progress)


def _scenario(
    trace: str, nodes: tuple[Node, ...], *, form: str | None, synthetic: Synthetic | None, **more: Any
) -> Scenario:
    if synthetic is not None:

        def draw(tally: Tally) -> Iterator[Any]:
            for job in synthetic.draw(more["seed"]):
                tally.jobs += 1
                yield job

        return Scenario(jobs=draw, name=f"{synthetic.jobs:,} synthetic jobs", nodes=nodes, **more)
    opened = open_trace(Path(trace).expanduser(), form)
    jobs = CachedJobs(opened.jobs)
    if opened.may_have_instances and any(job.mig for job in jobs(opened.tally())):
        nodes = cut_by_jobs(nodes, load_catalogue(home_prices(), home_gpus()))
    return Scenario(jobs=jobs, name=opened.path.name, nodes=nodes, **more)


def _priced(nodes: tuple[Node, ...], price_as: str | None) -> tuple[Node, ...]:
    """Return the nodes with the catalogue's price of their GPUs, or of the GPU that stands for them.

    Raises:
        CatalogueError: the catalogue has no GPU of this name, or no price for it, and none stands for it.
    """
    catalogue, found = load_catalogue(home_prices(), home_gpus()), []
    for node in nodes:
        if node.gpu_name != UNNAMED_GPU and price_as is None:
            _check_known(catalogue, node.gpu_name)
        own, other = priced(node, catalogue), price_as or "H100"
        if own.price_source.startswith("no ") and node.gpu_name != UNNAMED_GPU and price_as is None:
            hint = "account it as another one: --price-as H100, or none; or write its price into prices.toml"
            raise CatalogueError(f"{own.price_source}", hint=hint)
        if not own.micro_usd_per_gpu_hour and other != "none":
            own = replace(priced(replace(node, gpu_name=other), catalogue), gpu_name=node.gpu_name)
        found.append(own)
    return tuple(found)


def _check_known(catalogue: Catalogue, gpu_name: str) -> None:
    try:
        catalogue.find_gpu(gpu_name)
    except CatalogueError as error:
        hint = f"{error.hint}; or account it as one of them: --price-as H100"
        raise CatalogueError(error.message, hint=hint) from None


def _failures(text: str | None) -> tuple[OutageRate, ...]:
    if text is None:
        return ()
    rate, back = _rate(text, "--failures", "4h")
    return (OutageRate(per_node_day=rate, back_us=back),)


def _with_spot(scenario: Scenario, text: str, notice_us: int) -> Scenario:
    if Path(text).exists():
        nodes, series = spot_series(Path(text), scenario.nodes, notice_us)
        return replace(scenario, nodes=nodes, spot=series)
    rate, back = _rate(text, "--spot", "10m")
    reclaims = OutageRate(per_node_day=24 * rate, back_us=back, notice_us=notice_us, why="reclaimed by the cloud")
    return replace(scenario, outage_rates=(*scenario.outage_rates, reclaims))


def _rate(text: str, flag: str, back: str) -> tuple[float, int]:
    rate, _, away = text.partition("/")
    try:
        value = float(rate)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise InputError(
            f"{flag} {text!r} is not a rate", hint=f"give a rate and the length of an outage: {flag} 0.1/{back}"
        )
    return value, _us(away or back)


def _tiers(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    percentages = _names(text)
    if len(percentages) != 3 or not all(each.isdecimal() for each in percentages) or sum(map(int, percentages)) == 0:
        raise InputError(
            f"--tiers {text!r} is not three percentages", hint="production,standard,preemptible: --tiers 10,60,30"
        )
    return tuple(map(int, percentages))


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
    return "; ".join(f"{plural(count, 'row')} left out: {kind}" for kind, count in tally.kinds.items())
