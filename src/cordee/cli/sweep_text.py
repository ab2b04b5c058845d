"""Sweeps as text and as a page: their state, their trials, the best one, and what it cost."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cordee.answers.sweeps import SweepDetailView, SweepView, TrialView
from cordee.cli import terminal
from cordee.control.sweeps.picture import best_text, drawing, metric_text, ranked, rungs_text, value_text, values_text
from cordee.units import US_PER_HOUR, format_micro_usd
from cordee.view.report import HtmlReport, Section, report_html
from cordee.view.tables import table_html

SHOWN = 20
NARROW_COLUMNS = 100
BY_SWEEP = "stopped by its sweep"  # at the end of a sweep, of the trials that were left at a rung
_STATES = ("running", "queued", "paused", "done", "failed", "stopped")


def summary(sweep: SweepView) -> str:
    """Return the trials of a sweep by state, and the best one.

    A line of `cordee jobs` and of `cordee sweep list`.
    """
    counts = ", ".join(f"{sweep.counts[state]} {state}" for state in _STATES if sweep.counts.get(state))
    best = "" if sweep.best is None else f"; best {best_text(sweep, sweep.best)}"
    why = f"; {sweep.why}" if sweep.why else ""
    return f"{counts or 'no trial yet'}{best}{why}"


def print_list(console: Console, sweeps: Sequence[SweepView]) -> None:
    """Print one line a sweep."""
    rows = terminal.table("SWEEP", "STATE", "TRIALS", "AGE", "RESULT", right=("TRIALS", "AGE"), folds=("RESULT",))
    for each in sweeps:
        started = f"{sum(each.counts.values())}/{each.total}"
        rows.add_row(
            each.sweep_id, terminal.state(each.state), started, terminal.since(each.declared_us), summary(each)
        )
    console.print(rows)


def print_sweep(console: Console, sweep: SweepDetailView, *, show_all: bool) -> None:
    """Print a sweep and its trials, the best one first."""
    why = f" ({sweep.why})" if sweep.why else ""
    say: Callable[[str], None] = lambda line: console.print(line, highlight=False, markup=False)  # noqa: E731
    say(f"{sweep.sweep_id} is {sweep.state}: {sum(sweep.counts.values())} of {sweep.total} trials started{why}")
    say(rungs_text(sweep))
    if sweep.best is not None:
        say(f"best: {best_text(sweep, sweep.best)}: {values_text(sweep.best.values)}")
    say(cost_text(sweep))
    if sweep.note:
        say(f"note: {sweep.note}")
    found = ranked(sweep)
    shown = found if show_all else found[:SHOWN]
    narrow = console.width < NARROW_COLUMNS
    rows = _table(sweep, shown, narrow=narrow)
    if shown and narrow:
        terminal.print_with_notes(console, rows, [_why(sweep, each) for each in shown])
    elif shown:
        console.print(rows)
    if len(shown) < len(found):
        say(f"trials not shown: {len(found) - len(shown)} (--all shows them)")


def _table(sweep: SweepDetailView, shown: Sequence[TrialView], *, narrow: bool) -> Table:
    """Return the table of trials; a narrow one has short numbers, no GPU-hours, and no reasons."""
    names = list(sweep.trials[0].values) if sweep.trials else []
    rung = ["RUNG"] if sweep.rung_steps else []
    cells = ["TRIAL", *names, "STATE", *rung, "STEP", sweep.metric.upper(), "GPU-HOURS", "COST", "WHY"]
    left_out = {"GPU-HOURS", "WHY"} if narrow else {"WHY"} if not any(_why(sweep, each) for each in shown) else set()
    kept = [at for at, cell in enumerate(cells) if cell not in left_out]
    columns = [cells[at] for at in kept]
    rows = terminal.table(*columns, right=("TRIAL", *names, *cells[-5:-1], *rung), folds=("WHY",))
    for each in shown:
        values = [value_text(each.values[name], 3 if narrow else 6) for name in names]
        row: list[str | Text] = [
            str(each.number),
            *values,
            terminal.state(each.state),
            *_row(sweep, each),
            _why(sweep, each),
        ]
        rows.add_row(*(row[at] for at in kept))
    return rows


def cost_text(sweep: SweepDetailView) -> str:
    """Return what a sweep has cost, in all, a trial, and to its target."""
    started = max(1, len(sweep.trials))
    spent = f"spent: {hours_text(sweep.gpu_us)} GPU-hours, {format_micro_usd(sweep.micro_usd)}"
    text = f"{spent}, {format_micro_usd(sweep.micro_usd // started)} a trial"
    if sweep.target is None:
        return text
    if sweep.target_micro_usd is None:
        return f"{text}; the target {sweep.target:g} is not reached"
    return f"{text}; {format_micro_usd(sweep.target_micro_usd)} to the target {sweep.target:g}"


def hours_text(gpu_us: int) -> str:
    """Return GPU time in hours.

    >>> hours_text(5_400_000_000), hours_text(36_000_000)
    ('1.50', '0.0100')
    """
    hours = gpu_us / US_PER_HOUR
    return f"{hours:.2f}" if hours >= 1 or not hours else f"{hours:.3g}" if hours >= 0.1 else f"{hours:.4f}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _row(sweep: SweepDetailView, trial: TrialView) -> list[str]:
    rung = [f"{trial.rung}/{len(sweep.rung_steps)}"] if sweep.rung_steps else []
    cost = format_micro_usd(trial.micro_usd or 0)
    return [*rung, str(trial.step), metric_text(trial.metric), hours_text(trial.gpu_us or 0), cost]


def _why(sweep: SweepDetailView, trial: TrialView) -> str:
    if trial.state == "paused" and trial.rung and sweep.state != "ended":
        return f"waits at step {sweep.rung_steps[trial.rung - 1]}: the best one in {sweep.eta} goes on"
    return "" if trial.state in ("done", "running") or trial.why == BY_SWEEP else trial.why


def page(sweep: SweepDetailView) -> str:
    """Return a sweep as one HTML page: parallel coordinates, and the table of its trials."""
    found = ranked(sweep)
    with_metric = [each for each in found if each.metric is not None]
    names = list(sweep.trials[0].values) if sweep.trials else []
    rung = ["rung"] if sweep.rung_steps else []
    columns = ["trial", *names, "state", *rung, "step", sweep.metric, "GPU-hours", "cost"]
    rows = [
        [str(each.number), *(value_text(each.values[name]) for name in names), each.state, *_row(sweep, each)]
        for each in found
    ]
    facts = [(str(len(found)), f"of {sweep.total} trials"), (hours_text(sweep.gpu_us), "GPU-hours")]
    facts += [(format_micro_usd(sweep.micro_usd), "spent")] if sweep.micro_usd else []
    if sweep.best is not None:
        facts = [(metric_text(sweep.best.metric), f"best {sweep.metric}, trial {sweep.best.number}"), *facts]
    sections = []
    if with_metric:
        lead = (
            f"Each line is a trial, from its values to its {sweep.metric}. The best one is thick; the next "
            "four are in colour. A trial's name shows under the pointer."
        )
        sections.append(Section("Values and results", lead, [drawing(sweep, with_metric)]))
    sections.append(Section("Trials", _sentence(cost_text(sweep)), [table_html(columns, rows)]))
    return report_html(
        HtmlReport(title=f"Sweep {sweep.name}", lead=_sentence(rungs_text(sweep)), sections=sections, facts=facts)
    )
