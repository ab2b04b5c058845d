"""Ray's driver against a real cluster: what it reserves, what it starts, and what survives the death of each part."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'cordee[ray]'")

from cordee.client import Client
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    CheckpointCommitted,
    JobEnded,
    NodeDown,
    NodeReclaimed,
    RanksStarted,
    Restored,
)
from cordee.ids import JobId
from cordee.ids import job_id as new_id
from ray_home import RayHome, until
from ray_world import RayWorld

# It stands in for an agent: it takes the folder's lock and writes down what it was given.
AGENT = """
import fcntl, json, os, sys, time
folder = sys.argv[1]
lock = open(folder + "/lock", "w")
given = {"nice": os.nice(0), "parent": os.getppid(), "pid": os.getpid(), "environ": dict(os.environ),
         "oom_score_adj": open("/proc/self/oom_score_adj").read().strip()}
open(folder + "/given.json", "w").write(json.dumps(given))
fcntl.flock(lock, fcntl.LOCK_EX)
time.sleep(3600)
"""
PATIENT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}


class DriverWorld:
    """A driver's process, and the facts that it reports."""

    def __init__(self, world: RayWorld) -> None:
        self._folder = world.folder
        with (world.folder / "driver.log").open("ab") as errors:
            self.process = self._spawn(world.address, errors)
        self._facts: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _spawn(self, address: str, errors: BinaryIO) -> subprocess.Popen[str]:
        argv = [sys.executable, "-W", "ignore", "-m", "cordee.control.engines.ray_driver"]
        return subprocess.Popen(
            [*argv, "--address", address, "--namespace", "test"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            bufsize=1,
        )

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._facts.put(json.loads(line))
        self._facts.put(None)

    def say(self, **command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")

    def next(self, name: str, timeout_s: float = 60.0) -> Any:
        """Return the next fact of this name; the others are dropped."""
        deadline = time.monotonic() + timeout_s
        while (fact := self._facts.get(timeout=max(0.01, deadline - time.monotonic()))) is not None:
            if name in fact:
                return fact[name]
        raise AssertionError(f"the driver ended: {(self._folder / 'driver.log').read_text()[-2000:]}")

    def nodes(self, names: set[str]) -> dict[str, str]:
        """Wait until just these nodes have CPUs; return their ids by name."""
        while True:
            found = {node["name"]: node["id"] for node in self.next("nodes") if node["cpus"]}
            if found.keys() == names:
                return found

    def start(self, name: str, node_id: str, args: tuple[str, ...] = ("-c", AGENT, "{folder}")) -> None:
        folder = str(self._folder / "agents" / name)
        hold = {"id": node_id, "resources": {"CPU": 2}}
        self.say(start=hold | {"folder": folder, "config": {"node": name}, "args": args})

    def started(self, count: int) -> list[dict[str, Any]]:
        return [self.next("started") for _ in range(count)]

    def end(self, *, kill: bool = False) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        if kill:
            self.process.kill()
        self.process.stdin.close()
        self.process.wait(30)
        self._reader.join()
        self.process.stdout.close()


def given(world: RayWorld, name: str) -> dict[str, Any]:
    return dict(json.loads((world.folder / "agents" / name / "given.json").read_text()))


@contextlib.contextmanager
def cluster(
    names: tuple[str, ...], settings: dict[str, str], *, port: int | None = None, head_options: str = ""
) -> Iterator[tuple[RayWorld, Callable[[], DriverWorld]]]:
    """Start a cluster; yield it, and a function that starts a driver."""
    with contextlib.ExitStack() as stack:
        # A short path: it holds Unix sockets.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cordee-", ignore_cleanup_errors=True))
        world = RayWorld(Path(folder), settings, port)
        stack.callback(world.stop)
        world.start_head(head_options)
        for name in names:
            world.start_node(name)

        def connect() -> DriverWorld:
            driver = DriverWorld(world)
            stack.callback(driver.end, kill=True)
            return driver

        yield world, connect


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_an_agent_inherits_nothing_of_its_ray_worker_and_outlives_driver_and_raylet() -> None:
    with cluster(("n1", "n2"), PATIENT) as (world, connect):
        driver = connect()
        ids = driver.nodes({"n1", "n2"})
        driver.start("n1", ids["n1"])
        (fact,) = driver.started(1)
        facts = given(world, "n1")
        assert fact["started"] and fact["nice"] == facts["nice"] == 0
        assert facts["oom_score_adj"] == "0"
        assert facts["parent"] == 1
        assert not [name for name in facts["environ"] if name.startswith("RAY_") or name == "OMP_NUM_THREADS"]
        # The next driver finds its group and its agent.
        driver.end()
        again = connect()
        again.nodes({"n1", "n2"})
        again.start("n1", ids["n1"])
        assert again.next("started")["started"] is False
        # An agent that cannot start: the message has its last words.
        again.start("n2", ids["n2"], ("-m", "cordee.no_such_module"))
        assert "No module named cordee.no_such_module" in again.next("failed")["why"]
        world.raylet("n1").kill()
        assert again.next("gone")["id"] == ids["n1"]
        assert is_running(facts["pid"])


def test_rays_own_job_and_ours_never_have_the_same_slots() -> None:
    import ray

    class Holder:
        def here(self) -> bool:
            return True

    with cluster(("n1",), PATIENT) as (world, connect):
        ray.init(address=world.address, log_to_driver=False, logging_level="ERROR")
        try:
            holder = ray.remote(num_cpus=1)(Holder).remote()
            ray.get(holder.here.remote(), timeout=60)
            driver = connect()
            ids = driver.nodes({"n1"})
            driver.start("n1", ids["n1"])
            assert driver.next("waiting") == {"id": ids["n1"]}
            ray.kill(holder)
            assert driver.next("reserved") == {"id": ids["n1"]}
            assert driver.next("started")["started"]
            late = ray.remote(num_cpus=1)(Holder).remote()
            assert ray.wait([late.here.remote()], timeout=3)[0] == []
            driver.say(leave=True)
            driver.end()
            ray.get(late.here.remote(), timeout=60)
        finally:
            ray.shutdown()


def test_a_head_with_rocksdb_dies_and_comes_back_with_all_that_it_knew(tmp_path: Path) -> None:
    persistent = PATIENT | {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tmp_path)}
    with cluster(("n1", "n2"), persistent) as (world, connect):
        driver = connect()
        ids = driver.nodes({"n1", "n2"})
        for name, node_id in ids.items():
            driver.start(name, node_id)
        driver.started(2)
        pids = [given(world, name)["pid"] for name in ids]
        world.kill_gcs()
        world.start_head()
        driver.end(kill=True)
        again = connect()
        assert again.nodes({"n1", "n2"}) == ids
        for name, node_id in ids.items():
            again.start(name, node_id)
        assert [fact["started"] for fact in again.started(2)] == [False, False]
        assert [given(world, name)["pid"] for name in ids] == pids
        assert all(is_running(pid) for pid in pids)


def test_a_head_without_persistence_loses_its_nodes_and_groups_and_no_agent() -> None:
    with cluster(("n1",), PATIENT) as (world, connect):
        driver = connect()
        ids = driver.nodes({"n1"})
        driver.start("n1", ids["n1"])
        driver.started(1)
        pid = given(world, "n1")["pid"]
        raylet = world.raylet("n1")
        world.kill_gcs()
        world.start_head()
        driver.end(kill=True)
        raylet.wait(120)  # it is told that the cluster is another one, and ends
        assert is_running(pid)
        again = connect()
        again.next("cluster")
        world.start_node("n1")
        new = again.nodes({"n1"})
        assert new != ids
        again.start("n1", new["n1"])
        assert again.next("started")["started"] is False
        assert given(world, "n1")["pid"] == pid


def test_a_drain_with_a_deadline_is_reported() -> None:
    with cluster(("n1",), PATIENT) as (world, connect):
        driver = connect()
        ids = driver.nodes({"n1"})
        driver.say(hold={"id": ids["n1"], "resources": {"CPU": 2}})  # Ray ends an unused node at once
        assert driver.next("reserved") == {"id": ids["n1"]}
        before_ms = time.time() * 1000
        drain = ["drain-node", "--address", world.address, "--node-id", ids["n1"]]
        drain += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        world.ray([*drain, "--deadline-remaining-seconds", "600"])
        while not (deadlines := [node["drain_by_ms"] for node in driver.next("nodes") if node["drain_by_ms"]]):
            pass
        assert 590e3 < deadlines[0] - before_ms < 630e3


def test_the_autoscaler_adds_nodes_that_are_wanted_and_takes_those_that_are_released(tmp_path: Path) -> None:
    empty = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
    empty += ("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files")
    config: dict[str, object] = {key: [] for key in (*empty, "rsync_exclude", "rsync_filter")}
    config |= {"auth": {}, "docker": {}, "file_mounts": {}, "file_mounts_sync_continuously": False}
    options = {"type": "fake_multinode", "use_node_id_as_ip": True, "disable_node_updaters": True}
    kinds = {"ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}}
    kinds["cpu"] = {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 2}
    config |= {"cluster_name": "fake", "max_workers": 2, "upscaling_speed": 1.0, "idle_timeout_minutes": 0.1}
    config |= {"provider": options | {"disable_launch_config_check": True}, "available_node_types": kinds}
    (tmp_path / "cluster.json").write_text(json.dumps(config | {"head_node_type": "ray.head.default"}))
    settings = PATIENT | {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
    # Ray's fake provider dials its default port.
    with cluster((), settings, port=6379, head_options=f"--autoscaling-config={tmp_path}/cluster.json") as (_, connect):
        driver = connect()
        driver.say(want=[{"CPU": 1}] * 4)
        while len(nodes := [node for node in driver.next("nodes") if node["cpus"]]) < 2:
            pass
        kept, other = (str(node["id"]) for node in nodes)
        driver.say(hold={"id": kept, "resources": {"CPU": 2}})
        assert driver.next("reserved") == {"id": kept}
        driver.say(want=[])
        assert driver.next("gone")["id"] == other
        driver.say(release=kept)
        assert driver.next("gone")["id"] == kept


# -- a server on it -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def home(
    cpus: dict[str, int], settings: dict[str, str], lease: str | None = None, *, outside: bool = False
) -> Iterator[RayHome]:
    with tempfile.TemporaryDirectory(prefix="cordee-", ignore_cleanup_errors=True) as folder:
        world = RayHome(Path(folder), settings, lease, outside=outside)
        try:
            world.start(cpus)
            yield world
        finally:
            world.close()


def test_a_head_that_dies_and_comes_back_costs_no_rank_and_no_start(tmp_path: Path) -> None:
    persistent = PATIENT | {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tmp_path)}
    with home({"n1": 2, "n2": 2, "n3": 2}, persistent) as world:
        job = world.run(gpus=4)
        pids = [rank["pid"] for rank in world.ranks(job)]
        world.ray.kill_gcs()
        # Without a head: agents do not need Ray to start ranks.
        other = world.run(gpus=2)
        world.ray.start_head()
        assert all(is_running(pid) for pid in pids)
        assert len(world.events(AttemptPlaced)) == 2
        for each in (job, other):
            (world.out(each) / "end").touch()
        until(lambda: len(world.events(JobEnded)) == 2, world.logs)


def test_a_server_that_is_killed_finds_its_nodes_again(tmp_path: Path) -> None:
    with home({"n1": 2, "n2": 2}, PATIENT) as world:
        job = world.run(gpus=4)
        pids = [rank["pid"] for rank in world.ranks(job)]
        os.kill(world.server, signal.SIGKILL)
        os.waitpid(world.server, 0)
        world.up()
        until(lambda: all(node.up for node in world.nodes()), world.logs)
        (world.out(job) / "end").touch()
        until(lambda: world.events(JobEnded), world.logs)
        assert len(world.events(AttemptPlaced)) == 1
        assert not any(is_running(pid) for pid in pids)
        world.down()


def test_a_server_outside_of_the_cluster_uses_ray_client() -> None:
    pytest.importorskip("grpc", reason="Ray Client is not installed: pip install 'ray[client]'")
    with home({"n1": 2, "n2": 1}, PATIENT, outside=True) as world:
        job = world.run(gpus=3)
        assert {event.node for event in world.events(RanksStarted)} == {"n1", "n2"}
        os.kill(world.server, signal.SIGKILL)
        os.waitpid(world.server, 0)
        world.up()
        until(lambda: all(node.up for node in world.nodes()), world.logs)
        (world.out(job) / "end").touch()
        until(lambda: world.events(JobEnded), world.logs)
        assert len(world.events(AttemptPlaced)) == 1
        world.down()


def test_an_agent_that_dies_is_started_again_and_its_gang_too(tmp_path: Path) -> None:
    with home({"n1": 2, "n2": 2}, PATIENT) as world:
        job = world.run(gpus=4)
        (agent,) = (each for each in world.ray.processes("n2") if "cordee.agent" in each.cmdline())
        agent.kill()
        began_s = time.monotonic()
        until(lambda: len(world.events(AttemptPlaced)) == 2, world.logs)
        print(f"a gang starts again {time.monotonic() - began_s:.1f} s after the death of an agent")
        until(lambda: [event for event in world.events(RanksStarted) if event.epoch == 2], world.logs)
        (world.out(job) / "end").touch()
        until(lambda: world.events(JobEnded), world.logs)


def test_a_drain_of_ray_reclaims_the_node(tmp_path: Path) -> None:
    with home({"n1": 2, "n2": 2}, PATIENT) as world:
        import ray

        world.run(gpus=2)
        busy = world.events(AttemptPlaced)[0].leases[0].node
        ray.init(address=world.ray.address, log_to_driver=False, logging_level="ERROR")
        try:
            node_id = next(node["NodeID"] for node in ray.nodes() if node["NodeName"] == busy)
        finally:
            ray.shutdown()
        drain = ["drain-node", "--address", world.ray.address, "--node-id", node_id]
        drain += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        world.ray.ray([*drain, "--deadline-remaining-seconds", "60"])
        until(lambda: len(world.events(AttemptPlaced)) == 2, world.logs)
        assert world.events(AttemptPlaced)[1].leases[0].node != busy
        assert [event.node for event in world.events(NodeReclaimed)] == [busy]


def submit(world: RayHome, name: str, allowed: int) -> JobId:
    """Submit a gang of 4 ranks that trains 12 steps, and saves every 4."""
    script = Path(__file__).parent.parent / "faults" / "gang_script.py"
    job_id = new_id(name, os.urandom(6))
    world.out(job_id).mkdir()
    allow(world, job_id, allowed)
    run = [sys.executable, str(script), str(world.out(job_id)), "12"]
    spec = {"name": name, "run": run, "gpus": 4, "tier": "preemptible", "cwd": str(world.folder)}
    spec |= {"checkpoint": {"to": str(world.folder / "checkpoints")}}
    with Client(world.home) as client:
        client.submit(spec | {"env": {"RES_OPTIONS": "timeout:1 attempts:1"}}, job_id=job_id)
    return job_id


def allow(world: RayHome, job_id: JobId, steps: int) -> None:
    new = world.out(job_id) / "allowed.new"
    new.write_text(str(steps))
    new.replace(world.out(job_id) / "allowed")


def until_step(world: RayHome, job_id: JobId, step: int) -> None:
    diary = world.out(job_id) / "diary0.jsonl"
    until(lambda: diary.exists() and f'"step": {step}' in diary.read_text(), world.logs)


def test_a_node_that_is_killed_ends_its_lease_and_its_gang_resumes_elsewhere() -> None:
    with home({"n1": 2, "n2": 2, "n3": 2}, PATIENT, lease="4s") as world:
        gang = submit(world, "gang", 6)
        until_step(world, gang, 6)
        until(lambda: world.events(CheckpointCommitted), world.logs)
        killed = world.events(AttemptPlaced)[0].leases[1].node
        world.ray.kill(killed)
        dead_s = time.monotonic()
        until(lambda: len(world.events(AttemptPlaced)) == 2, world.logs)
        print(
            f"a gang is placed again {time.monotonic() - dead_s:.1f} s after the death of a node, with a lease of 4 s"
        )
        assert any(event.node == killed and "its lease is over" in event.why for event in world.events(NodeDown))
        assert killed not in {lease.node for lease in world.events(AttemptPlaced)[1].leases}
        allow(world, gang, 99)
        until(lambda: world.events(JobEnded), world.logs)
        assert [(event.epoch, event.step) for event in world.events(Restored) if event.epoch == 2] == [(2, 4)]


def test_a_gang_that_is_drained_and_resumed_over_nodes_ends_with_the_same_bits() -> None:
    with home({"n1": 2, "n2": 1, "n3": 2}, PATIENT) as world:

        def ended(job_id: JobId) -> bool:
            return any(event.job_id == job_id for event in world.events(JobEnded))

        alone = submit(world, "alone", 99)
        until(lambda: ended(alone), world.logs)
        gang = submit(world, "gang", 6)
        until_step(world, gang, 6)
        with Client(world.home) as client:
            client.drain("n1", why="test")
        allow(world, gang, 99)
        until(lambda: any(event.job_id == gang for event in world.events(AttemptEnded)), world.logs)
        with Client(world.home) as client:
            client.uncordon("n1")
        until(lambda: ended(gang), world.logs)
        assert max(event.epoch for event in world.events(AttemptPlaced) if event.job_id == gang) == 2
        for rank in range(4):
            name = f"weights{rank}"
            assert (world.out(gang) / name).read_bytes() == (world.out(alone) / name).read_bytes()
