"""The changes of an engine's settings that are kept: by measurement, beyond the noise, and with the same answers.

Changes are tried one at a time over those that were kept before. A change is kept if the interval of its gain, over
rounds of the same requests, lies above zero, no more requests fail, the SLO is met as before, and greedy answers are as
equal as the unchanged engine's are to its own. In the end the unchanged engine is measured again: what was kept must
win against that too, or a drift of the machine would count as a gain.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, exp, inf, log, sqrt
from statistics import NormalDist, mean, stdev

from cordee.errors import CordeeError
from cordee.plan.serving.tuning import Change
from cordee.workload.service import Flag, Slo, flag_name

CONFIDENCE = 0.95
_EXACT = {1: 12.706, 2: 4.303}


@dataclass(frozen=True, slots=True)
class Round:
    """One round of requests: its time, tokens and latencies of those that were answered."""

    requests: int
    failed: int
    seconds: float
    input_tokens: int
    output_tokens: int
    ttfts_s: tuple[float, ...] = ()
    tpots_s: tuple[float, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """One setting of the engine under the load.

    Attributes:
        rounds: the same requests for each setting.
        answers: texts of greedy answers to requests alone.
        answers_under_load: those to the same requests among others.
        slots, kv_tokens: as the engine reports them.
        usd_per_hour: price of the replica; None: unknown.
    """

    rounds: tuple[Round, ...]
    answers: tuple[str, ...] = ()
    answers_under_load: tuple[str, ...] = ()
    slots: int | None = None
    kv_tokens: int | None = None
    usd_per_hour: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second over all rounds."""
        return sum(each.output_tokens for each in self.rounds) / sum(each.seconds for each in self.rounds)

    @property
    def usd_per_mtok(self) -> float | None:
        """Dollars of a million tokens, input and output together."""
        tokens = sum(each.input_tokens + each.output_tokens for each in self.rounds)
        hours = sum(each.seconds for each in self.rounds) / 3600
        return None if not self.usd_per_hour or not tokens else self.usd_per_hour * hours / tokens * 1e6

    @property
    def failed(self) -> int:
        """Requests that were not answered."""
        return sum(each.failed for each in self.rounds)

    @property
    def noise(self) -> float:
        """The fraction of greedy answers that is equal alone and among other requests."""
        return agreement(self.answers, self.answers_under_load)

    def ttft_s(self, quantile: float) -> float | None:
        """Return a quantile of the time to first token."""
        return quantile_of([each for one in self.rounds for each in one.ttfts_s], quantile)

    def tpot_s(self, quantile: float) -> float | None:
        """Return a quantile of the time per output token."""
        return quantile_of([each for one in self.rounds for each in one.tpots_s], quantile)


@dataclass(frozen=True, slots=True)
class Interval:
    """A gain as a fraction, and the bounds between which it lies with 95 %."""

    low: float
    gain: float
    high: float


@dataclass(frozen=True, slots=True)
class Trial:
    """A change, what it measured, and whether it is kept; `identical` is the fraction of equal greedy answers."""

    change: Change
    kept: bool
    why: str
    measured: Measured | None = None
    gain: Interval | None = None
    identical: float | None = None


@dataclass(frozen=True, slots=True)
class TuningRules:
    """The rules of a tuning: the latencies to meet, and whether answers may change."""

    slo: Slo = field(default_factory=Slo)
    allow_lossy: bool = False


@dataclass(frozen=True, slots=True)
class Tuning:
    """The result of a tuning.

    Attributes:
        unchanged: the engine as it was.
        trials: all changes, in the order in which they were tried.
        flags: the changed settings that are kept together; none: the engine stays as it was.
        again: the unchanged engine, measured at the end; None: nothing was to be kept.
        gain: of all that is kept, against both measurements of the unchanged engine: the worse one.
        why: why nothing is kept after all.
    """

    unchanged: Measured
    trials: tuple[Trial, ...]
    flags: Mapping[str, Flag]
    again: Measured | None = None
    gain: Interval | None = None
    why: str = ""


Measure = Callable[[str, Mapping[str, Flag]], Measured]
"""Measure an engine with these settings over those of the service; the text names them for people."""


def tune(
    unchanged: Measured, changes: Iterable[Change], measure: Measure, rules: TuningRules, seen: Callable[[Trial], None]
) -> Tuning:
    """Try changes one at a time, and return what is kept of them; `seen` gets each trial."""
    best, flags, trials = unchanged, dict[str, Flag](), list[Trial]()
    for change in changes:
        trial = _try(change, flags, unchanged, best, measure, rules)
        trials.append(trial)
        seen(trial)
        if trial.kept and trial.measured is not None:
            best, flags = trial.measured, {**flags, **change.flags}
    if not flags:
        return Tuning(unchanged, tuple(trials), {})
    again = measure("the unchanged settings again", {})
    gains = [gain_between(each, best) for each in (unchanged, again)]
    worse = min(gains, key=lambda each: each.low)
    if worse.low > 0:
        return Tuning(unchanged, tuple(trials), flags, again, worse)
    why = f"all that was kept gains {interval_text(worse)} against the unchanged settings, measured again"
    return Tuning(unchanged, tuple(trials), {}, again, worse, why)


