"""The answers of `cordee simulate` and `cordee replay` on a terminal: waits, use of the GPUs, and losses by cause."""

from collections.abc import Callable, Iterator, Sequence

from rich.table import Table

from cordee.cli import terminal
from cordee.simulate.answer import (
    NONE,
    PolicyComparison,
    PolicyResult,
    Replay,
    duration_of,
    patiences_are_equal,
    unended,
)
from cordee.simulate.frontier import Figure, Recommendation, sentences
from cordee.simulate.knee import RULE, SAME, weighed
from cordee.units import US_PER_HOUR, format_duration, format_micro_usd, plural

TIMES = ("JCT", "P50", "P99", "WAIT", "P99 WAIT", "AWAY MAX", "JAIN")
GPUS = ("GOODPUT", "HELD", "FRAG", "PREEMPTED", "LOST GPU-H", "LOST", "ENDED")
KNEE = "<"
"""The mark of the knee, behind the policy's name."""


def print_comparison(answer: PolicyComparison) -> None:
    """Print tables that fit 80 columns, and remarks."""
    _print_head(answer)
    if answer.knee is not None:
        terminal.stdout().print(_frontier(answer))
        _print(f"{KNEE} the knee: {RULE}")
        if patiences_are_equal(answer):
            _print(SAME)
    elif answer.rule is not None:
        _print("no job ended, so there is no knee")
    _print_tables(answer.policies)
    for line in (*_losses(answer), *_remarks(answer)):
        _print(line)


def _print_head(answer: PolicyComparison) -> None:
    cluster = f"{plural(answer.nodes, 'node')}, {plural(answer.gpus, 'GPU')}"
    _print(f"{answer.trace}: {plural(answer.jobs, 'job')} on {cluster}")


COSTS = ("MEAN JCT", "P99 SLOWDOWN", "AWAY MAX", "LOST GPU-H")


def _frontier(answer: PolicyComparison) -> Table:
    table = terminal.table("POLICY", *COSTS, right=COSTS)
    for each in answer.policies:
        figures = weighed(each.summary) or (None,) * len(COSTS)
        written = (_written(figure, write) for write, figure in zip(_WRITE, figures, strict=True))
        table.add_row(_name(each.policy, each.knows_run_times, answer.knee), *written)
    return table


def print_recommendation(answer: Recommendation) -> None:
    """Print what each policy would have cost, and which one is recommended."""
    _print_head(answer.compared)
    table = terminal.table("POLICY", *COSTS, right=COSTS)
    for each in answer.costs:
        figures = (each.jct_s, each.slowdown_p99, each.away_s, each.lost_gpu_hours)
        compares = each.policy != answer.baseline
        written = (_figure(figure, write, compares) for write, figure in zip(_WRITE, figures, strict=True))
        table.add_row(_name(each.policy, each.knows_run_times, answer.policy), *written)
    terminal.stdout().print(table)
    ranges = (
        "below a figure: its range over resampled traces, 10th to 90th percentile, and that of its difference to"
        f" {answer.baseline} on the same ones"
    )
    for line in (*sentences(answer), ranges, *_remarks(answer.compared)):
        _print(line)


def _figure(figure: Figure, write: Callable[[float], str], compares: bool) -> str:
    """Return a figure of the trace; below it its range, and the difference to the baseline, in resampled traces."""
    lines = [_written(figure.value, write)]
    if figure.low is not None and figure.high is not None:
        lines.append(f"{write(figure.low)}–{write(figure.high)}")
    if compares and figure.over_low is not None and figure.over_high is not None:
        lines.append(f"{_percent(figure.over_low)} to {_percent(figure.over_high)} %")
    return "\n".join(lines)


def _written(figure: float | None, write: Callable[[float], str]) -> str:
    return NONE if figure is None else write(figure)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+,.0f}"


