"""The JSON of `cordee profile`: microseconds, fractions from 0 to 1, version 1; new keys may come, old ones stay."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cordee.cli.profile_text import Answer
from cordee.telemetry.profile import Efficiency, RankReport
from cordee.telemetry.profile.compare import Delta
from cordee.telemetry.profile.sweep import Time


def profile_json(answer: Answer) -> dict[str, Any]:
    """Everything that was found."""
    compared, against, waits = answer.compared, answer.against, answer.skew
    return {
        "version": 1,
        "ranks": [_rank(*each) for each in zip(answer.reports, answer.efficiency, strict=True)],
        "skew": waits and asdict(waits),
        "base": compared and {
            "files": answer.base, "per": compared.per, "times": _deltas(compared.times),
            "classes": _deltas(compared.classes), "kernels": _deltas(compared.kernels),
        },
        "plan": against and answer.planned and {
            "model": answer.planned.model, "gpus": answer.planned.gpus, "gpu": answer.planned.gpu,
            "layout": answer.planned.layout, "mfu": answer.planned.mfu, "steps": against.steps,
            "times": _deltas(against.rows),
        },
    }  # fmt: skip


def _rank(report: RankReport, efficient: Efficiency) -> dict[str, Any]:
    classes = [{"name": row.belongs.name, "kind": row.belongs.kind, "count": row.count, "total_us": row.total_us,
                "exposed_us": row.exposed_us} for row in report.classes]  # fmt: skip
    kernels = [{"name": row.name, "class": row.belongs.name, "kind": row.belongs.kind, "count": row.count,
                "total_us": row.total_us, "longest_us": row.longest_us, "exposed_us": row.exposed_us}
               for row in report.kernels]  # fmt: skip
    streams = [{"name": row.name, "count": row.count, "busy_us": row.busy_us, "kinds_us": row.kinds_us}
               for row in report.streams]  # fmt: skip
    return {
        "rank": report.rank, "label": report.label, "file": report.source, "side": report.side, "gpu": report.gpu,
        "time": time_json(report.time),
        "kernels_us": report.kernels_us,
        "communication_kernels_us": report.communication_kernels_us,
        "waiting_kernels_us": report.waiting_kernels_us,
        "classes": classes, "kernels": kernels, "streams": streams, "idle": asdict(report.idle),
        "steps": [{"number": step.number, "start_us": step.start_us, "time": time_json(step.time)}
                  for step in report.steps],
        "efficiency": asdict(efficient),
        "faults": [asdict(fault) for fault in report.faults],
    }  # fmt: skip


def time_json(time: Time) -> dict[str, Any]:
    """Where a while went, and the shares that are quoted."""
    derived = {
        "compute_us": time.compute_us, "idle_us": time.idle_us, "exposed_us": time.exposed_us,
        "alone_us": time.alone_us, "hidden_fraction": time.hidden_fraction, "busy_fraction": time.share(time.busy_us),
        "idle_fraction": time.share(time.idle_us), "compute_fraction": time.share(time.compute_us),
        "communication_fraction": time.share(time.communication_us), "exposed_fraction": time.share(time.exposed_us),
    }  # fmt: skip
    return asdict(time) | derived


def _deltas(deltas: Sequence[Delta]) -> list[dict[str, Any]]:
    return [asdict(delta) | {"change_us": delta.change_us} for delta in deltas]
