"""Preflights: a node's examination before the ranks of an attempt start, where the job says `preflight: full`.

Its GPUs compute a product and the ranks an all-reduce (`train/probe.py`, under the job's own interpreter, before the
job's ranks and at their rendezvous); the host and the checkpoint's destination are looked at. A thread for each rank
group waits for that. What is wrong with a GPU, or with the node, keeps it from further work; what may be the fault of
another node, of the network or of the destination only ends the attempt.
"""

import json
import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cordee.agent.clock import monotonic_s
from cordee.agent.findings import Finding, host_findings, write_speed
from cordee.agent.gpus import Devices
from cordee.agent.interpreters import interpreter_path
from cordee.agent.launch import Assignment, LaunchError, prepare
from cordee.agent.mig import MigError
from cordee.agent.probes import graded_link, graded_product
from cordee.errors import CatalogueError, CordeeError
from cordee.hardware.catalog import Gpu
from cordee.hardware.load import load_catalogue
from cordee.storage.destination import is_remote, level_urls
from cordee.storage.files import folder_of
from cordee.units import format_bytes

FULL = "full"
LIMIT_S = 120.0
"""The time that the work may take, start of the interpreter included; its own waits are shorter."""

WRITE_S = 64.0
"""The time for the destination: what is written there at a megabyte a second."""

PROBE = Path(__file__).resolve().parent.parent / "train" / "probe.py"

_log = logging.getLogger("cordee.agent")
_STEPS = {"flop_per_s": "product", "local_bytes_per_s": "all-reduce on this node", "bytes_per_s": "all-reduce"}


@dataclass(slots=True)
class Preflight:
    """The preflight of one rank group, and what it has found.

    Attributes:
        order: the order for the group.
        gpus: why GPUs must not be used, by their index on the node.
        node: why nothing on the node should be used; "" if nothing is in the way.
        why: why the ranks cannot start now, whoever is at fault.
        says: figures and warnings, as one line.
    """

    order: Assignment
    gpus: dict[int, str] = field(default_factory=dict)
    node: str = ""
    why: str = ""
    says: str = ""

    @property
    def problem(self) -> str:
        """Return why the ranks must not start; "" if they may."""
        sick = "; ".join(f"GPU {index}: {why}" for index, why in self.gpus.items())
        return "; ".join(each for each in (sick, self.node, self.why) if each)

    @property
    def is_nodes_fault(self) -> bool:
        """Return whether the node is known to be at fault."""
        return bool(self.gpus or self.node)


