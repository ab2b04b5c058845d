"""The answers of `cordee simulate` and `cordee replay` on a terminal: waits, use of the GPUs, and losses by cause."""

from collections.abc import Callable, Sequence

from rich.table import Table

from cordee.cli import terminal
from cordee.simulate.answer import PolicyComparison, PolicyResult, Replay
from cordee.simulate.frontier import Range, Recommendation
from cordee.units import US_PER_HOUR, format_duration, format_micro_usd, plural

TIMES = ("JCT", "P50", "P99", "WAIT", "P99 WAIT", "AWAY MAX", "JAIN")
GPUS = ("GOODPUT", "HELD", "FRAG", "PREEMPTED", "LOST GPU-H", "LOST", "ENDED")


def print_comparison(answer: PolicyComparison) -> None:
    """Print tables that fit 80 columns, and remarks."""
    cluster = f"{plural(answer.nodes, 'node')}, {plural(answer.gpus, 'GPU')}"
    _print(f"{answer.trace}: {plural(answer.jobs, 'job')} on {cluster}")
    _print_tables(answer.policies)
    for line in _remarks(answer):
        _print(line)


COSTS = ("MEAN JCT", "P99 SLOWDOWN", "AWAY MAX", "LOST GPU-H")


def print_recommendation(answer: Recommendation) -> None:
    """Print what each policy would have cost, and which one is recommended."""
    table = terminal.table("POLICY", *COSTS, right=COSTS)
    for each in answer.costs:
        name = each.policy + ("*" if each.knows_run_times else "")
        times = (_spread(each.jct_s, format_duration), _spread(each.slowdown_p99, _slowdown))
        lost = _spread(each.lost_gpu_hours, "{:,.1f}".format)
        table.add_row(name, *times, _spread(each.away_s, format_duration), lost)
    terminal.stdout().print(table)
    _print(f"recommended: {answer.policy}, in {answer.chosen} of {plural(answer.samples, 'resampled trace')} as well")
    _print(f"below each figure: its range over weeks drawn again, seeds from {answer.seed} on")
    if any(each.knows_run_times for each in answer.costs):
        _print("* knows the true run times, so it is never recommended")


def _spread(figure: Range, write: Callable[[float], str]) -> str:
    return f"{write(figure.value)}\n{write(figure.low)}-{write(figure.high)}"


def _slowdown(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


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


def _wait(value_s: float | None) -> str:
    return "no start" if value_s is None else f"a wait of {format_duration(value_s)}"


def _times(policies: Sequence[PolicyResult]) -> Table:
    table = terminal.table("POLICY", *TIMES, right=TIMES)
    for each in policies:
        summary = each.summary
        times_s = (
            *(summary.jct_s.mean, summary.jct_s.p50, summary.jct_s.p99),
            *(summary.wait_s.mean, summary.wait_s.p99, summary.away_s.max),
        )
        name = each.policy + ("*" if each.knows_run_times else "")
        table.add_row(name, *map(format_duration, times_s), f"{summary.slowdown_jain:.3f}")
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


def _remarks(answer: PolicyComparison) -> list[str]:
    lines = []
    for each in answer.policies:
        causes = [
            f"{lost.cause}: {lost.redone_gpu_us / US_PER_HOUR:,.1f} GPU-h repeated"
            f" + {lost.save_gpu_us / US_PER_HOUR:,.1f} saving, {format_micro_usd(lost.micro_usd)}"
            for lost in each.summary.lost
        ]
        if causes:
            lines.append(f"{each.policy} lost by {'; '.join(causes)}")
        if each.errors:
            lines.append(f"{each.policy}: {each.errors} scheduling cycles failed")
    if any(each.knows_run_times for each in answer.policies):
        lines.append("* knows the true run times")
    for left in answer.left_out:
        at = f" (first: line {left.line:,})" if left.line else ""
        lines.append(f"left out: {plural(left.rows, 'row')}, {left.kind}{at}")
    return lines + [f"price: {source}" for source in answer.price_sources]
