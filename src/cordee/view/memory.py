"""Memory of layouts as bars against the memory of one GPU: cells for a terminal, SVG for a page.

A line marks the GPU's memory: a bar that crosses it does not fit. The parts differ in shade as well as in colour.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cordee.units import format_bytes
from cordee.view.markup import num, palette_css, text, twins

Parts = Mapping[str, tuple[tuple[str, ...], tuple[str, str], tuple[str, str]]]
"""The parts of a bar from left to right: the names it gathers, its glyphs (Unicode, ASCII), colours (light, dark)."""

PARTS: Parts = {
    "weights": (("weights",), ("█", "#"), ("#1f4e79", "#5b9bd5")),
    "gradients": (("gradients",), ("▓", "="), ("#2f8f6f", "#4bb08d")),
    "optimizer": (("optimizer",), ("▒", "+"), ("#8a6fb0", "#b39ad6")),
    "activations": (("activations",), ("░", "-"), ("#e3a72f", "#e9b949")),
    "other": (("loss", "buffers", "fragmentation", "context"), ("·", "."), ("#a8a296", "#83807a")),
}
"""Memory of a training step."""

SERVING_PARTS: Parts = {
    "weights": (("weights",), ("█", "#"), ("#1f4e79", "#5b9bd5")),
    "activations": (("activations",), ("░", "-"), ("#e3a72f", "#e9b949")),
    "other": (("graphs", "context", "communication"), ("·", "."), ("#a8a296", "#83807a")),
    "kv": (("kv",), ("▒", "="), ("#2f8f6f", "#4bb08d")),
}
"""Memory of an engine: the KV cache takes what the rest leaves."""

LIMIT = ("┃", "|")
# Bars of layouts that are far too large are cut at so many GPUs' memory, so that the near ones can be compared.
LONGEST_GPUS = 1.5


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """The fullest GPU of one layout: its parts in bytes by name, and a note on its speed or its shortfall."""

    label: str
    parts: Mapping[str, int]
    note: str = ""
    shown: Parts = field(default_factory=lambda: PARTS)

    @property
    def total_bytes(self) -> int:
        """Return the sum of all parts."""
        return sum(self.parts.values())

    def grouped(self) -> dict[str, int]:
        """Return the parts as they are drawn; parts without a colour of their own are `other`."""
        named = {name for names, _, _ in self.shown.values() for name in names}
        groups = {group: sum(self.parts.get(name, 0) for name in names) for group, (names, _, _) in self.shown.items()}
        groups["other"] += sum(size for name, size in self.parts.items() if name not in named)
        return groups


def memory_cells(bar: MemoryBar, gpu_memory_bytes: int, full_bytes: int, width: int) -> list[tuple[str, int]]:
    """Return a bar of `width` cells as (part, cells), with one cell for the limit and `""` for empty ones.

    The limit stands in the same cell for all bars of one scale; a bar that exceeds it by less than a cell gets one.

    >>> memory_cells(MemoryBar("a", {"weights": 40, "optimizer": 20}), 80, 80, 9)
    [('weights', 4), ('optimizer', 2), ('', 2), ('limit', 1)]
    """
    usable = width - 1
    edges, done = [], 0
    for group, size in bar.grouped().items():
        done += size
        edges.append((group, min(usable, round(done / full_bytes * usable))))
    # Rounding must not hide an overflow: where any bar exceeds the limit, a cell is kept to the right of it.
    limit_at = min(usable - (full_bytes > gpu_memory_bytes), round(gpu_memory_bytes / full_bytes * usable))
    if bar.total_bytes > gpu_memory_bytes:
        last = next(at for at, (group, _) in reversed(list(enumerate(edges))) if bar.grouped()[group])
        edges = [(group, max(end, limit_at + 1) if at >= last else end) for at, (group, end) in enumerate(edges)]
    row = [""] * usable
    start = 0
    for group, end in edges:
        row[start:end] = [group] * (end - start)
        start = max(start, end)
    row.insert(limit_at, "limit")
    return _runs(row)


def full_scale_bytes(bars: Sequence[MemoryBar], gpu_memory_bytes: int) -> int:
    """Return the bytes that the whole width stands for."""
    longest = max((bar.total_bytes for bar in bars), default=0)
    return round(max(gpu_memory_bytes, min(longest, gpu_memory_bytes * LONGEST_GPUS)))


def memory_html(bars: Sequence[MemoryBar], gpu_memory_bytes: int) -> str:
    """Return the bars twice: the page shows the drawing that its width has room for."""
    return twins(memory_svg(bars, gpu_memory_bytes), memory_svg(bars, gpu_memory_bytes, narrow=True))


def memory_svg(bars: Sequence[MemoryBar], gpu_memory_bytes: int, *, narrow: bool = False) -> str:
    """Return the bars as a self-contained SVG, with the limit drawn through all of them.

    Names and notes stand beside the bars, or on a line above each where there is no room beside them.
    """
    longest = max((len(bar.label) for bar in bars), default=0)
    # Seven and a half units a letter at 13 pixels: long names shift the bars, they are never cut.
    notes = max((len(bar.note) for bar in bars), default=0)
    width, gutter, right = (
        (420, 0, 8) if narrow else (1080, max(210, round(7.5 * longest)), max(150, 110 + round(7.5 * notes)))
    )
    top, row_height = (62, 52) if narrow else (46, 34)
    shown = bars[0].shown if bars else PARTS
    scale = (width - gutter - right) / full_scale_bytes(bars, gpu_memory_bytes)
    height = top + row_height * len(bars) + 34
    limit_x = gutter + gpu_memory_bytes * scale
    rows = "".join(
        f'<g transform="translate({gutter},{top + row_height * index})">'
        f"{_svg_row(bar, gpu_memory_bytes, scale, width if narrow else None)}</g>"
        for index, bar in enumerate(bars)
    )
    limit_name = text(f"GPU memory: {format_bytes(gpu_memory_bytes)}")
    anchor = "end" if narrow else "middle"
    tops = [top + row_height * index + 17 for index in range(len(bars))]
    limit = f"M{num(limit_x)} {top - 8}V{height - 24}"
    if narrow:  # it passes no words
        limit = "".join(f"M{num(limit_x)} {at}v30" for at in tops)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'class="memory {"narrow" if narrow else "wide"}" role="img" '
        f'aria-label="memory of {len(bars)} layouts against {text(format_bytes(gpu_memory_bytes))}">'
        f"<style>{palette_css()}{_svg_css(shown)}</style>{_legend(shown, gutter, 3 if narrow else len(shown))}{rows}"
        f'<path class="limit" d="{limit}"/>'
        f'<text class="limit-name" x="{num(limit_x)}" y="{height - 8}" text-anchor="{anchor}">{limit_name}</text></svg>'
    )


def _svg_row(bar: MemoryBar, gpu_memory_bytes: int, scale: float, width: int | None) -> str:
    """Draw one bar from x = 0; `scale` is SVG units for a byte, `width` is given if its words stand above it.

    A bar that is cut has its whole size in its note.
    """
    over = bar.total_bytes > gpu_memory_bytes
    edge, limit_x = gpu_memory_bytes * LONGEST_GPUS * scale, gpu_memory_bytes * scale
    top = 0 if width is None else 20
    pieces = []
    at = 0.0
    for group, size in bar.grouped().items():
        end = min(edge, at + size * scale)
        if end > at:
            title = f"<title>{text(f'{group}: {format_bytes(size)}')}</title>"
            place = f'x="{num(at)}" y="{top}" width="{num(end - at)}" height="24"'
            pieces.append(f'<rect class="m-{group}" {place}>{title}</rect>')
        at = end
    if over:
        pieces.append(f'<rect class="over" x="{num(limit_x)}" y="{top}" width="{num(at - limit_x)}" height="24"/>')
    cut = "→ " if bar.total_bytes * scale > edge + 1 else ""
    note = text(" · ".join(filter(None, (cut + format_bytes(bar.total_bytes), bar.note))))
    style = "note bad" if over else "note"
    if width is None:
        pieces.append(f'<text class="label" x="-12" y="17" text-anchor="end">{text(bar.label)}</text>')
        pieces.append(f'<text class="{style}" x="{num(max(at, limit_x) + 10)}" y="17">{note}</text>')
    else:
        pieces.append(f'<text class="label" x="0" y="14">{text(bar.label)}</text>')
        pieces.append(f'<text class="{style}" x="{width}" y="14" text-anchor="end">{note}</text>')
    return "".join(pieces)


def _legend(shown: Parts, x: float, per_row: int) -> str:
    pieces = []
    for index, group in enumerate(shown):
        at, top = x + index % per_row * 120, 8 + index // per_row * 20
        pieces.append(f'<rect class="m-{group}" x="{num(at)}" y="{top}" width="12" height="12" rx="2"/>')
        pieces.append(f'<text class="key" x="{num(at + 18)}" y="{top + 10}">{group}</text>')
    return "".join(pieces)


def _svg_css(shown: Parts) -> str:
    light = "".join(f".memory .m-{group}{{fill:{colours[0]}}}" for group, (_, _, colours) in shown.items())
    dark = "".join(f".memory .m-{group}{{fill:{colours[1]}}}" for group, (_, _, colours) in shown.items())
    return (
        ".memory text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:var(--ink)}"
        ".memory .key{fill:var(--soft)}.memory .note{font-variant-numeric:tabular-nums}"
        ".memory .bad{fill:var(--lost)}.memory .over{fill:var(--lost);fill-opacity:.45}"
        ".memory .limit{stroke:var(--ink);stroke-width:2.5;fill:none}.memory .limit-name{font-weight:600}"
        f"{light}@media (prefers-color-scheme:dark){{{dark}}}@media print{{{light}}}"
    )


def _runs(row: Sequence[str]) -> list[tuple[str, int]]:
    runs: list[tuple[str, int]] = []
    for cell in row:
        if runs and runs[-1][0] == cell:
            runs[-1] = (cell, runs[-1][1] + 1)
        else:
            runs.append((cell, 1))
    return runs
