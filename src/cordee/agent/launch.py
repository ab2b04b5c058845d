"""The argv and the environment of each process of a rank group. Nothing is started here."""

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cordee.agent.process import NODE, TAG
from cordee.events import Lease
from cordee.reports import ReportScope
from cordee.storage.destination import absolute, below
from cordee.workload.launcher import PYTHON, commands_of, launcher_of
from cordee.workload.telemetry import telemetry_env

DEFAULT_GRACE_S = 30.0

# Variables of an outer launcher in the server's own environment must not reach a rank.
_NOT_INHERITED = re.compile(
    r"CORDEE_.*|TORCHELASTIC_.*|PET_.*|(LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE"
    r"|MASTER_(ADDR|PORT)|NNODES|ROLE_NAME|OMP_NUM_THREADS"
    # Of the allocation that an agent runs in: libraries take its tasks for the ranks.
    r"|SLURM_(?!CONF|CLUSTER_NAME|JOB_ID).*|SLURMD_.*"
)

# Where the agent was told to keep the cache of datasets, for all jobs of the node.
_OF_NODE = ("CORDEE_CACHE", "CORDEE_CACHE_LIMIT")


class LaunchError(Exception):
    """A rank group cannot be started; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The order for one rank group: the ranks of an attempt on one node."""

    job_id: str
    epoch: int
    node: str
    leases: tuple[Lease, ...]
    spec: dict[str, Any]
    master_addr: str
    master_port: int
    estimate: dict[str, Any] | None = None  # an `events.Estimate`, if the job was planned
    placed_us: int = 0  # by the server's clock

    def scope(self, rank: int) -> ReportScope:
        """Return the bounds of what a rank of the attempt may report."""
        return ReportScope(
            job_id=self.job_id, epoch=self.epoch, gpus=self.world_size, since_us=self.placed_us, rank=rank
        )

    @property
    def tag(self) -> str:
        """Tag of the attempt, in the environment of each of its processes."""
        return f"{self.job_id}.{self.epoch}"

    @property
    def gpus(self) -> tuple[int, ...]:
        """Indices of the attempt's GPUs on this node."""
        return self.leases[self.node_rank].gpus

    @property
    def node_rank(self) -> int:
        """Position of this node among the attempt's leases."""
        return next(i for i, lease in enumerate(self.leases) if lease.node == self.node)

    @property
    def first_rank(self) -> int:
        """Rank of this node's first GPU."""
        return sum(len(lease.gpus) for lease in self.leases[: self.node_rank])

    @property
    def world_size(self) -> int:
        """Number of ranks of the whole gang: its GPUs, or one without GPUs."""
        return max(1, sum(len(lease.gpus) for lease in self.leases))

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return max(1, len(self.gpus))

    @property
    def grace_s(self) -> float:
        """Seconds from notice to SIGKILL."""
        value = (self.spec.get("on_preempt") or {}).get("grace_s")
        return DEFAULT_GRACE_S if value is None else float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLaunch:
    """One process to start; `rank` is None if it is a launcher that starts the ranks itself."""

    rank: int | None
    log_name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroupLaunch:
    """All processes of a rank group, and a sentence that says how they are started."""

    cwd: str
    per_rank: bool
    says: str
    omp_num_threads: int
    processes: tuple[RankLaunch, ...]


def prepare(
    order: Assignment,
    *,
    folder: Path,
    base_env: Mapping[str, str],
    secrets: dict[str, str],
    real_gpus: bool,
    gpus: int,
    visible: str | None = None,
) -> RankGroupLaunch:
    """Return the processes of a rank group.

    Args:
        order: the order for the rank group.
        folder: the folder of the rank group, with its spool.
        base_env: the agent's own environment.
        secrets: values by name; they are stored only in the environment.
        real_gpus: whether the node has GPUs, not CPU slots.
        gpus: number of GPUs of the whole node, among which its cores are divided.
        visible: CUDA_VISIBLE_DEVICES; None: the indices of its GPUs.

    Raises:
        LaunchError: the folder, the program or the script does not exist, or the spec is invalid.
    """
    run = order.spec.get("run")
    if not run or not isinstance(run, str | list):
        raise LaunchError(f"the spec's `run` is {json.dumps(run)}, not a command")
    launcher = launcher_of(run)
    wanted = order.spec.get("launch") or "auto"
    per_rank = wanted == "rank" or (wanted == "auto" and launcher is None)
    cwd = str(Path(order.spec.get("cwd") or "~").expanduser())
    spec_env = {str(name): str(value) for name, value in (order.spec.get("env") or {}).items()}
    omp = int(spec_env.get("OMP_NUM_THREADS") or _threads(order, gpus))
    env = {name: value for name, value in base_env.items() if not _NOT_INHERITED.fullmatch(name)}
    env.setdefault("PYTHONUNBUFFERED", "1")  # keeps the last lines of a killed rank
    env |= _gpu_env(order.gpus, real_gpus, visible) | {"OMP_NUM_THREADS": str(omp)} | spec_env | secrets
    env |= {name: base_env[name] for name in _OF_NODE if name in base_env} | _group_env(order, folder, cwd)
    argv = ("/bin/sh", "-c", run) if isinstance(run, str) else tuple(str(word) for word in run)
    _check(run, cwd, env)
    n_local = order.local_size
    device = "GPU" if real_gpus else "slot"
    if not order.gpus:
        says = "one process, without a GPU" if per_rank else f"{launcher or 'the command'} on this node, without a GPU"
        start = _launcher(order, argv, env) if not per_rank else _rank(order, argv, env, 0)
        processes: tuple[RankLaunch, ...] = (start,)
    elif per_rank:
        says = f"one process per {device}: {n_local} on this node, {order.world_size} in the gang"
        processes = tuple(_rank(order, argv, env, local) for local in range(n_local))
    else:
        starter = launcher or "the command"
        says = f"one process on this node: {starter} starts the ranks of its {n_local} {device}s"
        processes = (_launcher(order, argv, env),)
    says += f" (launch: {wanted})"
    return RankGroupLaunch(cwd=cwd, per_rank=per_rank, says=says, omp_num_threads=omp, processes=processes)


