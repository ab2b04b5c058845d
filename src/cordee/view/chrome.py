"""Rows in time as a Chrome trace: JSON that Perfetto and chrome://tracing open.

A lane is one line of the picture (a rank, a stream), a slice something that ran on it. Times go in as whole
microseconds of any clock. The format: "Trace Event Format", complete events (`X`), metadata (`M`) and flows (`s`, `f`).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Lane:
    """One line: `group` is what the viewer folds together (a process: one rank, one run), `line` a thread of it."""

    group: int
    line: int
    group_name: str
    line_name: str


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that ran on a lane; `kind` becomes its category and chooses its colour in most viewers."""

    lane: Lane
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
    """The trace as JSON text; one event a line, in the order of their start.

    >>> lane = Lane(0, 0, "rank 0", "passes")
    >>> [event["ph"] for event in json.loads(chrome_trace_text([Slice(lane, "F0", "forward", 0, 5)]))["traceEvents"]]
    ['M', 'M', 'X']
    """
    rows = sorted(slices, key=lambda each: (each.start_us, each.lane.group, each.lane.line))
    lanes = sorted({(each.lane.group, each.lane.line): each.lane for each in rows}.items())
    events: list[dict[str, object]] = []
    named: set[int] = set()
    for (group, line), lane in lanes:
        if group not in named:
            named.add(group)
            events.append({"ph": "M", "name": "process_name", "pid": group, "args": {"name": lane.group_name}})
        events.append({"ph": "M", "name": "thread_name", "pid": group, "tid": line, "args": {"name": lane.line_name}})
    events += [
        {"ph": "X", "name": each.name, "cat": each.kind, "pid": each.lane.group, "tid": each.lane.line,
         "ts": each.start_us, "dur": each.length_us, **({"args": dict(each.args)} if each.args else {})}
        for each in rows
    ]  # fmt: skip
    for number, flow in enumerate(flows):
        source, target = flow.source, flow.target
        common: dict[str, object] = {"name": flow.name, "cat": "message", "id": number}
        end_us = source.start_us + source.length_us
        events.append({"ph": "s", "pid": source.lane.group, "tid": source.lane.line, "ts": end_us, **common})
        events.append(
            {"ph": "f", "bp": "e", "pid": target.lane.group, "tid": target.lane.line, "ts": target.start_us, **common}
        )
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    head = "".join(f"{json.dumps(name)}:{json.dumps(value)},\n" for name, value in (about or {}).items())
    return f'{{"displayTimeUnit":"ms",\n{head}"traceEvents":[\n{lines}\n]}}\n'
