"""Accounting of another scheduler: what `sacct` prints of Slurm, or a table with a row for each attempt.

sacct escapes nothing: a job's name may hold its delimiter. A requeued job has a row for each attempt (`--duplicates`),
each with a submission of its own; exports of several months repeat their headers and the jobs that ran across a bound.
A job that waits has `Unknown` times, a job that was cancelled while it waited has GPUs, an end, and no start.
"""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, tzinfo
from pathlib import Path

from cordee.account.elsewhere import OtherAttempt
from cordee.errors import TraceError
from cordee.simulate.traces.job import BadRow, Tally, gpus_of, open_text
from cordee.units import US_PER_S

COMMAND = (
    "sacct -a -D -X -P -S 2026-01-01 -E now "
    "-o JobID,User,Account,Partition,State,Submit,Eligible,Start,End,ElapsedRaw,Timelimit,AllocTRES,ReqTRES,NodeList"
)
_COLUMNS = {
    "job": ("jobid", "job_id"),
    "state": ("state", "status"),
    "submit": ("submit", "submit_s"),
    "start": ("start", "start_s"),
    "end": ("end", "end_s"),
    "gpus": ("alloctres", "gpus"),
    "eligible": ("eligible",),
    "elapsed": ("elapsedraw", "elapsed", "duration_s"),
    "wanted": ("reqtres",),
    "user": ("user",),
    "account": ("account", "vc"),
    "partition": ("partition",),
    "kind": ("gpu_spec",),
    "nodes": ("nodelist",),
    "limit": ("timelimit", "time_limit_s"),
    "name": ("jobname",),
    "restarts": ("restarts",),
}
_NEEDED = {"job": "JobID", "state": "State", "submit": "Submit", "start": "Start", "end": "End", "gpus": "AllocTRES"}
_STATES = {
    "COMPLETED": "completed", "COMPLETING": "running", "RUNNING": "running", "SUSPENDED": "running",
    "RESIZING": "completed", "STOPPED": "running", "SIGNALING": "running", "STAGE_OUT": "running",
    "PENDING": "running", "CONFIGURING": "running", "REQUEUE_HOLD": "running", "REQUEUE_FED": "running",
    "CANCELLED": "cancelled", "REVOKED": "cancelled", "FAILED": "failed", "SPECIAL_EXIT": "failed",
    "DEADLINE": "timeout", "TIMEOUT": "timeout", "OUT_OF_MEMORY": "out_of_memory", "NODE_FAIL": "node_fail",
    "BOOT_FAIL": "node_fail", "PREEMPTED": "preempted", "REQUEUED": "requeued", "PASS": "completed",
    "SUCCEEDED": "completed", "FINISHED": "completed", "DONE": "completed", "KILLED": "cancelled",
}  # fmt: skip
"""States of Slurm, and some of other traces: the ends of `cordee.account.elsewhere`."""

_UNKNOWN = ("", "unknown", "none", "n/a", "invalid")


@dataclass(frozen=True, slots=True)
class Export:
    """The attempts of an export.

    Attributes:
        attempts: in the order of the file.
        steps: rows of job steps, which their job's row covers.
        again: rows that repeat an attempt.
        without_first: jobs whose earlier attempts are not in the export.
    """

    attempts: tuple[OtherAttempt, ...]
    steps: int
    again: int
    without_first: int


def read_export(path: Path, tally: Tally, zone: tzinfo) -> Export:
    """Read an export; count rows that are no attempt on GPUs.

    Args:
        path: its file, which may be packed.
        tally: counts rows that are left out.
        zone: the time zone of times that name none.

    Raises:
        TraceError: it cannot be read, is empty, lacks columns, or has no attempt on GPUs.
    """
    try:
        with open_text(path) as file:
            header, rows = _rows(file, path, tally)
            found = _attempts(rows, header, tally, zone)
    except (OSError, EOFError, csv.Error) as error:
        raise TraceError(f"{path} cannot be read: {error}", hint="is it cut off?") from error
    if not found.attempts:
        raise TraceError(f"{path} has no attempt on GPUs{_left_out(tally)}", hint=_no_gpus(tally))
    return found