def _try(
    change: Change,
    flags: Mapping[str, Flag],
    unchanged: Measured,
    best: Measured,
    measure: Measure,
    rules: TuningRules,
) -> Trial:
    if change.refused:
        return Trial(change, False, f"not tried: {change.refused}")
    try:
        found = measure(change.name, {**flags, **change.flags})
    except CordeeError as error:
        return Trial(change, False, f"does not run: {error.message.splitlines()[0]}")
    return judged(change, unchanged, best, found, rules)


def judged(change: Change, unchanged: Measured, before: Measured, after: Measured, rules: TuningRules) -> Trial:
    """Return whether a change is kept that was measured over another setting.

    Args:
        change: the change.
        unchanged: the engine as it was: its answers count.
        before: the best setting so far: its speed counts.
        after: the same with the change.
        rules: of the tuning.
    """
    gain, identical = gain_between(before, after), agreement(unchanged.answers, after.answers)
    trial = Trial(change, False, "", after, gain, identical)
    if after.failed > before.failed:
        return replace(trial, why=f"{after.failed} of {sum(each.requests for each in after.rounds)} requests failed")
    if change.lossless and identical < unchanged.noise:
        alone = f"the unchanged engine's own differ by {1 - unchanged.noise:.1%}"
        return replace(trial, why=f"changes {1 - identical:.1%} of greedy answers; {alone}")
    if gain.low <= 0:
        return replace(trial, why="slower" if gain.high < 0 else "within the noise")
    if missed := _missed(before, after, rules.slo):
        return replace(trial, why=missed)
    if not change.lossless and not rules.allow_lossy:
        return replace(trial, why="changes answers: keep it with --allow-lossy")
    return replace(trial, kept=True)


def _missed(before: Measured, after: Measured, slo: Slo) -> str:
    """Return which latency of the SLO is no longer met, or further away; "": none."""
    pairs = (
        ("TTFT", before.ttft_s(0.99), after.ttft_s(0.99), slo.ttft_s),
        ("TPOT", before.tpot_s(0.99), after.tpot_s(0.99), slo.tpot_s),
    )
    for name, old_s, new_s, limit_s in pairs:
        if limit_s is not None and new_s is not None and new_s > max(limit_s, old_s or 0.0):
            return f"p99 of the {name} is {1000 * new_s:.0f} ms for {1000 * limit_s:.0f} ms"
    return ""


def gain_between(before: Measured, after: Measured) -> Interval:
    """Return the gain in tokens a second, from pairs of rounds with the same requests."""
    pairs = zip(before.rounds, after.rounds, strict=True)
    return paired_gain([(one.tokens_per_s, other.tokens_per_s) for one, other in pairs])


def paired_gain(pairs: Sequence[tuple[float, float]]) -> Interval:
    """Return the mean ratio of pairs less one, with Student's interval on the logarithms of the ratios.

    >>> found = paired_gain([(100, 119), (104, 126), (98, 118), (101, 121)])
    >>> [round(each, 3) for each in (found.low, found.gain, found.high)]
    [0.187, 0.201, 0.215]
    """
    if any(one <= 0 or other <= 0 for one, other in pairs):
        return Interval(-1.0, -1.0, -1.0)
    logs = [log(other / one) for one, other in pairs]
    if len(logs) < 2:
        return Interval(-inf, exp(logs[0]) - 1 if logs else 0.0, inf)
    middle, half = mean(logs), student_t(len(logs) - 1) * stdev(logs) / sqrt(len(logs))
    return Interval(exp(middle - half) - 1, exp(middle) - 1, exp(middle + half) - 1)


def student_t(freedom: int) -> float:
    """Return Student's two-sided quantile of 95 %, by Cornish and Fisher's expansion.

    >>> [round(student_t(each), 2) for each in (1, 2, 4, 9, 1000)]
    [12.71, 4.3, 2.77, 2.26, 1.96]
    """
    if freedom in _EXACT:
        return _EXACT[freedom]
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def agreement(answers: Sequence[str], others: Sequence[str]) -> float:
    """Return the fraction of answers up to the first difference of each from the other one.

    >>> agreement(["abcd", "xy"], ["abce", "xy"])
    0.8333333333333334
    """
    total = same = 0
    for one, other in zip(answers, others, strict=True):
        total += max(len(one), len(other))
        pairs = enumerate(zip(one, other, strict=False))
        same += next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))
    return same / total if total else 1.0


def quantile_of(values: Sequence[float], quantile: float) -> float | None:
    """Return the smallest value that so many do not exceed; None of none.

    >>> quantile_of([3.0, 1.0, 2.0], 0.5), quantile_of([], 0.5)
    (2.0, None)
    """
    return sorted(values)[max(0, ceil(quantile * len(values)) - 1)] if values else None


def interval_text(found: Interval) -> str:
    """Return a gain with its bounds.

    >>> interval_text(Interval(0.187, 0.201, 0.215))
    '+20 % (+19 to +22)'
    """
    return f"{100 * found.gain:+.0f} % ({100 * found.low:+.0f} to {100 * found.high:+.0f})"


def merged_flags(flags: Mapping[str, Flag], changed: Mapping[str, Flag]) -> dict[str, Flag]:
    """Return a service's settings with some changed, as a job file writes them; False takes one out.

    >>> merged_flags({"max_num_seqs": 8, "no-cache": True}, {"--max-num-seqs": 16, "--no-cache": False})
    {'max-num-seqs': 16}
    """
    kept = {name: value for name, value in flags.items() if flag_name(name) not in changed}
    return kept | {name.removeprefix("--"): value for name, value in changed.items() if value is not False}
