"""The log as a picture: a lane for each job, its attempts, what they did with their time, which job preempted which.

It draws events, and the segments of time that the ledger concludes from them: it has no rules of its own for where an
attempt's time went.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    CheckpointCommitted,
    Event,
    Job,
    JobEnded,
    JobSubmitted,
    KillOrdered,
    NoticeGiven,
    Outcome,
    Reported,
    Restored,
)
from cordee.ids import JobId
from cordee.units import US_PER_S, format_bytes, format_duration
from cordee.view.markup import CLASSES, SPAN_COLOURS, class_label, num, palette_css, text

WIDTH, GUTTER, RIGHT = 1080, 168, 26
LANE, BAR_TOP, BAR = 96, 34, 24
TOP, AXIS = 12, 34


class Timed(Protocol):
    """A stretch of an attempt's time in one class, as the ledger concludes it (`account.Segment`)."""

    @property
    def cls(self) -> str: ...
    @property
    def from_us(self) -> int: ...
    @property
    def to_us(self) -> int: ...
    @property
    def first_step(self) -> int: ...
    @property
    def steps(self) -> int: ...


Segments = Mapping[tuple[JobId, int], Sequence[Timed]]
"""By job and epoch: without gaps, from placed until the attempt's GPUs were free, or until now."""


@dataclass(frozen=True, slots=True)
class Span:
    """Time of one class as it is drawn: neighbouring segments of a class are one span."""

    name: str
    from_us: int
    to_us: int
    first_step: int = 0
    steps: int = 0


@dataclass(slots=True)
class AttemptTrack:
    """One attempt as it will be drawn."""

    epoch: int
    placed_us: int
    ended_us: int | None = None
    outcome: Outcome | None = None
    restored_step: int | None = None
    reached_step: int = 0
    spans: list[Span] = field(default_factory=list)
    checkpoints: list[CheckpointCommitted] = field(default_factory=list)
    notices: list[NoticeGiven] = field(default_factory=list)
    kills: list[KillOrdered] = field(default_factory=list)


@dataclass(slots=True)
class JobTrack:
    """One lane."""

    job: Job
    submitted_us: int
    attempts: list[AttemptTrack] = field(default_factory=list)
    ended: JobEnded | None = None


def tracks(events: Iterable[Event], segments: Segments) -> list[JobTrack]:
    """Return the log job by job, in the order of their submission."""
    jobs: dict[JobId, JobTrack] = {}
    for event in events:
        if isinstance(event, JobSubmitted):
            jobs[event.job.job_id] = JobTrack(event.job, event.at_us)
        elif isinstance(event, JobEnded):
            jobs[event.job_id].ended = event
        elif isinstance(event, AttemptPlaced):
            spans = joined(segments.get((event.job_id, event.epoch), ()))
            jobs[event.job_id].attempts.append(AttemptTrack(event.epoch, event.at_us, spans=spans))
        elif isinstance(event, NoticeGiven | KillOrdered | Restored | Reported | CheckpointCommitted | AttemptEnded):
            _note(jobs[event.job_id].attempts[event.epoch - 1], event)
    return list(jobs.values())


def _note(attempt: AttemptTrack, event: Event) -> None:
    if isinstance(event, NoticeGiven):
        attempt.notices.append(event)
    elif isinstance(event, KillOrdered):
        attempt.kills.append(event)
    elif isinstance(event, Restored):
        attempt.restored_step = attempt.reached_step = event.step
    elif isinstance(event, Reported):
        attempt.reached_step = max(attempt.reached_step, event.first_step + event.steps)
    elif isinstance(event, CheckpointCommitted):
        attempt.checkpoints.append(event)
    elif isinstance(event, AttemptEnded):
        attempt.ended_us, attempt.outcome = event.at_us, event.outcome


def joined(segments: Iterable[Timed]) -> list[Span]:
    """Return the segments with neighbours of one class joined; every microsecond stays in its class."""
    spans: list[Span] = []
    for each in segments:
        _join(spans, Span(each.cls, each.from_us, each.to_us, each.first_step, each.steps))
    return spans