def _left_out(tally: Tally) -> str:
    kinds = [f"{count:,} rows: {kind}" for kind, count in tally.kinds.items()]
    return f" ({'; '.join(kinds)})" if kinds else ""


def _no_gpus(tally: Tally) -> str:
    if tally.kinds.get("asks for no GPU"):
        return (
            "Slurm accounts GPUs only with AccountingStorageTRES=gres/gpu in slurm.conf; AllocTRES then has gres/gpu=8"
        )
    return f"export it with {COMMAND}"


def _rows(file: Iterator[str], path: Path, tally: Tally) -> tuple[dict[str, int], Iterator[tuple[int, list[str]]]]:
    """Return the columns by what they hold, and the rows with their lines."""
    first = next((line for line in file if line.strip()), "").rstrip("\r\n")
    if not first:
        raise TraceError(f"{path} is empty", hint=f"export it with {COMMAND}")
    delimiter = max("|\t;,", key=first.count)
    names = [name.strip() for name in next(_cells([first], delimiter))]
    if names and not names[-1]:
        names.pop()  # `sacct --parsable` ends each line with the delimiter
    places = {name.lower(): place for place, name in reversed(list(enumerate(names)))}
    header = {
        what: next(places[name] for name in known if name in places)
        for what, known in _COLUMNS.items()
        if any(name in places for name in known)
    }
    optional = {"start", "end"} if "duration_s" in places else set()  # a trace may have a run time only
    missing = [name for what, name in _NEEDED.items() if what not in header and what not in optional]
    if missing:
        raise TraceError(
            f"{path} has no column {', '.join(missing)}: its header is {first[:160]!r}",
            hint=f"export it with {COMMAND}",
        )

    def rows() -> Iterator[tuple[int, list[str]]]:
        for line, written in enumerate(_cells(file, delimiter), start=2):
            if not written or [cell.strip() for cell in written[: len(names)]] == names:
                continue  # a blank line, or the header of the next export in the same file
            cells = _mended(written, len(names), header.get("name"))
            if len(cells) < len(names):
                tally.bad(f"{len(cells)} columns in place of {len(names)}: cut off", line)
            elif len(cells) > len(names):
                tally.bad(f"{len(cells)} columns in place of {len(names)}", line)
            else:
                yield line, cells

    return header, rows()


def _cells(lines: Iterable[str], delimiter: str) -> Iterator[list[str]]:
    """Yield the cells of lines; only tables with commas quote any, sacct itself does not."""
    if delimiter == ",":
        return csv.reader(lines)
    return (line.rstrip("\r\n").split(delimiter) if line.strip() else [] for line in lines)


def _mended(cells: list[str], count: int, name: int | None) -> list[str]:
    """Return the cells of a row, with those put together into which a job's name with delimiters was divided."""
    if len(cells) == count + 1 and not cells[-1]:
        cells = cells[:-1]
    more = len(cells) - count
    if more > 0 and name is not None:
        return [*cells[:name], "|".join(cells[name : name + more + 1]), *cells[name + more + 1 :]]
    return cells


