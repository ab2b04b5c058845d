"""Prefill and decode on replicas of their own: a prompt is computed in one pool, its KV travels to the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cordee.hardware.catalog import Gpu
from cordee.hardware.collectives import network_link, send_s
from cordee.plan.serving.queueing.batching import Limits, Steps, serve
from cordee.plan.serving.queueing.served import Outcome, Served
from cordee.workload.requests import Request


@dataclass(frozen=True)
class Replicas:
    """Equal replicas; requests go to them in turn."""

    count: int
    speed: Steps
    limits: Limits


def transfer_s(gpu: Gpu, kv_bytes: float, gpus: int) -> float:
    """Return the seconds in which the KV of one prompt crosses the network, each GPU sending its part."""
    return float(send_s(kv_bytes / gpus, network_link(gpu)))


def serve_apart(
    requests: Sequence[Request], prefill: Replicas, decode: Replicas, sent_s: Callable[[int], float]
) -> Served:
    """Return the outcomes of requests whose prompts and answers run on different replicas.

    Args:
        requests: in the order of arrival.
        prefill: where prompts run; the first token comes from here.
        decode: where answers run.
        sent_s: seconds in which the KV of a prompt of so many tokens travels.
    """
    firsts = dict[int, Outcome]()
    refused, busy_s = 0, 0.0
    prompts = [replace(each, output_tokens=1) for each in requests]
    for turn in range(prefill.count):
        indices = range(turn, len(prompts), prefill.count)
        served = serve([prompts[index] for index in indices], prefill.speed, prefill.limits)
        refused, busy_s = refused + served.refused, busy_s + served.busy_s
        # A refused prompt has no outcome; the others keep their order.
        longest = [index for index in indices if _fits(prompts[index], prefill.limits)]
        firsts.update(zip(longest, served.outcomes, strict=True))
    arrived = sorted(
        (requests[index].arrival_s + first.ttft_s + sent_s(requests[index].input_tokens), index)
        for index, first in firsts.items()
    )
    outcomes = {index: firsts[index] for _, index in arrived if requests[index].output_tokens == 1}
    arrived = [pair for pair in arrived if requests[pair[1]].output_tokens > 1]
    preemptions, end_s = 0, max((each.arrival_s + each.e2e_s for each in firsts.values()), default=0.0)
    for turn in range(decode.count):
        mine = [pair for pair in arrived[turn :: decode.count] if _fits(requests[pair[1]], decode.limits)]
        refused += len(arrived[turn :: decode.count]) - len(mine)
        moved = [replace(requests[index], arrival_s=at_s, blocks=()) for at_s, index in mine]
        served = serve(moved, decode.speed, decode.limits, prefilled=True)
        preemptions, busy_s = preemptions + served.preemptions, busy_s + served.busy_s
        end_s = max(end_s, served.end_s)
        for (at_s, index), outcome in zip(mine, served.outcomes, strict=True):
            e2e_s = at_s + outcome.e2e_s - requests[index].arrival_s
            first = firsts[index]
            waited_s, tokens = first.waited_s + outcome.waited_s, requests[index].output_tokens
            outcomes[index] = replace(first, e2e_s=e2e_s, output_tokens=tokens, waited_s=waited_s)
    return Served([outcomes[index] for index in sorted(outcomes)], refused, preemptions, busy_s, end_s)


def _fits(request: Request, limits: Limits) -> bool:
    return limits.holds(request.input_tokens, request.output_tokens)
