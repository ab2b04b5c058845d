"""Run a table of `plan/pipeline/` on torch's pipeline runtime and record the time of each pass.

Torch has classes for some schedules; its runtime takes any table of passes and adds the sends. This module passes the
table on, adds the sends of two models that run in opposite directions (DualPipe), and records the passes. Torch runs
the whole backward of a first stage in its W: its I takes no time.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from cordee.errors import LayoutError, MissingExtraError
from cordee.plan.pipeline import PassTimes, ScheduleTable, StagePlacement, cell_text, timeline, violations

Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Pass:
    """One recorded pass, on the host's clock."""

    stage: int
    kind: str
    micro_batch: int
    start_s: float
    end_s: float


class TimedStage(PipelineStage):  # type: ignore[misc]
    """A stage that records its passes, and knows the ends of its own model where two models share the ranks."""

    def __init__(self, module: nn.Module, stage: int, placement: StagePlacement, device: torch.device) -> None:
        self._place, self.passes = placement, list[Pass]()
        super().__init__(module, stage, placement.stages, device)

    @property
    def is_first(self) -> bool:
        """Return whether it takes the model's input."""
        return self._place.previous(int(self.stage_index)) is None

    @property
    def is_last(self) -> bool:
        """Return whether the loss is computed from its output."""
        return self._place.next(int(self.stage_index)) is None

    @contextmanager
    def _timed(self, kind: str, micro_batch: int) -> Iterator[None]:
        start_s = time.monotonic()
        yield
        self.passes.append(Pass(int(self.stage_index), kind, micro_batch, start_s, time.monotonic()))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: object, **kwargs: object) -> object:
        """Run F."""
        with self._timed("F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: object = None, full_backward: bool = True, **kwargs: object
    ) -> None:
        """Run B, or I alone."""
        with self._timed("B" if full_backward else "I", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=full_backward, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run W."""
        with self._timed("W", bwd_chunk_id):
            if self.is_first and self.stage_index != 0:
                self._second_first(bwd_chunk_id, last_backward)
            else:
                super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)

    def _second_first(self, micro_batch: int, last_backward: bool) -> None:
        """Run the whole backward of the first stage of a second model; torch does it for stage 0 only."""
        self.dw_runner.pop(micro_batch)
        inputs, _, output, grads = self.backward_state.pop(micro_batch)
        kwargs = {"stage_output": output, "output_grads": grads, "input_values": inputs}
        self.backward_maybe_with_nosync("full", kwargs, last_backward=last_backward)

    # Torch would pass tensors between the two models of a rank, as in a V.

    def set_local_fwd_input(self, prev_stage_outputs: object, mb_index: int) -> None:
        """Set the output of the previous stage, if it is of the same model."""
        if not self.is_first:
            super().set_local_fwd_input(prev_stage_outputs, mb_index)

    def get_local_bwd_output(self, mb_index: int) -> object:
        """Return the gradient for the previous stage, if it is of the same model."""
        return () if self.is_first else super().get_local_bwd_output(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: object, mb_index: int) -> None:
        """Set the gradient from the next stage, if it is of the same model."""
        if not self.is_last:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class TablePipeline:
    """A table on this rank's stages; every rank of the group creates one and calls `step`.

    Args:
        table: the schedule.
        modules: this rank's stages by number, as the table places them.
        loss: of an output and a target; a mean over the micro-batch, as gradients are averaged over micro-batches.
        device: of the modules.

    Raises:
        LayoutError: the table is not valid, or the modules are not the stages of this rank.
        MissingExtraError: this torch has no such runtime.
    """

    def __init__(
        self, table: ScheduleTable, modules: Mapping[int, nn.Module], loss: Loss, device: torch.device
    ) -> None:
        wrong = violations(table)
        if wrong:
            more = f", and {len(wrong) - 1} more violations" if len(wrong) > 1 else ""
            raise LayoutError(f"{table.name} is not a valid schedule: {wrong[0]}{more}")
        self.table = table
        self.stages = _stages(table.placement, modules, device)
        runtime = getattr(torch_schedules, "_PipelineScheduleRuntime", None)
        if runtime is None:
            hint = "use torch 2.13, whose private _PipelineScheduleRuntime takes tables"
            raise MissingExtraError(f"torch {torch.__version__} cannot run tables of passes", hint=hint)
        self._runtime = runtime(self.stages, table.model_micro_batches, loss_fn=loss)
        action = torch_schedules._Action.from_str
        rows = {rank: [action(cell_text(cell)) for cell in row] for rank, row in enumerate(table.cells)}
        if table.placement.copies == 1:
            self._runtime._prepare_schedule_with_comms(rows)
        else:
            # Torch would finish one model before it starts the other, so the sends are added here.
            sent = {rank: [action(text) for text in row] for rank, row in enumerate(with_sends(table))}
            self._runtime._prepare_schedule_with_comms(sent, format="compute_comms")

    def step(self, *inputs: Tensor, target: Tensor | None = None) -> tuple[Tensor, ...]:
        """Run one step: inputs go to first stages, the target to last ones, whose ranks return the losses."""
        return run_step(self._runtime, self.stages, inputs, target)

    def take_passes(self) -> tuple[Pass, ...]:
        """Return the passes since the last call, in their order."""
        return take_passes(self.stages)


def _stages(placement: StagePlacement, modules: Mapping[int, nn.Module], device: torch.device) -> list[TimedStage]:
    rank = torch.distributed.get_rank()
    world_size = torch.distributed.get_world_size()
    if world_size != placement.ranks:
        raise LayoutError(f"the table is for {placement.ranks} ranks, but {world_size} run")
    held = placement.stages_of(rank)
    if sorted(modules) != sorted(held):
        given = ", ".join(map(str, sorted(modules))) or "none"
        raise LayoutError(f"rank {rank} holds the stages {', '.join(map(str, held))}, but has modules for {given}")
    return [TimedStage(modules[stage], stage, placement, device) for stage in held]


def torch_pipeline(
    name: str, placement: StagePlacement, micro_batches: int, modules: Mapping[int, nn.Module], *, loss: Loss,
    device: torch.device,
) -> tuple[object, list[TimedStage]]:  # fmt: skip
    """Return a schedule of torch's own, by its name there, on stages that record their passes."""
    stages = _stages(placement, modules, device)
    made = torch_schedules.get_schedule_class(name)
    single = issubclass(made, torch_schedules.PipelineScheduleSingle)
    return made(stages[0] if single else stages, micro_batches, loss_fn=loss), stages


def run_step(
    schedule: Any, stages: Sequence[TimedStage], inputs: Sequence[Tensor], target: Tensor | None
) -> tuple[Tensor, ...]:
    """Run one step of a schedule; this rank's inputs and target go to the stages that take them."""
    losses: list[Tensor] = []
    first, last = (any(getattr(stage, end) for stage in stages) for end in ("is_first", "is_last"))
    schedule.step(*(inputs if first else ()), target=target if last else None, losses=losses if last else None,
                  return_outputs=False)  # fmt: skip
    return tuple(losses)


def take_passes(stages: Sequence[TimedStage]) -> tuple[Pass, ...]:
    """Return the passes since the last call, in their order."""
    found = sorted((each for stage in stages for each in stage.passes), key=lambda each: each.start_s)
    for stage in stages:
        stage.passes.clear()
    return tuple(found)


def with_sends(table: ScheduleTable) -> tuple[tuple[str, ...], ...]:
    """Return each rank's actions with sends, receives, and the gradient reduction after a stage's last pass.

    A send follows its pass. A receive is posted when its message would be sent if all passes took equally long: so two
    ranks receive messages in the order in which they are sent.
    """
    place = table.placement
    rows: list[list[tuple[float, int, str]]] = [[] for _ in table.cells]
    left = dict.fromkeys(range(place.stages), table.model_micro_batches)
    for rank, spans in enumerate(timeline(table, PassTimes(1.0, 1.0, 1.0)).spans):
        for span in spans:
            rows[rank].append((span.start_s, 1, cell_text(span.cell)))
            for action in span.cell:
                forward = action.kind == "F"
                to = place.next(action.stage) if forward else place.previous(action.stage)
                if action.kind != "W" and to is not None and place.rank_of(to) != rank:
                    letter = "F" if forward else "B"
                    rows[rank].append((span.start_s, 1, f"{action.stage}SEND_{letter}{action.micro_batch}"))
                    rows[place.rank_of(to)].append((span.end_s, 0, f"{to}RECV_{letter}{action.micro_batch}"))
                if action.kind in "WB":
                    left[action.stage] -= 1
                    if not left[action.stage]:
                        rows[rank].append((span.start_s, 1, f"{action.stage}REDUCE_GRAD"))
    return tuple(tuple(text for _, _, text in sorted(row, key=lambda each: each[:2])) for row in rows)
