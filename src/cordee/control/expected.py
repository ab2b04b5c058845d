"""The plan for a job on this cluster: refuses a model that does not fit, and gives the job its estimates."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cordee.control.engines.choice import LOCAL
from cordee.control.prices import SLOT
from cordee.errors import CatalogueError, DoesNotFitError, LayoutError
from cordee.events import Estimate, Node
from cordee.hardware.catalog import Catalogue, Gpu
from cordee.plan.answer import estimate_of_work
from cordee.plan.ask import Answer, Request, ask
from cordee.plan.expect import DEFAULTS, Assumptions
from cordee.plan.survive import Saving, Survival, survival
from cordee.plan.wanted import layout_wanted
from cordee.planning import settings_of
from cordee.units import format_bytes, format_duration
from cordee.workload.load import load_shape
from cordee.workload.model import ModelShape
from cordee.workload.spec import JobSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class Expected:
    """The plan's answer for one job.

    Attributes:
        survival: checkpoint, restart and interval, on all its GPUs.
        estimates: for all its GPUs first, then for each smaller size on which it fits, largest first.
        notes: what was assumed.
    """

    survival: Survival
    estimates: tuple[Estimate, ...]
    notes: tuple[str, ...]


def expect(spec: JobSpec, kind: str | None, eligible: Sequence[Node], catalogue: Catalogue) -> Expected | None:
    """Plan the job's model on the nodes that it may use; None if the job names no model.

    Args:
        spec: the job.
        kind: the kind of GPU that it asked for, under the nodes' name for it.
        eligible: the nodes that it may use.
        catalogue: GPUs and prices.

    Raises:
        DoesNotFitError: its model does not fit its GPUs, or a size that the job names.
        CatalogueError, LayoutError, ShapeError: its model or its kind of GPU is unknown, or does not divide.
    """
    model = spec.model
    if model is None:
        return None
    shape = load_shape(_model_path(model, spec.cwd))
    gpus_per_node = max(node.gpus for node in eligible)
    kinds = sorted({kind} if kind else {node.gpu_name for node in eligible})
    if SLOT in kinds:
        return _on_slots(spec, model, shape, gpus_per_node, _calibrated_cpu(eligible, catalogue))
    # The job may wait for the kind with the most memory.
    chips = sorted({catalogue.find_gpu(each).name for each in kinds})
    gpu = max(map(catalogue.find_gpu, chips), key=lambda each: (each.memory_bytes, each.name))
    if spec.mig is not None:
        gpu = gpu.instance(spec.mig)
    answers = _answers(spec, model, shape, gpu, gpus_per_node)
    estimates = tuple(answer.estimate() for answer in answers)
    found = answers[0].survival
    notes = [_note(found)]
    if len(chips) > 1:  # its step takes another time on each
        estimates = tuple(
            replace(each, step_us=None, step_us_low=None, step_us_high=None, mfu=None, gpu_flop_per_s=0.0)
            for each in estimates
        )
        example = f"--gpus {spec.gpus}x{gpu.name}"
        notes.append(f"no step time is planned: the job may run on {' or '.join(chips)}; name one: {example}")
    return Expected(found, estimates, tuple(notes))


def _answers(spec: JobSpec, model: ModelSpec, shape: ModelShape, gpu: Gpu, gpus_per_node: int) -> list[Answer]:
    """Return the answers for the numbers of GPUs on which the model fits; those that the job names must fit."""
    answers = []
    for gpus in (spec.gpus, *spec.sizes):
        is_named = gpus == spec.gpus or gpus in spec.elastic.sizes
        request = Request(
            shape=shape,
            gpu=gpu,
            gpus=gpus,
            settings=settings_of(model),
            layout=layout_wanted(model.layout, model.recompute, model.micro_batch),
            search="best",
            assumed=Assumptions(gpus_per_node=gpus_per_node),
            stage=model.tune.stage,
        )
        try:
            answer = ask(request)
        except LayoutError:  # what was asked for does not divide so few
            if is_named:
                raise
            continue
        if answer.fits:
            answers.append(answer)
        elif is_named:
            raise answer.error()
    return answers


def _calibrated_cpu(eligible: Sequence[Node], catalogue: Catalogue) -> Gpu | None:
    """Return the CPU of this host as `cordee calibrate` measured it, where no other node may get the job."""
    if {node.name for node in eligible} != {LOCAL}:
        return None
    host = socket.gethostname()
    known = ((gpu, gpu.measured) for gpu in catalogue.gpus if gpu.is_synchronous)
    return next((gpu for gpu, found in known if found is not None and found.fingerprint.get("host") == host), None)


def _on_slots(
    spec: JobSpec, model: ModelSpec, shape: ModelShape, slots_per_node: int, calibrated: Gpu | None
) -> Expected:
    """Plan a model on CPU slots, which have no memory of their own, and a known speed on a calibrated host alone.

    A process's resident memory is not compared either: the interpreter and its libraries are most of it, and a
    checkpoint is captured there too.
    """
    training = settings_of(model).training(shape, spec.gpus)
    nodes = -(-spec.gpus // slots_per_node)
    saving = Saving(nodes * DEFAULTS.storage_bytes_per_s, DEFAULTS.start_s)
    found = survival(shape, training, spec.gpus, saving)
    wanted = None if model.layout is None else layout_wanted(model.layout, model.recompute, model.micro_batch)
    layout = "" if wanted is None else str(wanted.plainest(spec.gpus))
    estimate = estimate_of_work(shape, training, spec.gpus, layout, found)
    notes = [f"{shape.name} is not checked against memory: CPU slots have none of their own", _note(found)]
    if calibrated is not None:
        try:
            planned = _answers(spec, model, shape, calibrated, slots_per_node)[0].estimate()
            estimate = replace(planned, peak_bytes=0, gpu_memory_bytes=0, allocated_bytes=0)
            notes.append(f"its step is planned on {calibrated.name}, as it was calibrated")
        except (CatalogueError, DoesNotFitError, LayoutError) as error:
            notes.append(f"no step time is planned on {calibrated.name}: {error.message}")
    return Expected(found, (estimate,), tuple(notes))


def _note(found: Survival) -> str:
    return (
        f"a checkpoint weighs {format_bytes(found.checkpoint_bytes)} and is expected to take "
        f"{format_duration(found.checkpoint_s)}, a restart {format_duration(found.restart_s)}"
    )


def _model_path(model: ModelSpec, cwd: str | None) -> str:
    if model.config is None:
        assert model.name is not None, "a model has a name or a config"
        return model.name
    return str(Path(cwd or ".") / model.config)
