"""Latencies of a workload, predicted from the profile, and measured on the pipelines themselves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cordee.serve.policy.rag_forecast import (
    AnswerLatency,
    MemoryPlan,
    RagProfile,
    RagSetup,
    even_arrivals,
    forecast,
)
from cordee.serve.rag.index import RagIndex, probed
from cordee.serve.rag.partition import drop_pages
from cordee.serve.rag.profile import ProfileLoad, sample
from cordee.serve.rag.setup import RagOptions, running
from cordee.serve.rag.workload import play

REQUESTS_MIN, PREDICTED_S = 10, 60.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """The latencies of requests at a rate; none were measured if nobody asked for that."""

    rate_per_s: float
    predicted: list[AnswerLatency]
    measured: list[AnswerLatency]


async def predictions(
    index: RagIndex,
    options: RagOptions,
    plan: MemoryPlan,
    profile: RagProfile,
    rates_per_s: Sequence[float],
    check_s: float,
    load: ProfileLoad,
    say: Callable[[str], None],
) -> list[Prediction]:
    """Return the latencies at each rate; with `check_s` each is played for so long, on a cold cache.

    The questions are texts of the index itself, so that they want the partitions that real ones would.
    """
    found = []
    for rate in rates_per_s:
        arrivals = even_arrivals(rate, max(REQUESTS_MIN, round(rate * (check_s or PREDICTED_S))))
        questions = sample(index, len(arrivals))
        say(f"predicting {rate:g} requests a second")
        predicted = predict(index, options, plan, profile, arrivals, questions)
        measured: list[AnswerLatency] = []
        if check_s:
            say(f"playing {rate:g} requests a second")
            for each in index.catalog.partitions():
                drop_pages(index.path_of(each))
            quiet = replace(options, enforce=False)
            async with running(index, quiet, plan, profile, "profile", lambda *change: None) as rag:
                played = await play(rag, arrivals, questions, load.output_tokens, load.top)
            measured = [each.latency for each in played]
        found.append(Prediction(rate, predicted, measured))
    return found


def predict(
    index: RagIndex,
    options: RagOptions,
    plan: MemoryPlan,
    profile: RagProfile,
    arrivals_s: Sequence[float],
    questions: Sequence[str],
) -> list[AnswerLatency]:
    """Return the latencies that the profile leads to."""
    partitions = index.catalog.partitions()
    sizes = {each.id: each.size_bytes for each in partitions}
    wanted = None
    if options.probes is not None:
        wanted = [frozenset(each) for each in probed(partitions, index.embed(questions), options.probes)]
    setup = RagSetup(sizes, plan.partition_bytes, plan.slots, options.rules)
    return forecast(profile, setup, arrivals_s, wanted)
