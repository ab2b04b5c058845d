"""Stages after supervised fine-tuning as a user writes them: `dpo,reference=computed`, `grpo,group=8,prompt=512`.

What they cost is added up where it arises: the reference's bytes in `states.py` and `memory.py`, its passes in
`step.py`, and the generation of completions in `rollouts.py`.
"""

from dataclasses import replace
from typing import TypeVar

from cordee.errors import LayoutError
from cordee.near import did_you_mean, nearest
from cordee.plan.settings import default_batch
from cordee.plan.training import REFERENCES, STAGES, Adapters, Reference, Rollouts, Stage, StageName, Training
from cordee.units import plural

T = TypeVar("T", bound=str)
GROUP, PROMPT_TOKENS = 8, 512
_KEYS = {
    "dpo": ("reference",),
    "grpo": (
        "reference", "group", "prompt", "completion", "updates", "rollouts", "rollout-gpus", "overlap", "resident",
    ),
}  # fmt: skip
_HINT = "write dpo, dpo,reference=computed, grpo,group=8,prompt=512 or grpo,rollouts=apart,rollout-gpus=4"


def parse_stage(text: str, *, seq_tokens: int, adapters: bool) -> Stage:
    """Read a stage; what it leaves open depends on the sequence, and on whether adapters alone are trained.

    >>> parse_stage("dpo", seq_tokens=4096, adapters=True)
    Stage(name='dpo', reference='adapters-off', rollouts=None)
    >>> parse_stage("grpo,prompt=1024,rollouts=apart", seq_tokens=4096, adapters=False).rollouts.completion_tokens
    3072

    Raises:
        LayoutError: an unknown stage, key or value, or values that contradict each other.
    """
    first, *rest = (word.strip() for word in text.split(","))
    name = _one_of("stage", first, STAGES)
    given: dict[str, str] = {}
    for word in rest:
        key, equals, value = word.partition("=")
        if key not in _KEYS[name] or not (equals and value):
            raise LayoutError(f"stage {text!r} has a part that cannot be read: {word!r}", hint=_near(key, name))
        given[key] = value
    asked = given.pop("reference", "adapters-off" if adapters else "model" if name == "dpo" else "none")
    reference = _one_of("reference", asked, REFERENCES)
    _check(name, reference, adapters=adapters)
    return Stage(name, reference, None if name == "dpo" else _rollouts(given, seq_tokens))


def _check(name: StageName, reference: Reference, *, adapters: bool) -> None:
    if reference == "adapters-off" and not adapters:
        raise LayoutError("a model without adapters has none to turn off", hint="use reference=model or computed")
    if name == "dpo" and reference == "none":
        raise LayoutError("DPO compares with a reference", hint="use reference=model, adapters-off or computed")
    if name == "grpo" and reference == "computed":
        raise LayoutError(
            "the reference's log probabilities of completions cannot be computed before these are generated",
            hint="use reference=model, adapters-off or none (no KL term)",
        )


def _rollouts(given: dict[str, str], seq_tokens: int) -> Rollouts:
    prompt = _number(given, "prompt", PROMPT_TOKENS)
    if prompt >= seq_tokens:
        raise LayoutError(
            f"prompts of {prompt:,} tokens leave no completion in sequences of {seq_tokens:,}",
            hint="give a longer --seq, which holds a prompt with its longest completion",
        )
    longest = seq_tokens - prompt
    completion = _number(given, "completion", longest)
    if completion > longest:
        raise LayoutError(
            f"completions of {completion:,} tokens on average are longer than the longest, {longest:,}",
            hint=f"--seq is the prompt with the longest completion: give {prompt + completion} at least",
        )
    where = _one_of("place of roll-outs", given.get("rollouts", "colocated"), ("colocated", "apart"))
    gpus = _number(given, "rollout-gpus", 0) or None
    overlap = _one_of("overlap", given.get("overlap", "no"), ("no", "yes")) == "yes"
    resident = _fraction(given, "resident")
    apart = where == "apart" or gpus is not None
    if overlap and not apart:
        raise LayoutError("roll-outs on the same GPUs cannot overlap with updates", hint="add rollouts=apart")
    if resident and apart:
        raise LayoutError("an engine on other GPUs keeps nothing on these", hint="leave resident out")
    return Rollouts(
        _number(given, "group", GROUP), prompt, completion, _number(given, "updates", 1), apart, gpus, overlap, resident
    )


def with_stage(training: Training, stage: Stage, *, asked_batch: int | None, gpus: int) -> Training:
    """Return the training in this stage: a batch of DPO is of pairs, one of GRPO of completions.

    Raises:
        LayoutError: a batch that groups do not divide, or documents packed into sequences that are compared.
    """
    tuning = replace(training.tuning, stage=stage)
    if training.tuning.packed_tokens is not None:
        raise LayoutError(f"{stage.name} compares whole sequences, which are not packed", hint="leave --packed out")
    if stage.name == "dpo":
        pairs = asked_batch or default_batch(2 * training.seq_tokens, gpus, adapted=training.adapters is not None)
        return replace(training, global_batch=2 * pairs, tuning=tuning)
    assert stage.rollouts is not None, "GRPO generates what it trains on"
    group, batch = stage.rollouts.group, training.global_batch
    if asked_batch is None:
        batch = -(-batch // group) * group
    if batch % group:
        raise LayoutError(
            f"a batch of {plural(batch, 'completion')} has no whole groups of {group}",
            hint=f"use a --batch that is a multiple of {group}",
        )
    return replace(training, global_batch=batch, tuning=tuning)


def stage_in_words(stage: Stage, adapters: Adapters | None) -> str:
    """Return a stage for a sentence."""
    copies = {
        "model": f"a frozen copy as its reference ({'as the base is' if adapters else '16 bits'})",
        "adapters-off": "the model without adapters as its reference",
        "computed": "log probabilities of the reference computed beforehand",
        "none": "no reference",
    }
    if stage.rollouts is None:
        return f"DPO over pairs, {copies[stage.reference]}"
    made = stage.rollouts
    where = "on other GPUs" if made.apart else "on the same GPUs"
    return f"GRPO, {made.group} completions of a prompt, generated {where}, {copies[stage.reference]}"


def _number(given: dict[str, str], key: str, default: int) -> int:
    text = given.get(key, str(default))
    if not text.isdecimal() or (key in given and int(text) < 1):
        raise LayoutError(f"{key}={text} is not a whole number from 1", hint=_HINT)
    return int(text)


def _fraction(given: dict[str, str], key: str) -> float:
    text = given.get(key, "0")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise LayoutError(f"{key}={text} is no fraction of a GPU's memory", hint="give the part that stays: 0.3")
    return value


def _one_of(what: str, text: str, known: tuple[T, ...]) -> T:
    for name in known:
        if text == name:
            return name
    raise LayoutError(f"unknown {what} {text!r}", hint=did_you_mean(text, known))


def _near(key: str, name: StageName) -> str:
    near = nearest(key, _KEYS[name])
    return (f"did you mean {near}? " if near else "") + _HINT
