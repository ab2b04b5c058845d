"""The answers of `cordee simulate` and `cordee replay` as values: the terminal, the page and the JSON show them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cordee.control.patience import DEFAULT
from cordee.simulate.compare import Result, Scenario
from cordee.simulate.knee import RULE, can_be_chosen, knee, weighed
from cordee.simulate.metrics import Spread, Summary
from cordee.simulate.observed import ObservedLog
from cordee.simulate.policies import NamedPolicy
from cordee.simulate.replay import Replayed, audit, measure_log, replay
from cordee.simulate.traces import Tally
from cordee.units import US_PER_S, format_duration, plural

MOVED = 5
"""Jobs that are named where a policy would have moved many."""

NONE = "–"
"""A figure that no job has."""

_NEVER_US = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Rows of one kind; `line` is an example's."""

    kind: str
    rows: int
    line: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """The result of one policy. `errors` are steps of decisions that failed; there should be none."""

    policy: str
    description: str
    knows_run_times: bool
    summary: Summary
    lost_gpu_hours: float
    lost_micro_usd: int
    events: int
    errors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyComparison:
    """Policies on the same trace and cluster; `knee` is one of at least two patiences of `cordee`, by the rule.

    `changed` are jobs that run differently from what their rows say.
    """

    trace: str
    nodes: int
    gpus: int
    seed: int
    jobs: int
    left_out: tuple[LeftOut, ...]
    changed: tuple[LeftOut, ...]
    price_sources: tuple[str, ...]
    policies: tuple[PolicyResult, ...]
    knee: str | None = None
    rule: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedJob:
    """A job whose wait for its first start changes; None: it does not start."""

    job_id: str
    was_s: float | None
    would_be_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedPolicy:
    """A policy on the log's world, and the jobs whose start it moves most."""

    result: PolicyResult
    sooner: int
    later: int
    moved: tuple[MovedJob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A log decided again.

    Attributes:
        moments: times in the log with decisions; each was decided again from the log up to there.
        differences: numbers of the records at which the decision differs.
        logged: the log itself.
    """

    log: str
    jobs: int
    moments: int
    decisions: int
    differences: tuple[int, ...]
    logged: PolicyResult
    replayed: tuple[ReplayedPolicy, ...]


def duration_of(spread: Spread | None, read: Callable[[Spread], float]) -> str:
    """Return a time of a spread as text; – where no job has it."""
    return NONE if spread is None else format_duration(read(spread))


def unended(answer: PolicyComparison) -> list[str]:
    """Return sentences for policies under which jobs had not ended when the run did, one for all with the same."""
    policies_of: dict[str, list[str]] = {}
    for each in answer.policies:
        if each.summary.unended:
            never = f", {each.summary.unstarted:,} never started" if each.summary.unstarted else ""
            count = plural(each.summary.jobs, "job")
            policies_of.setdefault(
                f"{each.summary.unended:,} of {count} had not ended when the run did{never}; times count until then", []
            ).append(each.policy)
    return [f"{_names(names, answer)}: {sentence}" for sentence, names in policies_of.items()]


def _names(names: Sequence[str], answer: PolicyComparison) -> str:
    return "all policies" if 1 < len(names) == len(answer.policies) else ", ".join(names)


def patience_of(policy: str) -> str | None:
    """Return the patience that the name of a policy says; None: a server cannot run it.

    >>> patience_of("cordee:2"), patience_of("cordee"), patience_of("easy")
    ('2', 'default', None)
    """
    name, _, patience = policy.partition(":")
    return (patience or DEFAULT) if name == "cordee" else None


def patiences_are_equal(answer: PolicyComparison) -> bool:
    """Return whether patiences were compared, and all of them gave the same figures."""
    figures = {weighed(each.summary) for each in answer.policies if patience_of(each.policy) is not None}
    return answer.rule is not None and len(figures) == 1


def comparison(scenario: Scenario, tally: Tally, jobs: int, results: Sequence[Result]) -> PolicyComparison:
    """Return what was simulated and how each policy did."""
    several = sum(can_be_chosen(each.policy) for each in results) > 1
    return PolicyComparison(
        trace=scenario.name,
        nodes=len(scenario.nodes),
        gpus=sum(node.gpus for node in scenario.nodes),
        seed=scenario.seed,
        jobs=jobs,
        left_out=_rows(tally, tally.kinds),
        changed=_rows(tally, tally.changes),
        price_sources=tuple(sorted({node.price_source for node in scenario.nodes})),
        policies=tuple(_result(each.policy, each) for each in results),
        knee=knee([(each.policy, each.summary) for each in results]) if several else None,
        rule=RULE if several else None,
    )


def _rows(tally: Tally, counts: Mapping[str, int]) -> tuple[LeftOut, ...]:
    return tuple(LeftOut(kind=kind, rows=rows, line=tally.first.get(kind)) for kind, rows in sorted(counts.items()))


def replayed(
    name: str, log: ObservedLog, policies: Sequence[NamedPolicy], baseline: NamedPolicy, *, whole: bool = True
) -> Replay:
    """Audit the log against its own policy if it is whole, and replay its world under others."""
    checked, logged = audit(log.log if whole else (), baseline.policy), measure_log(log)
    itself = NamedPolicy(name="the log", description="as it was logged", policy=baseline.policy)
    return Replay(
        log=name,
        jobs=len(log.jobs),
        moments=checked.moments,
        decisions=checked.decisions,
        differences=tuple(each.number for each in checked.differences),
        logged=_result(itself, logged),
        replayed=tuple(_replayed(log, each, logged) for each in policies),
    )


def _replayed(log: ObservedLog, named: NamedPolicy, logged: Replayed) -> ReplayedPolicy:
    done = replay(log, named.policy, estimates=named.estimates)
    moved = []
    for job_id in sorted(logged.waits_us.keys() | done.waits_us.keys()):
        before_us, after_us = logged.waits_us.get(job_id), done.waits_us.get(job_id)
        later_us = (_NEVER_US if after_us is None else after_us) - (_NEVER_US if before_us is None else before_us)
        if abs(later_us) >= US_PER_S:
            moved.append((later_us, MovedJob(job_id=job_id, was_s=_s(before_us), would_be_s=_s(after_us))))
    most = sorted(moved, key=lambda each: (-abs(each[0]), each[1].job_id))[:MOVED]
    return ReplayedPolicy(
        result=_result(named, done),
        sooner=sum(later_us < 0 for later_us, _ in moved),
        later=sum(later_us > 0 for later_us, _ in moved),
        moved=tuple(job for _, job in most),
    )


def _s(value_us: int | None) -> float | None:
    return None if value_us is None else value_us / US_PER_S


def _result(named: NamedPolicy, done: Result | Replayed) -> PolicyResult:
    return PolicyResult(
        policy=named.name,
        description=named.description,
        knows_run_times=named.estimates,
        summary=done.summary,
        lost_gpu_hours=done.summary.lost_gpu_hours,
        lost_micro_usd=done.summary.lost_micro_usd,
        events=done.events,
        errors=done.errors,
    )
