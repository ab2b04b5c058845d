"""A job as a test writes it, and as admission hands it to the scheduler."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cordee.control.admission import admit
from cordee.events import Job, Node, Queue
from cordee.hardware.load import load_catalogue
from cordee.ids import JobId
from cordee.schedule.quota.quotas import Quotas
from cordee.workload.spec import JobSpec

H100 = Node(
    name="a", epoch=1, gpu_name="NVIDIA H100 80GB HBM3", gpus=8, micro_usd_per_gpu_hour=2_990_000, price_source="a bill"
)


def spec(folder: Path, **fields: Any) -> JobSpec:
    return JobSpec.model_validate({"run": ["true"], "gpus": 4, "name": "gpt", "cwd": str(folder)} | fields)


def admitted(wanted: JobSpec, *nodes: Node, unprotected: bool = False, queues: Sequence[Queue] = ()) -> Job:
    return admit(
        wanted,
        job_id=JobId("gpt-abcdef"),
        owner="ada",
        nodes=nodes,
        catalogue=load_catalogue(),
        quotas=Quotas(queues),
        unprotected=unprotected,
    ).job