def _slowdown(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


_WRITE: tuple[Callable[[float], str], ...] = (format_duration, _slowdown, format_duration, "{:,.1f}".format)


def print_replay(answer: Replay) -> None:
    """Print the audit, the tables, and the jobs whose start would have moved."""
    same = answer.moments - len(answer.differences)
    checked = f"; {same:,} of {answer.moments:,} moments ({answer.decisions:,} decisions) are the same as in the log"
    _print(f"{answer.log}: {plural(answer.jobs, 'job')}" + (checked if answer.moments else ""))
    if answer.differences:
        numbers = ", ".join(f"{number:,}" for number in answer.differences[:5])
        _print(f"different at records {numbers}: another version or policy made these decisions")
    _print_tables((answer.logged, *(each.result for each in answer.replayed)))
    for each in answer.replayed:
        sooner = plural(each.sooner, "job starts", "jobs start")
        _print(f"under {each.result.policy}, {sooner} sooner and {each.later:,} later")
        for job in each.moved:
            _print(f"  {job.job_id}: {_wait(job.was_s)} becomes {_wait(job.would_be_s)}")


def _print(line: str) -> None:
    terminal.stdout().print(line, highlight=False, markup=False)


def _print_tables(policies: Sequence[PolicyResult]) -> None:
    out = terminal.stdout()
    out.print(_times(policies))
    out.print(_gpus(policies))


def _name(policy: str, knows_run_times: bool, knee: str | None) -> str:
    return policy + ("*" if knows_run_times else "") + (KNEE if policy == knee else "")


def _wait(value_s: float | None) -> str:
    return "no start" if value_s is None else f"a wait of {format_duration(value_s)}"


def _times(policies: Sequence[PolicyResult]) -> Table:
    table = terminal.table("POLICY", *TIMES, right=TIMES)
    for each in policies:
        summary = each.summary
        name = _name(each.policy, each.knows_run_times, None)
        table.add_row(
            name,
            duration_of(summary.jct_s, lambda jct_s: jct_s.mean),
            duration_of(summary.jct_s, lambda jct_s: jct_s.p50),
            duration_of(summary.jct_s, lambda jct_s: jct_s.p99),
            duration_of(summary.wait_s, lambda wait_s: wait_s.mean),
            duration_of(summary.wait_s, lambda wait_s: wait_s.p99),
            duration_of(summary.away_s, lambda away_s: away_s.max),
            _written(summary.slowdown_jain, "{:.3f}".format),
        )
    return table


def _gpus(policies: Sequence[PolicyResult]) -> Table:
    table = terminal.table("POLICY", *GPUS, right=GPUS)
    for each in policies:
        summary = each.summary
        table.add_row(
            each.policy,
            f"{summary.goodput:.2%}",
            f"{summary.held_fraction:.1%}",
            f"{summary.fragmented:.1%}",
            f"{summary.preemptions:,}",
            f"{each.lost_gpu_hours:,.1f}",
            format_micro_usd(each.lost_micro_usd),
            f"{summary.ended:,}",
        )
    return table


def _losses(answer: PolicyComparison) -> Iterator[str]:
    policies_of: dict[str, list[str]] = {}
    for each in answer.policies:
        for lost in each.summary.lost:
            policies_of.setdefault(
                f"lost by {lost.cause}: {lost.redone_gpu_us / US_PER_HOUR:,.1f} GPU-h repeated"
                f" + {lost.save_gpu_us / US_PER_HOUR:,.1f} saving, {format_micro_usd(lost.micro_usd)}",
                [],
            ).append(each.policy)
    for sentence, names in policies_of.items():
        yield f"{', '.join(names)} {sentence}"


def _remarks(answer: PolicyComparison) -> list[str]:
    lines = [f"{each.policy}: {each.errors} scheduling cycles failed" for each in answer.policies if each.errors]
    lines += unended(answer)
    if any(each.knows_run_times for each in answer.policies):
        lines.append("* knows the true run times")
    for left in answer.left_out:
        at = f" (first: line {left.line:,})" if left.line else ""
        lines.append(f"left out: {plural(left.rows, 'row')}, {left.kind}{at}")
    for changed in answer.changed:
        lines.append(f"changed: {plural(changed.rows, 'row')}, {changed.kind} (first: line {changed.line:,})")
    return lines + [f"price: {source}" for source in answer.price_sources]
