"""Traces that are one table with a row for each job: their columns and how values are written.

A row of the common form: `job_id,user,vc,submit_s,gpus,duration_s,status`, and more columns if the header has them;
`start_s,end_s` may stand for `duration_s`.
The other formats are as their authors publish them: github.com/S-Lab-System-Group/HeliosData (cluster_log.csv),
github.com/InternLM/AcmeTrace (trace_seren.csv, trace_kalos.csv), github.com/alibaba/clusterdata
cluster-trace-gpu-v2023 (openb_pod_list_*.csv), and what `sacct --parsable2` prints (slurm.schedmd.com/sacct.html).
"""

import csv
import heapq
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cordee.errors import TraceError, UnitError
from cordee.events import Tier
from cordee.simulate.traces.job import (
    BadRow,
    Tally,
    TraceJob,
    checked,
    distinct,
    gpus_of,
    instance_of,
    open_text,
    seconds_us,
    stamp_us,
)
from cordee.units import US_PER_S, parse_duration_s

Row = Mapping[str, str]

MIB = 1 << 20
_TIERS = frozenset(tier.value for tier in Tier)
_ROUNDED = "GPUs are no whole number: runs on the next larger one"
_WINDOW = 100_000  # rows that a table of the common form may be out of order


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A table's name, its required columns, and the function that turns a row into a job.

    `instead` names two columns that stand for the last required one.
    """

    name: str
    needs: tuple[str, ...]
    read: Callable[[Row, int], TraceJob | None]
    delimiter: str = ","
    is_sorted: bool = False
    instead: tuple[str, ...] = ()

    def missing(self, header: Collection[str]) -> list[str]:
        """Return the required columns that a header lacks."""
        whole = not self.instead or not set(self.instead) <= set(header)
        return [name for name in (self.needs if whole else self.needs[:-1]) if name not in header]


def table(path: Path, form: Format, tally: Tally) -> Iterator[TraceJob]:
    """Yield the jobs of a table; count rows that are no job.

    Raises:
        TraceError: columns are missing.
    """
    with open_text(path) as file:
        # sacct quotes nothing: a name that begins with a quote would otherwise take in the rows after it.
        raw = form.delimiter == "|"
        rows = csv.reader(file, delimiter="|", quoting=csv.QUOTE_NONE) if raw else csv.reader(file)
        header = [name.strip() for name in next(rows, [])]
        if missing := form.missing(header):
            raise TraceError(
                f"{path} has no column {', '.join(missing)}: its header is {form.delimiter.join(header)[:200]!r}",
                hint=f"the {form.name} format needs {form.delimiter.join(form.needs)}",
            )
        for cells in rows:
            line = rows.line_num
            if not cells:
                continue
            try:
                if len(cells) != len(header):
                    raise BadRow(f"{len(cells)} columns in place of {len(header)}")
                job = form.read(dict(zip(header, cells, strict=True)), line)
                if job is None:
                    continue
                checked(job, cpu_jobs=form.name == "common")  # others' CPU jobs ran on nodes without GPUs
                for change in job.changes:
                    tally.changed(change, line)
                yield job
            except BadRow as bad:
                tally.bad(str(bad), line)


def streamed(jobs: Iterator[TraceJob], tally: Tally) -> Iterator[TraceJob]:
    """Yield jobs in order without holding them all, with times from the first one.

    A job that is too late for its place is counted and left out.
    """
    zero_us: int | None = None
    for job in distinct(_merged(jobs, tally), tally):
        zero_us = job.submit_us if zero_us is None else zero_us
        tally.jobs += 1
        yield replace(job, submit_us=job.submit_us - zero_us) if zero_us else job


def _merged(jobs: Iterator[TraceJob], tally: Tally) -> Iterator[TraceJob]:
    window: list[tuple[int, int, TraceJob]] = []
    last_us = 0
    for job in jobs:
        if job.submit_us < last_us:
            tally.bad(f"out of order by more than {_WINDOW} rows", job.line)
            continue
        heapq.heappush(window, (job.submit_us, job.line, job))
        if len(window) > _WINDOW:
            last_us, _, first = heapq.heappop(window)
            yield first
    while window:
        yield heapq.heappop(window)[2]


# -- the common form -----------------------------------------------------------------------------------------


def _common(row: Row, line: int) -> TraceJob:
    mig, kind = _instance(row)
    gpus, milli = (1, 1000) if mig else _gpus(row["gpus"])
    memory = row.get("memory_mib", "")
    limit, tier = row.get("time_limit_s", ""), row.get("tier", "").strip().lower()
    changes: tuple[str, ...] = (_ROUNDED,) if not mig and milli == 1000 and float(row["gpus"]) != gpus else ()
    if tier and tier not in _TIERS:
        changes += ("an unknown tier: runs as standard",)
    return TraceJob(
        job_id=row["job_id"],
        submit_us=_time_us(row["submit_s"], "submission time", stamp_us),
        gpus=gpus,
        gpu_milli=milli,
        duration_us=_ran_us(row),
        line=line,
        user=row.get("user", ""),
        vc=row.get("vc", ""),
        status=row.get("status", ""),
        gpu_name=kind or _one_name(row.get("gpu_spec", "")),
        cpu_milli=_whole(row.get("cpu_milli", ""), "cpu_milli"),
        memory_bytes=_whole(memory, "memory_mib") * MIB,
        tier=tier,
        changes=changes,
        time_limit_us=_time_us(limit, "time limit", _length_us) if limit else None,
        mig=mig,
    )


def _instance(row: Row) -> tuple[str, str]:
    """Return the MIG instance of a row, by its column `mig` or where its GPUs are one, and the kind of its GPU."""
    gpus = row["gpus"].strip()
    mig, kind = instance_of(row.get("mig", "") or gpus)
    if row.get("mig", "").strip() and not mig:
        raise BadRow("mig is no MIG profile")
    if mig and re.fullmatch(r"\d+(\.\d+)?", gpus) and float(gpus) > 1:
        raise BadRow("a gang on MIG instances")
    return mig, kind


def _ran_us(row: Row) -> int:
    """Return the run time of a row: its own, or from its start to its end."""
    if "duration_s" in row:
        return _time_us(row["duration_s"], "run time", _length_us)
    return _time_us(row["end_s"], "end", stamp_us) - _time_us(row["start_s"], "start", stamp_us)


def _time_us(text: str, what: str, other: Callable[[str, str], int]) -> int:
    """Parse seconds, or what another parser takes."""
    try:
        return seconds_us(text, what)
    except BadRow:
        return other(text, what)


def _length_us(text: str, what: str) -> int:
    """Parse `[days-]hours:minutes:seconds`, or a length with units such as 1h30m."""
    if ":" in text:
        return _elapsed_us(text)
    try:
        return round(parse_duration_s(text) * US_PER_S)
    except UnitError:
        raise BadRow(f"{what} is no time" if text.strip() else f"no {what}") from None


def _gpus(text: str) -> tuple[int, int]:
    """Parse a number of GPUs; return it with thousandths of each: less than one is a fraction of a GPU."""
    try:
        gpus = float(text)
    except ValueError:
        raise BadRow("number of GPUs is no number" if text.strip() else "no number of GPUs") from None
    if 0 < gpus < 1:
        return 1, max(1, round(gpus * 1000))
    if not abs(gpus) < 1e9:
        raise BadRow("number of GPUs is no number")
    return -int(-gpus // 1), 1000


def _whole(text: str, what: str) -> int:
    try:
        return round(float(text)) if text.strip() else 0
    except (ValueError, OverflowError):
        raise BadRow(f"{what} is no number") from None


def _one_name(text: str) -> str | None:
    """Parse the name of a GPU; None if several would do."""
    return text.strip() if text.strip() and "|" not in text else None


# -- Helios and Acme -----------------------------------------------------------------------------------------


def _datacentre(row: Row, line: int) -> TraceJob:
    gpus, milli = _gpus(row["gpu_num"])
    return TraceJob(
        changes=(_ROUNDED,) if milli == 1000 and float(row["gpu_num"]) != gpus else (),
        job_id=row["job_id"],
        submit_us=stamp_us(row["submit_time"], "submission time"),
        gpus=gpus,
        gpu_milli=milli,
        duration_us=seconds_us(row["duration"], "run time"),
        line=line,
        user=row["user"],
        vc=row.get("vc", ""),
        status=row["state"],
        cpu_milli=1000 * _whole(row.get("cpu_num", ""), "cpu_num"),
    )


# -- Alibaba 2023 --------------------------------------------------------------------------------------------


def _openb(row: Row, line: int) -> TraceJob:
    gpus, milli = _whole(row["num_gpu"], "num_gpu"), _whole(row["gpu_milli"], "gpu_milli")
    if not row["scheduled_time"].strip():
        raise BadRow("never ran")
    submit_us = seconds_us(row["creation_time"], "submission time")
    ended_us = seconds_us(row["deletion_time"], "end")
    return TraceJob(
        job_id=row["name"],
        submit_us=submit_us,
        gpus=gpus,
        gpu_milli=milli if gpus == 1 and 0 < milli < 1000 else 1000,
        duration_us=ended_us - seconds_us(row["scheduled_time"], "start"),
        line=line,
        vc=row["qos"],
        status=row["pod_phase"],
        gpu_name=_one_name(row["gpu_spec"]),
        cpu_milli=_whole(row["cpu_milli"], "cpu_milli"),
        memory_bytes=_whole(row["memory_mib"], "memory_mib") * MIB,
    )


# -- Slurm ---------------------------------------------------------------------------------------------------


def _sacct(row: Row, line: int) -> TraceJob | None:
    if "." in row["JobID"]:
        return None  # a step of the job above it
    gpus, kind = gpus_of(row.get("AllocTRES") or row.get("ReqTRES") or "")
    mig, of = instance_of(kind)
    if mig and gpus > 1:
        raise BadRow("a gang on MIG instances")
    limit = row.get("Timelimit", "")
    return TraceJob(
        job_id=row["JobID"],
        submit_us=stamp_us(row["Submit"], "submission time"),
        gpus=gpus,
        duration_us=_held_us(row),
        line=line,
        user=row.get("User", ""),
        vc=row.get("Partition", ""),
        status=row["State"].split(" ")[0],
        gpu_name=(of if mig else kind) or None,
        time_limit_us=_elapsed_us(limit) if re.fullmatch(r"[\d:-]+", limit) else None,
        mig=mig,
    )


def _held_us(row: Row) -> int:
    """Return how long a row of Slurm's held its GPUs: as it says, or from its start to its end."""
    if seconds := row.get("ElapsedRaw", ""):
        return seconds_us(seconds, "run time")
    if "Elapsed" not in row and "Start" in row and "End" in row:
        return stamp_us(row["End"], "end") - stamp_us(row["Start"], "start")
    return _elapsed_us(row.get("Elapsed", ""))


def _elapsed_us(text: str) -> int:
    """Parse `[days-]hours:minutes:seconds`."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)(?:\.\d+)?", text.strip())
    if match is None:
        raise BadRow("run time is no time" if text.strip() else "no run time")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * US_PER_S


_DATACENTRE = ("job_id", "user", "gpu_num", "state", "submit_time", "duration")

FORMATS = (
    Format(
        name="common",
        needs=("job_id", "submit_s", "gpus", "duration_s"),
        read=_common,
        is_sorted=True,
        instead=("start_s", "end_s"),
    ),
    Format(name="openb", needs=("name", "num_gpu", "gpu_milli", "qos", "creation_time", "deletion_time"), read=_openb),
    Format(name="helios", needs=(*_DATACENTRE, "vc"), read=_datacentre),
    Format(name="acme", needs=_DATACENTRE, read=_datacentre),
    Format(name="sacct", needs=("JobID", "Submit", "State", "AllocTRES"), read=_sacct, delimiter="|"),
)
