"""The rows of a comparison, for the terminal and the page."""

from collections.abc import Callable

from cordee.simulate.services.answer import ClustersResult
from cordee.units import format_digits_usd, format_latency, format_micro_usd

Row = tuple[str, Callable[[ClustersResult], str] | None]


def result_rows() -> list[Row]:
    """Return the names of the rows and how each is written; None: a heading."""
    return [
        ("GPUs", None),
        ("in all", lambda each: f"{each.gpus:,}"),
        ("serving + training", _division),
        ("cost of all", lambda each: format_micro_usd(each.micro_usd)),
        ("idle GPU-hours", lambda each: f"{each.idle_gpu_hours:,.0f}"),
        ("Serving", None),
        ("within the SLO", lambda each: f"{each.serving.attained:.2%}"),
        ("in the worst hour", lambda each: f"{each.serving.worst_hour:.2%}"),
        ("TTFT p50, p99", lambda each: _pair(each.serving.ttft_p50_s, each.serving.ttft_p99_s)),
        ("TPOT p50, p99", lambda each: _pair(each.serving.tpot_p50_s, each.serving.tpot_p99_s)),
        ("replicas, mean and most", lambda each: f"{each.serving.replicas_mean:.1f}, {each.serving.replicas_max:,}"),
        ("GPU-hours", lambda each: f"{each.serving.gpu_hours:,.0f}"),
        ("a million tokens", lambda each: _usd(each.serving.usd_per_mtok)),
        ("Training", None),
        ("useful GPU-hours", lambda each: f"{each.training.useful_gpu_hours:,.0f}"),
        ("goodput", lambda each: f"{each.training.goodput:.2%}"),
        ("a useful GPU-hour", lambda each: _usd(each.training.usd_per_useful_gpu_hour)),
        ("jobs ended", lambda each: f"{each.training.ended:,}"),
        ("GPUs waited for", lambda each: f"{each.training.waiting_gpus:,.0f}"),
        ("preemptions", lambda each: f"{each.training.preemptions:,}"),
    ]


def _division(each: ClustersResult) -> str:
    return "shared" if each.serving_gpus is None else f"{each.serving_gpus:,} + {each.gpus - each.serving_gpus:,}"


def _pair(median_s: float, tail_s: float) -> str:
    return f"{format_latency(median_s)}, {format_latency(tail_s)}"


def _usd(usd: float | None) -> str:
    return "no price" if usd is None else format_digits_usd(usd)
