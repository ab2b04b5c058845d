"""Admission: makes a Job from a JobSpec or refuses it with the numbers. Reads files and catalogues, changes nothing."""

import os
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path

from cordee.control.eligible import dearest, hourly_price, kind_of, may_get
from cordee.control.expected import Expected, expect
from cordee.control.instances import check_profile, instance_milli, nodes_with
from cordee.control.zones import window_of
from cordee.errors import ScriptError, SpecError, TooLargeError, UnprotectedError
from cordee.events import Capacity, Job, Node, Tier
from cordee.hardware.catalog import Catalogue
from cordee.ids import JobId
from cordee.plan.wanted import near_ranks, parse_layout
from cordee.schedule.placement.place import most_gpus
from cordee.schedule.quota.queues import DEFAULT, near
from cordee.schedule.quota.quotas import Quotas
from cordee.schedule.state.retries import INFRASTRUCTURE, SCRIPT, exit_cause
from cordee.storage.destination import check_destination
from cordee.units import MICRO_USD, US_PER_S, format_bytes, format_micro_usd, plural
from cordee.workload.spec import Elastic, JobSpec, Retries

_DEFAULTS = Job(job_id=JobId("none"), name="none", owner="none", gpus=1)
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
_SHELL_WORDS = {
    "cd",
    "exec",
    "export",
    "set",
    "source",
    ".",
    "if",
    "for",
    "while",
    "case",
    "(",
    "{",
    "!",
    "time",
    "ulimit",
}


@dataclass(frozen=True, slots=True)
class Admitted:
    """The job for the scheduler, its price on the most expensive GPUs that it may get, and the assumptions made."""

    job: Job
    micro_usd_per_hour: int
    notes: tuple[str, ...]


def admit(
    spec: JobSpec,
    *,
    job_id: JobId,
    owner: str,
    nodes: Sequence[Node],
    catalogue: Catalogue,
    quotas: Quotas | None = None,
    unprotected: bool = False,
) -> Admitted:
    """Decide whether a job may queue in this cluster.

    Args:
        spec: the job as its user wrote it.
        job_id: its id.
        owner: the user that submits it.
        nodes: all known nodes, up or down.
        catalogue: GPUs and prices.
        quotas: the queues and what each holds.
        unprotected: the owner accepts a preemptible job without checkpoints.

    Raises:
        ScriptError: the program does not exist.
        DestinationError: no store handles its checkpoint destination.
        SpecError: the queue does not exist.
        TooLargeError: the gang is larger than the cluster, or than its queue ever allows.
        DoesNotFitError: its model does not fit its GPUs.
        UnprotectedError: it is preemptible without a checkpoint destination, and the risk was not accepted.
        CatalogueError, LayoutError, ShapeError: its model or GPU is unknown, or its layout does not divide.
    """
    quotas = quotas or Quotas()
    if spec.files is None:  # otherwise its folder need not be on this machine
        check_program(spec)
    if spec.checkpoint.to is not None:
        check_destination(spec.checkpoint.to)
    _check_queue(spec, quotas)
    kind = kind_of(spec, nodes, catalogue)
    eligible = [node for node in nodes if may_get(node, kind, spec)]
    if spec.mig is not None:
        check_profile(spec.mig, spec.gpu, eligible, catalogue)
        eligible = nodes_with(spec.mig, eligible, nodes)
        spec = spec.model_copy(update={"gpu_milli": instance_milli(spec.mig, eligible)})
    _check_size(spec, kind, eligible, nodes)
    expected = expect(spec, kind, eligible, catalogue)
    notes = [] if expected is None else [*expected.notes]
    sizes = spec.sizes
    if expected is not None and expected.estimates[0].gpu_memory_bytes:
        sizes = tuple(each.gpus for each in expected.estimates[1:])
    risk = unprotected_risk(spec, eligible)
    if not spec.gpus and spec.cpus is None:
        notes.append("it counts as one CPU core: --cpus says how many it needs, --memory how much host memory")
    if risk is not None:
        if not unprotected and Tier(spec.tier) is Tier.PREEMPTIBLE:
            raise UnprotectedError(
                risk,
                hint="give --checkpoint-to (or checkpoint.to; the script's own is not seen here), "
                "or accept the risk with --unprotected",
            )
        notes.append(risk)
    if spec.elastic != Elastic():
        smaller = ", ".join(map(str, sizes)) or "no fewer"
        notes.append(f"it is elastic: {spec.gpus} GPUs, or {smaller}")
    job = replace(_job(spec, job_id, owner, kind, expected), sizes=sizes, unit_gpus=_unit_gpus(spec, eligible))
    if not spec.gpus and catalogue.cpu is not None:
        job = replace(job, micro_usd_per_cpu_hour=round(catalogue.cpu.usd_per_core_hour * MICRO_USD))
    never = quotas.never(job, min((job.gpus, *sizes)))
    if never is not None:
        raise TooLargeError(never, hint="ask for less, or for another queue: `cordee queues` shows them")
    return Admitted(job, hourly_price(spec, eligible, job.micro_usd_per_cpu_hour), tuple(notes))


