"""Texts and tables of `cordee serve tune`, and its document."""

from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from cordee.cli import terminal
from cordee.serve.policy.tuning import Interval, Measured, Trial, Tuning, interval_text
from cordee.units import format_latency, format_usd
from cordee.workload.service import Flag

NARROW_COLUMNS = 100


class GainDocument(BaseModel):
    """A gain as a fraction, with the bounds between which it lies with 95 %."""

    low: float
    gain: float
    high: float

    @classmethod
    def of(cls, found: Interval | None) -> "GainDocument | None":
        """Return the document of an interval."""
        return None if found is None else cls(low=found.low, gain=found.gain, high=found.high)


class SettingDocument(BaseModel):
    """One setting of the engine as it was measured; latencies in seconds."""

    output_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    slots: int | None
    kv_tokens: int | None
    usd_per_mtok: float | None
    failed: int

    @classmethod
    def of(cls, found: Measured) -> "SettingDocument":
        """Return the document of a measurement."""
        return cls(
            output_tokens_per_s=found.tokens_per_s,
            ttft_p50_s=found.ttft_s(0.5),
            ttft_p99_s=found.ttft_s(0.99),
            tpot_p50_s=found.tpot_s(0.5),
            tpot_p99_s=found.tpot_s(0.99),
            slots=found.slots,
            kv_tokens=found.kv_tokens,
            usd_per_mtok=found.usd_per_mtok,
            failed=found.failed,
        )


class TrialDocument(BaseModel):
    """One change: planned and measured, kept or why not; `identical` is the fraction of equal greedy answers."""

    change: str
    flags: dict[str, Flag]
    lossless: bool
    planned_gain: float | None
    measured: SettingDocument | None
    gain: GainDocument | None
    identical: float | None
    kept: bool
    why: str

    @classmethod
    def of(cls, trial: Trial) -> "TrialDocument":
        """Return the document of a trial."""
        planned = trial.change.gain
        return cls(
            change=trial.change.name,
            flags=dict(trial.change.flags),
            lossless=trial.change.lossless,
            planned_gain=None if planned is None else planned - 1,
            measured=None if trial.measured is None else SettingDocument.of(trial.measured),
            gain=GainDocument.of(trial.gain),
            identical=trial.identical,
            kept=trial.kept,
            why=trial.why,
        )


class TuningDocument(BaseModel):
    """A tuning as JSON; `revision` is that of the updated service, null where it stays as it was."""

    service: str
    unchanged: SettingDocument
    again: SettingDocument | None
    noise: float
    trials: list[TrialDocument]
    flags: dict[str, Flag]
    gain: GainDocument | None
    why: str
    revision: int | None

    @classmethod
    def of(cls, service: str, found: Tuning, revision: int | None) -> "TuningDocument":
        """Return the document of a tuning."""
        return cls(
            service=service,
            unchanged=SettingDocument.of(found.unchanged),
            again=None if found.again is None else SettingDocument.of(found.again),
            noise=found.unchanged.noise,
            trials=[TrialDocument.of(each) for each in found.trials],
            flags=dict(found.flags),
            gain=GainDocument.of(found.gain),
            why=found.why,
            revision=revision,
        )


def setting_line(name: str, found: Measured) -> str:
    """Return one setting in a line, as it is measured."""
    ttft, tpot = _latency(found.ttft_s(0.5)), _latency(found.tpot_s(0.5))
    return f"{name}: {found.tokens_per_s:,.0f} tokens/s, TTFT {ttft}, TPOT {tpot}"


def trial_line(trial: Trial) -> str:
    """Return one trial in a line."""
    line = trial.change.name if trial.measured is None else setting_line(trial.change.name, trial.measured)
    gain = "" if trial.gain is None else f", {interval_text(trial.gain)}"
    return f"{line}{gain}: {'kept' if trial.kept else trial.why}"


def update_words(service: str, flags: Mapping[str, Flag]) -> str:
    """Return the command by which somebody keeps the settings."""
    values = {True: "true", False: "false"}
    words = [
        f"--flag '{name.removeprefix('--')}={values[value] if isinstance(value, bool) else value}'"
        for name, value in flags.items()
    ]
    return " ".join(["cordee serve update", service, *words])


def print_tuning(found: TuningDocument, *, dry_run: bool) -> None:
    """Print the settings as they were measured, the changes with what became of them, and the end."""
    settings: list[tuple[str, SettingDocument, float | None]] = [("unchanged", found.unchanged, found.noise)]
    settings += [(each.change, each.measured, each.identical) for each in found.trials if each.measured]
    settings += [("unchanged, again", found.again, None)] if found.again else []
    console = terminal.stdout()
    console.print(_settings(settings, narrow=console.width < NARROW_COLUMNS))
    console.print(_trials(found.trials))
    console.print(_end(found, dry_run=dry_run), highlight=False, markup=False)


def _settings(found: Sequence[tuple[str, SettingDocument, float | None]], *, narrow: bool) -> object:
    cells = {
        "SETTING": [name for name, _, _ in found],
        "TOK/S": [f"{each.output_tokens_per_s:,.0f}" for _, each, _ in found],
        "TTFT": [_latency(each.ttft_p50_s) for _, each, _ in found],
        "TTFT P99": [_latency(each.ttft_p99_s) for _, each, _ in found],
        "TPOT": [_latency(each.tpot_p50_s) for _, each, _ in found],
        "TPOT P99": [_latency(each.tpot_p99_s) for _, each, _ in found],
        "KV TOKENS": ["–" if each.kv_tokens is None else f"{each.kv_tokens:,}" for _, each, _ in found],
        "$/MTOK": ["–" if each.usd_per_mtok is None else format_usd(each.usd_per_mtok) for _, each, _ in found],
        "SAME": ["–" if same is None else f"{same:.1%}" for _, _, same in found],
    }
    if narrow:
        del cells["TTFT P99"], cells["TPOT P99"]
    rows = terminal.table(*cells, right=tuple(cells)[1:], folds=("SETTING",))
    for row in zip(*cells.values(), strict=True):
        rows.add_row(*row)
    return rows


def _trials(found: Sequence[TrialDocument]) -> object:
    rows = terminal.table("CHANGE", "PLANNED", "MEASURED", "KEPT", right=("PLANNED",), folds=("CHANGE", "KEPT"))
    for each in found:
        planned = "–" if each.planned_gain is None else f"{100 * each.planned_gain:+.0f} %"
        gain = each.gain
        measured = "–" if gain is None else interval_text(Interval(gain.low, gain.gain, gain.high))
        rows.add_row(each.change, planned, measured, "yes" if each.kept else f"no: {each.why}")
    return rows


def _end(found: TuningDocument, *, dry_run: bool) -> str:
    if not found.flags:
        return f"{found.service} stays as it is: {found.why or 'nothing that was tried pays'}"
    assert found.gain is not None, "what is kept was measured again"
    gain = interval_text(Interval(found.gain.low, found.gain.gain, found.gain.high))
    if found.revision is None:
        say = "nothing was changed (--dry-run)" if dry_run else "nothing was changed"
        return f"{gain} tokens a second in all; {say}, to keep it: {update_words(found.service, found.flags)}"
    flags = ", ".join(f"{name.removeprefix('--')}={value}" for name, value in found.flags.items())
    follow = f"follow it: cordee serve show {found.service}"
    return f"{gain} tokens a second in all; {found.service} is updated to revision {found.revision}: {flags}\n{follow}"


def _latency(seconds: float | None) -> str:
    return "–" if seconds is None else format_latency(seconds)
