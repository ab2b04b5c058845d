"""What `cordee simulate` answers, and how it reads on a terminal: who waited, what the GPUs did, what was lost to
what."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from cordee.cli import terminal
from cordee.simulate.compare import Result, Scenario
from cordee.simulate.metrics import Summary
from cordee.simulate.traces import Tally
from cordee.units import MICRO_USD, US_PER_HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Rows of the trace that are no job for this cluster; `line` is an example's."""

    kind: str
    rows: int
    line: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAnswer:
    """One policy. `errors` are steps of decisions that failed; there should be none."""

    policy: str
    says: str
    knows_run_times: bool
    summary: Summary
    lost_gpu_hours: float
    lost_micro_usd: int
    events: int
    errors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A comparison."""

    trace: str
    nodes: int
    gpus: int
    seed: int
    jobs: int
    left_out: tuple[LeftOut, ...]
    price_sources: tuple[str, ...]
    policies: tuple[PolicyAnswer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedJob:
    """A job whose wait for its first start would have been another one; None: it would not have started."""

    job_id: str
    was_s: float | None
    would_be_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedPolicy:
    """A policy on the log's world, and the jobs that it would have moved most."""

    answer: PolicyAnswer
    sooner: int
    later: int
    moved: tuple[MovedJob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayAnswer:
    """A log decided again.

    Attributes:
        moments: of the log that hold decisions; all were decided again from what the log says up to them.
        differences: numbers of the records at which something else came out.
        was: the log itself.
    """

    log: str
    jobs: int
    moments: int
    decisions: int
    differences: tuple[int, ...]
    was: PolicyAnswer
    replayed: tuple[ReplayedPolicy, ...]


def print_replay(answer: ReplayAnswer) -> None:
    """The check, the tables, and who would have moved."""
    out = terminal.stdout()
    same = answer.moments - len(answer.differences)
    out.print(
        f"{answer.log}: {answer.jobs:,} jobs; {same:,} of {answer.moments:,} moments "
        f"({answer.decisions:,} decisions) come out as they are in the log; times in seconds",
        highlight=False,
        markup=False,
    )
    if answer.differences:
        numbers = ", ".join(f"{number:,}" for number in answer.differences[:5])
        out.print(f"others at records {numbers}: another version or policy decided them", highlight=False, markup=False)
    rows = (answer.was, *(each.answer for each in answer.replayed))
    out.print(_times(rows))
    out.print(_gpus(rows))
    for each in answer.replayed:
        out.print(
            f"under {each.answer.policy} {each.sooner:,} jobs start sooner and {each.later:,} later", highlight=False
        )
        for job in each.moved:
            out.print(
                f"  {job.job_id}: {_wait(job.was_s)} becomes {_wait(job.would_be_s)}", highlight=False, markup=False
            )


def _wait(value_s: float | None) -> str:
    return "no start" if value_s is None else f"a wait of {seconds(value_s)}"


def answer_of(scenario: Scenario, tally: Tally, jobs: int, results: list[Result]) -> Answer:
    """Everything but the drawings."""
    return Answer(
        trace=scenario.name,
        nodes=len(scenario.nodes),
        gpus=sum(node.gpus for node in scenario.nodes),
        seed=scenario.seed,
        jobs=jobs,
        left_out=tuple(
            LeftOut(kind=kind, rows=rows, line=tally.first.get(kind)) for kind, rows in sorted(tally.kinds.items())
        ),
        price_sources=tuple(sorted({node.price_source for node in scenario.nodes})),
        policies=tuple(
            PolicyAnswer(
                policy=each.named.name,
                says=each.named.says,
                knows_run_times=each.named.estimates,
                summary=each.summary,
                lost_gpu_hours=each.summary.lost_gpu_hours,
                lost_micro_usd=each.summary.lost_micro_usd,
                events=each.events,
                errors=each.errors,
            )
            for each in results
        ),
    )


def print_answer(answer: Answer) -> None:
    """Tables that fit 80 columns, and what has to be said besides."""
    out = terminal.stdout()
    out.print(
        f"{answer.trace}: {answer.jobs:,} jobs on {answer.nodes:,} nodes, {answer.gpus:,} GPUs; times in seconds",
        highlight=False,
        markup=False,
    )
    out.print(_times(answer.policies))
    out.print(_gpus(answer.policies))
    for line in _remarks(answer):
        out.print(line, highlight=False, markup=False, soft_wrap=False)


TIMES = ("JCT", "P50", "P99", "WAIT", "P99 WAIT", "AWAY MAX", "JAIN")
GPUS = ("GOODPUT", "HELD", "FRAG", "PUSHED", "LOST GPU-H", "LOST", "ENDED")


def _times(policies: Sequence[PolicyAnswer]) -> Table:
    table = terminal.table("POLICY", *TIMES, right=TIMES)
    for each in policies:
        summary = each.summary
        table.add_row(
            each.policy + ("*" if each.knows_run_times else ""),
            plain(summary.jct_s.mean),
            plain(summary.jct_s.p50),
            plain(summary.jct_s.p99),
            plain(summary.wait_s.mean),
            plain(summary.wait_s.p99),
            plain(summary.away_s.max),
            f"{summary.slowdown_jain:.3f}",
        )
    return table


def _gpus(policies: Sequence[PolicyAnswer]) -> Table:
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
            dollars(each.lost_micro_usd),
            f"{summary.ended:,}",
        )
    return table


def plain(value: float) -> str:
    """Seconds in a column of them."""
    return f"{value:,.0f}"


def seconds(value: float) -> str:
    """Whole seconds, of which people can take differences."""
    return f"{value:,.0f} s"


def dollars(micro_usd: int) -> str:
    """Cents only where there are few dollars."""
    return f"${micro_usd / MICRO_USD:,.0f}" if abs(micro_usd) >= 100 * MICRO_USD else f"${micro_usd / MICRO_USD:,.2f}"


def _remarks(answer: Answer) -> list[str]:
    lines = []
    for each in answer.policies:
        causes = [
            f"{lost.cause}: {lost.redone_gpu_us / US_PER_HOUR:,.1f} GPU-h done again"
            f" + {lost.save_gpu_us / US_PER_HOUR:,.1f} saving, {dollars(lost.micro_usd)}"
            for lost in each.summary.lost
        ]
        if causes:
            lines.append(f"{each.policy} lost by {'; '.join(causes)}")
        if each.errors:
            lines.append(f"{each.policy}: {each.errors} steps of decisions failed")
    if any(each.knows_run_times for each in answer.policies):
        lines.append("* is told the true run times")
    for left in answer.left_out:
        at = f" (first: line {left.line:,})" if left.line else ""
        lines.append(f"left out: {left.rows:,} rows, {left.kind}{at}")
    return lines + [f"price: {source}" for source in answer.price_sources]