def _join(spans: list[Span], span: Span) -> None:
    last = spans[-1] if spans else None
    if last is None or last.name != span.name:
        spans.append(span)
    else:
        first_step = span.first_step if span.steps and not last.steps else last.first_step
        spans[-1] = Span(last.name, last.from_us, span.to_us, first_step, last.steps + span.steps)


def _visible(spans: Iterable[Span], scale: "_Scale") -> list[Span]:
    """Return the spans that can be seen; a class goes on through what is too short for that, except lost time."""
    seen: list[Span] = []
    for span in spans:
        if span.name == "lost" or scale.x(span.to_us) - scale.x(span.from_us) >= _SEEN_PX:
            _join(seen, span)
    return seen


_SEEN_PX = 0.25


def timeline_svg(
    events: Sequence[Event], segments: Segments, *, title: str = "What ran, and when", until_us: int = 0
) -> str:
    """Return one SVG that stands alone or inline in a page; it has no lanes if no job was submitted.

    It ends at the last event, or at `until_us` if that is later: what runs is drawn until then.
    """
    lanes = tracks(events, segments)
    start_us = min((lane.submitted_us for lane in lanes), default=0)
    end_us = max((event.at_us for event in events), default=start_us)
    end_us = max(end_us, until_us)
    scale = _Scale(start_us, max(end_us, start_us + 1))
    height = TOP + LANE * len(lanes) + AXIS + 40
    rows = {lane.job.job_id: TOP + LANE * index for index, lane in enumerate(lanes)}
    body = [_axis(scale, TOP + LANE * len(lanes))]
    body += [_lane(lane, rows[lane.job.job_id], scale) for lane in lanes]
    body += [_notices(lane, rows, scale) for lane in lanes]
    body.append(_legend(lanes, height - 20))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{text(title)}"><title>{text(title)}</title><style>{palette_css()}{_css()}</style>'
        f"{_DEFS}{''.join(body)}</svg>"
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    start_us: int
    end_us: int

    def x(self, at_us: int) -> float:
        fraction = (min(max(at_us, self.start_us), self.end_us) - self.start_us) / (self.end_us - self.start_us)
        return GUTTER + fraction * (WIDTH - GUTTER - RIGHT)


