"""The completions that GRPO trains on: how fast an engine generates them, where, and what a whole iteration takes.

An iteration is a sum of what the planner knows: completions by `serving/`, passes of the reference and updates by the
training plan, and the new weights on their way to the engine. On the same GPUs the engine has what the training's
standing state leaves, and sleeps during updates unless it keeps a part of the memory; on GPUs of its own it has them
whole, and one side waits for the other unless both overlap, one update stale.
"""

from dataclasses import replace
from math import ceil

from cordee.errors import CordeeError, DoesNotFitError, LayoutError
from cordee.hardware.catalog import Gpu
from cordee.hardware.collectives import group_of, near_gpus
from cordee.plan.ask import Answer, Request, ask
from cordee.plan.candidates import Candidate
from cordee.plan.iteration import RolloutPlan
from cordee.plan.serving.engine import find_engine
from cordee.plan.serving.judge import ServingCandidate, unloaded
from cordee.plan.serving.performance import speed_of, steady_state
from cordee.plan.serving.request import EngineLimits, ServingRequest, Traffic
from cordee.plan.training import Rollouts, Training
from cordee.units import format_gb
from cordee.workload.model import ModelShape

# What vLLM leaves of a GPU, so that peaks of others have room: its default fraction is this much below the whole.
HEADROOM = 0.08
WEIGHT_BYTES = 2


def ask_stages(request: Request) -> Answer:
    """Answer a request as `ask` does; where its stage generates completions, with their iteration.

    GPUs for roll-outs apart are those of the request, too: unless their number is asked for, it is the one with the
    most completions a second. The layouts are then those of the GPUs that are left.

    Raises:
        LayoutError, CatalogueError, ShapeError: as `ask`.
        DoesNotFitError: no engine has room for a completion beside the training.
    """
    stage = request.parsed_stage()
    if stage is None or stage.rollouts is None:
        return ask(request)
    if not stage.rollouts.apart:
        return _with_rollouts(request, request.gpus)
    options = splits(request.gpus, stage.rollouts.gpus)
    found: list[tuple[float, int]] = []
    refused: CordeeError | None = None
    for generating in options if len(options) > 1 else ():
        trainers = replace(request, gpus=request.gpus - generating, search="best")
        try:
            made = _with_rollouts(trainers, generating).rollouts
        except (LayoutError, DoesNotFitError) as error:
            refused = error
            continue
        if made is not None:
            found.append((made.iteration_s / made.completions, generating))
    if refused is not None and not found:
        raise refused
    generating = min(found)[1] if found else options[0]
    return _with_rollouts(replace(request, gpus=request.gpus - generating), generating)


def _with_rollouts(request: Request, generating: int) -> Answer:
    answer = ask(request)
    if answer.best is None:
        return answer
    # An engine that stays has its own part of the memory, so that it is the whole GPU that is divided.
    made = plan_rollouts(request.shape, request.gpu, answer.training, answer.best, gpus=generating)
    return replace(answer, rollouts=made)


def plan_rollouts(shape: ModelShape, gpu: Gpu, training: Training, best: Candidate, *, gpus: int) -> RolloutPlan:
    """Return the iteration of a layout that fits; `gpus` are those that generate.

    The engine's layout is the one that is done first.

    Raises:
        DoesNotFitError: no layout of the engine has room for one completion beside what the training keeps.
    """
    stage = training.tuning.stage
    assert stage is not None and stage.rollouts is not None, "only GRPO has roll-outs"
    made, step = stage.rollouts, best.step
    assert step is not None, "a layout that fits has a step"
    standing = 0 if made.apart else standing_bytes(best)
    completions = training.global_batch * made.updates
    found = [
        (_generate_s(each, made, training, completions), index, each)
        for index, each in enumerate(_engines(shape, gpu, training, made, standing=standing, gpus=gpus))
    ]
    if not found:
        raise DoesNotFitError(
            f"no engine has room for a completion on {gpus} x {gpu.name} beside {format_gb(standing)} of the training",
            hint="use rollouts=apart, a shorter sequence, or a smaller optimizer",
        )
    generate_s, _, engine = min(found, key=lambda each: each[:2])
    held = engine.memory
    used = held.weights_bytes + held.activation_bytes + held.graph_bytes + held.context_bytes + held.kv_bytes
    return RolloutPlan(
        engine=str(engine.case.layout),
        gpus=gpus,
        trainers=best.layout.gpus,
        apart=made.apart,
        completions=completions,
        kv_tokens=held.kv_tokens,
        replicas=engine.replicas,
        concurrent=_concurrent(engine, completions),
        engine_bytes=used + standing,
        generate_s=generate_s,
        weights_s=_weights_s(shape, gpu, best, made),
        reference_s=float(step.reference_s) * made.updates,
        update_s=(float(step.total_s) - float(step.reference_s)) * made.updates,
        overlap=made.overlap,
    )


