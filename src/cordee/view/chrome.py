"""Slices of time as a Chrome trace: JSON that Perfetto and chrome://tracing open.

A track is one row of the picture (a rank, a stream), a slice an interval on it. Times are microseconds of any clock.
The format: "Trace Event Format", complete events (`X`), metadata (`M`) and flows (`s`, `f`).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Track:
    """One row: `group` is a process of the viewer (one rank, one run), `line` a thread of it."""

    group: int
    line: int
    group_name: str
    line_name: str


@dataclass(frozen=True, slots=True)
class Slice:
    """An interval on a track; `kind` becomes its category, which chooses its colour in most viewers."""

    track: Track
    name: str
    kind: str
    start_us: float
    length_us: float
    args: Mapping[str, str | int | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Flow:
    """An arrow from the end of one slice to the start of another: a message."""

    name: str
    source: Slice
    target: Slice


def chrome_trace_text(
    slices: Iterable[Slice], flows: Iterable[Flow] = (), about: Mapping[str, str] | None = None
) -> str:
    """Return the trace as JSON text, one event a line, ordered by start.

    >>> track = Track(0, 0, "rank 0", "passes")
    >>> [event["ph"] for event in json.loads(chrome_trace_text([Slice(track, "F0", "forward", 0, 5)]))["traceEvents"]]
    ['M', 'M', 'X']
    """
    rows = sorted(slices, key=lambda each: (each.start_us, each.track.group, each.track.line))
    tracks = sorted({(each.track.group, each.track.line): each.track for each in rows}.items())
    events: list[dict[str, object]] = []
    named: set[int] = set()
    for (group, line), track in tracks:
        if group not in named:
            named.add(group)
            events.append({"ph": "M", "name": "process_name", "pid": group, "args": {"name": track.group_name}})
        events.append({"ph": "M", "name": "thread_name", "pid": group, "tid": line, "args": {"name": track.line_name}})
    events += [
        {"ph": "X", "name": each.name, "cat": each.kind, "pid": each.track.group, "tid": each.track.line,
         "ts": each.start_us, "dur": each.length_us, **({"args": dict(each.args)} if each.args else {})}
        for each in rows
    ]  # fmt: skip
    for number, flow in enumerate(flows):
        source, target = flow.source, flow.target
        common: dict[str, object] = {"name": flow.name, "cat": "message", "id": number}
        end_us = source.start_us + source.length_us
        events.append({"ph": "s", "pid": source.track.group, "tid": source.track.line, "ts": end_us, **common})
        events.append(
            {"ph": "f", "bp": "e", "pid": target.track.group, "tid": target.track.line, "ts": target.start_us, **common}
        )
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    head = "".join(f"{json.dumps(name)}:{json.dumps(value)},\n" for name, value in (about or {}).items())
    return f'{{"displayTimeUnit":"ms",\n{head}"traceEvents":[\n{lines}\n]}}\n'
