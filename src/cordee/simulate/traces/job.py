"""A job of a trace, and rows that cannot be one: counted by kind, or refused."""

import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from cordee.errors import SpecError, TraceError
from cordee.units import US_PER_DAY, US_PER_S
from cordee.workload.gpus import parse_mig

_LATEST_US = 253_402_300_800 * US_PER_S  # since 1970
_LONGEST_US = 36_525 * US_PER_DAY


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """A job in the form that every format is read into.

    Attributes:
        submit_us: from the trace's own zero.
        duration_us: run time, queueing not included.
        line: in its file, for messages.
        changes: what runs differently from what its row says.
        mig: the profile of the MIG instance that it runs on; "": none.
    """

    job_id: str
    submit_us: int
    gpus: int
    duration_us: int
    line: int
    user: str = ""
    vc: str = ""
    status: str = ""
    gpu_milli: int = 1000
    gpu_name: str | None = None
    cpu_milli: int = 0
    memory_bytes: int = 0
    tier: str = ""
    changes: tuple[str, ...] = ()
    time_limit_us: int | None = None
    mig: str = ""


class BadRow(Exception):
    """A row that is no job; the text is its kind."""


@dataclass(slots=True)
class Tally:
    """Rows that were left out, by kind, and an example of each."""

    path: str
    strict: bool = False
    jobs: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    changes: dict[str, int] = field(default_factory=dict)  # of jobs that run differently from what their rows say

    @property
    def left_out(self) -> int:
        """Return the number of rows that were left out."""
        return sum(self.kinds.values())

    def bad(self, kind: str, line: int) -> None:
        """Count a row that is left out.

        Raises:
            TraceError: the count is strict.
        """
        if self.strict:
            raise TraceError(
                f"{self.path}, line {line}: {kind}", hint="without --strict such rows are counted and left out"
            )
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self.first.setdefault(kind, line)

    def changed(self, kind: str, line: int) -> None:
        """Count a job that runs differently from what its row says.

        Raises:
            TraceError: the count is strict.
        """
        if self.strict:
            raise TraceError(f"{self.path}, line {line}: {kind}", hint="without --strict such rows are counted")
        self.changes[kind] = self.changes.get(kind, 0) + 1
        self.first.setdefault(kind, line)


def open_text(path: Path) -> TextIO:
    """Open the file as text, unpacked if its name ends in .gz.

    Raises:
        TraceError: the file cannot be read.
    """
    try:
        if path.suffix == ".gz":
            return gzip.open(path, "rt", encoding="utf-8-sig", errors="replace", newline="")
        return path.open(encoding="utf-8-sig", errors="replace", newline="")
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}", hint="check the path") from error


def checked(job: TraceJob, *, cpu_jobs: bool = False) -> TraceJob:
    """Return the job, if it is one.

    Args:
        job: as its row says.
        cpu_jobs: take jobs without GPUs that say how many CPU cores they need, too.

    Raises:
        BadRow: a time is negative or beyond any that a cluster sees, the job never ran, or it needs no GPU.
    """
    if job.submit_us < 0:
        raise BadRow("negative submission time")
    if job.duration_us < 0:
        raise BadRow("negative run time")
    if job.submit_us > _LATEST_US:
        raise BadRow("submission time after the year 9999")
    if job.duration_us > _LONGEST_US:
        raise BadRow("runs for more than a hundred years")
    if job.gpus < 0:
        raise BadRow("negative number of GPUs")
    if job.gpus == 0 and not (cpu_jobs and job.cpu_milli):
        raise BadRow("asks for no GPU")
    if job.duration_us == 0:
        raise BadRow("never ran")
    return job


def seconds_us(text: str | None, what: str) -> int:
    """Parse seconds.

    Raises:
        BadRow: the text is missing or no number.
    """
    if text is None or not text.strip():
        raise BadRow(f"no {what}")
    try:
        return round(float(text) * US_PER_S)
    except (ValueError, OverflowError):
        raise BadRow(f"{what} is no number") from None


def stamp_us(text: str | None, what: str) -> int:
    """Parse a date and time, in UTC unless it has a zone.

    Raises:
        BadRow: the text is missing or no time.
    """
    if text is None or text.strip() in ("", "None", "Unknown", "N/A"):
        raise BadRow(f"no {what}")
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise BadRow(f"{what} is no time") from None
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * US_PER_S)


def gpus_of(text: str) -> tuple[int, str]:
    """Return the number of GPUs of a plain number or of Slurm's TRES, and the kind of most of them; "" without one.

    >>> gpus_of("billing=8,gres/gpu:h100=8,gres/gpu=8,node=1"), gpus_of("gres/gpu:a=2,gres/gpu:b=4"), gpus_of("cpu=4")
    ((8, 'h100'), (6, 'b'), (0, ''))
    """
    if text.isdecimal():
        return int(text), ""
    counts = {kind or "": int(count) for kind, count in re.findall(r"(?:^|,)gres/gpu(?::([^=,]+))?=(\d+)", text)}
    plain = counts.pop("", None)
    return sum(counts.values()) if plain is None else plain, max(counts, key=lambda kind: counts[kind], default="")


def instance_of(text: str) -> tuple[str, str]:
    """Return the profile of a MIG instance and the kind of its GPU, as people or Slurm write it; "" without one.

    >>> instance_of("1g.10gb"), instance_of("a100_1g.5gb"), instance_of("8"), instance_of("h100")
    (('1g.10gb', ''), ('1g.5gb', 'a100'), ('', ''), ('', ''))

    Raises:
        BadRow: several of them.
    """
    written = re.sub(r"_(\d+g\.\d+gb)", r":\1", text.strip())
    try:
        found = parse_mig(written)
    except SpecError:
        raise BadRow("a gang on MIG instances") from None
    return ("", "") if found is None else (found[0], found[1] or "")


def in_order(jobs: Iterator[TraceJob], tally: Tally) -> Iterator[TraceJob]:
    """Yield the jobs in the order of submission, with times from the first one."""
    known = sorted(jobs, key=lambda job: (job.submit_us, job.line))
    zero_us = known[0].submit_us if known else 0
    for job in distinct(iter(known), tally):
        tally.jobs += 1
        yield replace(job, submit_us=job.submit_us - zero_us) if zero_us else job


def distinct(jobs: Iterator[TraceJob], tally: Tally) -> Iterator[TraceJob]:
    """Yield jobs in order, each row once: other rows of the same id are attempts, or an id that came again."""
    at_us, seen = -1, set[tuple[object, ...]]()
    for job in jobs:
        if job.submit_us != at_us:
            at_us, seen = job.submit_us, set()
        row = (job.job_id, job.gpus, job.gpu_milli, job.mig, job.duration_us, job.vc, job.user)
        if job.job_id and row in seen:
            tally.bad("the same row again", job.line)
            continue
        seen.add(row)
        yield job
