"""The settings of a rank: from the agent (environment), the script (arguments) or defaults, in this order."""

import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast, get_args

from cordee.errors import InputError, LayoutError
from cordee.events import Estimate
from cordee.ids import JobId
from cordee.plan.layout import Layout
from cordee.plan.wanted import parse_layout
from cordee.reports import METRIC_NAME
from cordee.storage.destination import absolute, below, is_remote, level_urls
from cordee.storage.files import folder_of
from cordee.telemetry.cloud import Cloud, cloud_here
from cordee.units import parse_duration_s
from cordee.workload.keep import KEEP_MIN, Keep, parse_keep
from cordee.workload.telemetry import TRACKERS, OnSpike

HANG_REPORT_S = 60.0
_NOTICES = ("TERM", "USR1", "USR2", "HUP", "INT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """An interval between saves: by steps, by seconds, or neither, which is `auto`."""

    steps: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """Seconds without progress: a rank is then reported (0: never), and all ranks start again (None: never)."""

    report_s: float = HANG_REPORT_S
    restart_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """The answer to a spike of the loss, and where else metrics go."""

    on_spike: OnSpike = "warn"
    track: tuple[str, ...] = ()
    keep_best: str | None = None  # a metric: the checkpoint of its lowest value stays
    log_level: int = logging.INFO  # of the lines that are printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plan's answer for this attempt; None where nothing was planned."""

    estimate: Estimate | None = None
    layout: Layout | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one rank of one attempt. Without an agent `epoch`, `job_id` and `spool` are None."""

    to: str | None
    every: Every
    keep: Keep
    base: str | None
    ram: Every | None  # of captures in memory; None: off
    grace_s: float
    job_id: JobId | None
    epoch: int | None
    spool: Path | None
    signals: tuple[int, ...]  # that are a notice
    cloud: Cloud | None = field(compare=False)  # for this rank to ask
    hang: HangLimits
    torchelastic: bool
    planned: Planned
    telemetry: Telemetry


def settings(  # noqa: PLR0913 - those of `cordee.job`
    env: Mapping[str, str] | None = None,
    *,
    to: str | Path | None = None,
    every: str | int | None = None,
    keep: str | int | None = None,
    grace: str | None = None,
    base: str | Path | None = None,
    ram: str | int | None = None,
    hang: str | None = None,
    on_spike: str | None = None,
    track: str | Sequence[str] | None = None,
    keep_best: str | None = None,
) -> Settings:
    """Merge the settings; the agent's win, since they are what the job's owner submitted, except `auto`.

    Raises:
        InputError: a value cannot be read.
    """
    env = os.environ if env is None else env
    agent_every_s = None if env.get("CORDEE_CHECKPOINT_EVERY") == "auto" else _number(env, "CORDEE_CHECKPOINT_EVERY")
    agent_ram = env.get("CORDEE_CHECKPOINT_RAM") or "auto"
    grace_s = _number(env, "CORDEE_GRACE_S")
    telemetry = Telemetry(
        on_spike=parse_on_spike(env.get("CORDEE_ON_SPIKE") or on_spike or "warn"),
        track=parse_track(env.get("CORDEE_TRACK") or track or ()),
        keep_best=_metric(keep_best),
        log_level=_log_level(env),
    )
    report_s, restart_s = _number(env, "CORDEE_HANG_REPORT_S"), _number(env, "CORDEE_HANG_RESTART_S")
    epoch = env.get("CORDEE_EPOCH")
    script_to = str(to) if to else None
    if script_to and env.get("CORDEE_FOLDER"):
        script_to = absolute(script_to, env["CORDEE_FOLDER"])  # not the copy of it that this process runs in
    if script_to and env.get("CORDEE_FILES") and not env.get("CORDEE_CHECKPOINT_TO"):
        _check_outside(script_to, Path(env["CORDEE_FILES"]))
    if script_to and env.get("CORDEE_JOB"):
        # A job's epochs count its own attempts: in a folder that other jobs write to it would be fenced.
        script_to = below(script_to, env["CORDEE_JOB"])
    return Settings(
        to=env.get("CORDEE_CHECKPOINT_TO") or script_to,
        every=parse_every(every) if agent_every_s is None else Every(seconds=agent_every_s),
        keep=parse_keep(env.get("CORDEE_CHECKPOINT_KEEP") or (KEEP_MIN if keep is None else keep)),
        base=env.get("CORDEE_CHECKPOINT_BASE") or (str(base) if base else None),
        ram=(
            parse_ram(ram if agent_ram == "auto" else agent_ram)
            if agent_ram in ("auto", "off")
            else Every(seconds=_number(env, "CORDEE_CHECKPOINT_RAM"))
        ),
        grace_s=parse_duration_s(str(grace or "30s")) if grace_s is None else grace_s,
        job_id=JobId(env["CORDEE_JOB"]) if env.get("CORDEE_JOB") else None,
        epoch=int(epoch) if epoch else None,
        spool=Path(env["CORDEE_SPOOL"]) if env.get("CORDEE_SPOOL") and env.get("CORDEE_JOB") and epoch else None,
        signals=_signals(env),
        cloud=cloud_here(env) if env.get("LOCAL_RANK", env.get("SLURM_LOCALID", "0")) == "0" else None,
        hang=HangLimits(
            report_s=HANG_REPORT_S if report_s is None else report_s,
            restart_s=(parse_duration_s(hang) if hang else None) if restart_s is None else restart_s,
        ),
        torchelastic="TORCHELASTIC_RUN_ID" in env,
        planned=Planned(
            estimate=_estimate(env.get("CORDEE_ESTIMATE")),
            layout=_layout(env.get("CORDEE_LAYOUT"), int(env.get("WORLD_SIZE") or 1)),
        ),
        telemetry=telemetry,
    )


def _check_outside(to: str, copy: Path) -> None:
    """Raise InputError if checkpoints would lie in the copy of the submitted files, which goes with the attempt."""
    for place in level_urls(to):
        if not is_remote(place) and folder_of(place).is_relative_to(copy):
            raise InputError(
                f"to={place!r} lies in {copy}, a copy of the submitted files that is removed after this attempt",
                hint="give an absolute path that every node sees, or a URL; or submit with --checkpoint-to",
            )


def _estimate(text: str | None) -> Estimate | None:
    """Return the agent's estimate; one that another version wrote with other fields is left out."""
    try:
        return Estimate(**json.loads(text)) if text else None
    except (TypeError, ValueError):
        return None


def _layout(text: str | None, world_size: int) -> Layout | None:
    if not text:
        return None
    try:
        return parse_layout(text).plainest(world_size)
    except LayoutError as error:
        raise InputError(f"CORDEE_LAYOUT cannot be read: {error.message}", hint=error.hint) from None


def _signals(env: Mapping[str, str]) -> tuple[int, ...]:
    """Return the signals that are a notice: SIGTERM; under Slurm SIGUSR1 too; and those that CORDEE_SIGNALS names.

    Without that variable, SIGINT is one where a person at a terminal may press Ctrl-C.
    """
    more = env.get("CORDEE_SIGNALS", "INT" if _is_at_terminal(env) else "").split(",")
    names = ["TERM", *(["USR1"] if "SLURM_JOB_ID" in env else []), *more]
    found = []
    for name in (name.strip().upper().removeprefix("SIG") for name in names if name.strip()):
        if name not in _NOTICES:
            raise InputError(
                f"CORDEE_SIGNALS names {name}, which cannot be a notice", hint=f"it may name {', '.join(_NOTICES)}"
            )
        found.append(int(getattr(signal, f"SIG{name}")))
    return tuple(dict.fromkeys(found))


def _is_at_terminal(env: Mapping[str, str]) -> bool:
    """Return whether this process has a terminal, and nothing else of it handles Ctrl-C."""
    has_terminal = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))
    return has_terminal and "CORDEE_JOB" not in env and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _log_level(env: Mapping[str, str]) -> int:
    """Return the level of the lines to print: warnings, what a person wants to see, or each checkpoint too."""
    levels = {"CORDEE_QUIET": logging.WARNING, "CORDEE_VERBOSE": logging.DEBUG}
    return next((level for name, level in levels.items() if env.get(name, "0") not in ("", "0")), logging.INFO)


