"""Every kind of GPU in a terminal: which cards hold a training, how far they go, and what they cost."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cordee.cli.plan_text import console, indented, settings_in_words, title
from cordee.plan.cards import Card, Cards
from cordee.plan.memory_interval import residuals_of
from cordee.units import GB, format_count, format_gb, format_whole_usd

REJECTED_SHOWN = 5
_WIDE = 96


def print_cards(found: Cards, *, show_all: bool) -> None:
    """Print the kinds that fit, those that do not, and the smallest and the cheapest in a sentence."""
    out = console()
    every = (*found.fitting, *found.rejected)
    out.print(Text.assemble((found.request.shape.name, "bold"), " on which GPU?"))
    out.print(settings_in_words(found.request.shape, every[0].training), style="dim")
    if found.fitting:
        title(out, f"GPUs that hold it: {len(found.fitting)}", "the fewest of one node, cheapest first")
        out.print(_fitting(out, found.fitting))
        if any(card.price is None for card in found.fitting):
            indented(out, "–: no price is known; give yours with --prices")
        more = f"nine of ten such runs need up to {residuals_of(every[0].training).high:.0%} more than planned"
        if any(card.candidate.tight for card in found.fitting):
            indented(out, f"* tight: it fits as planned, but {more}")
        indented(
            out,
            "longest: tokens of the longest sequence; batch: sequences at once of the length above; both surely "
            f"({more}) and as planned, with full recomputation where that holds more. --gpus NxKIND shows the whole "
            "plan of one.",
        )
    if found.rejected:
        shown = found.rejected if show_all else found.rejected[:REJECTED_SHOWN]
        title(out, f"GPUs that do not: {len(found.rejected)}", "a whole node of them; nearest first")
        out.print(_rejected(shown))
        if len(found.rejected) > len(shown):
            indented(out, f"and {len(found.rejected) - len(shown)} more (--all)")
    for _, reason in found.unable if show_all else ():
        indented(out, reason)
    if found.unable and not show_all:
        names = ", ".join(name for name, _ in found.unable)
        indented(out, f"not in {every[0].training.precision}: {names} (--all says why, --precision has others)")
    out.print()
    out.print(_summary(found), style="bold")


def _fitting(out: Console, cards: tuple[Card, ...]) -> Table:
    wide = out.width >= _WIDE
    names = ["peak GB", "of", "longest", "batch", *(["tok/s"] if wide else []), "$/h"]
    table = _table("GPUs", "layout", *names, *(["$/1B tok"] if wide else []))
    for card in cards:
        found, usd = card.candidate, card.usd_per_billion_tokens
        assert found.tokens_per_s is not None, "what fits has a speed"
        table.add_row(
            Text.assemble(("* " if found.tight else "  ", "yellow"), f"{card.gpus} x {card.gpu.name}"),
            str(found.layout),
            f"{found.peak_bytes / GB:.1f}",
            f"{card.gpu.visible_bytes / GB:.1f}",
            _from_to(format_count(card.sure_seq_tokens), format_count(card.seq_tokens)),
            _from_to(f"{card.sure_micro_batch:,}", f"{card.micro_batch:,}"),
            *([format_count(found.tokens_per_s)] if wide else []),
            "–" if card.usd_per_hour is None else f"${card.usd_per_hour:,.2f}",
            *(["–" if usd is None else format_whole_usd(usd)] if wide else []),
        )
    return table


def _from_to(low: str, high: str) -> str:
    return low if low == high else f"{low}–{high}"


def _rejected(cards: tuple[Card, ...]) -> Table:
    table = _table("GPUs", "layout", "peak", "of", "over by")
    for card in cards:
        found = card.candidate
        over = Text(f"+{format_gb(found.shortfall_bytes)}", "red")
        table.add_row(
            f"  {card.gpus} x {card.gpu.name}", str(found.layout), format_gb(found.peak_bytes),
            format_gb(card.gpu.visible_bytes), over,
        )  # fmt: skip
    return table


def _table(first: str, second: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column(f"  {first}", no_wrap=True)
    table.add_column(second, overflow="fold", min_width=len("selective"))
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _summary(found: Cards) -> str:
    """Return the smallest single card, as planned and surely, and the cheapest ones, a line each."""
    small, sure, cheap = found.smallest, found.smallest_sure, found.cheapest
    if not found.fitting:
        return "no node of any known GPU holds it"
    lines = []
    if small is not None:
        lines.append(f"smallest: {_in_words(small)}")
        if sure is not small:
            lines[-1] += "; surely " + ("no single one" if sure is None else _in_words(sure))
    if cheap is not None:
        lines.append(f"cheapest: {_in_words(cheap)} at ${cheap.usd_per_hour:,.2f} an hour")
    return "\n".join(lines) or f"fewest: {_in_words(found.fitting[0])}"


def _in_words(card: Card) -> str:
    words, found = f"{card.gpus} x {card.gpu.name}", card.candidate
    memory = format_gb(card.gpu.visible_bytes)
    if not found.tight:
        return f"{words} of {memory}"
    high = format_gb(found.needed_interval_bytes[1])
    return f"{words} (tight: {format_gb(found.peak_bytes)}, up to {high}, of {memory})"
