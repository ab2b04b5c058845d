"""The plan that a profile is compared with: of the layout that the flags name, or of a job and its estimate."""

import json
from dataclasses import dataclass
from pathlib import Path

from cordee.cli import terminal
from cordee.errors import DoesNotFitError, InputError, NoServerError, SpecError
from cordee.hardware.load import load_catalogue
from cordee.plan import Request, Settings, ask
from cordee.plan.states import flop_per_token
from cordee.plan.training import PRECISIONS
from cordee.plan.wanted import layout_wanted
from cordee.planning import home_gpus, settings_of
from cordee.telemetry.profile.answer import PlanOfProfile
from cordee.workload.gpus import parse_gpus
from cordee.workload.load import load_shape
from cordee.workload.spec import JobSpec

PATTERNS = ("*.pt.trace.json*", "rank*.json", "rank*.json.gz")


@dataclass(frozen=True)
class PlanFlags:
    """The flags that describe a plan; `model` None: none is asked for."""

    model: str | None
    gpus: str | None
    layout: str | None
    precision: str
    seq: int | None
    batch: int | None
    micro_batch: int | None


@dataclass(frozen=True)
class ProfiledJob:
    """A job whose profile is read: its plan, and the folders in which its profile may lie."""

    planned: PlanOfProfile
    folders: tuple[Path, ...]


def planned_by_flags(flags: PlanFlags) -> PlanOfProfile | None:
    """Return the plan that the flags describe.

    Raises:
        SpecError: a flag that belongs to a plan without a model, or a plan without GPUs.
        DoesNotFitError: no such layout fits.
    """
    if flags.model is None:
        if flags.gpus or flags.layout or flags.seq or flags.batch or flags.micro_batch:
            hint = "add --plan MODEL"
            raise SpecError("--gpus, --layout, --seq, --batch and --micro-batch belong to a plan", hint=hint)
        return None
    if flags.gpus is None:
        hint = "add --gpus 64xH100, and --layout tp=8,pp=2"
        raise SpecError(f"--plan {flags.model} does not say on which GPUs it ran", hint=hint)
    count, kind = parse_gpus(flags.gpus)
    if kind is None:
        raise SpecError(f"--gpus {flags.gpus} names no GPU", hint="write --gpus 64xH100")
    precision = next((known for known in PRECISIONS if known == flags.precision), None)
    if precision is None:
        raise SpecError(f"--precision {flags.precision} is not planned", hint=f"use {', '.join(PRECISIONS)}")
    request = Request(
        shape=load_shape(flags.model), gpu=load_catalogue(gpu_files=home_gpus()).find_gpu(kind), gpus=count,
        settings=Settings(seq_tokens=flags.seq, global_batch=flags.batch, precision=precision),
        layout=layout_wanted(flags.layout, None, flags.micro_batch),
    )  # fmt: skip
    return _planned(request)


def planned_job(name: str, home: Path | None) -> ProfiledJob:
    """Return a job's plan, from its estimate and its spec: the server's, else those in the home of an agent.

    Raises:
        InputError: the job is not known, names no model, or has run on no GPU of a known kind.
    """
    folder = terminal.folder(home)
    job_id, spec, layout, kind, gpus = _from_server(name, home) or _from_home(name, folder)
    model, kind = spec.model, kind or spec.gpu
    if model is None:
        raise InputError(f"job {name} names no model, so it has no plan", hint="add a model section to its YAML")
    if kind is None:
        raise InputError(f"job {name} does not say which GPU it ran on", hint="use --plan MODEL --gpus 64xH100")
    path = model.config if model.config is None or spec.cwd is None else str(Path(spec.cwd) / model.config)
    gpu = load_catalogue(gpu_files=home_gpus()).find_gpu(kind)
    request = Request(
        shape=load_shape(str(path or model.name)), gpu=gpu, gpus=gpus, settings=settings_of(model),
        layout=layout_wanted(layout or model.layout, None if layout else model.recompute, model.micro_batch),
        search="best", stage=model.tune.stage,
    )  # fmt: skip
    folders = [folder / "attempts" / job_id, *([Path(spec.cwd)] if spec.cwd else [])]
    return ProfiledJob(_planned(request, job_id), tuple(folders))


def find_profiles(job: ProfiledJob) -> list[Path]:
    """Return the profiles in a job's folders, newest folder first.

    Raises:
        InputError: there is none.
    """
    for folder in job.folders:
        found = {path for pattern in PATTERNS for path in folder.glob(f"**/{pattern}") if path.is_file()}
        if found:
            newest = max(found, key=lambda path: path.stat().st_mtime).parent
            return sorted(path for path in found if path.parent == newest)
    places = " or ".join(str(folder) for folder in job.folders)
    raise InputError(f"there is no profile in {places}", hint="name the files, or write rank0.json.gz there")


Known = tuple[str, JobSpec, str | None, str | None, int]


def _from_server(name: str, home: Path | None) -> Known | None:
    try:
        with terminal.connect(home) as client:
            job = client.job(name)
    except NoServerError:
        return None
    layout = job.estimate.layout or None if job.estimate else None
    gpus = job.estimate.gpus or job.gpus if job.estimate else job.gpus
    return job.job_id, JobSpec.model_validate(job.spec), layout, job.gpu_name, gpus


def _from_home(name: str, folder: Path) -> Known:
    """Read the order of the newest attempt, which the agent keeps."""
    orders = sorted(folder.glob(f"attempts/{name}/*/*/order.json"), key=lambda path: path.stat().st_mtime)
    if not orders:
        hint = "start the server with cordee up, or give --home"
        raise InputError(f"no server runs and {folder} has no attempt of job {name}", hint=hint)
    order = json.loads(orders[-1].read_text(encoding="utf-8"))
    spec = JobSpec.model_validate(order["spec"])
    layout = (order.get("estimate") or {}).get("layout") or None
    return name, spec, layout, spec.gpu, sum(len(lease["gpus"]) for lease in order["leases"])


def _planned(request: Request, job: str | None = None) -> PlanOfProfile:
    answer = ask(request)
    best = answer.best
    if best is None or best.step is None:
        raise DoesNotFitError(
            f"the plan has no layout of {request.shape.name} on {request.gpus} x {request.gpu.name} that fits",
            hint="cordee plan says why",
        )
    training = answer.training
    flop = flop_per_token(request.shape, training) * training.tokens_per_step / request.gpus
    mesh = best.layout.mesh
    return PlanOfProfile(
        request.shape.name, request.gpus, request.gpu.name, mesh, best.step, best.mfu, float(flop), job
    )  # fmt: skip
