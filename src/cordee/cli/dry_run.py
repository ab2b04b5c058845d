"""`cordee run --dry-run`: what submitting a job would do, or a comparison of variants; and forecasts in words.

Nothing is submitted, and no server is started.
"""

import os
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ValidationError
from rich.text import Text

from cordee.answers.jobs import ForecastView, SpreadView
from cordee.answers.submissions import DryRunView
from cordee.cli import terminal
from cordee.client import Client
from cordee.errors import AdmissionError, InputError, SpecError
from cordee.units import US_PER_S, format_bytes, format_duration, format_micro_usd, plural
from cordee.workload.spec import JobSpec, wanted_gpus

DRAWS = 20
VARIANTS_MAX = 24
NARROW_COLUMNS = 100

SpecOf = Callable[[str | None, str | None, str | None], JobSpec]
"""The job with this many GPUs, of this tier, in this queue; None: as its spec says."""


class VariantView(BaseModel):
    """One variant of a job: the dry run, or the reason of its refusal."""

    gpus: int
    tier: str
    queue: str
    answer: DryRunView | None
    refused: str | None


class Given(NamedTuple):
    """The flags; GPUs, tier and queue may be lists, separated by commas."""

    gpus: str | None
    tier: str | None
    queue: str | None
    unprotected: bool


def show_dry_run(spec_of: SpecOf, given: Given, *, home: Path | None, as_json: bool) -> None:
    """Try the job, or each combination of what the flags list."""
    lists: list[list[str | None]] = [[None] if text is None else [*text.split(",")] for text in given[:3]]
    specs = [spec_of(*each) for each in product(*lists)]
    unprotected = given.unprotected
    if specs[0].sweep is not None:
        raise InputError("--dry-run tries one job, not a sweep", hint="try one trial: leave the sweep out")
    if len(specs) > VARIANTS_MAX:
        raise InputError(f"{len(specs)} variants are too many", hint=f"{VARIANTS_MAX} at most")
    with terminal.connect(home) as client:
        if len(specs) == 1:
            answer = _ask(client, specs[0], unprotected)
            terminal.print_json(answer) if as_json else _show(answer)
            return
        variants = [_variant(client, spec, unprotected) for spec in specs]
    if as_json:
        terminal.print_json(variants)
    else:
        _compare(variants)


def with_flags(spec: JobSpec, gpus: str | None, tier: str | None, queue: str | None) -> JobSpec:
    """Return the job of a file with other GPUs, tier or queue.

    Raises:
        SpecError: the job cannot have them.
    """
    changes: dict[str, object] = {}
    if gpus is not None:
        changes |= wanted_gpus(gpus)
        changes["gpu"] = changes["gpu"] or spec.gpu
    changes |= {key: value for key, value in (("tier", tier), ("queue", queue)) if value is not None}
    try:
        return JobSpec.model_validate(spec.model_dump() | changes)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise SpecError(f"{where + ': ' if where else ''}{first['msg']}", hint="see the job's file") from None


def _ask(client: Client, spec: JobSpec, unprotected: bool) -> DryRunView:
    from cordee.control.admission import check_program

    here = spec.model_copy(update={"cwd": spec.cwd or str(Path.cwd())})
    check_program(here)
    Client.check_secrets(here.secrets, os.environ)
    return client.dry_run(here.model_dump(mode="json"), unprotected=unprotected, draws=DRAWS)


def _variant(client: Client, spec: JobSpec, unprotected: bool) -> VariantView:
    answer, refused = None, None
    try:
        answer = _ask(client, spec, unprotected)
    except (AdmissionError, SpecError) as error:
        refused = error.message
    return VariantView(gpus=spec.gpus, tier=spec.tier, queue=spec.queue, answer=answer, refused=refused)


# -- words ---------------------------------------------------------------------------------------------------


