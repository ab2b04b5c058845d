"""Facts that an agent reports about its node: place, capacity and price, CPU and memory, software, and its GPUs.

Labels from the agent's own settings come before those in the machine's node file, and these before the cloud's.
"""

import logging
import os
import platform
from collections.abc import Container, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import cordee
from cordee.agent.gpus import Devices
from cordee.agent.mig import MODES
from cordee.agent.nvlink import FABRIC_GPUS
from cordee.errors import InputError
from cordee.events import NO_PRICE, Capacity, HeldSet, Node
from cordee.hardware.labels import check_labels, domain_of, parse_node_file, price_of
from cordee.telemetry import host

NODE_FILE = Path("/etc/cordee/node.labels")

_log = logging.getLogger("cordee.agent")


class Facts:
    """The facts of one node.

    Args:
        node: the node's name.
        devices: the node's GPUs or slots.
        labels: by key, as the agent's settings state them.

    Attributes:
        devices: its GPUs or slots.
        problem: why none of them can be leased, whatever their own state; "" if nothing is in the way.
        data: the datasets in its cache.
        gives_at: where other nodes get pieces of them.
    """

    def __init__(self, node: str, devices: Devices, labels: Mapping[str, str]) -> None:
        self.devices, self.problem = devices, ""
        self._labels = _file_labels() | _checked(labels, "the agent's settings")
        devices.mig_mode = next((mode for mode in MODES if mode == self._labels.get("mig")), devices.mig_mode)
        self._cloud: Mapping[str, str] = {}
        self._cpu_milli, self._memory_bytes = host.cpu_milli(), host.memory_bytes()
        self._bare = Node(
            name=node, epoch=0, gpu_name=devices.gpu_name, gpus=devices.count, software=tuple(_software(devices))
        )
        self._seen: Node | None = None
        self.data: tuple[HeldSet, ...] = ()
        self.gives_at = ""

    def learn(self, cloud: Mapping[str, str]) -> None:
        """Take in the labels that the cloud states."""
        self._cloud = _checked(cloud, "the cloud's metadata")

    def changed(self, epoch: int, ours: Container[int]) -> Node | None:
        """Return the node if it is new or has changed; `ours` are the pids of the processes of its agent."""
        before, self._seen = self._seen, replace(self._node(ours), epoch=epoch)
        return None if before == self._seen else self._seen

    def _node(self, ours: Container[int]) -> Node:
        fabric = {"island": self.devices.fabric} if self.devices.fabric else {}
        labels = {**fabric, **self._cloud, **self._labels}
        unavailable = self.devices.look(ours)
        if self.problem:
            unavailable = dict.fromkeys(range(self.devices.count), self.problem) | unavailable
        price = labels.get("price")
        return replace(
            self._bare,
            capacity=Capacity(labels.get("capacity", Capacity.ON_DEMAND)),
            micro_usd_per_gpu_hour=0 if price is None else price_of(price),
            price_source=NO_PRICE if price is None else "the node's label",
            domain=domain_of(labels, self._bare.name),
            island_gpus=self._island_gpus(labels),
            unavailable=tuple(unavailable),
            unavailable_why=tuple(unavailable.values()),
            cpu_milli=self._cpu_milli,
            memory_bytes=self._memory_bytes,
            mig=self.devices.mig(),
            data=self.data,
            gives_at=self.gives_at,
        )

    def _island_gpus(self, labels: Mapping[str, str]) -> int:
        """Return the GPUs of an island: more than the node's where an island is named, since that one spans nodes."""
        named = int(labels.get("island_gpus", 0))
        return max(named or FABRIC_GPUS, self._bare.gpus + 1) if "island" in labels else named or self.devices.islands


def _checked(labels: Mapping[str, str], where: object) -> dict[str, str]:
    """Return the labels, none if one is wrong: that is only logged, so that the agent still runs."""
    try:
        check_labels(labels)
        return dict(labels)
    except InputError as error:
        _log.error("the labels in %s are not used: %s; %s", where, error, error.hint)
        return {}


def _file_labels() -> dict[str, str]:
    """Return the labels of the machine's node file."""
    path = Path(os.environ.get("CORDEE_NODE_FILE") or NODE_FILE)
    try:
        return parse_node_file(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, InputError) as error:
        _log.error("the labels in %s are not used: %s", path, error)
        return {}


def _software(devices: Devices) -> list[str]:
    found = [f"cordee {cordee.__version__}", f"python {platform.python_version()}"]
    try:
        found.append(f"torch {version('torch')}")
    except PackageNotFoundError:
        pass
    return [*found, f"driver {devices.driver}"] if devices.driver else found
