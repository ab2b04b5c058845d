"""A job as a batch script of Slurm, which needs no Cordee server.

Slurm starts the gang as one step. Before the time limit it signals the script, at a preemption the step; the ranks save
and leave with 75. The script requeues its job then, and ends the gang after the first real failure.
"""

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from cordee.errors import EXIT_CHECKPOINTED, SpecError, StopError
from cordee.workload.kubernetes import GPUS_PER_NODE
from cordee.workload.launcher import launcher_of
from cordee.workload.spec import JobSpec
from cordee.workload.telemetry import telemetry_env

NOTICE_MARGIN_S = 20  # from the end of the grace period to Slurm's own kill: one commit, and the script's last lines
_SAVED, _UNSAVED = EXIT_CHECKPOINTED, StopError.exit_code  # of a rank that wants to start again

_END_OF_TASK = f"""\
  code=$?
  case $code,$notice in 0,* | {_SAVED},* | {_UNSAVED},* | *,yes) ;; *) # a failure, for which the others would wait
    echo "task $SLURM_PROCID left with exit code $code: the gang ends" >&2
    while sleep 3; do scancel --quiet --signal=KILL "$SLURM_JOB_ID.$SLURM_STEP_ID"; done ;;
  esac
  exit $code
}}
export -f task"""

_STEP = """\
# Before the time limit Slurm signals this script, which hands it on to the ranks; at a preemption it signals the ranks.
notice=; trap 'notice=yes; scancel --quiet --signal=TERM "$SLURM_JOB_ID"' TERM
srun --kill-on-bad-exit=0 bash -c task &
while wait $!; code=$?; kill -0 $! 2>/dev/null; do :; done # the trap interrupts `wait`
wait $!
code=$?"""

