"""Bars of memory against the memory of a GPU: cells for a terminal, SVG for a report."""

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from cordee.units import GB
from cordee.view.memory import MemoryBar, full_scale_bytes, memory_cells, memory_html, memory_svg

NAMES = ("weights", "gradients", "optimizer", "activations", "loss", "buffers", "fragmentation", "context")
BARS = st.builds(MemoryBar, st.just("a"), st.fixed_dictionaries({name: st.integers(0, 200 * GB) for name in NAMES}))


@given(BARS, st.integers(10, 80))
def test_every_bar_fills_its_cells_and_an_overflow_can_be_seen(bar: MemoryBar, width: int) -> None:
    limit = 80 * GB
    cells = memory_cells(bar, limit, full_scale_bytes([bar], limit), width)
    assert sum(count for _, count in cells) == width
    assert [part for part, _ in cells].count("limit") == 1
    after = cells[[part for part, _ in cells].index("limit") + 1 :]
    drawn_after = sum(count for part, count in after if part)
    assert (drawn_after > 0) == (bar.total_bytes > limit)


@given(st.lists(BARS, min_size=2, max_size=4), st.integers(10, 80))
def test_the_limit_stands_in_one_line(bars: list[MemoryBar], width: int) -> None:
    limit = 80 * GB
    full = full_scale_bytes(bars, limit)
    places = set()
    for bar in bars:
        cells = memory_cells(bar, limit, full, width)
        places.add(sum(count for _, count in cells[: [part for part, _ in cells].index("limit")]))
    assert len(places) == 1


def test_bars_are_cut_at_one_and_a_half_gpus() -> None:
    huge = MemoryBar("a", {"weights": 1000 * GB})
    assert full_scale_bytes([huge], 80 * GB) == 120 * GB
    assert full_scale_bytes([MemoryBar("a", {"weights": GB})], 80 * GB) == 80 * GB
    assert full_scale_bytes([], 80 * GB) == 80 * GB


def test_a_part_without_a_place_of_its_own_is_other() -> None:
    bar = MemoryBar("a", {"weights": 1, "loss": 2, "experts' imbalance": 3})
    assert bar.grouped() == {"weights": 1, "gradients": 0, "optimizer": 0, "activations": 0, "other": 5}
    assert sum(bar.grouped().values()) == bar.total_bytes


def test_the_svg_is_well_formed_says_all_numbers_and_escapes_labels() -> None:
    bars = [
        MemoryBar("tp8 pp2", {"weights": 9 * GB, "optimizer": 26 * GB, "activations": 20 * GB}, "59.6 s"),
        MemoryBar('<b> & "dp64"', {"weights": 141 * GB, "optimizer": 850 * GB}, "does not fit"),
    ]
    svg = memory_svg(bars, 80 * GB)
    tree = ElementTree.fromstring(svg)
    words = "".join(tree.itertext())
    assert tree.attrib["role"] == "img" and "2 layouts against 80 GB" in tree.attrib["aria-label"]
    for expected in (
        "55 GB · 59.6 s",
        "→ 991 GB · does not fit",
        '<b> & "dp64"',
        "GPU memory: 80 GB",
        "optimizer: 26 GB",
    ):
        assert expected in words
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    space = "{http://www.w3.org/2000/svg}"
    assert len(tree.findall(f".//{space}rect[@class='over']")) == 1
    edges = [
        float(rect.attrib["x"]) + float(rect.attrib["width"])
        for rect in tree.iter(f"{space}rect")
        if "x" in rect.attrib
    ]
    assert max(edges) <= 1080


def test_on_a_narrow_page_the_words_stand_above_the_bars() -> None:
    bars = [MemoryBar("tp8 pp2", {"weights": 9 * GB}, "59.6 s"), MemoryBar("dp64", {"weights": 991 * GB})]
    wide, narrow = ElementTree.fromstring(memory_html(bars, 80 * GB)).findall("{http://www.w3.org/2000/svg}svg")
    assert sorted("".join(wide.itertext()).split()) == sorted("".join(narrow.itertext()).split())
    for each in narrow.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(each.attrib["x"]) + float(each.attrib["width"]) <= 420


def test_an_empty_svg_is_still_one() -> None:
    ElementTree.fromstring(memory_svg([], 80 * GB))