def _attempts(rows: Iterator[tuple[int, list[str]]], header: Mapping[str, int], tally: Tally, zone: tzinfo) -> Export:
    found: dict[tuple[str, int, int | None], OtherAttempt] = {}
    restarted: dict[str, int] = {}
    open_ends: set[tuple[str, int, int | None]] = set()
    steps = again = 0
    for line, cells in rows:
        row = {what: cells[place].strip() for what, place in header.items()}
        if "." in row["job"]:
            steps += 1
            continue
        try:
            each, is_open = _attempt(row, line, zone)
        except BadRow as bad:
            tally.bad(str(bad), line)
            continue
        key = (each.job_id, _time_us(row["submit"], zone) or 0, each.start_us)
        if key in found:
            again += 1
            if each.end_us < found[key].end_us:
                continue  # an older export of the same attempt
        found[key] = each
        (open_ends.add if is_open else open_ends.discard)(key)
        restarts = row.get("restarts", "")
        if restarts.isdecimal() and int(restarts):
            restarted[each.job_id] = max(restarted.get(each.job_id, 0), int(restarts))
    started = {(job_id, submit_us) for job_id, submit_us, start_us in found if start_us is not None}
    for key in [key for key in found if key[2] is None and key[:2] in started]:
        del found[key]  # an older export, in which it still waited
        again += 1
    last_us = max((each.end_us for each in found.values()), default=0)
    attempts = [replace(each, end_us=last_us) if key in open_ends else each for key, each in found.items()]
    tally.jobs += len({each.job_id for each in attempts})
    seen: dict[str, int] = {}
    for each in attempts:
        seen[each.job_id] = seen.get(each.job_id, 0) + 1
    missing = sum(count >= seen[job_id] for job_id, count in restarted.items())
    return Export(attempts=tuple(attempts), steps=steps, again=again, without_first=missing)


def _attempt(row: Mapping[str, str], line: int, zone: tzinfo) -> tuple[OtherAttempt, bool]:
    """Return the attempt of a row, and whether it had not ended when the export was made."""
    gpus, kind = gpus_of(row["gpus"] or row.get("wanted", ""))
    if gpus == 0:
        raise BadRow("asks for no GPU")
    state = row["state"].upper().split(" ")[0].rstrip("+")  # CANCELLED by 1001
    if state not in _STATES:
        raise BadRow(f"unknown state {row['state'][:20]!r}")
    submit_us = _time_us(row["submit"], zone)
    if submit_us is None:
        raise BadRow("no submission time")
    held_us = _held_us(row.get("elapsed", ""))
    start_us, end_us = _time_us(row.get("start", ""), zone), _time_us(row.get("end", ""), zone)
    if "start" not in row and held_us:
        start_us = submit_us  # a trace without times of starts
    eligible_us = _time_us(row.get("eligible", ""), zone)
    is_open = _STATES[state] == "running" and end_us is None
    if start_us is not None and held_us is not None:
        end_us = start_us + held_us  # by Slurm's clock; the times may be local, across the end of summer time
    limit_us = _held_us(row.get("limit", ""))
    since_us = max(submit_us, eligible_us or 0)
    last_us = end_us if end_us is not None else since_us if start_us is None else start_us
    return OtherAttempt(
        job_id=row["job"],
        end=_STATES[state],
        gpus=gpus,
        submit_us=since_us if start_us is None else min(since_us, start_us),
        start_us=start_us,
        end_us=last_us,
        line=line,
        user=row.get("user", ""),
        account=row.get("account", ""),
        partition=row.get("partition", ""),
        gpu_name=kind or row.get("kind", ""),
        node=_first_node(row.get("nodes", "")),
        limit_us=limit_us or None,
    ), is_open


def _time_us(text: str, zone: tzinfo) -> int | None:
    """Parse a time: in the zone unless it names one, or in seconds."""
    if text.lower() in _UNKNOWN:
        return None
    try:
        if re.fullmatch(r"\d+(\.\d+)?", text):
            return round(float(text) * US_PER_S)
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadRow("a time that cannot be read") from None
    return round((moment if moment.tzinfo else moment.replace(tzinfo=zone)).timestamp()) * US_PER_S


def _held_us(text: str) -> int | None:
    """Parse seconds or `[days-]hours:minutes:seconds`; None for anything else, such as UNLIMITED."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return round(float(text) * US_PER_S)
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * US_PER_S


def _first_node(text: str) -> str:
    """Return the first node of a list.

    >>> _first_node("gpu[003-004,7]"), _first_node("a1,a2"), _first_node("None assigned")
    ('gpu003', 'a1', '')
    """
    if text.lower() in (*_UNKNOWN, "none assigned"):
        return ""
    match = re.match(r"([^\[,]*)(?:\[(\d+))?", text)
    return f"{match[1]}{match[2] or ''}" if match else ""
