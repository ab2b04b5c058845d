"""Charts: every point is where its numbers say, names stay apart, and nothing comes from outside."""

import re
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest

from cordee.view.chart import BOTTOM, NARROW, TOP, WIDE, Axis, ChartLine, Mark, chart_html, chart_svg
from cordee.view.frame import ROW, Frame, key
from cordee.view.tables import table_html

PLAIN = Axis("GPUs", lambda value: f"{value:g}")
LOG = Axis("tokens/s", lambda value: f"{value:g}", log=True)


def _paths(svg: str) -> list[list[tuple[float, float]]]:
    found = re.findall(r'class="line"[^>]* d="M([^"]+)"', svg)
    return [[tuple(map(float, point.split())) for point in path.split("L")] for path in found]  # type: ignore[misc]


def test_points_stand_where_their_numbers_say() -> None:
    svg = chart_svg([ChartLine("a", [(0, 0), (50, 5), (100, 10)])], PLAIN, PLAIN)
    ElementTree.fromstring(svg)
    left, right, top, bottom = WIDE.left, WIDE.width - WIDE.right, TOP, WIDE.height - BOTTOM
    assert _paths(svg) == [[(left, bottom), ((left + right) / 2, (top + bottom) / 2), (right, top)]]


def test_a_logarithmic_axis_gives_each_doubling_the_same_room() -> None:
    (line,) = _paths(chart_svg([ChartLine("a", [(8, 8), (16, 16), (32, 32), (64, 64)])], LOG, LOG))
    steps = [after[0] - before[0] for before, after in pairwise(line)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.02)


def test_names_at_the_ends_are_kept_apart_and_escaped() -> None:
    svg = chart_svg([ChartLine("<rent>", [(0, 1), (1, 2)]), ChartLine("own", [(0, 1), (1, 2.001)])], PLAIN, PLAIN)
    rows = [float(y) for y in re.findall(r'class="name"[^>]* y="([\d.]+)"', svg)]
    assert abs(rows[0] - rows[1]) >= 18
    assert "&lt;rent&gt;" in svg and "<rent>" not in svg


def test_a_value_that_holds_until_the_next_is_drawn_as_steps() -> None:
    svg = chart_svg([ChartLine("held", [(0, 4), (10, 0), (20, 8)], steps=True)], PLAIN, PLAIN)
    (path,) = re.findall(r'class="line"[^>]* d="([^"]+)"', svg)
    assert re.fullmatch(r"M[\d.]+ [\d.]+(H[\d.]+V[\d.]+){2}", path)


def test_a_narrow_page_gets_a_chart_of_its_own_with_the_names_below() -> None:
    page = ElementTree.fromstring(
        chart_html([ChartLine("rent", [(0, 1), (1, 2)]), ChartLine("own", [(0, 2), (1, 1)])], PLAIN, PLAIN)
    )
    _, wide, narrow = list(page)
    assert [(each.get("class") or "").split()[1] for each in (wide, narrow)] == ["wide", "narrow"]
    width, height = map(int, (narrow.get("viewBox") or "").split()[2:])
    assert width == NARROW.width
    names = [each for each in narrow.iter("{http://www.w3.org/2000/svg}text") if each.get("class") == "name"]
    assert [each.text for each in names] == ["rent", "own"]
    assert all(NARROW.height - 10 < float(each.get("y") or 0) < height for each in names)


def test_a_mark_is_named_and_a_single_point_is_no_error() -> None:
    svg = chart_svg([ChartLine("a", [(4, 4)])], LOG, LOG, [Mark(4, 4, "knee: 4 GPUs")])
    assert "knee: 4 GPUs" in svg
    ElementTree.fromstring(svg)


def test_names_of_near_marks_cover_neither_each_other_nor_the_axis() -> None:
    """Three patiences within a few pixels were one blot, and a point at the top stood in the name of the axis."""
    points = [(1.0, 100.0), (9.0, 50.0), (9.1, 49.0), (9.2, 51.0), (100.0, 1.0)]
    marks = [Mark(*point, name) for point, name in zip(points, ("easy", "0.1", "0.25", "0.5", "srsf"), strict=True)]
    svg = chart_svg([ChartLine("a", points)], LOG, Axis("mean JCT", str, log=True), marks)
    boxes = {}
    for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        if each.get("class") == "mark-name" or each.text == "mean JCT":
            width, x, y = 7 * len(each.text or ""), float(each.get("x") or 0), float(each.get("y") or 0)
            left = x - width if each.get("text-anchor") == "end" else x
            boxes[each.text] = (left, y - 13, left + width, y)
    assert len(boxes) == 6
    for (one, a), (other, b) in combinations(boxes.items(), 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, f"{one} covers {other}"


def test_a_table_escapes_its_cells() -> None:
    html = table_html(["layout", "step"], [["tp<8>", "1 s"]])
    assert "tp&lt;8&gt;" in html and html.count("<td>") == 1 and html.count('scope="row"') == 1


def test_the_key_of_a_narrow_drawing_has_as_many_rows_as_it_needs() -> None:
    entries = [("useful", "w" * 30), ("lost", "w" * 30), ("", "words alone")]
    drawn, more = key(entries, Frame("narrow", 420, 90, 0), 50)
    assert re.findall(r'<rect class="(\w+)" x="(\d+)" y="(\d+)"', drawn) == [("useful", "0", "39"), ("lost", "0", "59")]
    assert more == ROW
    assert key(entries, Frame("wide", 1080, 90, 0), 50)[1] == 0


def test_no_two_of_many_lines_look_alike():
    svg = chart_svg([ChartLine(f"l{each}", [(0, each), (1, each)]) for each in range(25)], PLAIN, PLAIN)
    assert len(set(re.findall(r'<path class="line" style="([^"]*)"', svg))) == 25
