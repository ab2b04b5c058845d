"""Published step times as cases for the planner, and many cases as a few stacks of arrays that it predicts at once."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cordee.hardware.catalog import ChipEfficiency, Gpu
from cordee.plan.doubt import doubt
from cordee.plan.layout import Layout
from cordee.plan.memory import peak_bytes
from cordee.plan.step import step_time
from cordee.plan.training import Optimizer, Training
from cordee.workload.model import ModelShape
from published import Published

# Metrics that a step time follows from without any convention, the most direct first.
METRICS = ("step_time_s", "tokens_per_s_per_gpu", "tokens_per_s", "samples_per_gpu_per_s", "tflops_per_gpu")
# Memory that no mistake of the planner explains: a run that would need more of it recomputes, said or not.
FAR_OVER = 2.0
_SHAPE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "learned_positions")
_LAYOUT = ("dp", "tp", "zero", "sp", "micro_batch", "cp", "ep")
_OPTIMIZER = ("weight_bytes", "gradient_bytes", "master_bytes", "moment_bytes")


@dataclass(frozen=True)
class Case:
    """One measured step."""

    source: str
    config_id: str
    shape: ModelShape
    gpu: Gpu
    layout: Layout
    training: Training
    measured_s: float

    @property
    def flop_per_gpu(self) -> float:
        """FLOPs that the hardware does in a step, recomputation included, on one GPU: what HFU counts."""
        flop = self.shape.train_flop_per_token(self.training.seq_tokens) * self.training.tokens_per_step
        again = 4 / 3 if self.layout.recompute == "full" else 1.0
        return flop * again / self.layout.gpus


def time_cases(runs: Iterable[Published]) -> tuple[list[Case], dict[str, int]]:
    """The cases to score, and how many runs are none, by reason."""
    cases, left_out = [], defaultdict[str, int](int)
    for run in runs:
        timed = run.primary & {*METRICS, "mfu", "gpu_hours"}
        if not timed:
            continue
        if run.trust > 2:
            left_out["inconsistent in the source (trust 3)"] += 1
        elif run.gpu is None:
            left_out[f"GPU not in the catalogue: {run.gpu_type}"] += 1
        elif not timed & set(METRICS):
            left_out["only MFU or GPU-hours, whose convention is not stated"] += 1
        elif "LoRA" in run.note:
            left_out["adapters alone are trained"] += 1
        elif run.fp4:
            left_out["4-bit products, which the planner does not know"] += 1
        else:
            cases.append(_case(run, run.gpu))
    return cases, dict(left_out)


def _case(run: Published, gpu: Gpu) -> Case:
    gpu = replace(gpu, network_bytes_per_s=_network_bytes_per_s(run, gpu))
    # Megatron-LM before Transformer Engine reduced gradients after the last micro-batch.
    overlap = run.training.overlap and not run.training.dropout and "not overlapped" not in run.note
    training = replace(run.training, overlap=overlap)
    layout = _filled(run, gpu, training)
    if layout.cp > 1 and not re.search("a2a|ulysses|all-gather", run.note.lower()):
        # Megatron-LM passes keys and values around in a ring unless it is told otherwise.
        layout = replace(layout, cp_kind="ring")
    return Case(run.source, run.config_id, run.shape, gpu, layout, training, _measured_s(run, layout))


def _network_bytes_per_s(run: Published, gpu: Gpu) -> float:
    """One GPU's share of what the row says of its node's network: `4x100Gb`, `8x200G RDMA`, `1600 Gbps`."""
    text = f"{run.gpu_type} {run.note}"
    if match := re.search(r"(\d+)x(\d+) ?G(?:b|bit)?\b(?! NVLink)", text):
        bits = int(match[1]) * int(match[2])
    elif match := re.search(r"(\d{3,4}) ?Gbps", text):
        bits = int(match[1])
    else:
        return gpu.network_bytes_per_s
    return bits * 1e9 / 8 / gpu.gpus_per_node


def _filled(run: Published, gpu: Gpu, training: Training) -> Layout:
    """What a source leaves open is filled as the planner would choose: the fastest of a few usual values."""
    layout = run.layout
    sizes = (1, 2, 4, 8, 16) if "microbatch" in run.unstated else (layout.micro_batch,)
    chunks = (2, 3, 4) if "vpp" in run.unstated and layout.pp > 1 else (layout.vpp,)
    if not run.recompute_said and peak_bytes(run.shape, layout, training) > FAR_OVER * gpu.memory_bytes:
        layout = replace(layout, recompute="full")
    tried = [
        replace(layout, micro_batch=size, vpp=vpp, schedule="interleaved" if vpp > 1 else layout.schedule)
        for size in sizes
        for vpp in chunks
        if training.global_batch >= layout.dp * size and (vpp == 1 or divides(run.shape.layers, layout.pp * vpp))
    ]
    tried = [one for one in tried if peak_bytes(run.shape, one, training) < gpu.memory_bytes] or tried or [layout]
    plain = replace(gpu, efficiency=gpu.uncalibrated)
    return min(tried, key=lambda one: float(step_time(run.shape, plain, one, training).total_s))


def is_unexplained(case: Case) -> bool:
    """Whether its time has a cause that is not modelled: torch's context parallelism takes 1.5 to 1.9 times.

    Such rows are scored all the same; in a fit they would pass for slow attention.
    """
    return case.training.framework == "torch" and case.layout.cp > 1


def divides(layers: int, stages: int) -> bool:
    """Whether stages are even, or would be with the embedding and the head counted as a layer each."""
    return layers % stages == 0 or (layers + 2) % stages == 0


def _measured_s(run: Published, layout: Layout) -> float:
    metric = next(m for m in METRICS if m in run.metrics)
    value, training, gpus = run.metrics[metric], run.training, layout.gpus
    if metric == "step_time_s":
        return value
    if metric == "tokens_per_s_per_gpu":
        return training.tokens_per_step / (value * gpus)
    if metric == "tokens_per_s":
        return training.tokens_per_step / value
    if metric == "samples_per_gpu_per_s":
        return training.global_batch / (value * gpus)
    return run.shape.train_flop_per_token(training.seq_tokens) * training.tokens_per_step / (value * 1e12 * gpus)


class Stack:
    """Cases that differ in numbers only, side by side in arrays; those that differ in words stand in several parts."""

    def __init__(self, cases: Sequence[Case]) -> None:
        groups: dict[Any, list[int]] = defaultdict(list)
        for index, case in enumerate(cases):
            groups[_words(case)].append(index)
        self.parts = [(np.array(members), *_stacked([cases[i] for i in members])) for members in groups.values()]
        self.measured = np.array([case.measured_s for case in cases])
        self.sources = np.array([case.source for case in cases])
        self.software = np.array([case.training.framework for case in cases])
        self.ceiling = cases[0].gpu.matmul_fraction
        self.unexplained = np.array([is_unexplained(case) for case in cases])
        # 8-bit rows say nothing of 16-bit products: what a source's rows have in common, they have in one precision.
        self.groups = np.array([f"{case.source}: {case.training.precision}" for case in cases])

    def predict(self, table: ChipEfficiency) -> np.ndarray:
        """Seconds of each case with this table."""
        seconds = np.empty(len(self.measured))
        for members, shape, bare, layout, training in self.parts:
            seconds[members] = step_time(shape, replace(bare, efficiency=table), layout, training).total_s
        return seconds

    def predict_with_doubt(self, table: ChipEfficiency) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of each case, and the deviation that the planner knows of beyond the table's spread."""
        seconds, doubts = np.empty(len(self.measured)), np.empty(len(self.measured))
        for members, shape, bare, layout, training in self.parts:
            gpu = replace(bare, efficiency=table)
            step = step_time(shape, gpu, layout, training)
            seconds[members], doubts[members] = step.total_s, doubt(shape, gpu, layout, training, step)
        return seconds, doubts