class Preflights:
    """The preflights of one node.

    Args:
        node: its name.
        devices: its GPUs or slots.
        gpu_files: those of Cordee's home, with own GPUs and calibrated ones.
    """

    def __init__(self, node: str, devices: Devices, gpu_files: Sequence[Path] = ()) -> None:
        self._node, self._devices, self._gpu_files = node, devices, gpu_files
        self._begun: dict[str, tuple[Preflight, float]] = {}
        self._done: queue.SimpleQueue[Preflight] = queue.SimpleQueue()

    @staticmethod
    def wanted(spec: Mapping[str, Any]) -> bool:
        """Return whether a job wants more than a look at the driver's counters."""
        return spec.get("preflight") == FULL

    def begin(self, order: Assignment, folder: Path, base_env: Mapping[str, str]) -> None:
        """Begin the preflight of a rank group; an order that cannot be launched is left to its launch."""
        preflight = Preflight(order)
        self._begun[order.tag] = preflight, monotonic_s() + LIMIT_S + WRITE_S
        try:
            lease = order.leases[order.node_rank]
            launch = prepare(
                order,
                folder=folder,
                base_env=base_env,
                secrets={},
                real_gpus=self._devices.real,
                gpus=self._devices.count,
                visible=self._devices.visible(lease),
            )
        except (LaunchError, MigError):
            self._done.put(preflight)
            return
        env, gpu = launch.processes[0].env, self._gpu() if self._devices.real else None
        preflight.gpus |= self._devices.crowded(order.gpus) if not lease.has_part else {}
        args = (preflight, folder, dict(env), gpu)
        threading.Thread(target=self._run, args=args, name="cordee-preflight", daemon=True).start()

    def ended(self) -> Iterator[Preflight]:
        """Yield the preflights that have ended since the last call, or have taken too long."""
        while not self._done.empty():
            found = self._done.get()
            if self._begun.pop(found.order.tag, None) is not None:  # else it has come too late
                yield found
        late = [tag for tag, (_, until_s) in self._begun.items() if monotonic_s() >= until_s]
        for tag in late:
            order = self._begun.pop(tag)[0].order
            yield Preflight(order, why="the preflight stood still: a disk or a destination does not answer")

    def _gpu(self) -> Gpu | None:
        try:
            return load_catalogue(gpu_files=self._gpu_files).find_gpu(self._devices.gpu_name)
        except CatalogueError:
            return None

    # -- on a thread of its own ------------------------------------------------------------------------------

    def _run(self, preflight: Preflight, folder: Path, env: dict[str, str], gpu: Gpu | None) -> None:
        try:
            self._host(preflight, folder, env.get("CORDEE_CHECKPOINT_TO"))
            lease = preflight.order.leases[preflight.order.node_rank]
            if preflight.order.gpus and not lease.has_part and not preflight.problem:
                self._work(preflight, env, gpu, folder)
        except Exception as error:  # an unforeseen error must not leave the attempt without an end
            _log.exception("%s: the preflight failed", preflight.order.tag)
            preflight.says = f"it failed: {error!r}"
        self._done.put(preflight)

    def _host(self, preflight: Preflight, folder: Path, to: str | None) -> None:
        """Look at limits, shared memory, disk, clock, and the destination of checkpoints."""
        notes = [preflight.says] if preflight.says else []
        for found in host_findings(folder):
            if found.state == "bad":
                preflight.node = "; ".join(filter(None, (preflight.node, _line(found))))
            elif found.state == "warn":
                notes.append(_line(found))
        for url in level_urls(to) if to else ():
            found = _destination(url)
            if found.state == "bad":
                preflight.why = _line(found)
            elif found.state == "warn" or not is_remote(url):
                notes.append(_line(found))
        preflight.says = "; ".join(notes)

    def _work(self, preflight: Preflight, env: dict[str, str], gpu: Gpu | None, folder: Path) -> None:
        """Let the GPUs compute a product, and the ranks an all-reduce; grade what they reach."""
        order = preflight.order
        interpreter = interpreter_path(order.spec, env.get("PATH", "")) or sys.executable
        of_ranks = {"first": order.first_rank, "world": order.world_size, "local": order.local_size}
        meeting = {"address": order.master_addr, "port": order.master_port}
        gpus = order.local_size if self._devices.real else 0
        options = [f"--{name}={value}" for name, value in ({"gpus": gpus} | of_ranks | meeting).items()]
        errors = folder / "preflight.log"
        with errors.open("wb") as log:
            argv = [interpreter, str(PROBE), "ranks", *options]
            try:
                # The process has the attempt's tag, so whoever ends the group ends it too.
                with subprocess.Popen(
                    argv, env=env, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                    start_new_session=True,
                ) as process:  # fmt: skip
                    text = _output(process)
            except OSError as error:
                preflight.says += f"; no product: {interpreter} cannot be started: {error}"
                return
        if text is None:
            preflight.node = f"a product and an all-reduce did not end within {LIMIT_S:.0f} s"
            return
        ranks = _ranks(text)
        if ranks is None or len(ranks) != order.local_size:
            said = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
            preflight.says += f"; no product, no all-reduce: {interpreter}: {''.join(said[-1:]).strip()[:160]}"
            return
        _judge(preflight, ranks, gpu, real=self._devices.real)