def times(spread: SpreadView, ahead: ForecastView, verb: str) -> str:
    """Return when something happens: the median, then one draw in ten before and after.

    >>> at = ForecastView.model_construct(at_us=0, seen_us=604_800_000_000)
    >>> times(SpreadView(p10_us=4_800_000_000, p50_us=7_800_000_000, p90_us=14_700_000_000), at, "starts")
    'starts in 2h10m (1h20m to 4h5m)'
    >>> times(SpreadView(p10_us=4_800_000_000, p50_us=None, p90_us=None), at, "starts")
    'starts in 1h20m or later, more likely not within 7d'
    >>> times(SpreadView(p10_us=0, p50_us=0, p90_us=0), at, "starts")
    'starts now'
    """
    seen = format_duration((ahead.seen_us - ahead.at_us) / US_PER_S)
    p10, p50, p90 = (_in(at_us, ahead.at_us) for at_us in (spread.p10_us, spread.p50_us, spread.p90_us))
    if p10 is None:
        return f"{verb} later than {seen} from now"
    if p50 is None:
        return f"{verb} in {p10} or later, more likely not within {seen}"
    if p10 == p90:
        return f"{verb} now" if p50 == "0 s" else f"{verb} in {p50}"
    return f"{verb} in {p50} ({p10} to {p90 or 'beyond ' + seen})"


def forecast_line(ahead: ForecastView) -> str:
    """Return the start, if it is still to come, and the end of a job in one sentence."""
    starts_us = ahead.start.p50_us
    parts = [] if starts_us is not None and starts_us < ahead.at_us else [times(ahead.start, ahead, "starts")]
    if starts_us is not None:
        parts.append(times(ahead.end, ahead, "ends"))
    return f"{', '.join(parts)} ({_basis(ahead)})"


def _basis(ahead: ForecastView) -> str:
    if ahead.source != "other jobs":
        known = f"run time from {ahead.source}"
    elif ahead.learnt_from:
        known = f"run times from {plural(ahead.learnt_from, 'job')}"
    else:
        known = "no job has finished yet, so run times are guesses"
    return f"{plural(ahead.draws, 'simulation')}; {known}"


def _in(at_us: int | None, now_us: int) -> str | None:
    if at_us is None:
        return None
    seconds = max(0, round((at_us - now_us) / US_PER_S))
    return format_duration(seconds) if seconds else "0 s"


def _show(answer: DryRunView) -> None:
    console = terminal.stdout()
    facts = terminal.table("", "", folds=("",))
    facts.show_header = False
    facts.add_row("starts now", Text("yes", "green") if answer.starts_now else Text("no: " + answer.text, "yellow"))
    ahead = answer.forecast
    if ahead is not None:
        if not answer.starts_now:
            facts.add_row("starts", times(ahead.start, ahead, "").strip())
        facts.add_row("ends", times(ahead.end, ahead, "").strip())
        if ahead.preemptions:
            facts.add_row("preempted", f"{ahead.preemptions:.1f} times until then, on average")
    if answer.nodes:
        facts.add_row("on" if answer.starts_now else "likely on", _where(answer))
    for number, victim in enumerate(answer.victims):
        loss = format_micro_usd(victim.expected_loss_micro_usd)
        line = f"{victim.job_id} of {victim.owner} ({victim.reason}), expected to lose {loss}"
        facts.add_row("" if number else "preempts", line)
    if not answer.victims:
        facts.add_row("preempts", "no job")
    facts.add_row("costs", _costs(answer))
    facts.add_row("model", _model(answer))
    for number, note in enumerate(answer.notes):
        facts.add_row("" if number else "note", note)
    console.print(facts)
    basis = "" if ahead is None else f"; the forecast is from {_basis(ahead)}"
    console.print(f"nothing was submitted{basis}", highlight=False)


