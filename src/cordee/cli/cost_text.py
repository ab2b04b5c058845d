"""The tables of `cordee cost`."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from cordee.answers.cost import CostRowView, CostView, SplitView
from cordee.answers.metrics import JobCostView
from cordee.answers.services import CostLineView, TokenCountsView, TokenPrices, UsageRowView, UsageView
from cordee.cli import terminal
from cordee.units import US_PER_S, format_count, format_duration, format_kg, format_micro_usd
from cordee.view.markup import CLASSES, SERVING_CLASSES, class_label
from cordee.view.money import gpu_time

_NARROW = 110  # columns of a terminal below which some are left out
_JOINED = (("useful", "serving"), ("restart", "loading"), ("stall", "idle_held"))
_LESSER = ("checkpoint", "stall", "unreported")
_OTHERS = ("checkpoint", "draining", "lost", "unreported")


class _Column(NamedTuple):
    """A column of one or more classes."""

    head: str
    classes: Sequence[str]

    def of(self, split: SplitView) -> int:
        """Return their sum."""
        return sum(getattr(split, cls) for cls in self.classes)


def _columns(total: SplitView, width: int) -> tuple[list[_Column], bool]:
    """Return the columns of the classes that have any time, and whether jobs and replicas are joined in them.

    Joined, classes that mean the same of a job and of a replica share a column, and few columns are left.
    """
    if not any(getattr(total, cls) for cls in SERVING_CLASSES):
        return [_Column(class_label(cls).upper(), (cls,)) for cls in CLASSES if getattr(total, cls)], False
    groups = [*_JOINED, *((_OTHERS,) if width < _NARROW else ((cls,) for cls in _OTHERS))]
    found = []
    for group in groups:
        classes = [cls for cls in group if getattr(total, cls)]
        head = "/".join(class_label(cls).upper() for cls in classes)
        found.append(_Column("OTHER" if len(classes) > 1 and group is _OTHERS else head, classes))
    return [column for column in found if column.classes], True


def cost_table(found: CostView, width: int) -> Table:
    """Return the costs by row: GPU time of each class, or where that is too wide, its fraction of what was held.

    Classes without any time are left out; on the narrowest terminals, some share a column.
    """
    columns, is_joined = _columns(found.gpu_us, width)
    tokens = any(row.tokens for row in found.rows)
    if is_joined:
        return _cost_table(found, columns, fractions=True, tokens=tokens)
    ways = [(columns, False, tokens), (columns, True, tokens), (columns, True, False), (_few(columns), True, False)]
    tables = [_cost_table(found, each, fractions=fractions, tokens=more) for each, fractions, more in ways]
    return next((each for each in tables if _width(each) <= width), tables[-1])


def _cost_table(found: CostView, columns: Sequence[_Column], *, fractions: bool, tokens: bool) -> Table:
    ends = ["HELD", "COST", *(["$/1M TOKENS"] if tokens else [])]
    table = _table(found.by.upper(), [*(column.head for column in columns), *ends], folds=fractions)
    for row in found.rows:
        more = [_tokens(row)] if tokens else []
        table.add_row(row.key, *_cells(columns, row.gpu_us, fractions), format_micro_usd(row.micro_usd.held), *more)
    if len(found.rows) > 1:
        table.add_section()
        more = [""] if tokens else []
        all_cells = _cells(columns, found.gpu_us, fractions)
        table.add_row("all", *all_cells, format_micro_usd(found.micro_usd.held), *more)
    return table


def _few(columns: Sequence[_Column]) -> list[_Column]:
    """Return the columns with those of lesser classes in one."""
    lesser = [cls for column in columns for cls in column.classes if cls in _LESSER]
    kept = [column for column in columns if column.classes[0] not in _LESSER]
    return [*kept, *([_Column("OTHER", lesser)] if lesser else [])]


def _width(table: Table) -> int:
    """Return the columns of a terminal that the table takes if no cell is folded."""
    console = Console(width=10_000)
    return Measurement.get(console, console.options, table).maximum


def class_table(found: UsageView, width: int) -> Table:
    """Return the GPU time of services and of all other jobs in one table, as fractions of what each held."""
    splits = {row.key: (row.gpu_us, row.micro_usd.total) for row in found.rows if row.gpu_us is not None}
    splits["training"] = (found.training_gpu_us, found.training_micro_usd.held)
    total = SplitView(
        **{cls: sum(getattr(split, cls) for split, _ in splits.values()) for cls in SplitView.model_fields}
    )
    columns, _ = _columns(total, width)
    table = _table("SERVICE", [*(column.head for column in columns), "HELD", "COST"], folds=True)
    for key, (split, micro_usd) in splits.items():
        if split.held or key != "training":
            table.add_row(key, *_cells(columns, split, True), format_micro_usd(micro_usd))
    table.add_section()
    table.add_row("all", *_cells(columns, total, True), format_micro_usd(found.micro_usd))
    return table


def token_table(found: UsageView, width: int) -> Table:
    """Return tokens and dollars by row, beside the dollars of days without tokens and of all other jobs."""
    heads = [*(["REQUESTS"] if width >= _NARROW else []), *_TOKEN_HEADS, "COST"]
    table = _table(found.by.upper(), heads, folds=True)
    spare = len(heads) - 1
    unused = sum(row.micro_usd.unused for row in found.rows)
    for row in sorted(found.rows, key=lambda row: -row.micro_usd.total):
        used = row.micro_usd.total - row.micro_usd.unused
        if used or row.tokens.requests:
            table.add_row(
                _label(row), *_counts(row.tokens, width), *_prices(row.micro_usd_per_million), format_micro_usd(used)
            )
    table.add_section()
    for label, micro_usd in (("days without tokens", unused), ("training", found.training_micro_usd.held)):
        if micro_usd:
            table.add_row(label, *[""] * spare, format_micro_usd(micro_usd))
    sums = {kind: sum(getattr(row.tokens, kind) for row in found.rows) for kind in TokenCountsView.model_fields}
    table.add_row("all", *_counts(TokenCountsView(**sums), width), "", "", "", format_micro_usd(found.micro_usd))
    return table


def retrieval_lines(found: UsageView) -> list[str]:
    """Return one line for each row with requests to a knowledge base: the time of both its parts."""
    lines = []
    for row in found.rows:
        tokens = row.tokens
        if tokens.retrieval_us or tokens.generation_us:
            retrieval, generation = (
                format_duration(each / US_PER_S) for each in (tokens.retrieval_us, tokens.generation_us)
            )
            lines.append(f"{_label(row)}: requests spent {retrieval} in retrieval and {generation} in generation")
    return lines


_TOKEN_HEADS = ("INPUT", "CACHED", "OUTPUT", "$/1M IN", "$/1M CACHED", "$/1M OUT")


def line_table(lines: Iterable[CostLineView], width: int) -> Table:
    """Return the cost lines, one a row."""
    heads = [*(["REQUESTS"] if width >= _NARROW else []), "INPUT", "CACHED", "OUTPUT", "COST"]
    names = ("DAY", "SERVICE", "TENANT", "KEY", *(["MODEL"] if width >= _NARROW else []))
    table = terminal.table(*names, *heads, right=heads, folds=names[1:])
    for line in lines:
        words = (line.service, line.tenant or "–", line.key or "–", *([line.model or "–"] if width >= _NARROW else []))
        table.add_row(_period(line), *words, *_counts(line.tokens, width), format_micro_usd(line.micro_usd.total))
    return table


def epoch_table(found: JobCostView) -> Table:
    """Return the cost of each epoch of a job's data."""
    rows = terminal.table("EPOCH", "FROM STEP", "COST", right=("EPOCH", "FROM STEP", "COST"))
    for each in found.epochs:
        rows.add_row(str(each.epoch), f"{each.first_step:,}", format_micro_usd(each.micro_usd))
    return rows