def _output(process: "subprocess.Popen[bytes]") -> str | None:
    """Return what a process prints; None: it was ended, since it took too long."""
    try:
        return process.communicate(timeout=LIMIT_S)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None


def _ranks(text: str) -> list[dict[str, Any]] | None:
    """Return what the ranks have found; None: the probe did not come to its end."""
    for line in reversed(text.splitlines()):
        if line.startswith('{"ranks"'):
            found: list[dict[str, Any]] = json.loads(line)["ranks"]
            return found
    return None


def _judge(preflight: Preflight, ranks: Sequence[Mapping[str, Any]], gpu: Gpu | None, *, real: bool) -> None:
    """Say which GPU is at fault, or the node, or none; with the figures."""
    if real and not all(rank.get("cuda", True) for rank in ranks):
        preflight.says += "; no product, no all-reduce: the job's torch is not built with CUDA"
        return
    notes = [preflight.says] if preflight.says else []
    for index, rank in zip(preflight.order.gpus, ranks, strict=True):
        if "flop_per_s" not in rank:
            preflight.gpus[index] = f"its product failed: {rank.get('why', 'its process died')}"
        elif real and gpu is not None:
            found = graded_product(rank["flop_per_s"], gpu)
            if found.state == "bad":
                preflight.gpus[index] = _line(found)
            elif found.state == "warn":
                notes.append(f"GPU {index}: {_line(found)}")
    products = [rank["flop_per_s"] for rank in ranks if "flop_per_s" in rank]
    if products:
        unit, scale = ("TFLOP/s", 1e12) if real else ("GFLOP/s", 1e9)
        notes.append(f"product {min(products) / scale:.0f} {unit} or more")
    if not preflight.gpus:
        notes += _judge_links(preflight, ranks, gpu)
    preflight.says = "; ".join(notes)


def _judge_links(preflight: Preflight, ranks: Sequence[Mapping[str, Any]], gpu: Gpu | None) -> Iterator[str]:
    """Yield the figures of the all-reduces; one within the node that fails is the node's fault."""
    failed = next((rank for rank in ranks if "failed" in rank), None)
    if failed is not None:
        why = f"its {_STEPS[failed['failed']]} failed: {failed['why']}"
        if failed["failed"] == "local_bytes_per_s":
            preflight.node = why
        else:
            preflight.why = why.replace("its", "the", 1)
    for name, promised in (
        ("local_bytes_per_s", gpu and (gpu.link_bytes_per_s, gpu.link)),
        ("bytes_per_s", gpu and (gpu.network_bytes_per_s, "network")),
    ):
        speeds = [rank[name] for rank in ranks if name in rank]
        if not speeds:
            continue
        yield f"{_STEPS[name]} {format_bytes(min(speeds))}/s a rank"
        found = graded_link(min(speeds), *promised) if promised else None
        if found is not None and found.state == "bad" and name == "local_bytes_per_s":
            preflight.node = _line(found)
        elif found is not None and found.state != "ok":
            yield _line(found)


def _destination(url: str) -> Finding:
    """Return the finding of one storage level of a destination."""
    if not is_remote(url):
        folder = folder_of(url)
        while not folder.exists():
            folder = folder.parent
        return write_speed(folder)
    from cordee.storage.remote import RemoteBlobs  # only here: it needs an extra

    name = f"checkpoints to {url}"
    try:
        blobs = RemoteBlobs(url)
        began_s, data = monotonic_s(), b"\0" * (8 << 20)
        key = f".cordee-doctor-{id(blobs):x}"
        blobs.put(key, data)
        rate = len(data) / max(1e-6, monotonic_s() - began_s)
        blobs.delete(key)
    except CordeeError as error:
        return Finding(name, "bad", error.message)
    return Finding(name, "ok", f"{format_bytes(rate)}/s, {format_bytes(len(data))} written")


def _line(found: Finding) -> str:
    return f"{found.check} {found.figure}" + (f", expected {found.expected}" if found.expected else "")
