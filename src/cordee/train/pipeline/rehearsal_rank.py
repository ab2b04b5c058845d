"""One rank of a rehearsal: its part of a model, the schedules on it, and the whole model to compare gradients with."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from cordee.plan.pipeline import ScheduleTable, StagePlacement
from cordee.train.pipeline.runtime import TablePipeline, run_step, take_passes, torch_pipeline

CPU = torch.device("cpu")
SEED = 1865


class _Sleep(torch.autograd.Function):  # type: ignore[misc]
    """The identity, with a backward pass of `seconds`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return tensor.clone()  # torch detaches outputs in place, which a view forbids

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class _Waits(nn.Module):  # type: ignore[misc]
    """A small product whose passes take given times."""

    def __init__(self, width: int, seconds: tuple[float, float, float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.float64) / width**0.5)
        self.forward_s, self.inner_s, self.weight_s = seconds

    def forward(self, x: Tensor) -> Tensor:
        """Run F; I waits after the product, W after the weight."""
        time.sleep(self.forward_s)
        product: Tensor = _Sleep.apply(x @ _Sleep.apply(self.weight, self.weight_s), self.inner_s)
        return product


class _Products(nn.Module):  # type: ignore[misc]
    """Products with a bounded function after each."""

    def __init__(self, width: int, layers: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers in order."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _model(stage_model: Mapping[str, Any], placement: StagePlacement) -> list[nn.Module]:
    """Return all stages of one model, the same on every rank."""
    torch.manual_seed(SEED)
    count = placement.model_stages
    size = placement.ranks / count  # of a stage, in parts of the depth that a rank holds
    if stage_model["kind"] == "waits":
        seconds = tuple(stage_model[name] * size for name in ("forward_s", "inner_s", "weight_s"))
        return [_Waits(stage_model["width"], (seconds[0], seconds[1], seconds[2])) for _ in range(count)]
    dtype = torch.float64 if stage_model["kind"] == "exact" else torch.float32
    return [_Products(stage_model["width"], max(1, round(stage_model["layers"] * size)), dtype) for _ in range(count)]


def run_rank(
    spec: Mapping[str, Any], table_from: Callable[[Mapping[str, object], int], ScheduleTable]
) -> list[dict[str, object]]:
    """Run every schedule of the spec on this rank of a new group; return the records as JSON values."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        ranks = dist.get_world_size()
        records = []
        for one in (*spec["tables"], *spec["torch"]):
            placement = StagePlacement(one["shape"], ranks, one["chunks"])
            table = table_from(one, ranks) if "csv" in one else None
            records.append(_run(one, placement, table, spec))
        return records
    finally:
        dist.destroy_process_group()


def _run(
    one: Mapping[str, Any], placement: StagePlacement, table: ScheduleTable | None, spec: Mapping[str, Any]
) -> dict[str, object]:
    rank, stage_model = dist.get_rank(), spec["stage_model"]
    count = one["micro_batches"] // placement.copies
    held = placement.stages_of(rank)
    chain = placement.model_stages
    # Both models start from the same weights, and each has its own copy.
    models = [_model(stage_model, placement) for _ in range(placement.copies)]
    modules = {stage: models[stage // chain][stage % chain] for stage in held}
    if table is not None:
        pipeline = TablePipeline(table, modules, functional.mse_loss, CPU)
        schedule, stages = pipeline._runtime, pipeline.stages
    else:
        schedule, stages = torch_pipeline(one["name"], placement, count, modules, loss=functional.mse_loss, device=CPU)
    data = [_data(stage_model, count, number) for number in range(placement.copies)]
    inputs = [data[stage // chain][0] for stage in held if placement.previous(stage) is None]
    targets = [data[stage // chain][1] for stage in held if placement.next(stage) is None]
    steps, losses = [], ()
    for _ in range(spec["steps"]):
        for module in modules.values():
            module.zero_grad()
        dist.barrier()
        losses = run_step(schedule, stages, inputs, targets[0] if targets else None)
        steps.append([(each.stage, each.kind, each.micro_batch, each.start_s, each.end_s)
                      for each in take_passes(stages)])  # fmt: skip
    gradient, loss = _errors(placement, modules, losses, data=data, stage_model=stage_model)
    return {"name": one["name"], "gradient_error": gradient, "loss_error": loss, "steps": steps}


def _data(stage_model: Mapping[str, Any], count: int, number: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a step of one model, the same on every rank."""
    made = torch.Generator().manual_seed(SEED + 1 + number)
    dtype = torch.float32 if stage_model["kind"] == "products" else torch.float64
    size = (count * stage_model["rows"], stage_model["width"])
    inputs, targets = (torch.randn(size, generator=made, dtype=dtype) for _ in range(2))
    return inputs, targets


def _errors(
    placement: StagePlacement, modules: Mapping[int, nn.Module], losses: Sequence[Tensor], *,
    data: Sequence[tuple[Tensor, Tensor]], stage_model: Mapping[str, Any],
) -> tuple[float, float]:  # fmt: skip
    """Return the largest relative errors of gradients and losses against the model without a pipeline."""
    chain = placement.model_stages
    worst = loss_worst = 0.0
    for number in sorted({stage // chain for stage in modules}):
        whole = _model({**stage_model, "forward_s": 0.0, "inner_s": 0.0, "weight_s": 0.0}, placement)
        mean = []
        count = len(data[number][0]) // stage_model["rows"]
        for inputs, target in zip(*(part.chunk(count) for part in data[number]), strict=True):
            x = inputs
            for module in whole:
                x = module(x)
            mean.append(functional.mse_loss(x, target))
            (mean[-1] / count).backward()
        for stage, module in modules.items():
            if stage // chain == number:
                pairs = zip(module.parameters(), whole[stage % chain].parameters(), strict=True)
                worst = max(worst, *(_apart(one.grad, other.grad) for one, other in pairs))
        if losses and any(placement.next(stage) is None and stage // chain == number for stage in modules):
            pairs_of = zip(losses, mean, strict=True)
            loss_worst = max(loss_worst, *(abs(float(one) - float(other)) for one, other in pairs_of))
    return worst, loss_worst


def _apart(one: Tensor | None, other: Tensor | None) -> float:
    assert one is not None and other is not None, "every weight has a gradient"
    return float((one - other).abs().max() / other.abs().max())
