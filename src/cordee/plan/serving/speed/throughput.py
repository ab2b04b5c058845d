"""The steady state of a replica that always has requests waiting: tokens a second at the largest batch.

In each step every running answer gets a token. So sequences / output requests end in a step and as many prompts begin:
a step carries sequences x input / output tokens of prompts beside the answers, as far as its limit allows.
"""

from dataclasses import dataclass
from math import ceil

from cordee.plan.serving.speed.speculation import Speculation
from cordee.plan.serving.speed.speed import Speed


@dataclass(frozen=True, slots=True)
class Throughput:
    """A replica under full load.

    Attributes:
        output_tokens_per_s: tokens of answers a second, of the whole replica.
        sequences: concurrent answers.
        step_s: seconds of a mixed step.
        ttft_s: seconds from the start of a prompt to its first token; waiting for a slot is not in it.
        tpot_s: seconds between two tokens of one answer.
    """

    output_tokens_per_s: float
    sequences: int
    step_s: float
    ttft_s: float
    tpot_s: float


def saturated(
    speed: Speed,
    input_tokens: int,
    output_tokens: int,
    *,
    sequences: int,
    cached_tokens: int = 0,
    speculation: Speculation | None = None,
) -> Throughput:
    """Return the steady state with so many concurrent sequences, at most.

    Args:
        speed: step times of the replica.
        input_tokens: tokens of each prompt.
        output_tokens: tokens of each answer.
        sequences: sequences that fit in memory and in the engine's limits, at least 1.
        cached_tokens: tokens of each prompt that are not computed, only read; fewer than the prompt has.
        speculation: how tokens are guessed, if they are.
    """
    gained = speculation.tokens_per_step if speculation else 1.0
    each = speculation.draft_tokens + 1 if speculation else 1
    steps = max(1.0, output_tokens / gained)
    computed = input_tokens - cached_tokens
    limit = max(speed.case.max_batched_tokens * speed.case.layout.dp, computed // 64 + 1)
    running = max(1, min(sequences, speed.case.slots))
    # A request occupies its slot while its prompt passes, too: `steps` of answers and a few of prompts.
    answering: float = running
    for _ in range(8):
        prompt_tokens = min(answering * computed / steps, max(1.0, limit - answering * each))
        prompt_steps = max(1.0, computed / limit)
        answering = min(running, max(1.0, running * steps / (steps + prompt_steps)), prompt_tokens * steps / computed)
    room = max(1, min(computed, ceil(limit - answering * each)))
    chunk = (room, cached_tokens + (computed - room) // 2)
    context = answering * (input_tokens + output_tokens / 2)
    seconds = _step_s(speed, prompt_tokens, chunk, answering, context, each)
    if speculation:
        seconds += speculation.draft_tokens * speculation.draft_s
    rate = answering * gained / seconds
    first = seconds * prompt_steps
    return Throughput(rate, running, seconds, first, seconds / gained)


def _step_s(speed: Speed, tokens: float, chunk: tuple[int, int], sequences: float, context: float, each: int) -> float:
    """Return the mean seconds of steps in which `tokens` of prompts pass on average.

    `chunk` is the tokens of a prompt in one step, and those before it. Prompts are not spread over all steps: a step
    has whole chunks or none, so steps with one more and with one fewer are averaged.
    """
    running = max(1, round(sequences))
    fewer, fraction = divmod(tokens / chunk[0], 1)
    seconds = (1 - fraction) * speed.step_s([chunk] * int(fewer), running, context, each=each)
    return seconds + fraction * speed.step_s([chunk] * int(fewer + 1), running, context, each=each)
