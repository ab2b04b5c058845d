"""Readers of traces of jobs: the public formats as published, Slurm's accounting, and Cordee's own log.

`open_trace` tells a format by its content. A row that is no job is counted by kind and left out, or is an error when
strict.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cordee.errors import TraceError
from cordee.near import did_you_mean
from cordee.simulate.traces.job import Tally, TraceJob, in_order, open_text
from cordee.simulate.traces.log import is_log, logged_jobs
from cordee.simulate.traces.pai import pai
from cordee.simulate.traces.philly import philly
from cordee.simulate.traces.table import FORMATS, Format, streamed, table

NAMES = (*(form.name for form in FORMATS), "philly", "pai", "cordee")

__all__ = ["NAMES", "Tally", "Trace", "TraceJob", "open_trace"]


@dataclass(frozen=True, slots=True)
class Trace:
    """A file or folder with its reader; it can be read repeatedly."""

    path: Path
    form: str

    def jobs(self, tally: Tally) -> Iterator[TraceJob]:
        """Yield the jobs in the order of submission; count rows that are left out in `tally`.

        Raises:
            TraceError: it cannot be read to its end, or a row is bad and it is to be strict.
        """
        try:
            yield from self._jobs(tally)
        except (OSError, EOFError, csv.Error) as error:
            raise TraceError(f"{self.path} cannot be read: {error}", hint="is it cut off?") from error

    def _jobs(self, tally: Tally) -> Iterator[TraceJob]:
        if self.form == "philly":
            return in_order(philly(self.path, tally), tally)
        if self.form == "pai":
            return in_order(pai(self.path, tally), tally)
        if self.form == "cordee":
            return in_order(logged_jobs(self.path), tally)
        form = next(form for form in FORMATS if form.name == self.form)
        rows = table(self.path, form, tally)
        return streamed(rows, tally) if form.is_sorted else in_order(rows, tally)

    @property
    def may_have_instances(self) -> bool:
        """Return whether its format has MIG instances."""
        return self.form in ("common", "sacct", "cordee")

    def tally(self, *, strict: bool = False) -> Tally:
        """Return a new count."""
        return Tally(str(self.path), strict)


def open_trace(path: Path, form: str | None = None) -> Trace:
    """Return the trace, with the format that its content shows.

    Raises:
        TraceError: there is no such file, or no format has such content.
    """
    if form is not None and form not in NAMES:
        raise TraceError(f"there is no format {form!r}", hint=did_you_mean(form, NAMES))
    if not path.exists():
        raise TraceError(f"{path} does not exist", hint="give a trace file, a folder of tables or a Cordee home")
    return Trace(path, form or _format_of(path))


def _format_of(path: Path) -> str:
    if path.name.startswith("pai_") or (path.is_dir() and any(path.glob("pai_job_table.csv*"))):
        return "pai"
    if is_log(path):
        return "cordee"
    if path.is_dir():
        raise TraceError(f"{path} holds neither PAI tables nor Cordee's database", hint="give the file itself")
    with open_text(path) as file:
        try:
            head = file.read(4096)
        except (OSError, EOFError) as error:
            raise TraceError(f"{path} cannot be read: {error}", hint="is it cut off, or not gzip at all?") from error
    if head.lstrip().startswith("["):
        return "philly"
    header = head.split("\n", 1)[0].strip()
    for form in FORMATS:
        if not form.missing({name.strip() for name in header.split(form.delimiter)}):
            return form.name
    if not header:
        raise TraceError(f"{path} is empty", hint=f"write a table with the columns {_needs(FORMATS[0])}")
    raise TraceError(
        f"no format has the header {header[:120]!r}",
        hint=f"rename its columns: {_needs(FORMATS[0])} are enough, in any order and among others, or start_s and end_s"
        " in place of duration_s; times are in seconds or dates, the run time in seconds, 01:30:00 or 1h30m",
    )


def _needs(form: Format) -> str:
    return form.delimiter.join(form.needs)
