"""A plan for a job: the JSON of `cordee plan --json`, read into the keys of a job's YAML.

It sets GPUs, model, layout and checkpoint interval. Admission checks that layout again, and refuses it with the numbers
if it no longer fits.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cordee.errors import DoesNotFitError, SpecError
from cordee.units import format_bytes
from cordee.workload.gpus import parse_mig, parse_wanted
from cordee.workload.tuning import TuneSpec

VERSIONS = (1, 2)
_MAKE_ONE = "make one: cordee plan llama-3-8b --gpus 8xH100 --json > plan.json"
_SIZES = ("tp", "pp", "dp", "cp", "ep", "etp", "zero", "shard", "vpp")
_WORDS = ("recompute", "schedule", "cp_kind", "offload")


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """One layout of a plan, and its source.

    Attributes:
        source: the plan's file.
        gpus: the job's total.
        gpu: the kind of GPU.
        model: the keys of a job's `model` section.
        every: the checkpoint interval with its unit; None: the plan has none.
    """

    source: str
    gpus: int
    gpu: str
    model: Mapping[str, Any]
    every: str | None

    def fill(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of a job together with those of the plan.

        Raises:
            SpecError: the job contradicts the plan.
        """
        if written.get("gpus") is not None:
            instance = parse_mig(written["gpus"])
            wanted = parse_wanted(written["gpus"]) if instance is None else (1, 1000, _name(*instance, self.gpu))
            count, milli, kind = wanted
            if count != self.gpus or milli != 1000 or (kind or self.gpu).casefold() != self.gpu.casefold():
                raise SpecError(
                    f"gpus is {written['gpus']}, but {self.source} is a plan for {self.gpus}x{self.gpu}",
                    hint=f"leave gpus out, or plan again with --gpus {written['gpus']}",
                )
        if written.get("model"):
            raise SpecError(
                f"the job has a model and a plan: {self.source} names one already", hint="give one of the two"
            )
        filled = {**written, "plan": self.source, "gpus": f"{self.gpus}x{self.gpu}", "model": dict(self.model)}
        checkpoint = written.get("checkpoint") or {}
        if self.every is not None and isinstance(checkpoint, dict) and not checkpoint.get("every"):
            filled["checkpoint"] = {**checkpoint, "every": self.every}
        return filled


def read_plan(text: str, *, source: str, layout: str | None = None) -> PlannedJob:
    """Return the best layout of a plan, or its fastest one with the axes that `layout` names (`tp=8,pp=2`).

    Raises:
        SpecError: this is not a plan, its version is unknown, or it lacks the layout.
        DoesNotFitError: none of its layouts fits.
    """
    plan = _load(text, source)
    fitting = [each for each in plan["layouts"] if each["fits"]]
    if not fitting:
        nearest = plan["layouts"][0]
        raise DoesNotFitError(
            f"{source}: {plan['model']['name']} does not fit {plan['gpus']} x {plan['gpu']['name']}: "
            f"{nearest['layout']} is over by {format_bytes(nearest['shortfall_bytes'])}",
            hint="`cordee plan` shows what would fit",
        )
    chosen = fitting[0] if layout is None else _with_axes(fitting, layout, source)
    training, path = plan["training"], plan.get("model_path")
    where = {"config": path} if path else {"name": plan["model"]["name"]}
    stage, tune = training.get("stage"), _tune(plan, source)
    pairs = 2 if stage and stage["name"] == "dpo" else 1
    return PlannedJob(
        source=source,
        gpus=plan["gpus"],
        gpu=plan["gpu"]["name"],
        model={
            **where,
            "seq": training["seq_tokens"],
            "global_batch": training["global_batch"] // pairs,
            "micro_batch": chosen["micro_batch"],
            "precision": training["precision"],
            "optimizer": training["optimizer"],
            "framework": training["framework"],
            "loss": training["loss"],
            "recompute": chosen["recompute"],
            "layout": _layout_text(chosen),
            **({"tune": tune} if tune else {}),
        },
        every=_interval(plan),
    )


def _tune(plan: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the keys of a job's `model.tune` that differ from training in full on whole sequences.

    Raises:
        SpecError: a plan of fine-tuning that was written before plans said how it was asked for.
    """
    written, training = plan.get("tune"), plan["training"]
    if written is None and any(training.get(name) for name in ("adapters", "frozen", "packed_tokens", "stage")):
        raise SpecError(
            f"{source} is a plan of fine-tuning that does not say how it was asked for",
            hint="plan again with this Cordee",
        )
    usual = asdict(TuneSpec())
    return {key: value for key, value in (written or {}).items() if value != usual.get(key)}


def _load(text: str, source: str) -> dict[str, Any]:
    try:
        plan = json.loads(text)
    except ValueError as error:
        raise SpecError(f"{source} is not JSON: {error}", hint=_MAKE_ONE) from None
    if not isinstance(plan, dict) or not isinstance(plan.get("layouts"), list) or not plan["layouts"]:
        raise SpecError(f"{source} is not a plan for one number of GPUs", hint=_MAKE_ONE)
    if plan.get("version") not in VERSIONS:
        raise SpecError(
            f"{source} is a plan of version {plan.get('version')}, but this Cordee reads up to version {VERSIONS[-1]}",
            hint="plan again with this Cordee",
        )
    return plan


def _with_axes(fitting: list[dict[str, Any]], layout: str, source: str) -> dict[str, Any]:
    wanted = {part.replace("=", "") for part in re.split(r"[,\s]+", layout.strip()) if part}
    for each in fitting:
        if wanted <= _axes(each):
            return each
    raise SpecError(
        f"{source} has no layout {layout!r} among its {len(fitting)} that fit",
        hint="it has " + ", ".join(each["layout"] for each in fitting[:5]),
    )


def _axes(each: Mapping[str, Any]) -> set[str]:
    """Return the axes of a layout's text, also those of size 1."""
    sizes = {f"{axis}{each[axis]}" for axis in _SIZES if each[axis] is not None}
    fsdp = {f"fsdp{each['dp']}"} if each["zero"] == 3 else set()
    return sizes | fsdp | {f"mb{each['micro_batch']}", *(each[word] for word in _WORDS), *each["layout"].split()}


def _layout_text(each: Mapping[str, Any]) -> str:
    """Return the layout with every axis given, so that admission checks just this one."""
    parts = [f"{axis}={each[axis]}" for axis in _SIZES if each[axis] is not None]
    parts += [f"sp={int(each['sp'])}", f"mb={each['micro_batch']}", *(f"{word}={each[word]}" for word in _WORDS)]
    return ",".join(parts + [part for part in each["layout"].split() if part.startswith("split=")])


def _interval(plan: Mapping[str, Any]) -> str | None:
    """Return the best checkpoint interval on the capacity that the plan was priced for."""
    capacity = (plan.get("price") or {}).get("capacity", "on-demand")
    period_s = next((each["period_s"] for each in plan["survival"] if each["capacity"] == capacity), None)
    return None if period_s is None else f"{max(1, round(period_s))}s"


def _name(profile: str, kind: str | None, planned: str) -> str:
    """Return the name of a MIG instance in the catalogue; a job that names no kind has the planned one."""
    return f"{kind or planned.rpartition(' ')[0]} {profile}"
