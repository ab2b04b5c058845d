"""`cordee simulate --requests R --service S`: a service and training jobs on one cluster, beside two."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cordee.cli import terminal
from cordee.cli.plan_more import write_page
from cordee.cli.simulate_services_text import print_together
from cordee.control.eligible import micro_usd_per_hour
from cordee.errors import InputError, TraceError
from cordee.events import Node
from cordee.hardware.load import load_catalogue
from cordee.planning import home_gpus, serving_request
from cordee.serve.policy.scale import ScaleRules
from cordee.simulate.compare import Scenario, count_jobs
from cordee.simulate.policies import NamedPolicy
from cordee.simulate.services.arrivals import SYNTHETIC, Arrivals, SyntheticDay, read_arrivals
from cordee.simulate.services.cluster_run import Together
from cordee.simulate.services.fluid import FluidPlay
from cordee.simulate.services.replica import ReplicaModel, replica_model
from cordee.simulate.services.service import ServicePlan
from cordee.simulate.services.together import compare
from cordee.units import US_PER_S, format_duration, parse_rate_per_s
from cordee.workload.service import WHOLE_MILLI, ServiceSpec
from cordee.workload.spec import JobSpec, parse_spec

Requests = Annotated[
    str | None,
    typer.Option("--requests", help="A trace of requests (Azure, BurstGPT, Mooncake), or `synthetic`: a made-up day."),
]
ServiceFile = Annotated[
    Path | None, typer.Option("--service", help="Job file with a section `service`, which serves --requests.")
]
Rate = Annotated[str, typer.Option(help="With --requests synthetic: mean rate of arrivals.")]
Split = Annotated[
    int | None,
    typer.Option(help="GPUs of the serving cluster of two.", show_default="the fewest that meet the SLO in every hour"),
]
WarmUp = Annotated[str, typer.Option(help="With --requests: time in which jobs run before the first request.")]
LoadTime = Annotated[str, typer.Option(help="With --requests: time from a replica's start until it is ready.")]
Target = Annotated[
    float, typer.Option(help="With --requests: load that the scaling policy aims at, of what meets the SLO.")
]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of the service, as they were given."""

    requests: str | None
    service: Path | None
    rate: str
    split: int | None
    warm_up_us: int
    load_us: int
    target: float
    price_as: str | None


def simulate_together(
    scenario: Scenario, policy: NamedPolicy, wanted: Wanted, *, html: Path | None, as_json: bool
) -> None:
    """Simulate, and print or write the answer."""
    asked = _asked(scenario, policy, wanted)
    with terminal.waiting("the requests") as shown:
        answer = compare(asked, shown.now)
    if html is not None:
        from cordee.simulate.services.page import together_page

        write_page(html, together_page(answer))
    if as_json:
        terminal.print_json(answer)
    else:
        print_together(answer)


def _asked(scenario: Scenario, policy: NamedPolicy, wanted: Wanted) -> Together:
    if wanted.requests is None or wanted.service is None:
        given, missing = ("--service", "--requests") if wanted.requests is None else ("--requests", "--service")
        hint = "give a trace or `synthetic`" if wanted.requests is None else "give a job file with a section `service`"
        raise InputError(f"{given} needs {missing}", hint=hint)
    for name, has in (("--vc-clusters", scenario.vcs), ("--until", scenario.until_us is not None)):
        if has:
            raise InputError(f"{name} does not go with --requests", hint=f"leave out {name}: the requests set the time")
    spec, service = _service(wanted.service)
    arrivals = _arrivals(wanted, scenario.seed)
    model = _model(scenario, wanted, spec, service, arrivals)
    fitting = arrivals.shorter_than(_longest(model))
    if fitting.count < arrivals.count / 2:
        raise TraceError(
            f"{arrivals.count - fitting.count:,} of {arrivals.count:,} requests are longer than the context of "
            f"{_longest(model):,} tokens",
            hint="give the service a longer `context`, or a model with more positions",
        )
    gpus = sum(node.gpus for node in scenario.nodes)
    play = FluidPlay(model, fitting, most=_most(spec, service, gpus))
    if count_jobs(scenario)[1] == 0:
        raise InputError(f"{scenario.name} has no job for this cluster", hint="check --from and --for")
    if not 0 < wanted.target <= 2:
        raise InputError(f"--target {wanted.target:g} is no load to aim at", hint="give a fraction, such as 0.8")
    if wanted.warm_up_us < wanted.load_us:
        times = f"--warm-up {format_duration(wanted.warm_up_us / US_PER_S)}"
        raise InputError(f"{times} is shorter than --load-time", hint="give at least the time that a replica loads")
    return Together(
        scenario=scenario,
        play=play,
        service=_plan(spec, service, play, wanted, scenario.nodes),
        policy=policy,
        split_gpus=wanted.split,
        warm_up_us=wanted.warm_up_us,
        refused=arrivals.count - fitting.count,
    )


