"""GPUs as NVML reports them; the driver is a stub in C, the binding and everything above it are real."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
from agent_world import World, python

from cordee.agent.gpus import discover, lock_file
from cordee.agent.wire import Shutdown
from cordee.control.executors.supervise import NodeConfig
from cordee.errors import MissingExtraError
from cordee.events import NodeUp, Outcome

NVML = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } proc;
static int gpus(void) { const char *n = getenv("STUB_GPUS"); return n ? atoi(n) : 3; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned f) { return 0; }
const char *nvmlErrorString(int e) { return "stub"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = gpus(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)(long)(i + 1); return 0; }
int nvmlDeviceGetName(void *h, char *b, unsigned n) {
  const char *odd = getenv("STUB_ODD");
  snprintf(b, n, odd && atol(odd) + 1 == (long)h ? "NVIDIA A10" : "NVIDIA H100 80GB HBM3"); return 0; }
int nvmlDeviceGetUUID(void *h, char *b, unsigned n) {
  snprintf(b, n, "GPU-stub-%s-%ld", getenv("STUB_ID"), (long)h - 1); return 0; }
/* The file holds lines "gpu pid". */
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *count, proc *out) {
  unsigned room = *count, found = 0; long gpu; unsigned pid;
  FILE *f = fopen(getenv("STUB_PROCESSES"), "r");
  if (f) { while (fscanf(f, "%ld %u", &gpu, &pid) == 2) if (gpu + 1 == (long)h) {
      if (found < room && out) { memset(&out[found], 0, sizeof(proc)); out[found].pid = pid; }
      found++; }
    fclose(f); }
  *count = found; return found > room ? 7 : 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("no gcc to build the stub of libnvidia-ml.so.1 with")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(NVML)
    subprocess.run([gcc, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", folder / "nvml.c"], check=True)
    return folder


@pytest.fixture
def stub(library, tmp_path, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))  # read when a process starts: for agents, not for this one
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("STUB_ID", f"{os.getpid()}")
    monkeypatch.setenv("STUB_PROCESSES", str(tmp_path / "processes"))
    return tmp_path / "processes"


@pytest.fixture
def machine(stub, tmp_path):
    worlds = []

    def make(name):
        worlds.append(World(tmp_path / name, nodes=(NodeConfig(name="local"),)))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def last_node(world):
    return next((event.node for event in reversed(world.log) if isinstance(event, NodeUp)), None)


def test_gpus_in_use_by_others_are_unavailable(machine, stub, monkeypatch):
    monkeypatch.setenv("STUB_ODD", "2")
    stub.write_text(f"0 {os.getpid()}\n")
    world = machine("home")
    node = world.until(lambda: last_node(world))
    assert (node.gpu_name, node.gpus) == ("NVIDIA H100 80GB HBM3", 3)
    assert node.unavailable == (0, 2), "0 is in use, 2 is of another kind"


def test_a_change_is_reported_and_our_own_ranks_are_no_strangers(machine, stub, monkeypatch):
    world = machine("home")
    assert world.until(lambda: last_node(world)).unavailable == ()
    code = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], os.getpid(), flush=True); time.sleep(600)"
    world.start(python(code), gpus=2)
    world.logged("0,1 ")
    ours = int(world.log_text("rank0.log").split()[-1])
    stub.write_text(f"0 {ours}\n2 {os.getpid()}\n")
    world.until(lambda: last_node(world).unavailable)
    assert last_node(world).unavailable == (2,)
    world.kill()
    assert world.ended().outcome is Outcome.KILLED


def test_two_servers_do_not_offer_the_same_gpu(machine, stub):
    first = machine("first")
    assert first.until(lambda: last_node(first)).unavailable == ()
    second = machine("second")
    assert second.until(lambda: last_node(second)).unavailable == (0, 1, 2)
    pid = first.agent_pid()
    first.executor._farewell = Shutdown()  # so that no other agent takes the locks again
    os.kill(pid, signal.SIGKILL)
    second.until(lambda: last_node(second).unavailable == (), "the locks of a dead agent are free")


@pytest.mark.parametrize("by_uuid", [False, True])
def test_the_agents_own_visible_devices_are_what_it_offers(machine, stub, monkeypatch, by_uuid):
    names = [f"GPU-stub-{os.getpid()}-{index}" if by_uuid else str(index) for index in (0, 2)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
    world = machine("home")
    assert world.until(lambda: last_node(world)).unavailable == (1,)


def test_slots_are_what_was_asked_for_or_the_cores(monkeypatch):
    assert (discover(3).count, discover(3).gpu_name) == (3, "slot")
    monkeypatch.setattr("cordee.agent.gpus._nvml", lambda: None)
    found = discover(None)
    assert found.count == os.cpu_count() and "no NVIDIA driver was found" in found.says


def test_a_driver_without_its_binding_is_an_error(stub):
    code = "import sys; sys.modules['pynvml'] = None\nfrom cordee.agent.gpus import discover\ndiscover(None)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert MissingExtraError.__name__ in done.stderr and "nvidia-ml-py is not installed" in done.stderr


def test_a_lock_is_held_by_one(tmp_path):
    held = lock_file(tmp_path / "lock")
    assert held is not None and lock_file(tmp_path / "lock") is None
    os.close(held)
    again = lock_file(tmp_path / "lock")
    assert again is not None
    os.close(again)