def _number(env: Mapping[str, str], name: str) -> float | None:
    text = env.get(name)
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{name}={text} is not a plain number", hint="times are in seconds, without a unit") from None


def parse_on_spike(word: str) -> OnSpike:
    """Read what to do about a spike of the loss.

    >>> parse_on_spike("rollback")
    'rollback'
    """
    if word not in get_args(OnSpike):
        raise InputError(f"on_spike={word!r} is not possible", hint=f"use one of: {', '.join(get_args(OnSpike))}")
    return cast(OnSpike, word)


def _metric(name: str | None) -> str | None:
    if name is not None and not METRIC_NAME.fullmatch(name):
        raise InputError(f"keep_best={name!r} cannot be a metric", hint='name one that you log: keep_best="val/loss"')
    return name


def parse_track(names: str | Sequence[str]) -> tuple[str, ...]:
    """Read the names of trackers, with commas between or as a list.

    >>> parse_track("wandb, tensorboard"), parse_track(["mlflow"])
    (('wandb', 'tensorboard'), ('mlflow',))
    """
    found = [each.strip() for each in (names.split(",") if isinstance(names, str) else names) if each.strip()]
    for name in found:
        if name not in TRACKERS:
            raise InputError(f"track={name!r} is no tracker", hint=f"use some of: {', '.join(TRACKERS)}")
    return tuple(dict.fromkeys(found))


def parse_every(every: str | int | None) -> Every:
    """Read an interval: `10m` is a time, a whole number is steps, None and `auto` are left to the plan.

    >>> parse_every("10m"), parse_every(50)
    (Every(steps=None, seconds=600.0), Every(steps=50, seconds=None))
    """
    if every is None or every == "auto":
        return Every()
    if isinstance(every, str):
        return Every(seconds=parse_duration_s(every))
    if not isinstance(every, int) or every < 1:
        raise InputError(f"every={every} steps is not possible", hint='write a time ("10m"), steps (500) or "auto"')
    return Every(steps=every)


def parse_ram(ram: str | int | None) -> Every | None:
    """Read an interval as `every`; `off` is None.

    >>> parse_ram("off"), parse_ram("30s")
    (None, Every(steps=None, seconds=30.0))
    """
    return None if ram == "off" else parse_every(ram)