def _service(path: Path) -> tuple[JobSpec, ServiceSpec]:
    try:
        spec = parse_spec(path.read_text(encoding="utf-8"), source=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}", hint="give a job file with a section `service`") from None
    if spec.service is None:
        raise InputError(f"{path} is a job that does not serve", hint="give it a section `service` with a `model`")
    if spec.service.model is None or spec.service.engine == "command":
        raise InputError(
            f"{path} serves by a command, whose speed is not known",
            hint="give a `model` of the catalogue, and no `run`",
        )
    if spec.gpu_milli < WHOLE_MILLI:
        raise InputError(
            f"{path} asks for {spec.gpu_milli / WHOLE_MILLI:g} of a GPU, and requests are simulated on whole ones",
            hint="write gpus: 1, or plan the part: cordee serve plan MODEL --memory-fraction",
        )
    return spec, spec.service


def _arrivals(wanted: Wanted, seed: int) -> Arrivals:
    if wanted.requests == SYNTHETIC:
        return SyntheticDay(per_s=parse_rate_per_s(wanted.rate)).draw(seed)
    return read_arrivals(Path(str(wanted.requests)).expanduser())


def _model(scenario: Scenario, wanted: Wanted, spec: JobSpec, service: ServiceSpec, arrivals: Arrivals) -> ReplicaModel:
    """Return the replica of the plan, on the GPU that the job file or most of the cluster has."""
    kinds = Counter[str]()
    for node in scenario.nodes:
        kinds[node.gpu_name] += node.gpus
    kind = spec.gpu or kinds.most_common(1)[0][0]
    if kind == "GPU":
        kind = wanted.price_as if wanted.price_as not in (None, "none") else "H100"
    latencies = {"ttft": service.slo.ttft_s, "tpot": service.slo.tpot_s}
    request = serving_request(
        str(service.model),
        f"{spec.gpus}x{kind}",
        input_tokens=arrivals.mean_input,
        output_tokens=arrivals.mean_output,
        engine=None if service.engine in ("auto", "transformers") else service.engine,
        context=None if service.context is None else str(service.context),
        ttft=None if latencies["ttft"] is None else f"{latencies['ttft']}s",
        tpot=None if latencies["tpot"] is None else f"{latencies['tpot']}s",
    )
    return replica_model(request, prefixes=bool(arrivals.traced))


def _longest(model: ReplicaModel) -> int:
    """Return the tokens of the longest request that a replica accepts."""
    limits = model.limits
    return int(min(limits.max_context_tokens, limits.kv_tokens - limits.block_tokens))


def _most(spec: JobSpec, service: ServiceSpec, gpus: int) -> int:
    """Return the replicas that the service may have here.

    Raises:
        InputError: the cluster has no GPUs for the fewest.
    """
    most = min(service.replicas.max, gpus // spec.gpus)
    if most < max(1, service.replicas.min):
        raise InputError(
            f"{max(1, service.replicas.min)} replicas of {spec.gpus} GPUs are more than the cluster's {gpus}",
            hint="give a larger --cluster, or fewer `replicas`",
        )
    return most


def _plan(spec: JobSpec, service: ServiceSpec, play: FluidPlay, wanted: Wanted, nodes: tuple[Node, ...]) -> ServicePlan:
    slo = play.model.slo
    return ServicePlan(
        name=spec.name if spec.name != "job" else "service",
        gpus=spec.gpus,
        gpu_name=spec.gpu,
        load_us=wanted.load_us,
        drain_us=round(service.drain_s * US_PER_S),
        kv_tokens=play.model.limits.kv_tokens,
        rules=ScaleRules(
            min_replicas=service.replicas.min,
            max_replicas=play.most,
            ttft_us=None if slo.ttft_s is None else round(slo.ttft_s * US_PER_S),
            tpot_us=None if slo.tpot_s is None else round(slo.tpot_s * US_PER_S),
            target=wanted.target,
            window_us=round(service.window_s * US_PER_S),
            idle_us=round(service.idle_s * US_PER_S),
            micro_usd_per_hour=micro_usd_per_hour(spec, nodes, load_catalogue(gpu_files=home_gpus())),
            max_micro_usd_per_hour=service.max_micro_usd_per_hour,
        ),
    )