def job_remarks(found: JobCostView) -> list[str]:
    """Return one line for each figure of a job that its row lacks."""
    row = found.row
    lines = [f"{row.tokens:,} tokens"] if row.tokens else ["no tokens: job.log(tokens=...) counts those of a step"]
    if row.steps:
        repeated = f", {row.steps_repeated:,} of them again" if row.steps_repeated else ""
        lines.append(
            f"{row.steps:,} steps{repeated}, {format_micro_usd(row.micro_usd.held * 1000 // row.steps)} a thousand"
        )
    return lines


def remarks(found: CostView) -> list[str]:
    """Return one line for each loss, for idle time, and for each source of prices."""
    lines = []
    for row in found.rows:
        causes = [f"{gpu_time(lost.gpu_us)} by {lost.cause}" for lost in row.lost_by_cause]
        if causes:
            lines.append(f"{row.key} lost {', '.join(causes)}")
        if row.charged_gpu_us:
            amount = f"{gpu_time(row.charged_gpu_us)} ({format_micro_usd(row.charged_micro_usd)})"
            lines.append(f"{row.key} made others lose {amount}")
    if found.idle_gpu_us:
        lines.append(f"idle: {gpu_time(found.idle_gpu_us)} ({format_micro_usd(found.idle_micro_usd)})")
    lines += energy_lines(found)
    sources = sorted({source for row in found.rows for source in row.price_sources})
    return lines + [f"price: {source}" for source in sources]


