"""Pipelines drawn, and Chrome traces: every block where its time says, and JSON that viewers take."""

import json
import re
from xml.etree import ElementTree

import pytest

from cordee.view.chrome import Flow, Slice, Track, chrome_trace_text
from cordee.view.pipeline import NARROW, WIDE, Block, RankRow, pipeline_html


def test_blocks_stand_where_their_times_say() -> None:
    lines = [
        RankRow("rank 0", [Block("F", "0", "first", 0, 1), Block("W", "0", "last", 3, 4)]),
        RankRow(
            "rank 1", [Block("F", "1", "above", 1, 3, half=0), Block("B", "0", "below", 1, 3, half=1, second=True)]
        ),
    ]
    both = pipeline_html("a <name>", lines, aside="4 steps", end=8)
    svg, narrow = re.findall(r"<svg.*?</svg>", both, re.DOTALL)
    for each, frame in ((svg, WIDE), (narrow, NARROW)):
        assert ElementTree.fromstring(each).get("viewBox", "").split()[2] == str(frame.width)
        assert "a &lt;name&gt;" in each
        edges = [float(x) + float(width) for x, width in re.findall(r'x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', each)]
        assert max(edges) <= frame.width
    scale = WIDE.inner / 8
    found = {
        about: (float(x), float(y)) for x, y, about in re.findall(r'x="([\d.]+)" y="([\d.]+)"[^>]*><title>(\w+)<', svg)
    }
    assert found["first"][0] == WIDE.left
    assert found["last"][0] == pytest.approx(WIDE.left + 3 * scale, abs=0.01)
    assert found["above"][0] == found["below"][0]
    assert found["above"][1] < found["below"][1]
    # Idle time is drawn to the end of the step, not of the axis.
    assert [float(width) for width in re.findall(r'class="idle" x="76" y="\d+" width="([\d.]+)"', svg)] == [
        pytest.approx(4 * scale, abs=0.01)
    ] * 2
    assert 'class="B second"' in svg
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


def test_a_trace_has_lanes_slices_and_messages() -> None:
    upper, lower = Track(0, 0, "rank 0", "passes"), Track(1, 0, "rank 1", "passes")
    one = Slice(upper, 'F "0"', "forward", 10, 5, {"stage": 0})
    other = Slice(lower, "F 0", "forward", 20, 5)
    trace = json.loads(chrome_trace_text([other, one], [Flow("activation 0", one, other)], {"schedule": "1f1b"}))
    assert trace["schedule"] == "1f1b"
    names = [(event["pid"], event["args"]["name"]) for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert names == [(0, "rank 0"), (1, "rank 1")]
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"], event["pid"]) for event in slices] == [
        ('F "0"', 10, 5, 0), ("F 0", 20, 5, 1),
    ]  # fmt: skip
    begin, finish = (next(event for event in trace["traceEvents"] if event["ph"] == phase) for phase in "sf")
    assert (begin["ts"], finish["ts"], begin["id"]) == (15, 20, finish["id"])
    assert json.loads(chrome_trace_text([]))["traceEvents"] == []