_LEAVES_WHEN = {
    Tier.STANDARD: "when a production job preempts it or its node fails",
    Tier.PRODUCTION: "when its node fails",
}


def spec_for(job: Job, spec: JobSpec) -> str:
    """Return the spec of an admitted job as the log and its agents have it: with the grace period that it got."""
    got = spec.on_preempt.model_copy(update={"grace_s": job.grace_us / US_PER_S})
    return spec.model_copy(update={"on_preempt": got}).model_dump_json()


def unprotected_risk(spec: JobSpec, eligible: Sequence[Node]) -> str | None:
    """Describe what a job without checkpoints can lose; None for those with them, without GPUs, and for services."""
    if spec.checkpoint.to is not None or spec.service is not None or not spec.gpus:
        return None
    tier = Tier(spec.tier)
    if tier is not Tier.PREEMPTIBLE:
        return f"unprotected: it names no checkpoint destination, and loses all its work {_LEAVES_WHEN[tier]}"
    hourly = hourly_price(spec, eligible, 0)
    at_risk = f"up to {format_micro_usd(hourly)} an hour at risk: " if hourly else ""
    return (
        f"unprotected: {at_risk}a preemptible job on {plural(spec.gpus, 'GPU')} that "
        f"writes no checkpoint loses all its work when it is preempted (price: {dearest(eligible).price_source})"
    )


def check_program(spec: JobSpec) -> None:
    """Check that the program in `run` can be found from the job's folder.

    Raises:
        ScriptError: an executable or a script is missing.
    """
    folder = Path(spec.cwd or Path.cwd())
    if not folder.is_dir():
        raise ScriptError(f"the job's folder {folder} does not exist", hint="submit from a folder that exists")
    if isinstance(spec.run, str):
        words = _first_command(spec.run)
        if not words or words[0] in _SHELL_WORDS:
            return  # only the shell can resolve it
    else:
        words = list(spec.run)
    path = spec.env.get("PATH", os.environ.get("PATH", os.defpath))
    found = folder / words[0] if "/" in words[0] else shutil.which(words[0], path=path)
    if found is None or not os.access(found, os.X_OK):
        raise ScriptError(f"{words[0]!r} is not an executable in {folder} or on PATH", hint="check `run`")
    script = _script(words)
    if script is not None and not (folder / script).exists():
        raise ScriptError(f"{script} does not exist in {folder}", hint="check `run`, or submit from its folder")


def script_of(spec: JobSpec) -> Path | None:
    """Return the script that the job's command runs, by its absolute path; None if it cannot be determined."""
    words = _first_command(spec.run) if isinstance(spec.run, str) else list(spec.run)
    script = _script(words) if words and words[0] not in _SHELL_WORDS else None
    return None if script is None or spec.cwd is None else Path(spec.cwd) / script


def _first_command(line: str) -> list[str]:
    """Return the words of a shell line's first command; empty if only a shell can parse it."""
    if re.search(r"[`$\\\n]", line):
        return []
    try:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:
        return []
    first: list[str] = []
    for word in words:
        if word[0] in ";&|<>()":
            break
        if first or not re.match(r"[A-Za-z_]\w*=", word):
            first.append(word)
    return first


def _script(words: Sequence[str]) -> str | None:
    """Return the file that an interpreter or a launcher runs; None if it cannot be determined."""
    program = Path(words[0]).name
    rest = iter(words[1:])
    if re.fullmatch(r"python[\d.]*|bash|sh", program):
        for word in rest:
            if word in ("-m", "-c", "-", "-s"):
                return None
            if word in ("-W", "-X", "-o"):
                next(rest, None)
            elif not word.startswith("-"):
                return word
        return None
    if program in _LAUNCHERS and not {"-m", "--module"} & set(words):
        return next((word for word in rest if word.endswith(".py")), None)
    return None


def _check_queue(spec: JobSpec, quotas: Quotas) -> None:
    """Refuse an unknown queue. Until queues are set, any name is accepted: it only labels the costs."""
    known = {queue.name for queue in quotas.queues} | {DEFAULT}
    if quotas.queues and spec.queue not in known:
        raise SpecError(f"there is no queue {spec.queue!r}", hint=near(spec.queue, known))


def _check_size(spec: JobSpec, kind: str | None, eligible: Sequence[Node], nodes: Sequence[Node]) -> None:
    most = most_gpus(eligible, kind, Capacity(spec.capacity))
    least = min((spec.gpus, *spec.sizes))
    if most >= least and eligible:
        _check_host(spec, least, eligible)
        return
    wanted = f"{least} x {kind}" if kind else f"{least} GPUs" if least else "a node"
    if spec.capacity != "any":
        wanted += f" ({spec.capacity})"
    have = ", ".join(f"{node.name} with {node.gpus} x {node.gpu_name} ({node.capacity})" for node in nodes)
    raise TooLargeError(
        f"the job needs {wanted} at once, but the whole cluster has {most} of one type",
        hint=f"the cluster is {have}" if have else "no node is known yet: see `cordee nodes`",
    )