def energy_lines(found: CostView) -> list[str]:
    """Return what GPUs drew by class, with idle ones, and what that emits; nothing where no driver counted any."""
    held, at = found.energy_mj, found.electricity
    whole_mj = held.held + found.idle_energy_mj
    if not whole_mj or at is None:
        return []
    classes = {class_label(cls): getattr(held, cls) for cls in CLASSES} | {"idle": found.idle_energy_mj}
    parts = [f"{_percent(mj, whole_mj)} {label}" for label, mj in classes.items() if mj]
    lines = [f"energy of GPUs: {_kwh(whole_mj):,.3f} kWh ({', '.join(parts)})"]
    for row in found.rows:
        causes = [f"{_kwh(lost.energy_mj):,.3f} kWh by {lost.cause}" for lost in row.lost_by_cause if lost.energy_mj]
        if causes:
            lines.append(f"{row.key} lost {', '.join(causes)}")
    building = _kwh(whole_mj) * at.building_factor
    emitted = "" if at.g_co2e_per_kwh is None else f", {format_kg(building * at.g_co2e_per_kwh / 1000)} CO2e"
    lines.append(f"with the building {building:,.3f} kWh{emitted}; hosts are not counted")
    if found.integrated_mj:
        lines.append(f"{_percent(found.integrated_mj, whole_mj)} of it is power over time, where no counter was")
    return lines + list(at.sources)


def _kwh(energy_mj: int) -> float:
    return energy_mj / 3.6e9


def _table(first: str, heads: Sequence[str], *, folds: bool) -> Table:
    """Return a table with right-aligned columns; on a terminal, long heads take two lines."""
    table = terminal.table(first, *heads, right=heads, folds=(first,) if folds else ())
    if folds and table.box is not None:
        for column in table.columns[1:]:
            column.header = (
                str(column.header).replace("/", "/\n", 1)
                if "$" not in str(column.header)
                else str(column.header).replace(" ", "\n", 1)
            )
    return table


def _cells(columns: Sequence[_Column], split: SplitView, is_joined: bool) -> list[str]:
    if is_joined:
        return [*(_percent(column.of(split), split.held) for column in columns), gpu_time(split.held)]
    return [*(gpu_time(column.of(split)) for column in columns), gpu_time(split.held)]


def _percent(part: int, whole: int) -> str:
    if not part or not whole:
        return "–"
    return f"{100 * part / whole:.1f} %" if part < whole / 10 else f"{100 * part / whole:.0f} %"


def _tokens(row: CostRowView) -> str:
    price = row.micro_usd_per_million_tokens
    return "–" if price is None else format_micro_usd(price)


def _label(row: UsageRowView) -> str:
    name = row.key or "–"
    return name if row.tenant is None else f"{name} ({row.tenant})"


def _counts(tokens: TokenCountsView, width: int) -> list[str]:
    counts = [tokens.input, tokens.cached, tokens.output]
    shown = [format_count(count) if count else "–" for count in counts]
    return [*([f"{tokens.requests:,}"] if width >= _NARROW else []), *shown]


def _prices(prices: TokenPrices) -> list[str]:
    return ["–" if each is None else format_micro_usd(each) for each in (prices.computed, prices.cached, prices.output)]


def _period(line: CostLineView) -> str:
    from_, to = (datetime.fromtimestamp(at_us // US_PER_S, UTC) for at_us in (line.from_us, line.to_us))
    return f"{from_:%Y-%m-%d}" if (to - from_).days == 1 else f"{from_:%Y-%m}"
