"""What `cordee plan --json` prints: base units, version 1; new keys may come, old ones stay."""

from dataclasses import asdict
from typing import Any

from cordee.hardware.catalog import Gpu
from cordee.plan.answer import Candidate
from cordee.plan.ask import Answer
from cordee.plan.curve import Curve
from cordee.plan.expect import Expectation
from cordee.plan.longest import LongestContext
from cordee.plan.why import Why
from cordee.workload.model import ModelShape


def plan_json(found: Answer, model_path: str | None = None) -> dict[str, Any]:
    """Return the whole plan; `model_path` is where its model was read, None for one of the catalogue."""
    return {
        "version": 1,
        "model": _model(found.request.shape),
        "model_path": model_path,
        "gpu": _gpu(found.request.gpu),
        "gpus": found.request.gpus,
        "training": {
            "seq_tokens": found.training.seq_tokens,
            "global_batch": found.training.global_batch,
            "tokens_per_step": found.training.tokens_per_step,
            "optimizer": found.training.optimizer.name,
            "precision": found.training.precision,
            "framework": found.training.framework,
            "loss": found.training.loss_kind,
        },
        "state": {
            "bytes_per_parameter": found.training.optimizer.bytes_per_parameter,
            "state_bytes": found.state_bytes,
            "fewest_gpus": found.fewest_gpus_to_hold,
            "fewest_gpus_to_train": found.fewest_gpus_to_train and found.fewest_gpus_to_train[0],
        },
        "price": found.request.price
        and {
            "capacity": found.request.price.capacity,
            "usd_per_gpu_hour": found.request.price.usd_per_gpu_hour,
            "source": str(found.request.price.source),
        },
        "fits": found.best is not None,
        "candidates": found.layouts.candidates,
        "layouts": [_layout_json(candidate) for candidate in (*found.fitting, *found.rejected)],
        "timeline": _timeline(found.nearest),
        "remedies": [
            {
                "change": remedy.change,
                "because": remedy.because,
                "gpus": remedy.gpus,
                "seq_tokens": remedy.training.seq_tokens,
                "optimizer": remedy.training.optimizer.name,
                "layout": _layout_json(remedy.candidate),
            }
            for remedy in found.remedies
        ],
        "survival": [_survivor_json(survivor) for survivor in found.expectations],
        "storage_levels": [asdict(save) for save in found.level_saves],
        "capture_bytes_per_node": found.capture_bytes_per_node(held=False),
        "why": found.why and _why(found.why),
        "longest_contexts": [_longest(each) for each in found.longest_contexts],
        "run": found.run and asdict(found.run),
        "rent_or_buy": found.rent_or_buy and asdict(found.rent_or_buy) | {"verdict": found.rent_or_buy.verdict},
        "launch": found.launch and asdict(found.launch),
    }  # fmt: skip


def curve_json(curve: Curve, shape: ModelShape, gpu: Gpu) -> dict[str, Any]:
    """The scaling curve; a size on which nothing fits or divides has no layout."""
    return {
        "version": 1,
        "model": _model(shape),
        "gpu": _gpu(gpu),
        "seq_tokens": curve.training.seq_tokens,
        "global_batch": curve.training.global_batch,
        "knee_gpus": curve.knee and curve.knee.gpus,
        "points": [
            {
                "gpus": point.gpus,
                "layout": point.candidate and _layout_json(point.candidate),
                "added_fraction": point.added_fraction,
            }
            for point in curve.points
        ],
    }


def _model(shape: ModelShape) -> dict[str, Any]:
    return {
        "name": shape.name,
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "parts": asdict(shape.parameter_count),
    }


def _gpu(gpu: Gpu) -> dict[str, Any]:
    return {"name": gpu.name, "memory_bytes": gpu.memory_bytes, "source": str(gpu.source)}


def _layout_json(candidate: Candidate) -> dict[str, Any]:
    return {
        "layout": str(candidate.layout),
        **asdict(candidate.layout),
        "fits": candidate.fits,
        "peak_bytes": candidate.peak_bytes,
        "gpu_memory_bytes": candidate.gpu_memory_bytes,
        "shortfall_bytes": candidate.shortfall_bytes,
        "fullest_stage": candidate.memory.worst_stage,
        "parts_bytes": candidate.memory.worst.parts(),
        "step_s": candidate.step and candidate.step.total_s,
        "step_s_nine_of_ten": candidate.step_interval_s and list(candidate.step_interval_s),
        "step_parts_s": candidate.step and asdict(candidate.step),
        "mfu": candidate.mfu,
        "tokens_per_s": candidate.tokens_per_s,
        "usd_per_billion_tokens": candidate.usd_per_billion_tokens,
    }


def _timeline(candidate: Candidate) -> dict[str, Any]:
    """The events of the fullest stage of the best layout, in their order."""
    memory = candidate.memory
    moments = memory.timelines[memory.worst_stage]
    return {
        "layout": str(candidate.layout),
        "stage": memory.worst_stage,
        "peak_event": memory.peak_event,
        "events": [
            {name: (value if name == "event" else round(float(value))) for name, value in asdict(moment).items()}
            for moment in moments
        ],
    }


def _survivor_json(survivor: Expectation) -> dict[str, Any]:
    price = survivor.price
    return {
        "capacity": survivor.capacity,
        "usd_per_gpu_hour": price and price.usd_per_gpu_hour,
        "price_source": price and str(price.source),
        "mtbi_source": survivor.mtbi_source,
        **asdict(survivor.survival),
    }


def _why(why: Why) -> dict[str, Any]:
    return {
        "asked": why.asked,
        "ground": why.ground,
        "says": why.says,
        "hint": why.hint,
        "layout": why.candidate and _layout_json(why.candidate),
        "more_s": dict(why.more_s),
    }


def _longest(found: LongestContext) -> dict[str, Any]:
    return {"layout": str(found.layout), "seq_tokens": found.seq_tokens, "peak_bytes": found.peak_bytes}
