"""The page of one job: its attempts with every second in its class, its curves, logs, checkpoints and cost."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from cordee.account import curves as names
from cordee.account.ledger import attempt_segments
from cordee.answers.jobs import JobDetailView
from cordee.answers.metrics import CurveView, JobCostView
from cordee.control import logs
from cordee.control.access import Access
from cordee.control.job_metrics import job_cost, metrics
from cordee.control.months import Books
from cordee.control.operations import Operations
from cordee.control.web.ahead import Forecasts
from cordee.control.web.artifacts import version_page
from cordee.control.web.history import job_events
from cordee.control.web.now import in_line
from cordee.control.web.parts import Parts
from cordee.events import CheckpointCommitted, Event, NodeUp
from cordee.ids import JobId
from cordee.units import MiB, format_bytes, format_count, format_duration
from cordee.view.chart import Axis, ChartLine, chart_svg
from cordee.view.frame import Frame
from cordee.view.markup import CLASSES
from cordee.view.measured import compared_texts
from cordee.view.money import MoneyRow, money_html
from cordee.view.page import part
from cordee.view.timeline import timeline_svg

if TYPE_CHECKING:
    from cordee.control.artifacts.operations import ArtifactOperations

LINES_SHOWN = 300
"""Lines of the logs that a page shows."""

LOGS_SHOWN = 64
"""Logs of an attempt that are shown together."""

LOG_BYTES = 64 * MiB
"""Bytes at the ends of these logs that are searched for lines, together."""

CURVES_SHOWN = 8
CHECKPOINTS_SHOWN = 12
ARTIFACTS_SHOWN = 20
_CURVE = Frame("curve", 400, 64, 0, 200)


@dataclass(frozen=True, slots=True)
class LogChoice:
    """Which lines of the logs are shown: of which attempt and rank, and with which words."""

    epoch: int | None = None
    rank: int | None = None
    words: str = ""


@dataclass(frozen=True, slots=True)
class LogLines:
    """Lines of an attempt's logs, and what they were chosen from."""

    choice: LogChoice
    epochs: Sequence[int]
    ranks: int
    lines: Sequence[Sequence[tuple[bool, str]]]
    cut: bool  # there are others, or may be, before these
    hidden: int  # logs of which nothing is shown
    each_bytes: int  # of the end of each log were searched


def job_parts(
    operations: Operations,
    artifacts: "ArtifactOperations | None",
    books: Books,
    forecasts: Forecasts,
    ref: str,
    viewer: Access,
    choice: LogChoice,
) -> Parts:
    """Return the parts of the page.

    Raises:
        NotFoundError: there is no such job.
    """
    job = operations.job(viewer.job(ref))
    why = operations.why(job.job_id)
    events, whole = job_events(operations.store, job.job_id)
    costs = job_cost(operations, job.job_id)
    mine = viewer.changes(job)
    ahead = forecasts.of(in_line(operations)).get(JobId(job.job_id)) if job.state == "queued" else None
    parts = {
        "summary": _part("summary", job, why, costs, mine, ahead),
        "timeline": _timeline(events, books.node_events(), job, whole, costs.at_us),
    }
    curves = _curves(metrics(operations, job.job_id).curves)
    parts["curves"] = _part("curves", curves)
    parts["logs"] = _part("logs", job, _log_lines(operations.home, job, choice))
    compared = [(row.quantity, *compared_texts(row), row.missed) for row in job.measured]
    parts["measured"] = _part("measured", job, compared)
    saved = [event for event in events if isinstance(event, CheckpointCommitted)]
    parts["checkpoints"] = _part("checkpoints", list(reversed(saved))[:CHECKPOINTS_SHOWN], len(saved), job.spec)
    parts["made"] = "" if artifacts is None else _artifacts(artifacts, JobId(job.job_id), viewer)
    parts["cost"] = _part("cost", costs, _money(costs), why.failure)
    return parts


def _artifacts(artifacts: "ArtifactOperations", job_id: JobId, viewer: Access) -> str:
    made, used = (viewer.views(each) for each in artifacts.of_job(job_id, viewer))
    rows = [(how, each, version_page(each.ref)) for how, found in (("made", made), ("read", used)) for each in found]
    return _part("artifacts", rows[:ARTIFACTS_SHOWN], len(rows) - ARTIFACTS_SHOWN)


def _part(macro: str, *values: object) -> str:
    return part(macro, *values, template="web/job.html.j2")


def _timeline(
    events: Sequence[Event], node_events: Iterable[Event], job: JobDetailView, whole: bool, now_us: int
) -> str:
    if not whole:
        return _part("timeline", job, "")
    until_us = now_us if job.ended_us is None else 0
    nodes = {event.node.name: event.node for event in node_events if isinstance(event, NodeUp)}
    known = [NodeUp(at_us=events[0].at_us, node=node) for node in nodes.values()]  # the ledger asks for prices
    segments = attempt_segments([*known, *events], until_us)
    return _part("timeline", job, timeline_svg(events, segments, title=f"Attempts of {job.name}", until_us=until_us))


