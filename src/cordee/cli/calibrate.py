"""`cordee calibrate`: measure this machine's device, so that plans are made with its own tables."""

import os
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from cordee.account.drift import weeks_of_steps
from cordee.agent.calibration import files
from cordee.agent.calibration.check import check as compare
from cordee.agent.calibration.session import LIMIT_GPU_S, LIMIT_S, Calibration, Wanted
from cordee.agent.calibration.session import calibrate as measure
from cordee.agent.calibration.together import calibrate_together, started_together
from cordee.agent.gpus import discover
from cordee.cli import terminal
from cordee.cli.calibrate_text import print_calibration, print_checked, print_history, print_kept, print_together
from cordee.cli.stale import warned
from cordee.errors import InputError, NotFoundError
from cordee.hardware.load import load_home
from cordee.near import did_you_mean
from cordee.planning import gpus_here

PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationView:
    """The JSON of a calibration."""

    name: str
    path: str
    precision: str
    fingerprint: dict[str, str]
    doubt: float
    spread: float
    points: int
    poor: int
    worst: str
    load: float
    others: list[str]
    refused: dict[str, str]
    efficiency: dict[str, float]
    numbers: dict[str, float]


@dataclass(frozen=True, slots=True)
class TogetherView:
    """The JSON of what ranks have measured together."""

    name: str
    path: str
    efficiency: dict[str, float]
    numbers: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptView:
    """The JSON of a calibration that is kept."""

    name: str
    path: str
    as_of: str
    fingerprint: dict[str, str]
    changed: list[str]


