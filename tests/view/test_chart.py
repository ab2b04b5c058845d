"""Charts: every point is where its numbers say, names stay apart, and nothing comes from outside."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from cordee.view.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Line, Mark, chart_svg
from cordee.view.tables import Column, table_html

PLAIN = Axis("GPUs", lambda value: f"{value:g}")
LOG = Axis("tokens/s", lambda value: f"{value:g}", log=True)


def _paths(svg: str) -> list[list[tuple[float, float]]]:
    found = re.findall(r'class="line"[^>]* d="M([^"]+)"', svg)
    return [[tuple(map(float, point.split())) for point in path.split("L")] for path in found]  # type: ignore[misc]


def test_points_stand_where_their_numbers_say() -> None:
    svg = chart_svg([Line("a", [(0, 0), (50, 5), (100, 10)])], PLAIN, PLAIN)
    ElementTree.fromstring(svg)
    left, right, top, bottom = LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM
    assert _paths(svg) == [[(left, bottom), ((left + right) / 2, (top + bottom) / 2), (right, top)]]


def test_a_logarithmic_axis_gives_each_doubling_the_same_room() -> None:
    (line,) = _paths(chart_svg([Line("a", [(8, 8), (16, 16), (32, 32), (64, 64)])], LOG, LOG))
    steps = [after[0] - before[0] for before, after in pairwise(line)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.02)


def test_names_at_the_ends_are_kept_apart_and_escaped() -> None:
    svg = chart_svg([Line("<rent>", [(0, 1), (1, 2)]), Line("own", [(0, 1), (1, 2.001)])], PLAIN, PLAIN)
    rows = [float(y) for y in re.findall(r'class="name"[^>]* y="([\d.]+)"', svg)]
    assert abs(rows[0] - rows[1]) >= 18
    assert "&lt;rent&gt;" in svg and "<rent>" not in svg


def test_a_mark_is_named_and_a_single_point_is_no_error() -> None:
    svg = chart_svg([Line("a", [(4, 4)])], LOG, LOG, [Mark(4, 4, "knee: 4 GPUs")])
    assert "knee: 4 GPUs" in svg
    ElementTree.fromstring(svg)


def test_a_table_escapes_its_cells() -> None:
    html = table_html([Column("layout"), Column("step")], [["tp<8>", "1 s"]])
    assert "tp&lt;8&gt;" in html and html.count("<td>") == 1 and html.count('scope="row"') == 1