def _curves(found: Sequence[CurveView]) -> list[tuple[str, str]]:
    """Return the names and drawings of the curves, those first that people look at first."""
    order = {name: at for at, name in enumerate(_KNOWN)}
    known = sorted(found, key=lambda curve: (order.get(curve.name, len(order)), curve.name))
    drawn = []
    for curve in islice((each for each in known if sum(value is not None for value in each.values) > 1), CURVES_SHOWN):
        points = [
            (float(step), value) for step, value in zip(curve.steps, curve.values, strict=True) if value is not None
        ]
        name, write = _KNOWN.get(curve.name, (curve.name.replace("_", " "), _write))
        axes = Axis("step", lambda value: format_count(round(value))), Axis("", write)
        drawn.append((name, chart_svg([ChartLine("", points)], *axes, label=f"{name} by step", frame=_CURVE)))
    return drawn


def _write(value: float) -> str:
    return format_count(round(value)) if abs(value) >= 1000 else f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%"


_KNOWN: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "loss": ("loss", _write),
    names.TOKENS_PER_S: ("tokens a second", _write),
    names.MFU: ("MFU", _percent),
    names.GPU_BUSY: ("busy time of the GPUs", _percent),
    names.GPU_MEMORY: ("memory of the fullest GPU", format_bytes),
    names.GPU_POWER: ("power of all GPUs", lambda value: f"{_write(value)} W"),
    names.STEP_S: ("step time", format_duration),
    names.PEAK_BYTES: ("peak memory, as the ranks measured it", format_bytes),
}
"""Curves whose unit is known, by name: in the order in which people look at them, with their names and units."""


def _log_lines(home: Path, job: JobDetailView, choice: LogChoice) -> LogLines:
    epoch = choice.epoch or job.epoch
    files = logs.log_files(home, job.job_id, epoch, choice.rank)
    shown, wanted = files[:LOGS_SHOWN], choice.words.lower()
    each_bytes = LOG_BYTES // max(1, len(shown))
    ends = [_end_of(path, wanted, each_bytes) for path in shown]
    counts = _divided([len(lines) for lines, _ in ends], LINES_SHOWN)
    lines = []
    for path, (found, _), count in zip(shown, ends, counts, strict=True):
        name = path.parent.parent.name if path.stem == "node" else path.stem
        label = f"[{name}] " if len(files) > 1 else ""
        lines += [_marked(label + line, wanted) for line in found[len(found) - count :]]
    cut = any(is_cut or len(found) > count for (found, is_cut), count in zip(ends, counts, strict=True))
    epochs = [attempt.epoch for attempt in job.attempts]
    chosen = LogChoice(epoch, choice.rank, choice.words)
    return LogLines(chosen, epochs, max(1, job.gpus), lines, cut, len(files) - len(shown), each_bytes)


def _divided(counts: Sequence[int], most: int) -> list[int]:
    """Return how many of each are taken: as many of each, and what some do not have goes to the others.

    >>> _divided([400, 2, 400], 300)
    [149, 2, 149]
    """
    taken = [0] * len(counts)
    for left, at in zip(range(len(counts), 0, -1), sorted(range(len(counts)), key=counts.__getitem__), strict=True):
        taken[at] = min(counts[at], (most - sum(taken)) // left)
    return taken


def _end_of(path: Path, wanted: str, most_bytes: int) -> tuple[list[str], bool]:
    """Return the last lines of a file that have some words, and whether what comes before them was not looked at.

    A line that is longer than what is read at once comes in parts.
    """
    found: list[str] = []
    with path.open("rb") as file:
        at = size = file.seek(0, 2)
        rest = b""  # of a line that begins further up
        while at and len(found) < LINES_SHOWN and size - at < most_bytes:
            begin = max(0, at - logs.READ_BYTES, size - most_bytes)
            file.seek(begin)
            block = file.read(at - begin) + rest
            first = block.find(b"\n") + 1 if begin else 0
            at, rest, text = begin, block[:first], block[first:].decode(errors="replace")
            if wanted in text.lower():
                found = [line for line in text.splitlines() if wanted in line.lower()] + found
    return found[-LINES_SHOWN:], at > 0 or len(found) > LINES_SHOWN


def _marked(text: str, wanted: str) -> list[tuple[bool, str]]:
    """Return a line as pieces, each with whether it is what was looked for.

    >>> _marked("an error here", "error")
    [(False, 'an '), (True, 'error'), (False, ' here')]
    """
    text = text[:4000]
    if not wanted:
        return [(False, text)]
    pieces, at, lowered = [], 0, text.lower()
    while (found := lowered.find(wanted, at)) >= 0:
        pieces += [(False, text[at:found]), (True, text[found : found + len(wanted)])]
        at = found + len(wanted)
    return [piece for piece in (*pieces, (False, text[at:])) if piece[1]]


def _money(costs: JobCostView) -> str:
    amounts = {name: getattr(costs.row.gpu_us, name) for name in CLASSES}
    return money_html([MoneyRow("this job", amounts, costs.row.micro_usd.held)]) if costs.row.attempts else ""
