"""Each field that memory or time is planned with is in a launcher's text, in a note, among its limits, or refused."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from cordee.errors import LayoutError
from cordee.plan.launch import LAUNCHERS, launch_settings
from cordee.plan.launch_parts import FRAMEWORKS_OF
from cordee.plan.layout import Layout
from cordee.plan.settings import Settings
from cordee.plan.training import (
    BASES,
    Adapters,
    Base,
    Frozen,
    Optimizer,
    Precision,
    Stage,
    Training,
    Tuning,
    find_optimizer,
)
from cordee.planning import settings_of
from cordee.workload.load import load_shape
from cordee.workload.model import ModelShape
from cordee.workload.spec import parse_spec

DENSE, MIXTURE, GPT2 = (load_shape(name) for name in ("llama-3-8b", "mixtral-8x7b", "gpt2"))
PLAIN = Training(4096, 64, tuning=Tuning(composite_norms=True))
QLORA = replace(PLAIN, tuning=Tuning(), optimizer=find_optimizer("adamw", "fp32"), adapters=Adapters(base=BASES["nf4"]))
# Two optimizers that differ in what the field says.
OPTIMIZERS = {
    "name": ("adamw", "muon"), "weight_bytes": ("adamw", "adamw fp32"), "gradient_bytes": ("adamw", "adamw-fp32-grads"),
    "master_bytes": ("adamw-8bit", "adamw-8bit-master"), "moment_bytes": ("adamw", "adamw-bf16-moments"),
    "outer_moment_bytes": ("muon", "sgd-momentum"), "paged": ("adamw", "adamw-paged"),
}  # fmt: skip
BASE: dict[str, Any] = {
    "name": BASES["int8"], "bits": BASES["int8"], "block_bytes": BASES["nf4-double"], "row_bytes": BASES["int8"],
    "keeps_inputs": BASES["int8"], "head": replace(BASES["nf4"], head=True),
    "copies": replace(BASES["nf4"], copies=2),
}  # fmt: skip
ADAPTERS: dict[str, Any] = {
    "rank": 32, "targets": ("q", "v"), "dropout": 0.1, "magnitudes": True, "joined": True, "widened": True
}  # fmt: skip
FROZEN: dict[str, Any] = {"layers": (0, 1), "embeddings": True, "head": True}
TUNING: dict[str, Any] = {
    "packed_tokens": 512, "stage": Stage("dpo", "model"), "composite_norms": False, "composite_gelu": True,
    "flat": True, "regathers": True, "loss_within": True,
}  # fmt: skip
TRAINING: dict[str, Any] = {
    "seq_tokens": 2048, "global_batch": 128, "precision": "fp32", "flash": False, "dropout": True,
    "framework": "internevo", "imbalance": 1.5, "imbalance_by_ep": ((8, 1.4),), "overlap": False, "loss": "chunked",
    "attention": "first", "fused": True, "adapters": Adapters(),
}  # fmt: skip
FSDP = Layout(dp=8, zero=3)
LAYOUTS: dict[str, tuple[Layout, object]] = {
    "dp": (FSDP, 16), "tp": (FSDP, 2), "pp": (Layout(dp=8), 2), "zero": (FSDP, 2), "sp": (Layout(dp=8, tp=2), True),
    "micro_batch": (FSDP, 2), "recompute": (FSDP, "full"), "cp": (FSDP, 2), "ep": (FSDP, 8),
    "etp": (Layout(dp=8, tp=2, zero=1), 1), "shard": (FSDP, 4), "schedule": (Layout(dp=8, pp=4), "gpipe"),
    "vpp": (Layout(dp=8, pp=4, schedule="interleaved", vpp=2), 4),
    "cp_kind": (Layout(dp=8, cp=2, zero=3), "all-gather"), "split": (Layout(dp=8, pp=4), (7, 9, 9, 7)),
    "recompute_layers": (replace(FSDP, recompute="full"), 4), "offload": (FSDP, "optimizer"),
}  # fmt: skip

# What a launcher refuses whole, whatever else is asked of it.
NO_PIPELINE = dict.fromkeys(("Layout.schedule", "Layout.vpp", "Layout.split"), "there are no pipelines (pp)")
NO_FREEZING = dict.fromkeys(("Frozen.layers", "Frozen.embeddings", "Frozen.head"), "Megatron-LM freezes no part")
REFUSED: dict[str, dict[str, str]] = {
    "accelerate": NO_PIPELINE, "trainer": NO_PIPELINE | {"Layout.cp_kind": "TrainingArguments have no tp and cp"},
    "lightning": NO_PIPELINE | {"Layout.cp_kind": "Lightning has no context parallelism"}, "megatron": NO_FREEZING,
    "deepspeed": {"Layout.vpp": "DeepSpeed's pipeline is 1F1B"},
}  # fmt: skip
ADAPTED = ("Adapters", "Base")

Case = tuple[ModelShape, Layout, Training]


def _pairs() -> Iterator[tuple[str, Case, Case]]:
    """Two plans for each field; a KeyError is a field that has no example here."""
    for field in fields(Layout):
        layout, other = LAYOUTS[field.name]
        shape = MIXTURE if field.name in ("ep", "etp") else DENSE
        changed: Layout = replace(layout, **{field.name: other})  # type: ignore[arg-type]
        yield f"Layout.{field.name}", (shape, layout, PLAIN), (shape, changed, PLAIN)
    for name, (training, other_training) in _trainings():
        other = {"Training.imbalance": MIXTURE, "Training.imbalance_by_ep": MIXTURE, "Tuning.composite_gelu": GPT2}
        shape = other.get(name, DENSE)
        yield name, (shape, FSDP, training), (shape, FSDP, other_training)


def _trainings() -> Iterator[tuple[str, tuple[Training, Training]]]:
    for field in fields(Training):
        if field.name == "optimizer":
            yield from _optimizers()
        elif field.name == "tuning":
            yield from _tunings()
        else:
            yield f"Training.{field.name}", (PLAIN, replace(PLAIN, **{field.name: TRAINING[field.name]}))
    assert QLORA.adapters is not None
    for field in fields(Adapters):
        if field.name == "base":
            for part in fields(Base):
                other = replace(QLORA, adapters=replace(QLORA.adapters, base=BASE[part.name]))
                yield f"Base.{part.name}", (QLORA, other)
        else:
            other = replace(QLORA, adapters=replace(QLORA.adapters, **{field.name: ADAPTERS[field.name]}))
            yield f"Adapters.{field.name}", (QLORA, other)


def _optimizers() -> Iterator[tuple[str, tuple[Training, Training]]]:
    for field in fields(Optimizer):
        if field.name == "in_backward":
            changed = replace(PLAIN, optimizer=replace(PLAIN.optimizer, in_backward=True))
            yield "Optimizer.in_backward", (PLAIN, changed)
            continue
        first, second = (_with_optimizer(*text.split()) for text in OPTIMIZERS[field.name])
        assert getattr(first.optimizer, field.name) != getattr(second.optimizer, field.name)
        yield f"Optimizer.{field.name}", (first, second)


def _with_optimizer(name: str, precision: Precision = "bf16") -> Training:
    return replace(PLAIN, optimizer=find_optimizer(name, precision), precision=precision)


def _tunings() -> Iterator[tuple[str, tuple[Training, Training]]]:
    some = replace(PLAIN, tuning=replace(PLAIN.tuning, frozen=Frozen((5,))))
    for field in fields(Tuning):
        if field.name == "frozen":
            yield "Tuning.frozen", (PLAIN, some)
            continue
        changed = replace(PLAIN, tuning=replace(PLAIN.tuning, **{field.name: TUNING[field.name]}))
        yield f"Tuning.{field.name}", (PLAIN, changed)
    for field in fields(Frozen):
        parts = replace(Frozen((5,)), **{field.name: FROZEN[field.name]})
        yield f"Frozen.{field.name}", (some, replace(PLAIN, tuning=replace(PLAIN.tuning, frozen=parts)))


def _said(launcher: str, case: Case) -> object:
    """What the user is told: the text, limits and notes, or the error."""
    shape, layout, training = case
    framework = training.framework if training.framework == "internevo" else FRAMEWORKS_OF.get(launcher, "torch")
    try:
        said = launch_settings(launcher, shape, layout, replace(training, framework=framework))
    except LayoutError as error:
        return str(error)
    return said.text, said.cannot, said.notes


@pytest.mark.parametrize("launcher", sorted(LAUNCHERS))
@pytest.mark.parametrize("name, before, after", list(_pairs()), ids=[name for name, _, _ in _pairs()])
def test_no_field_is_left_out(name: str, before: Case, after: Case, launcher: str) -> None:
    adapted = launcher not in ("trainer", "cordee") and name.startswith(ADAPTED)
    whole = "adapters are not written" if adapted else REFUSED.get(launcher, {}).get(name)
    if whole is not None:
        assert whole in str(_said(launcher, before)) and whole in str(_said(launcher, after))
    else:
        assert _said(launcher, before) != _said(launcher, after)


SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {"model_code": "hf"}, {"model_code": "hf", "compiled": True}, {"optimizer": "adamw-bf16"},
    {"loss": "chunked", "compiled": True}, {"compiled": True}, {"packed_tokens": 512, "model_code": "hf"},
    {"optimizer_in_backward": True, "precision": "fp32"}, {"train": "qlora", "rank": 64, "model_code": "hf"},
    {"train": "dora", "base_bits": "nf4-double"},
    {"train": "lora", "model_code": "torchtitan"},
    {"train": "qlora", "base_bits": 8, "fsdp_version": 1, "optimizer": "adamw-bf16"},
)  # fmt: skip
OF_LLAMA: tuple[dict[str, Any], ...] = (
    {"freeze": "embeddings,0..3,9"}, {"train": "lora", "targets": "q,v", "lora_dropout": 0.1},
    {"train": "qlora", "fused_qkv": True, "quantize_head": True, "dequantized": 2},
)  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "settings"),
    [*((DENSE, each) for each in (*SETTINGS, *OF_LLAMA)), *((GPT2, each) for each in SETTINGS)],
)
def test_admission_plans_the_yaml_as_it_was_planned(shape: ModelShape, settings: dict[str, Any]) -> None:
    training = Settings(**settings).training(shape, 8)
    said = launch_settings("cordee", shape, FSDP, training)
    spec = parse_spec(said.text)
    assert spec.model is not None and not said.cannot
    assert settings_of(spec.model).training(shape, 8) == training