def _axis(scale: _Scale, bottom: float) -> str:
    length_s = (scale.end_us - scale.start_us) / US_PER_S
    step_s = next((step for step in _TICKS_S if length_s / step <= 9), 86_400 * 30)
    parts = []
    for tick in range(int(length_s // step_s) + 1):
        x = num(scale.x(scale.start_us + round(tick * step_s * US_PER_S)))
        label = format_duration(tick * step_s) if tick else "0"
        parts.append(f'<line class="grid" x1="{x}" y1="{TOP}" x2="{x}" y2="{num(bottom)}"/>')
        parts.append(f'<text class="tick" x="{x}" y="{num(bottom + 18)}">{text(label)}</text>')
    return "".join(parts)


_TICKS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 604800)


def _lane(lane: JobTrack, top: float, scale: _Scale) -> str:
    job, bar = lane.job, top + BAR_TOP
    parts = [
        f'<line class="rule" x1="0" y1="{num(top + LANE - 6)}" x2="{WIDTH}" y2="{num(top + LANE - 6)}"/>',
        f'<text class="name" x="0" y="{num(bar + 9)}">{text(_short(job.name, 19))}{_tip(job.job_id)}</text>',
        f'<text class="soft" x="0" y="{num(bar + 26)}">{text(job.tier)} · gang of {job.gpus}</text>',
    ]
    queued_us: int | None = lane.submitted_us
    for attempt in lane.attempts:
        if queued_us is not None:
            parts.append(_queued(queued_us, attempt.placed_us, bar, scale))
        parts.append(_attempt(attempt, bar, scale))
        queued_us = attempt.ended_us
    ended = lane.ended
    if ended is None and queued_us is not None:
        parts.append(_queued(queued_us, scale.end_us, bar, scale))
    elif ended is not None:
        x, y = scale.x(ended.at_us), bar - 8
        anchor = "end" if x > WIDTH - 90 else "start"
        if anchor == "end" and lane.attempts and x - scale.x(lane.attempts[-1].placed_us) < 130:
            y = bar + BAR + 16  # above it is the name of the attempt
        parts.append(
            f'<text class="end {text(ended.state)}" x="{num(x)}" y="{num(y)}" text-anchor="{anchor}">'
            f"{text(ended.state)}<title>{text(ended.why)}</title></text>"
        )
    return "".join(parts)


def _queued(from_us: int, to_us: int, bar: float, scale: _Scale) -> str:
    x1, x2, y = num(scale.x(from_us)), num(scale.x(to_us)), num(bar + BAR / 2)
    waited = format_duration((to_us - from_us) / US_PER_S)
    return f'<line class="queued" x1="{x1}" y1="{y}" x2="{x2}" y2="{y}"><title>queued {text(waited)}</title></line>'


def _attempt(attempt: AttemptTrack, bar: float, scale: _Scale) -> str:
    end_us = scale.end_us if attempt.ended_us is None else attempt.ended_us
    x1, x2 = scale.x(attempt.placed_us), scale.x(end_us)
    width = max(x2 - x1, 1.5)
    outcome = attempt.outcome or "running"
    about = f"attempt {attempt.epoch}: {outcome}, {format_duration((end_us - attempt.placed_us) / US_PER_S)}"
    parts = [f'<g><rect class="held" {_box(x1, bar, width)} rx="3">{_tip(about)}</rect>']
    parts += [_span(span, bar, scale) for span in _visible(attempt.spans, scale)]
    parts += [_diamond(commit, bar, scale) for commit in _apart(attempt.checkpoints, scale)]
    for kill in attempt.kills:
        x, y = scale.x(kill.at_us), bar + BAR / 2
        cross = f"M{num(x - 5)} {num(y - 5)}l10 10m0 -10l-10 10"
        parts.append(f'<path class="kill" d="{cross}">{_tip(f"killed: {kill.why}")}</path>')
    label = f"attempt {attempt.epoch}" if width > 62 else f"{attempt.epoch}" if width > 9 else ""
    parts.append(f'<text class="soft" x="{num(x1)}" y="{num(bar - 8)}">{label}</text>')
    if width > 110 and attempt.reached_step:
        start = attempt.restored_step or 0
        steps = f"steps {start:,} to {attempt.reached_step:,}"
        parts.append(f'<text class="soft" x="{num(x1)}" y="{num(bar + BAR + 16)}">{steps}</text>')
    return "".join(parts) + "</g>"


def _span(span: Span, bar: float, scale: _Scale) -> str:
    x1, x2 = scale.x(span.from_us), scale.x(span.to_us)
    about = f"{class_label(span.name)}: {format_duration((span.to_us - span.from_us) / US_PER_S)}"
    if span.steps:
        about += f", steps {span.first_step:,} to {span.first_step + span.steps:,}"
    return f'<rect class="{text(span.name)}" {_box(x1, bar, max(x2 - x1, 1.2))}>{_tip(about)}</rect>'


def _apart(commits: Sequence[CheckpointCommitted], scale: _Scale) -> list[CheckpointCommitted]:
    """Return the newest of those commits that would cover one another; the last one is always among them."""
    shown: list[CheckpointCommitted] = []
    for commit in reversed(commits):
        if not shown or scale.x(shown[-1].at_us) - scale.x(commit.at_us) >= 9:
            shown.append(commit)
    return shown[::-1]


def _diamond(commit: CheckpointCommitted, bar: float, scale: _Scale) -> str:
    x, y = scale.x(commit.at_us), bar + BAR
    about = f"checkpoint {commit.generation}: durable up to step {commit.step:,}, {format_bytes(commit.size_bytes)}"
    return f'<path class="mark" d="M{num(x)} {num(y - 6)}l5 6l-5 6l-5 -6z">{_tip(about)}</path>'


def _notices(lane: JobTrack, rows: dict[JobId, int], scale: _Scale) -> str:
    """Draw each notice as an arrow from the job that gains by it, or from above if none does."""
    parts = []
    for attempt in lane.attempts:
        for notice in attempt.notices:
            x = scale.x(notice.at_us)
            bar = rows[lane.job.job_id] + BAR_TOP
            gains = rows.get(notice.for_job) if notice.for_job else None
            from_y, to_y = bar - 20.0, bar - 1.0
            if gains is not None:
                below = gains > bar
                from_y = gains + BAR_TOP + (BAR / 2)
                to_y = bar + BAR + 7 if below else bar - 1
            label_x, anchor = (x + 7, "start") if x < WIDTH - 190 else (x - 7, "end")
            label_y = bar + BAR + 32 if gains is not None and gains > bar else bar - 22
            allowed = format_duration(max(0, notice.deadline_us - notice.at_us) / US_PER_S)
            parts.append(
                f'<g><line class="preempts" x1="{num(x)}" y1="{num(from_y)}" x2="{num(x)}" y2="{num(to_y)}" '
                f'marker-end="url(#tl-arrow)"/>'
                f'<text class="notice" x="{num(label_x)}" y="{num(label_y)}" text-anchor="{anchor}">'
                f"{text(notice.reason)}: {text(allowed)} to leave</text></g>"
            )
    return "".join(parts)


def _legend(lanes: Sequence[JobTrack], y: float) -> str:
    seen = {span.name for lane in lanes for attempt in lane.attempts for span in attempt.spans}
    parts, x = [], float(GUTTER)
    for name in CLASSES:
        if name in seen:
            parts.append(f'<rect class="{name}" x="{num(x)}" y="{num(y - 10)}" width="13" height="13" rx="3"/>')
            parts.append(f'<text class="key" x="{num(x + 19)}" y="{num(y + 1)}">{class_label(name)}</text>')
            x += 40 + 7.2 * len(name)
    parts.append(f'<path class="mark" d="M{num(x + 6)} {num(y - 10)}l5 6l-5 6l-5 -6z"/>')
    parts.append(f'<text class="key" x="{num(x + 19)}" y="{num(y + 1)}">checkpoint is durable</text>')
    x += 176
    parts.append(f'<line class="queued" x1="{num(x)}" y1="{num(y - 4)}" x2="{num(x + 22)}" y2="{num(y - 4)}"/>')
    parts.append(f'<text class="key" x="{num(x + 29)}" y="{num(y + 1)}">queued</text>')
    return "".join(parts)


def _box(x: float, y: float, width: float) -> str:
    return f'x="{num(x)}" y="{num(y)}" width="{num(width)}" height="{BAR}"'


def _tip(about: str) -> str:
    return f"<title>{text(about)}</title>"


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"


def _css() -> str:
    fills = "".join(f".timeline .{name}{{fill:var(--{name})}}" for name in SPAN_COLOURS if name != "lost")
    return _CSS + fills


_CSS = """
.timeline{width:100%;height:auto;font:13px system-ui,-apple-system,'Segoe UI',sans-serif;fill:var(--ink)}
.timeline .name{font-weight:650;font-size:14px}
.timeline .soft,.timeline .tick,.timeline .key{fill:var(--soft);font-size:12px}
.timeline .tick{text-anchor:middle;font-variant-numeric:tabular-nums}
.timeline .grid{stroke:var(--rule);stroke-dasharray:1 4}
.timeline .rule{stroke:var(--rule)}
.timeline .held{fill:var(--idle)}
.timeline .lost{fill:url(#tl-lost)}
.timeline .queued{stroke:var(--soft);stroke-width:1.6;stroke-dasharray:2 5;stroke-linecap:round}
.timeline .mark{fill:var(--card);stroke:var(--ink);stroke-width:1.6}
.timeline .preempts{stroke:var(--accent);stroke-width:1.6;stroke-dasharray:5 3}
.timeline .notice{fill:var(--accent);font-size:12px;font-weight:600}
.timeline .kill{stroke:var(--ink);stroke-width:2.4;fill:none}
.timeline .end{font-size:12px;font-weight:600;fill:var(--useful)}
.timeline .end.failed,.timeline .end.stopped{fill:var(--accent)}
"""

_DEFS = """<defs>
<marker id="tl-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"
 markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" style="fill:var(--accent)"/></marker>
<pattern id="tl-lost" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="7" height="7" style="fill:var(--lost)"/>
<rect width="2.2" height="7" style="fill:var(--card);opacity:.38"/></pattern></defs>"""
