"""A plan as a job runs it: what it brings, and what is refused with its numbers."""

import json
from typing import Any

import pytest

from cordee.errors import CordeeError, DoesNotFitError, SpecError
from cordee.workload.planned import PlannedJob, read_plan
from cordee.workload.spec import JobSpec, parse_spec


def layout(name: str, *, fits: bool = True, **axes: int) -> dict[str, Any]:
    sizes = {"dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": None, "zero": 3, "shard": None, "vpp": 1, **axes}
    words = {"recompute": "none", "schedule": "1f1b", "cp_kind": "ring", "offload": "none"}
    more = {
        "sp": False,
        "micro_batch": 2,
        "layout": name,
        "fits": fits,
        "shortfall_bytes": 0 if fits else 3_000_000_000,
    }
    return {**sizes, **words, **more}


def plan(*layouts: dict[str, Any], **changes: Any) -> str:
    found = {
        "version": 1,
        "model": {"name": "llama-3-8b"},
        "gpu": {"name": "H100"},
        "gpus": 8,
        "training": {
            "seq_tokens": 4096,
            "global_batch": 64,
            "optimizer": "adamw",
            "precision": "bf16",
            "framework": "torch",
            "loss": "eager",
        },
        "price": None,
        "survival": [{"capacity": "on-demand", "period_s": 611.6}],
        "layouts": layouts or (layout("fsdp8 mb2", dp=8), layout("tp2 fsdp4 mb2", dp=4, tp=2)),
    }
    return json.dumps(found | changes)


def planned(name: str = "plan.json") -> PlannedJob:
    return read_plan(plan(), source=name)


def test_a_plan_brings_gpus_model_layout_and_interval() -> None:
    spec = JobSpec.from_flags(run="python train.py", gpus=None, plan=planned())
    assert (spec.gpus, spec.gpu, spec.plan, spec.checkpoint.every_s) == (8, "H100", "plan.json", 612.0)
    assert spec.model is not None
    assert (spec.model.name, spec.model.seq, spec.model.framework) == ("llama-3-8b", 4096, "torch")
    assert spec.model.layout == (
        "tp=1,pp=1,dp=8,cp=1,ep=1,zero=3,vpp=1,sp=0,mb=2,recompute=none,schedule=1f1b,cp_kind=ring,offload=none"
    )


def test_the_users_own_interval_wins() -> None:
    text = "run: python train.py\nplan: plan.json\ncheckpoint: {every: 5m}\n"
    assert parse_spec(text, plan_of=planned).checkpoint.every_s == 300.0


@pytest.mark.parametrize("asked", ["tp=2", "tp2 fsdp4", "dp=4,zero=3", "tp=2,mb=2"])
def test_another_layout_of_the_plan(asked: str) -> None:
    chosen = read_plan(plan(), source="plan.json", layout=asked)
    assert chosen.model["layout"].startswith("tp=2,pp=1,dp=4,")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("fsdp8", SpecError, r"plan.json is not JSON"),
        ("[]", SpecError, r"plan.json is not a plan for one number of GPUs"),
        (plan(version=3), SpecError, r"a plan of version 3, but this Cordee reads up to version 2"),
        (
            plan(layout("fsdp8", fits=False, dp=8)),
            DoesNotFitError,
            r"llama-3-8b does not fit 8 x H100: fsdp8 is over by 3 GB",
        ),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(text: str, error: type[CordeeError], message: str) -> None:
    with pytest.raises(error, match=message):
        read_plan(text, source="plan.json")


def test_a_layout_that_the_plan_has_not_is_refused() -> None:
    with pytest.raises(SpecError, match="has no layout 'tp=4' among its 2 that fit"):
        read_plan(plan(), source="plan.json", layout="tp=4")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("gpus: 16", r"job.yaml:2:1: gpus is 16, but plan.json is a plan for 8xH100"),
        ("gpus: 8xA100-80", r"gpus is 8xA100-80, but plan.json is a plan for 8xH100"),
        ("model: {name: llama-3-70b}", r"the job has a model and a plan: plan.json names one already"),
    ],
)
def test_a_job_that_says_otherwise_is_refused(written: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_spec(f"run: python train.py\nplan: plan.json\n{written}\n", source="job.yaml", plan_of=planned)


def test_a_job_may_repeat_what_the_plan_says() -> None:
    assert parse_spec("run: python train.py\nplan: plan.json\ngpus: h100:8\n", plan_of=planned).gpus == 8