def _threads(order: Assignment, gpus: int) -> int:
    """Return the threads of a process: its part of the node's cores; without a GPU the cores that its job asks for."""
    if not order.gpus:
        return max(1, math.floor(order.spec.get("cpus") or 1))
    lease = order.leases[order.node_rank]
    milli = 1000 if lease.instance is None else lease.milli  # several instances divide the cores of one GPU
    return max(1, (os.cpu_count() or 1) * milli // (1000 * max(1, gpus)))


def _check(run: str | Sequence[str], cwd: str, env: Mapping[str, str]) -> None:
    if not Path(cwd).is_dir():
        raise LaunchError(f"the job's folder {cwd} is not there")
    commands = commands_of(run)
    if len(commands) != 1:
        return  # an earlier command may create a file that a later one needs
    program, *rest = commands[0]
    on_path = shutil.which(program, path=env.get("PATH"))
    if isinstance(run, list) and on_path is None and not Path(cwd, program).exists():
        raise LaunchError(f"the program {program} is not there")
    if PYTHON.fullmatch(Path(program).name) and rest and not rest[0].startswith("-"):
        script = rest[0]
        if not any(char in script for char in "$`*?~") and not Path(cwd, script).exists():
            raise LaunchError(f"the script {script} is not in {cwd}")


def _gpu_env(gpus: Sequence[int], real: bool, visible: str | None) -> dict[str, str]:
    if not real:
        return {"CUDA_VISIBLE_DEVICES": ""}
    # NVML counts GPUs in PCI bus order; CUDA does so only with this variable.
    visible = ",".join(map(str, gpus)) if visible is None else visible
    return {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _group_env(order: Assignment, folder: Path, cwd: str) -> dict[str, str]:
    env = {
        TAG: order.tag,
        NODE: order.node,
        "CORDEE_JOB": order.job_id,
        "CORDEE_EPOCH": str(order.epoch),
        "CORDEE_SPOOL": str(folder / "spool"),
        "CORDEE_GRACE_S": f"{order.grace_s:g}",
        "CORDEE_PYTHON": sys.executable,  # it has this package, whatever the job's own interpreter is
        "CORDEE_CLOUD": "none",  # the agent polls the metadata service for all ranks
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(order.grace_s)),
        "MASTER_ADDR": order.master_addr,
        "MASTER_PORT": str(order.master_port),
        "NODE_RANK": str(order.node_rank),
        "NNODES": str(len(order.leases)),
    }
    if order.estimate:
        env["CORDEE_ESTIMATE"] = json.dumps(order.estimate)
        if order.estimate["layout"]:
            env["CORDEE_LAYOUT"] = order.estimate["layout"]
    on_hang = order.spec.get("on_hang") or {}
    for key, name in (("report_after_s", "CORDEE_HANG_REPORT_S"), ("restart_after_s", "CORDEE_HANG_RESTART_S")):
        if on_hang.get(key) is not None:
            env[name] = f"{on_hang[key]:g}"
    env |= telemetry_env(order.spec)
    checkpoint = order.spec.get("checkpoint") or {}
    if checkpoint.get("to"):
        env["CORDEE_CHECKPOINT_TO"] = below(absolute(str(checkpoint["to"]), cwd), order.job_id)
        every = checkpoint.get("every_s") or "auto"
        env["CORDEE_CHECKPOINT_EVERY"] = every if isinstance(every, str) else f"{every:g}"
        ram = checkpoint.get("ram_s") or "auto"
        env["CORDEE_CHECKPOINT_RAM"] = ram if isinstance(ram, str) else f"{ram:g}"
        if checkpoint.get("base"):
            env["CORDEE_CHECKPOINT_BASE"] = absolute(str(checkpoint["base"]), cwd)
        if checkpoint.get("keep") is not None:
            env["CORDEE_CHECKPOINT_KEEP"] = str(checkpoint["keep"])
    return env


def _rank(order: Assignment, argv: tuple[str, ...], env: Mapping[str, str], local: int) -> RankLaunch:
    rank = order.first_rank + local
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": str(order.world_size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(order.local_size),
    }
    return RankLaunch(rank=rank, log_name=f"rank{rank}.log", argv=argv, env={**env, **own})


def _launcher(order: Assignment, argv: tuple[str, ...], env: Mapping[str, str]) -> RankLaunch:
    # torchrun takes the default of each of its options from PET_<OPTION> (torch/distributed/argparse_util.py).
    own = {
        "PET_NNODES": str(len(order.leases)),
        "PET_NODE_RANK": str(order.node_rank),
        "PET_NPROC_PER_NODE": str(order.local_size),
        "PET_MASTER_ADDR": order.master_addr,
        "PET_MASTER_PORT": str(order.master_port),
    }
    return RankLaunch(rank=None, log_name="node.log", argv=argv, env={**env, **own})