def _model(answer: DryRunView) -> str:
    """Return how the job's model fits, and what a step of it is expected to take."""
    plan = answer.estimate
    if plan is None or not plan.gpu_memory_bytes:
        return "not checked: the job names no model, or CPU slots have no memory of their own"
    memory = f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.gpu_memory_bytes)} on its fullest GPU"
    step = "" if plan.step_us is None else f", a step of {format_duration(plan.step_us / US_PER_S)}"
    return f"{plan.layout}: {memory}{step}"


def _where(answer: DryRunView) -> str:
    names = [f"{node}:{terminal.ranges(gpus)}" if gpus else node for node, gpus in sorted(answer.nodes.items())]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    racks = "" if answer.racks is None or len(names) == 1 else f", {plural(answer.racks, 'rack')}"
    return f"{shown} ({plural(len(names), 'node')}{racks})"


def _costs(answer: DryRunView) -> str:
    if not answer.micro_usd_per_hour:
        return "no known price"
    parts = [f"{format_micro_usd(answer.micro_usd_per_hour)} an hour"]
    for amount, what in ((answer.micro_usd_to_estimate, "estimate"), (answer.micro_usd_to_limit, "limit")):
        if amount is not None:
            parts.append(f"{format_micro_usd(amount)} to its {what}")
    return ", ".join(parts)


def _compare(variants: Sequence[VariantView]) -> None:
    """Print one row for each variant; a narrow terminal omits spreads and losses, which a single dry run shows."""
    console = terminal.stdout()
    narrow = console.width < NARROW_COLUMNS
    cells: dict[str, list[str | Text]] = {
        "GPUS": [str(each.gpus) for each in variants],
        "TIER": [each.tier for each in variants],
        "QUEUE": [each.queue for each in variants],
        "STARTS IN": [_starts(each.answer, narrow) for each in variants],
        "ENDS IN": [_cell(each.answer, lambda seen: _short(seen.forecast, "end", narrow)) for each in variants],
        "PREEMPTS": [_cell(each.answer, lambda seen: str(len(seen.victims) or "–")) for each in variants],
        "LOSS": [_cell(each.answer, _loss) for each in variants],
        "$/H": [_cell(each.answer, lambda seen: format_micro_usd(seen.micro_usd_per_hour)) for each in variants],
    }
    if narrow:
        del cells["LOSS"]
    if len({each.queue for each in variants}) == 1:
        del cells["QUEUE"]
    rows = terminal.table(*cells, right=("GPUS", "PREEMPTS", "LOSS", "$/H"))
    for row in zip(*cells.values(), strict=True):
        rows.add_row(*row)
    console.print(rows)
    refused: dict[str, list[str]] = {}
    for each in variants:
        if each.refused is not None:
            refused.setdefault(each.refused, []).append(f"{each.gpus} {each.tier}")
    for why, which in refused.items():
        console.print(f"{', '.join(which)}: {why}", highlight=False, markup=False)
    console.print("nothing was submitted", highlight=False)


def _cell(answer: DryRunView | None, words: Callable[[DryRunView], str]) -> str:
    return "–" if answer is None else words(answer)


def _starts(answer: DryRunView | None, narrow: bool) -> Text:
    if answer is None:
        return Text("refused", "bold red")
    return Text("now", "green") if answer.starts_now else Text(_short(answer.forecast, "start", narrow))


def _loss(answer: DryRunView) -> str:
    losses = [victim.expected_loss_micro_usd for victim in answer.victims]
    return format_micro_usd(sum(losses)) if losses else "–"


def _short(ahead: ForecastView | None, which: Literal["start", "end"], narrow: bool) -> str:
    if ahead is None:
        return "–"
    spread = ahead.start if which == "start" else ahead.end
    p10, p50, p90 = (_in(at_us, ahead.at_us) for at_us in (spread.p10_us, spread.p50_us, spread.p90_us))
    seen = ">" + format_duration((ahead.seen_us - ahead.at_us) / US_PER_S)
    return p50 or seen if narrow or p10 == p90 else f"{p50 or seen} ({p10} to {p90 or seen})"
