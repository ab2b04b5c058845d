"""A calibration held to the truth: real steps of a user's own config, a few layers of it, against the plan."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cordee.agent.calibration.fingerprint import CPU
from cordee.agent.calibration.probes import records
from cordee.errors import CatalogueError, ShapeError
from cordee.hardware.catalog import Gpu
from cordee.plan.layer import head_passes, layer_passes
from cordee.plan.layout import Layout
from cordee.plan.settings import Settings
from cordee.plan.step import step_interval_s, step_time
from cordee.plan.training import PURE_BF16, Precision
from cordee.workload.families import shape_from_config

PARTS = ("forward", "backward", "update")


@dataclass(frozen=True, slots=True)
class Compared:
    """One part of a step: seconds as planned, as measured in quiet steps (the lower quartile), and their spread."""

    part: str
    planned_s: float
    measured_s: float
    spread: float

    @property
    def off(self) -> float:
        """The plan over what was measured, less one."""
        return self.planned_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class Checked:
    """A check: what was run, the parts, the whole step last, and the interval that the plan gave for it."""

    model: str
    layers: int
    seq_tokens: int
    sequences: int
    steps: int
    parts: tuple[Compared, ...]
    planned_from_s: float
    planned_to_s: float

    @property
    def step(self) -> Compared:
        """The whole step."""
        return self.parts[-1]


def check(gpu: Gpu, config: Path, *, seq_tokens: int, sequences: int, layers: int, steps: int) -> Checked:
    """Run real steps on the device that was calibrated, and put them beside the plan.

    Args:
        gpu: calibrated on this host.
        config: a config.json, or a folder with one.
        seq_tokens: in a sequence.
        sequences: in a step.
        layers: of the model, at most; 0: all of them.
        steps: that are timed.

    Raises:
        CatalogueError: the device was not calibrated.
        ShapeError: the config cannot be read.
        MissingExtraError, InputError, ScriptError: the steps cannot be run.
    """
    if gpu.measured is None:
        raise CatalogueError(f"{gpu.name} was not calibrated here", hint="run cordee calibrate first")
    path = config / "config.json" if config.is_dir() else config
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ShapeError(f"{path} cannot be read: {error}", hint="give a config.json, or a folder with one") from None
    shape = shape_from_config(facts, name=path.parent.name or path.stem)
    if layers:
        shape = replace(shape, layers=min(layers, shape.layers))
    marks = gpu.measured.fingerprint
    on_cpu = marks.get("device") == CPU
    precision: Precision = "fp32" if on_cpu else "bf16"
    settings = Settings(
        seq_tokens=seq_tokens, global_batch=sequences, precision=precision,
        optimizer="adamw" if on_cpu else PURE_BF16,
    )  # fmt: skip
    training, layout = settings.training(shape, 1), Layout(micro_batch=sequences)
    where = ["--threads", marks.get("threads", "1")] if on_cpu else ["--gpu", marks.get("index", "0")]
    options = {
        "config": path, "seq": seq_tokens, "batch": sequences, "layers": layers, "steps": steps, "dtype": precision,
    }  # fmt: skip
    run = list(records("step", *where, *(f"--{name}={value}" for name, value in options.items())))
    measured = [[each[f"{part}_s"] for part in PARTS] for each in run]
    planned = step_time(shape, gpu, layout, training)
    layer, head = layer_passes(shape, gpu, layout, training), head_passes(shape, gpu, layout, training)
    forward, backward = (
        shape.layers * layer.forward_s + head.forward_s,
        shape.layers * layer.backward_s + head.backward_s,
    )
    total = float(planned.total_s)
    seconds = [float(forward), float(backward), float(planned.optimizer_s), total]
    columns = [*zip(*measured, strict=True), [sum(each) for each in measured]]
    parts = (
        Compared(part, expected, quiet(times), _spread(times))
        for part, expected, times in zip((*PARTS, "step"), seconds, columns, strict=True)
    )
    low, high = step_interval_s(total, gpu)
    return Checked(shape.name, shape.layers, seq_tokens, sequences, steps, tuple(parts), float(low), float(high))


def quiet(times: Sequence[float]) -> float:
    """Return the lower quartile: the time of a step that nobody disturbs.

    >>> quiet([5.0, 1.0, 9.0, 2.0, 3.0])
    2.0
    """
    return statistics.quantiles(times, n=4, method="inclusive")[0]


def _spread(times: Sequence[float]) -> float:
    """Return the distance between the quartiles over the median."""
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / middle