_REQUEUE = f"""\
scontrol show job "$SLURM_JOB_ID" | grep -q PreemptTime=2 && notice=yes
if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then # and not cancelled by its user
  case $code,$notice in {_SAVED},* | {_UNSAVED},* | [1-9]*,yes) scontrol requeue "$SLURM_JOB_ID" ;; esac
fi"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmCluster:
    """The cluster's side of a job: names that a job file does not have; None: the cluster's own default.

    Attributes:
        gpus_per_node: GPUs of one node.
        gpu_type: the cluster's name of the kind of GPU, as `sinfo -o %G` shows it.
        partition, account, qos: as for sbatch.
        options: more options of sbatch, as one would write them there.
    """

    gpus_per_node: int = GPUS_PER_NODE
    gpu_type: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    options: tuple[str, ...] = ()


def sbatch_script(spec: JobSpec, cluster: SlurmCluster) -> str:
    """Return the text of the batch script that runs a job.

    Args:
        spec: the job.
        cluster: the cluster's names.

    Raises:
        SpecError: a value that Slurm cannot express.
    """
    for message, hint in _misfits(spec, cluster):
        raise SpecError(message, hint=hint)
    per_node = min(spec.gpus, cluster.gpus_per_node)
    launcher = launcher_of(spec.run)
    is_per_rank = spec.launch == "rank" or (spec.launch == "auto" and launcher is None)
    lines = [
        "#!/bin/bash",
        "# Written by `cordee render slurm`. It needs no Cordee server, but cordee in the environment of the job.",
        *(f"#SBATCH {option}" for option in _options(spec, cluster, per_node, is_per_rank)),
        *_environment(spec, spec.gpus // per_node),
        *_task(spec, per_node, is_per_rank),
        _STEP,
        *([_REQUEUE] if spec.on_preempt.then == "requeue" else []),
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _misfits(spec: JobSpec, cluster: SlurmCluster) -> Iterator[tuple[str, str]]:
    """Yield what Slurm cannot express, each with a hint."""
    per_node, within = cluster.gpus_per_node, spec.place.within
    if spec.service is not None:
        yield "a service has replicas and a gateway, which a batch job has not", "run it with `cordee serve`"
    if not spec.gpus:
        yield "a job without GPUs belongs to another partition, of which nothing is known here", "write its script"
        return
    if spec.gpu_milli < 1000:
        yield f"--gpus-per-node counts whole GPUs, not {spec.gpu_milli / 1000:g} of one", "write gpus: 1"
    if spec.gpus > per_node and spec.gpus % per_node:
        yield (
            f"{spec.gpus} GPUs are not whole nodes of {per_node}",
            f"use {spec.gpus - spec.gpus % per_node} GPUs, or another --gpus-per-node that divides {spec.gpus}",
        )
    if spec.sizes:
        sizes = ", ".join(map(str, spec.sizes))
        yield f"a batch job cannot run on {spec.gpus} GPUs and on {sizes}", "leave elastic out, or render each size"
    if min(spec.gpus, per_node) % (spec.place.unit or 1):
        yield (
            f"place.unit = {spec.place.unit} does not divide the GPUs of a node",
            f"use a unit that divides {per_node}",
        )
    if within in ("node", "island") and spec.gpus > per_node:
        yield f"place.within: {within} cannot hold {spec.gpus} GPUs on nodes of {per_node}", "leave it out"
    if spec.gpu is not None and cluster.gpu_type is None:
        yield (
            f"gpus: {spec.gpus}x{spec.gpu} names a kind of GPU, for which each cluster has its own name",
            f"`sinfo -o %G` shows it: --gpu-type {spec.gpu.lower()}; --gpu-type any leaves it to the partition",
        )
    if spec.capacity != "any" and cluster.partition is None:
        yield f"capacity: {spec.capacity} has no name in Slurm", "name the partition: --partition NAME"
    if (spec.tier, spec.priority, spec.queue) != ("standard", 0, "default") and not (cluster.partition or cluster.qos):
        yield (
            f"tier: {spec.tier}, priority: {spec.priority} and queue: {spec.queue} have no number in Slurm",
            "name the partition or the QOS that stands for them: --partition NAME or --qos NAME",
        )
    if spec.limit.cost_micro_usd is not None:
        yield "Slurm knows no prices: limit.cost cannot be kept", "use limit.time"
    if spec.limit.preemptions is not None:
        yield (
            f"limit.preemptions: {spec.limit.preemptions} cannot be kept: Slurm does not count preemptions",
            "leave it out, and name a QOS that is not preempted: --qos NAME",
        )


def _options(spec: JobSpec, cluster: SlurmCluster, per_node: int, is_per_rank: bool) -> Iterator[str]:
    """Yield the options of sbatch, each as a line of its own has it."""
    nodes = spec.gpus // per_node
    tasks = per_node if is_per_rank else 1
    kind = f"{cluster.gpu_type}:" if cluster.gpu_type not in (None, "any") else ""
    kind = f"{spec.mig}:" if spec.mig else kind  # Slurm's name of the type of a MIG instance
    requeue = "--requeue" if spec.on_preempt.then == "requeue" else "--no-requeue"
    yield f"--job-name={spec.name} {requeue} --open-mode=append --output=%x-%j.out"
    yield f"--nodes={nodes} --ntasks-per-node={tasks} --gpus-per-node={kind}{per_node}"
    yield f"--signal=B:TERM@{math.ceil(spec.on_preempt.notice_s) + NOTICE_MARGIN_S}"
    for name, value in (("partition", cluster.partition), ("account", cluster.account), ("qos", cluster.qos)):
        if value is not None:
            yield f"--{name}={value}"
    if spec.limit.time_s is not None:
        yield f"--time={_slurm_time(spec.limit.time_s)}"
    if spec.cpus is not None:
        yield f"--cpus-per-task={max(1, int(spec.cpus // (nodes * tasks)))}"
    if spec.memory_bytes is not None:
        yield f"--mem={math.ceil(spec.memory_bytes / nodes / (1 << 20))}M"
    if spec.place.within in ("rack", "block"):
        yield "--switches=1"
    if spec.cwd is not None:
        yield f"--chdir={shlex.quote(spec.cwd)}"
    yield from cluster.options


def _slurm_time(seconds: float) -> str:
    """Return a time limit as sbatch reads it, in whole minutes.

    >>> _slurm_time(47 * 3600), _slurm_time(90)
    ('1-23:00:00', '0-00:02:00')
    """
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 1440}-{minutes % 1440 // 60:02}:{minutes % 60:02}:00"


def _environment(spec: JobSpec, nodes: int) -> Iterator[str]:
    """Yield the lines that set the environment of all ranks."""
    threads = 1 if spec.cpus is None else max(1, int(spec.cpus // spec.gpus))
    values = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",  # keeps the last lines of a killed rank
        "CORDEE_GRACE_S": f"{spec.on_preempt.notice_s:g}",
        "CORDEE_HANG_REPORT_S": f"{spec.on_hang.report_after_s:g}",
    }
    if spec.on_hang.restart_after_s is not None:
        values["CORDEE_HANG_RESTART_S"] = f"{spec.on_hang.restart_after_s:g}"
    values |= telemetry_env(spec.model_dump(include={"on_spike", "track"}))
    if spec.model is not None and spec.model.layout is not None:
        values["CORDEE_LAYOUT"] = spec.model.layout
    checkpoint = spec.checkpoint
    if checkpoint.to is not None:
        values["CORDEE_CHECKPOINT_EVERY"] = _seconds(checkpoint.every_s)
        values["CORDEE_CHECKPOINT_RAM"] = _seconds(checkpoint.ram_s)
        values["CORDEE_CHECKPOINT_KEEP"] = str(checkpoint.keep)
        levels = (re.fullmatch(r"\s*(.*?)(\s+every\s+\S+)?\s*", each) for each in checkpoint.to.split(","))
        places = [_from_here(f"{each[1].rstrip('/')}/{spec.name}", each[2] or "") for each in levels if each]
        yield f"export CORDEE_CHECKPOINT_TO={','.join(places)} # on storage that all nodes see"
        if checkpoint.base is not None:
            yield f"export CORDEE_CHECKPOINT_BASE={_from_here(checkpoint.base)}"
    for name, value in (values | spec.env).items():
        yield f"export {name}={shlex.quote(value)}"
    for name in spec.secrets:
        yield f': "${{{name}:?is a secret of this job: set it where you call sbatch}}"'
    if nodes > 1:
        yield 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    else:
        yield "export MASTER_ADDR=127.0.0.1"
    if spec.cpus is not None:
        yield "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # which srun takes from sbatch only before 22.05"
    yield "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))"


def _from_here(place: str, often: str = "") -> str:
    """Return a destination as a word of the shell; a relative one begins at the folder in which the script runs."""
    if place.startswith("~/"):
        return f"~/{shlex.quote(place[2:] + often)}"
    here = "" if place.startswith("/") or "://" in place else '"$PWD"/'
    return here + shlex.quote(place + often)


def _task(spec: JobSpec, per_node: int, is_per_rank: bool) -> Iterator[str]:
    """Yield the lines of the shell function that srun starts: one a rank, or one a node for a launcher of ranks."""
    yield f"task() {{ # one for each {'rank' if is_per_rank else 'node'}"
    yield "  notice=; trap 'notice=yes' TERM"
    yield "  export NODE_RANK=$SLURM_NODEID NNODES=$SLURM_NNODES"
    if is_per_rank:
        yield (
            "  export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID "
            f"LOCAL_WORLD_SIZE={per_node}"
        )
    else:
        yield "  # torchrun takes the default of each of its options from PET_<OPTION>."
        yield f"  export PET_NNODES=$NNODES PET_NODE_RANK=$NODE_RANK PET_NPROC_PER_NODE={per_node}"
        yield "  export PET_MASTER_ADDR=$MASTER_ADDR PET_MASTER_PORT=$MASTER_PORT"
        # Else it kills its ranks 30 s after the notice.
        yield f"  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={math.ceil(spec.on_preempt.notice_s)}"
    yield "  ( trap : TERM # Slurm signals shells too; with a trap, one waits for its command"
    yield spec.run if isinstance(spec.run, str) else shlex.join(spec.run)
    yield "  )"
    yield _END_OF_TASK


def _seconds(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