def _words(case: Case) -> Any:
    shape, layout, training = case.shape, case.layout, case.training
    same_shape = (shape.gated, shape.qkv_bias, shape.out_bias, shape.mlp_bias, shape.tied)
    words = (layout.recompute, layout.recompute_layers, layout.schedule, layout.cp_kind, layout.offload)
    how = (training.precision, training.flash, training.framework, training.overlap, training.attention, training.fused)
    # A schedule has one number of stages and chunks; uneven stages are counted one by one as well.
    stages = (layout.split, layout.pp, layout.vpp)
    special = shape.experts or shape.latent or shape.mixed or layout.split
    chip = case.gpu.name, case.gpu.memory_bytes_per_s
    if shape.mixed is not None:
        words = (*words, training.seq_tokens)
    return chip, same_shape, shape if special else None, stages, words, how


def _stacked(cases: Sequence[Case]) -> tuple[ModelShape, Gpu, Layout, Training]:
    first = cases[0]

    def column(values: Iterable[Any]) -> Any:
        return np.array(list(values), dtype=float)

    shape, uneven = first.shape, first.layout.split is not None
    if shape.experts is None and shape.latent is None and not uneven:
        shape = replace(shape, **{key: column(getattr(c.shape, key) for c in cases) for key in _SHAPE})
    sizes = {key: np.array([getattr(c.layout, key) for c in cases]) for key in _LAYOUT}
    sizes["etp"] = column(c.layout.expert_tp for c in cases)
    sizes["shard"] = column(c.layout.shard_ranks for c in cases)
    layout = replace(first.layout, **sizes)
    optimizer = Optimizer("mixed", *(column(getattr(c.training.optimizer, key) for c in cases) for key in _OPTIMIZER))
    tokens = first.training.seq_tokens if shape.mixed is not None else column(c.training.seq_tokens for c in cases)
    training = replace(
        first.training,
        seq_tokens=tokens,
        global_batch=column(c.training.global_batch for c in cases),
        optimizer=optimizer,
    )
    gpu = replace(first.gpu, network_bytes_per_s=column(c.gpu.network_bytes_per_s for c in cases))
    return shape, gpu, layout, training
