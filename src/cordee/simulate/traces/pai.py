"""Alibaba's PAI trace of 2020 as published: tables of jobs, tasks and, if it is there, instances, without headers.

github.com/alibaba/clusterdata cluster-trace-gpu-v2020, `data/pai_*_table.header`. A job's GPUs are those of all
instances of its tasks; its run time is from its first instance (else task) to its last.
"""

import csv
from collections.abc import Iterator
from pathlib import Path

from cordee.errors import TraceError
from cordee.simulate.traces.job import BadRow, Tally, TraceJob, checked, open_text, seconds_us

JOB = ("job_name", "inst_id", "user", "status", "start_time", "end_time")
TASK = (
    *("job_name", "task_name", "inst_num", "status", "start_time", "end_time"),
    *("plan_cpu", "plan_mem", "plan_gpu", "gpu_type"),
)
INSTANCE = (
    *("job_name", "task_name", "inst_name", "worker_name", "inst_id", "status"),
    *("start_time", "end_time", "machine"),
)
GIB = 1 << 30


class _Asked:
    """The needs of a job's tasks, and when they ran."""

    __slots__ = ("cpu_milli", "end_us", "gpu_milli", "instances", "kinds", "memory_bytes", "start_us")

    def __init__(self) -> None:
        self.gpu_milli = self.cpu_milli = self.memory_bytes = self.instances = 0
        self.kinds: set[str] = set()
        self.start_us: int | None = None
        self.end_us: int | None = None

    def ran(self, start: str, end: str) -> None:
        """Return the time from the earliest start to the latest end."""
        if start and end:
            start_us, end_us = seconds_us(start, "start"), seconds_us(end, "end")
            self.start_us = start_us if self.start_us is None else min(self.start_us, start_us)
            self.end_us = end_us if self.end_us is None else max(self.end_us, end_us)


def pai(path: Path, tally: Tally) -> Iterator[TraceJob]:
    """Yield the jobs of a folder with the tables, or of the job table beside the others.

    Raises:
        TraceError: a table is missing.
    """
    folder = path if path.is_dir() else path.parent
    tasks = _tasks(_table(folder, "pai_task_table"), tally)
    instances = _table(folder, "pai_instance_table", optional=True)
    if instances is not None:
        _measure(instances, tasks)
    jobs = _table(folder, "pai_job_table")
    assert jobs is not None, "a missing table was refused"
    for line, row in _rows(jobs, JOB):
        try:
            yield checked(_job(row, tasks.get(row["job_name"]), line))
        except BadRow as bad:
            tally.bad(str(bad), line)


def _job(row: dict[str, str], asked: _Asked | None, line: int) -> TraceJob:
    if asked is None:
        raise BadRow("no task")
    if asked.start_us is None or asked.end_us is None:
        raise BadRow("had not ended" if row["status"] == "Running" else "never ran")
    alone = asked.instances == 1 and 0 < asked.gpu_milli < 1000
    return TraceJob(
        job_id=row["job_name"],
        submit_us=seconds_us(row["start_time"], "submission time"),
        gpus=-(-asked.gpu_milli // 1000),
        gpu_milli=asked.gpu_milli if alone else 1000,
        duration_us=asked.end_us - asked.start_us,
        line=line,
        user=row["user"],
        status=row["status"],
        gpu_name=asked.kinds.copy().pop() if len(asked.kinds) == 1 and asked.kinds != {"MISC"} else None,
        cpu_milli=asked.cpu_milli,
        memory_bytes=asked.memory_bytes,
    )


def _tasks(path: Path | None, tally: Tally) -> dict[str, _Asked]:
    assert path is not None, "a missing table was refused"
    found: dict[str, _Asked] = {}
    for line, row in _rows(path, TASK):
        asked = found.setdefault(row["job_name"], _Asked())
        try:
            instances = round(float(row["inst_num"] or 0))
            asked.instances += instances
            asked.gpu_milli += round(float(row["plan_gpu"] or 0) * 10) * instances
            asked.cpu_milli += round(float(row["plan_cpu"] or 0) * 10) * instances
            asked.memory_bytes += round(float(row["plan_mem"] or 0) * GIB) * instances
            asked.ran(row["start_time"], row["end_time"])
        except (ValueError, BadRow):
            tally.bad("a task that is no task", line)
            continue
        if row["gpu_type"]:
            asked.kinds.add(row["gpu_type"])
    return found


def _measure(path: Path, tasks: dict[str, _Asked]) -> None:
    """Read run times from instances, which are more exact than tasks."""
    again: set[str] = set()
    for _, row in _rows(path, INSTANCE):
        asked = tasks.get(row["job_name"])
        if asked is None or not row["start_time"] or not row["end_time"]:
            continue
        if row["job_name"] not in again:
            again.add(row["job_name"])
            asked.start_us = asked.end_us = None
        try:
            asked.ran(row["start_time"], row["end_time"])
        except BadRow:
            continue


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    with open_text(path) as file:
        rows = csv.reader(file)
        for cells in rows:
            if len(cells) == len(columns) and cells[0] != columns[0]:  # some copies carry the header
                yield rows.line_num, dict(zip(columns, cells, strict=True))


def _table(folder: Path, name: str, *, optional: bool = False) -> Path | None:
    for suffix in (".csv", ".csv.gz"):
        path = folder / f"{name}{suffix}"
        if path.exists():
            return path
    if optional:
        return None
    raise TraceError(f"{folder} has no {name}.csv", hint="unpack the published tables into one folder: tar -xzf")