def splits(gpus: int, asked: int | None) -> list[int]:
    """Return the numbers of GPUs that may generate beside others that update: as asked, or halves, quarters, eighths.

    >>> splits(8, None), splits(16, 4)
    ([1, 2, 4, 6, 7], [4])

    Raises:
        LayoutError: too few GPUs for both.
    """
    if gpus < 2 or (asked or 1) >= gpus:
        raise LayoutError(
            f"roll-outs on {asked or 1} of {gpus} GPUs leave none that update",
            hint="use more GPUs, or rollouts=colocated",
        )
    if asked is not None:
        return [asked]
    powers = [2**n for n in range(gpus.bit_length()) if 2**n < gpus]
    return sorted({part for size in powers if size * 8 >= gpus for part in (size, gpus - size)})


def standing_bytes(best: Candidate) -> int:
    """Return what the training keeps on a GPU between two updates: weights, optimizer, buffers and context."""
    held = best.memory.worst
    states = best.memory.worst_timeline[0]
    return round(float(states.weights_bytes) + float(states.optimizer_bytes)) + held.context_bytes


def _engines(
    shape: ModelShape, gpu: Gpu, training: Training, made: Rollouts, *, standing: int, gpus: int
) -> list[ServingCandidate]:
    """Return the layouts of an engine that have room for a longest completion."""
    whole = gpu.visible_bytes
    fraction = made.resident or max(0.0, 1 - HEADROOM - standing / whole)
    if fraction <= 0:
        return []
    engine = find_engine("vllm")
    request = ServingRequest(
        shape=shape,
        gpu=gpu,
        gpus=gpus,
        engine=engine,
        traffic=Traffic(
            input_tokens=made.prompt_tokens,
            output_tokens=made.completion_tokens,
            # A group's prompt is computed once and read by the others.
            cached_fraction=(made.group - 1) / made.group,
        ),
        limits=EngineLimits(
            context_tokens=min(shape.positions, training.seq_tokens), memory_fraction=min(1.0, fraction)
        ),
    )
    try:
        return [each for each in unloaded(request) if each.fits]
    except LayoutError:
        return []


def _concurrent(engine: ServingCandidate, completions: int) -> int:
    """Return the completions that a replica runs at once: as many as its cache holds, or its part of all."""
    return max(1, min(engine.sequences, ceil(completions / engine.replicas)))


def _generate_s(engine: ServingCandidate, made: Rollouts, training: Training, completions: int) -> float:
    """Return the seconds until the last completion: a replica's part of them, but at least the longest one alone.

    While waves follow each other a replica is in its steady state. The last one thins out, so that the longest
    completion bounds the time from below.
    """
    speed, own = speed_of(engine.case), ceil(completions / engine.replicas)
    state = steady_state(engine.request.traffic, speed, 1, _concurrent(engine, completions))
    longest = training.seq_tokens - made.prompt_tokens
    alone_s = speed.prefill_s(1, made.prompt_tokens) + longest * speed.decode_s(1, training.seq_tokens - longest / 2)
    return max(own / state.requests_per_s, alone_s)


def _weights_s(shape: ModelShape, gpu: Gpu, best: Candidate, made: Rollouts) -> float:
    """Return the seconds in which the engine gets the new weights in 16 bits, adapters merged into them.

    On the same GPUs they are gathered from their shards; on others they cross the network, each trainer's part at once.
    """
    total = WEIGHT_BYTES * shape.parameters
    if not made.apart:
        shards = best.layout.shard_ranks if best.layout.zero == 3 else 1
        gathered = float(group_of(gpu, shards, 1).gather_s(total)) if shards > 1 else 0.0
        return gathered + 2 * total / (best.layout.tp * best.layout.pp) / gpu.memory_bytes_per_s
    if best.layout.gpus + 1 <= near_gpus(gpu):
        return total / (gpu.link_bytes_per_s * gpu.efficiency.island_fraction)
    return total / (gpu.network_bytes_per_s * gpu.efficiency.network_fraction)