def calibrate(
    *,
    gpu: Annotated[int, typer.Option(min=0, help="Index of the GPU; all of them take part in collectives.")] = 0,
    cpu: Annotated[bool, typer.Option("--cpu", help="Measure the CPU even if there is a GPU.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a rank on the CPU.")] = 1,
    precision: Annotated[
        str | None, typer.Option(help="Precision of products: bf16, fp16 or fp32.", show_default="bf16, on a CPU fp32")
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(help="Seconds for the sweeps.", show_default=f"{LIMIT_GPU_S:g}, on a CPU {LIMIT_S:g}"),
    ] = None,
    to: Annotated[Path | None, typer.Option(help="Folder whose storage is measured too.", show_default="none")] = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="Leave out the collectives among this machine's ranks.")
    ] = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="Keep results that are too noisy to plan with.")] = False,
    check: Annotated[
        Path | None,
        typer.Option(help="Run steps of this config.json (a few layers) beside the plan.", show_default="no"),
    ] = None,
    seq: Annotated[int, typer.Option(min=1, help="With --check: tokens in a sequence.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="With --check: sequences in a step.")] = 1,
    layers: Annotated[int, typer.Option(min=0, help="With --check: layers of the model at most; 0: all.")] = 2,
    steps: Annotated[int, typer.Option(min=2, help="With --check: steps that are timed.")] = 10,
    show: Annotated[
        bool, typer.Option("--show", help="Show this machine's stored calibration, and what has changed since.")
    ] = False,
    history: Annotated[
        bool, typer.Option("--history", help="Show measured over planned step times of the server's jobs, by week.")
    ] = False,
    home: terminal.Home = None,
    as_json: terminal.Json = False,
) -> None:
    """Measure this machine: products, attention, memory, optimizer, host, links; then `--gpus here` plans with it.

    A minute on a CPU, five on a GPU; exits with 81 and keeps nothing if disturbed. Under torchrun: links of ranks.
    """
    place = terminal.folder(home)
    if show:
        _show(place, as_json=as_json)
        return
    if history:
        _history(home, as_json=as_json)
        return
    if check is not None:
        _check(place, check, Steps(seq, batch, layers, steps), cpu=cpu, as_json=as_json)
        return
    devices = discover(None)
    on_gpu = devices.real and not cpu
    if started_together():
        _together(place, to, on_gpu=on_gpu, as_json=as_json)
        return
    _refuse_absent(gpu if on_gpu else 0, devices.count if on_gpu else 1, threads)
    wanted = Wanted(
        gpu=gpu if on_gpu else None,
        gpus=devices.count if on_gpu else 0,
        threads=threads,
        precision=_precision(precision, on_gpu=on_gpu),
        limit_s=limit if limit is not None else LIMIT_GPU_S if on_gpu else LIMIT_S,
        storage=None if to is None else to.expanduser().absolute(),
        collectives=not alone,
        anyway=anyway,
    )
    with terminal.waiting("calibrate") as text:
        found = measure(place, wanted, load_home(place), text.now)
    if as_json:
        terminal.print_json(_view(found))
    else:
        print_calibration(found)


def _refuse_absent(gpu: int, gpus: int, threads: int) -> None:
    if gpu >= gpus:
        raise InputError(f"there is no GPU {gpu}", hint=f"this machine has {gpus}, from 0")
    if threads > (os.cpu_count() or 1):
        raise InputError(f"{threads} threads are more than the {os.cpu_count()} cores", hint="use fewer --threads")


def _together(place: Path, to: Path | None, *, on_gpu: bool, as_json: bool) -> None:
    storage = None if to is None else to.expanduser().absolute()
    take_part = partial(calibrate_together, place, on_gpu=on_gpu, storage=storage, catalogue=load_home(place))
    if os.environ["RANK"] != "0":  # the first one speaks for all
        take_part(said=lambda _: None)
        return
    with terminal.waiting("calibrate") as text:
        found = take_part(said=text.now)
    assert found is not None, "it is the first rank"
    if as_json:
        terminal.print_json(TogetherView(found.name, str(found.path), found.fractions, found.numbers))
    else:
        print_together(found)


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of a check: tokens in a sequence, sequences, layers at most, and how many steps."""

    seq_tokens: int
    sequences: int
    layers: int
    steps: int


def _check(place: Path, config: Path, wanted: Steps, *, cpu: bool, as_json: bool) -> None:
    catalogue = load_home(place)
    gpu = warned(catalogue.find_gpu(gpus_here("1xhere", catalogue, cpu=cpu).removeprefix("1x")))
    with terminal.waiting(f"{wanted.steps} steps of {config}"):
        found = compare(
            gpu, config, seq_tokens=wanted.seq_tokens, sequences=wanted.sequences, layers=wanted.layers,
            steps=wanted.steps,
        )  # fmt: skip
    if as_json:
        terminal.print_json(found)
    else:
        print_checked(found, gpu)


def _history(home: Path | None, *, as_json: bool) -> None:
    with terminal.connect(home) as client:
        weeks = weeks_of_steps(event for _, event in client.events())
    if as_json:
        terminal.print_json(weeks)
    else:
        print_history(weeks)


def _precision(text: str | None, *, on_gpu: bool) -> str:
    chosen = text or ("bf16" if on_gpu else "fp32")
    if chosen not in PRECISIONS:
        raise InputError(f"products are not measured in {chosen!r}", hint=did_you_mean(chosen, PRECISIONS))
    return chosen


def _view(found: Calibration) -> CalibrationView:
    how = found.quality
    assert how is not None and found.path is not None, "it was written"
    return CalibrationView(
        name=found.name, path=str(found.path), precision=found.precision, fingerprint=found.fingerprint,
        doubt=how.doubt, spread=how.spread, points=how.points, poor=how.poor, worst=how.worst, load=found.load,
        others=[f"{each.name} ({each.pid}) {each.has}" for each in found.others],
        refused=dict(found.refused), efficiency=found.fractions, numbers=found.numbers,
    )  # fmt: skip


def _show(place: Path, *, as_json: bool) -> None:
    kept = files.kept(place, socket.gethostname())
    if not kept:
        raise NotFoundError(f"{place} has no calibration of this machine", hint="run cordee calibrate")
    if as_json:
        terminal.print_json(
            [
                KeptView(
                    name=each.name, path=str(each.path), as_of=each.as_of, fingerprint=dict(each.fingerprint),
                    changed=list(each.changed),
                )
                for each in kept
            ]
        )  # fmt: skip
    else:
        print_kept(kept)