def _check_host(spec: JobSpec, gpus: int, eligible: Sequence[Node]) -> None:
    """Check that the nodes have the CPU cores and host memory for `gpus` of the job's GPUs, if they report them."""
    for asked, has, what, show in (
        (_cpu_milli(spec), [node.cpu_milli for node in eligible], "CPU cores", lambda amount: f"{amount / 1000:g}"),
        (spec.memory_bytes or 0, [node.memory_bytes for node in eligible], "of host memory", format_bytes),
    ):
        if not spec.gpus:  # it takes all of them on one node
            most = max((each for each in has if each is not None), default=0)
            if None not in has and asked > most:
                raise TooLargeError(
                    f"the job needs {show(asked)} {what} on one node, and the largest has {show(most)}",
                    hint="ask for less: `cordee nodes` shows what the nodes have",
                )
            continue
        there = sum(each or 0 for each in has)
        if None not in has and asked * gpus > there * spec.gpus:
            raise TooLargeError(
                f"{gpus} GPUs of the job need {show(asked * gpus // spec.gpus)} {what}, "
                f"but the nodes that it may use have {show(there)} together",
                hint="`cpus` and `memory` count for the whole job",
            )


def _cpu_milli(spec: JobSpec) -> int:
    """Return the thousandths of CPU cores of a job; one without GPUs that does not say has one core."""
    return round((spec.cpus if spec.cpus is not None else 0 if spec.gpus else 1) * 1000)


def _job(spec: JobSpec, job_id: JobId, owner: str, kind: str | None, expected: Expected | None) -> Job:
    every_us, save_us, restart_us = _DEFAULTS.checkpoint_every_us, _DEFAULTS.save_us, _DEFAULTS.restart_us
    if expected is not None:
        estimate = expected.estimates[0]
        every_us, save_us, restart_us = _us(expected.survival.period_s), estimate.save_us, estimate.restart_us
    if spec.checkpoint.every_s != "auto":
        every_us = _us(spec.checkpoint.every_s)
    return Job(
        job_id=job_id,
        name=spec.name,
        owner=owner,
        gpus=spec.gpus,
        queue=spec.queue,
        tier=Tier(spec.tier),
        priority=spec.priority,
        gpu_name=kind,
        capacity=Capacity(spec.capacity),
        time_limit_us=None if spec.limit.time_s is None else _us(spec.limit.time_s),
        cost_limit_micro_usd=spec.limit.cost_micro_usd,
        grace_us=_us(spec.on_preempt.notice_s),
        requeue=spec.on_preempt.then == "requeue",
        protected=spec.checkpoint.to is not None,
        checkpoint_every_us=every_us,
        save_us=save_us,
        restart_us=restart_us,
        # A job that is preempted before it has run as long as its restart takes would only ever restart. The value
        # cannot be raised in the spec: a job that must not be preempted has `limit.preemptions: 0`.
        min_run_us=restart_us,
        gpu_milli=spec.gpu_milli,
        mig=spec.mig,
        cpu_milli=_cpu_milli(spec),
        memory_bytes=spec.memory_bytes or 0,
        within=spec.place.within,
        grow_after_us=None if spec.elastic.grow_after_s is None else _us(spec.elastic.grow_after_s),
        estimate_us=None if spec.estimate_s is None else _us(spec.estimate_s),
        preemptions_max=spec.limit.preemptions,
        retries=_retries(spec.retries),
        not_before_us=spec.not_before_us,
        window=window_of(spec.window),
        window_stops=spec.stop_at_end,
        estimates=() if expected is None else expected.estimates,
        data=spec.data.sets,
    )


def _retries(wanted: Retries) -> tuple[tuple[str, int], ...]:
    by_cause = {INFRASTRUCTURE: wanted.infrastructure, SCRIPT: wanted.script}
    given = {cause: most for cause, most in by_cause.items() if most is not None}
    return tuple(sorted((given | {exit_cause(code): most for code, most in wanted.exit.items()}).items()))


def _unit_gpus(spec: JobSpec, eligible: Sequence[Node]) -> int | None:
    """Return how many GPUs must lie in one island: the requested number, else whole groups of the layout.

    If islands differ in size, return a common divisor, so that units pack into each; nodes of a kind that could never
    hold the job do not count. None: as much of the gang as a node holds.
    """
    if spec.place.unit is not None or spec.model is None or spec.model.layout is None:
        return spec.place.unit
    wanted = parse_layout(spec.model.layout)
    gpus, unit = Counter[str](), 0
    for node in eligible:
        gpus[node.gpu_name] += node.gpus
    for node in eligible:
        usable = node.gpus - len(node.unavailable)
        island_gpus = min(node.island_gpus or usable, usable)
        group = near_ranks(wanted, island_gpus)
        if group > 1 and gpus[node.gpu_name] >= min((spec.gpus, *spec.sizes)):
            unit = gcd(unit, island_gpus // group * group)
    return min(spec.gpus, unit) or None


def _us(seconds: float) -> int:
    return round(seconds * US_PER_S)
