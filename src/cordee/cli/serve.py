"""`cordee serve`: what a model needs to be served: layouts, concurrency, latencies, price, engine settings.

The verbs of services that run are in `services.py`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cordee.cli import terminal
from cordee.cli.gateway import gateway
from cordee.cli.keys import keys
from cordee.cli.plan_more import write_page
from cordee.cli.serve_text import print_serving, print_settings
from cordee.cli.services import VERBS
from cordee.cli.tune import tune
from cordee.errors import DoesNotFitError
from cordee.plan.serving.ask import ServingAnswer, ask
from cordee.plan.serving.disaggregation import parse_phases
from cordee.plan.serving.document import serving_document
from cordee.planning import serving_request
from cordee.workload.load import model_path

serve = typer.Typer(no_args_is_help=True, add_completion=False)
serve.add_typer(keys, name="keys", help="Make, list and revoke keys of the gateways; set a tenant's limits.")

Model = Annotated[str, typer.Argument(help="Name of a catalogued model, a config.json, or a folder with one.")]
Gpus = Annotated[str, typer.Option(help="GPUs for all replicas: 8xH100 or H100:8.")]
Input = Annotated[int, typer.Option("--input", help="Tokens of a prompt, on average.")]
Output = Annotated[int, typer.Option("--output", help="Tokens of an answer, on average.")]
Rate = Annotated[
    str | None, typer.Option(help="Requests that arrive: 5/s, 300/m.", show_default="as many as it serves")
]
Concurrency = Annotated[
    int | None, typer.Option(help="Requests that are open at any time, over all replicas, instead of a rate.")
]
Requests = Annotated[
    Path | None,
    typer.Option("--requests", help="A trace of requests (Mooncake, Azure, BurstGPT)."),
]
Cached = Annotated[float, typer.Option(help="Fraction of each prompt that is found in the prefix cache.")]
Imbalance = Annotated[
    float | None,
    typer.Option(help="Tokens of the fullest expert-parallel GPU over the mean.", show_default="by routing dumps"),
]
Ttft = Annotated[str | None, typer.Option(help="Limit of the time to first token: 500ms.", show_default="any")]
Tpot = Annotated[str | None, typer.Option(help="Limit of the time per output token: 50ms.", show_default="any")]
StatisticName = Annotated[str, typer.Option("--statistic", help="Statistic that must meet them: p50, p99 or mean.")]
Weights = Annotated[
    str | None,
    typer.Option(
        help="Format of the weights: bf16, fp8, int8, int4, ...; any searches.", show_default="the model's own"
    ),
]
Kv = Annotated[str, typer.Option(help="Format of the KV cache: bf16, fp8, ...; any searches.")]
LayoutText = Annotated[str | None, typer.Option(help="Evaluate only layouts with these axes: tp=2 or tp=8,ep.")]
EngineName = Annotated[
    str | None, typer.Option("--engine", help="Engine and version: vllm@0.21, sglang, ...", show_default="vllm")
]
Disaggregate = Annotated[
    str | None,
    typer.Option(help="Plan prefill and decode on replicas of their own: any, or prefill=2xtp4 decode=4xtp8."),
]
Context = Annotated[
    str | None, typer.Option(help="Longest prompt with its answer: 16384, 32K.", show_default="the model's, if it fits")
]
MaxSequences = Annotated[
    int | None, typer.Option(help="Concurrent requests of a replica, at most.", show_default="the engine's")
]
MemoryFraction = Annotated[
    float | None, typer.Option(help="Fraction of a GPU's memory for the engine.", show_default="the engine's")
]
Acceptance = Annotated[float, typer.Option(help="Probability that a drafted token is right, for --levers.")]
DraftText = Annotated[
    str | None,
    typer.Option(
        "--draft",
        help="Draft model of --levers: its name, config.json, or fraction of the parameters, 0.02.",
        show_default="look-up in the prompt",
    ),
]
Prefix = Annotated[float, typer.Option(help="Fraction of the prompts that a prefix cache would have, for --levers.")]
KvBandwidth = Annotated[
    str | None,
    typer.Option(help="Bandwidth at which a GPU reads KV from the host, for --levers.", show_default="25GB/s"),
]
CapacityName = Annotated[str, typer.Option("--capacity", help="Capacity to price: on-demand, spot or reserved.")]
Prices = Annotated[
    Path | None,
    typer.Option(help="TOML file of your prices.", show_default="prices.toml in CORDEE_HOME, ~/.cordee"),
]
Hours = Annotated[
    str | None,
    typer.Option(help="Load of each hour of a day over that of the busiest: 0.2,0.2,...,1; prices pay for all hours."),
]
Api = Annotated[
    str | None,
    typer.Option(help="Compare with an API: dollars of a million input, cached and output tokens: 0.5,0.05,1.5."),
]
Launcher = Annotated[
    str | None, typer.Option("--launch", help="Print an engine's command: vllm, sglang, tensorrt-llm or llama.cpp.")
]
WhyText = Annotated[
    str | None, typer.Option("--why", help="Explain why not this layout (tp=2), or this concurrency (128).")
]
WithCurve = Annotated[bool, typer.Option("--curve", help="Show throughput against latency, and the knee.")]
WithLevers = Annotated[
    bool, typer.Option("--levers", help="Show what lowers the price, and the crossover of each lever.")
]
All = Annotated[bool, typer.Option("--all", help="Show every layout.")]


@serve.callback()
def _verbs() -> None:
    """Plan the serving of a model, run it, and look after it."""


for verb, function in VERBS.items():
    serve.command(verb)(function)
serve.command(epilog="Example: cordee serve tune chat --prompts requests.jsonl --allow-lossy")(tune)
serve.command(epilog="Example: cordee serve gateway --listen 0.0.0.0:8480 --name edge-1")(gateway)


@serve.command()
def plan(
    model: Model,
    *,
    gpus: Gpus,
    input_tokens: Input = 1000,
    output_tokens: Output = 200,
    rate: Rate = None,
    concurrency: Concurrency = None,
    requests: Requests = None,
    cached: Cached = 0.0,
    imbalance: Imbalance = None,
    ttft: Ttft = None,
    tpot: Tpot = None,
    statistic: StatisticName = "p99",
    weights: Weights = None,
    kv: Kv = "bf16",
    layout: LayoutText = None,
    disaggregate: Disaggregate = None,
    engine: EngineName = None,
    context: Context = None,
    max_sequences: MaxSequences = None,
    memory_fraction: MemoryFraction = None,
    acceptance: Acceptance = 0.7,
    draft: DraftText = None,
    prefix: Prefix = 0.5,
    kv_bandwidth: KvBandwidth = None,
    capacity: CapacityName = "on-demand",
    prices: Prices = None,
    hours: Hours = None,
    api: Api = None,
    launcher: Launcher = None,
    why: WhyText = None,
    with_curve: WithCurve = False,
    with_levers: WithLevers = False,
    html: terminal.Html = None,
    show_all: All = False,
    models: terminal.Models = False,
    as_json: terminal.Json = False,
) -> None:
    """Plan a service: which layout and how many replicas meet the latencies, and what a token costs.

    Exits with 21 if nothing fits or meets them; the answer then shows the nearest, and what would work.
    """
    request = serving_request(
        model, gpus, input_tokens=input_tokens, output_tokens=output_tokens, rate=rate, concurrency=concurrency,
        requests=requests, cached=cached, imbalance=imbalance, ttft=ttft, tpot=tpot, statistic=statistic,
        weights=weights, kv=kv, layout=layout, engine=engine or launcher, context=context,
        max_sequences=max_sequences, memory_fraction=memory_fraction, acceptance=acceptance, draft=draft,
        prefix=prefix, kv_bandwidth=kv_bandwidth, capacity=capacity, prices=prices, hours=hours, api=api,
    )  # fmt: skip
    phases = None if disaggregate is None else parse_phases(disaggregate)
    answer = ask(replace(request, why=why, launcher=launcher), phases)
    _print(
        answer, html, model_path=model_path(model), show_all=show_all, with_curve=with_curve, with_levers=with_levers,
        as_json=as_json,
    )  # fmt: skip


def _print(
    answer: ServingAnswer,
    html: Path | None,
    *,
    model_path: str | None,
    show_all: bool,
    with_curve: bool,
    with_levers: bool,
    as_json: bool,
) -> None:
    """Print the answer in the form that was asked for; exit with 21 if nothing meets the latencies."""
    if html is not None:
        write_page(html, answer.page())
    if as_json:
        print(serving_document(answer, model_path).model_dump_json(indent=2))
    elif answer.launch is not None:
        print_settings(answer.launch, answer)
    else:
        print_serving(answer, show_all=show_all, with_curve=with_curve, with_levers=with_levers)
    if not answer.meets:
        raise typer.Exit(DoesNotFitError.exit_code)
