"""GPUs as NVML reports them; the driver's table of functions is a stub in C, the binding and all above it are real.

No GPU was there to compare with: the meaning of the counters and links is that of NVIDIA's pages.
"""

import os
import shutil
import signal
import subprocess
import sys

import pytest
from agent_world import World, python

from cordee.agent.gpus import discover, lock_file
from cordee.control.engines.local import NodeConfig
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
int nvmlSystemGetDriverVersion(char *b, unsigned n) { snprintf(b, n, "580.95.05"); return 0; }
typedef struct { char legacy[16]; unsigned domain, bus, device, id, sub; char text[32]; } pci;
int nvmlDeviceGetPciInfo_v3(void *h, pci *p) { memset(p, 0, sizeof *p); p->bus = 16 + (long)h; return 0; }
/* The file holds lines "gpu link remote"; the remote is another GPU, or 99 for a switch. */
static int remote(void *h, unsigned link) {
  long gpu; unsigned l; int other, found = -1;
  const char *name = getenv("STUB_LINKS"); FILE *f = name ? fopen(name, "r") : 0;
  if (f) { while (fscanf(f, "%ld %u %d", &gpu, &l, &other) == 3) if (gpu + 1 == (long)h && l == link) found = other;
    fclose(f); }
  return found; }
int nvmlDeviceGetNvLinkState(void *h, unsigned link, unsigned *on) {
  if (link > 17) return 2;
  *on = remote(h, link) >= 0; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *h, unsigned link, unsigned *kind) {
  *kind = remote(h, link) == 99 ? 2 : 0; return 0; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *h, unsigned link, pci *p) {
  memset(p, 0, sizeof *p); p->bus = 17 + remote(h, link); return 0; }
typedef struct {
  unsigned version; unsigned char uuid[16]; int status; unsigned clique; unsigned char state; unsigned mask; } fabric;
int nvmlDeviceGetGpuFabricInfoV(void *h, fabric *f) {
  const char *clique = getenv("STUB_CLIQUE");
  f->state = 3; f->status = 0; f->clique = clique ? atoi(clique) : 0;
  memset(f->uuid, clique ? 0xab : 0, 16); return 0; }
/* The file holds lines "gpu counter value". */
static long counter(void *h, const char *wanted) {
  long gpu, value, found = 0; char name[32];
  const char *path = getenv("STUB_HEALTH"); FILE *f = path ? fopen(path, "r") : 0;
  if (f) { while (fscanf(f, "%ld %31s %ld", &gpu, name, &value) == 3)
      if (gpu + 1 == (long)h && !strcmp(name, wanted)) found = value;
    fclose(f); }
  return found; }
int nvmlDeviceGetTotalEccErrors(void *h, int kind, int life, unsigned long long *n) {
  if (counter(h, "lost")) return 15;
  *n = kind == 1 && life == 0 ? counter(h, "ecc") : 0; return 0; }
int nvmlDeviceGetRemappedRows(void *h, unsigned *corr, unsigned *unc, unsigned *pending, unsigned *failed) {
  *corr = 0; *unc = counter(h, "rows"); *pending = counter(h, "row_pending"); *failed = counter(h, "row_failed");
  return counter(h, "no_rows") ? 3 : 0; }
int nvmlDeviceGetRetiredPages(void *h, int cause, unsigned *n, unsigned long long *pages) {
  unsigned long long i, found = cause == 1 ? counter(h, "pages") : 0;
  if (!pages) { *n = found; return found ? 7 : 0; }
  for (i = 0; i < found; i++) pages[i] = i;
  *n = found; return 0; }
int nvmlDeviceGetRetiredPagesPendingStatus(void *h, int *on) { *on = counter(h, "page_pending"); return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *h, unsigned long long *bits) {
  *bits = counter(h, "clocks"); return 0; }
typedef struct { unsigned long long total, free, used; } memory;
int nvmlDeviceGetMemoryInfo(void *h, memory *m) {
  m->total = 80ull << 30; m->used = (unsigned long long)counter(h, "used_gib") << 30; m->free = m->total - m->used;
  return 0; }
typedef struct { unsigned gpu, memory; } rates;
int nvmlDeviceGetUtilizationRates(void *h, rates *r) { r->gpu = counter(h, "busy"); r->memory = 0; return 0; }
int nvmlDeviceGetPowerUsage(void *h, unsigned *mw) { *mw = counter(h, "power"); return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *h, unsigned long long *mj) {
  *mj = counter(h, "energy"); return counter(h, "no_energy") ? 3 : 0; }
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
    assert node.unavailable_why == ("in use by a process that is not Cordee's", "of another kind: NVIDIA A10")
    assert "driver 580.95.05" in node.software


def in_driver(code):
    """Run code in a process that finds the stub; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", f"from cordee.agent.gpus import discover\nfound = discover(None)\n{code}"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def test_a_sick_gpu_is_unavailable_with_its_reason(stub, tmp_path, monkeypatch):
    counters = [
        *("0 no_rows 1", "0 pages 60", "1 ecc 4", "2 row_pending 1", "3 rows 9", "3 row_failed 1", "3 row_pending 1"),
        *("4 pages 61", "5 page_pending 1", "6 clocks 64", "7 lost 1", "8 clocks 36"),
    ]
    (tmp_path / "health").write_text("\n".join(counters))
    monkeypatch.setenv("STUB_HEALTH", str(tmp_path / "health"))
    monkeypatch.setenv("STUB_GPUS", "9")
    lines = in_driver("for index, why in found.look(()).items(): print(index, why)")
    assert lines == [
        "1 4 uncorrectable memory errors since its last reset; reset it: nvidia-smi --gpu-reset",
        "2 a remapped row waits for a reset; reset it: nvidia-smi --gpu-reset",
        "3 9 rows remapped after uncorrectable errors, and one more could not be: replace it",
        "4 61 retired pages of memory, more than 60: replace it",
        "5 a retired page of memory waits for a reset; reset it: nvidia-smi --gpu-reset",
        "6 too hot: the hardware has lowered its clocks",
        "7 lost: the driver cannot reach it; restart the node",
    ], "60 retired pages, missing counters and clocks lowered by power or by the driver are no sickness"


def test_gpus_are_sampled_and_a_counter_that_is_missing_is_zero(stub, tmp_path, monkeypatch):
    health = tmp_path / "health"
    monkeypatch.setenv("STUB_HEALTH", str(health))
    health.write_text("0 busy 50\n0 used_gib 40\n0 power 600000\n0 energy 7000\n1 no_energy 1\n")
    code = f"""
from pathlib import Path
from types import SimpleNamespace
from cordee.agent.samples import Samples
samples = Samples("local", found, print, SimpleNamespace(now_us=lambda: 9))
lease = SimpleNamespace(gpus=(0, 1), milli=1000)
order = SimpleNamespace(tag="a.1", job_id="a", epoch=1, gpus=(0, 1), leases=(lease,), node_rank=0)
samples.begin(order, 1.0)
Path({str(health)!r}).write_text("0 busy 100\\n0 used_gib 30\\n0 power 500000\\n0 energy 9500\\n")
samples.step(2.0, [order])
for at in (6.0, 11.0):
    samples.step(at, [order])
samples.end(order, 11.0)
"""
    first, rest = in_driver(code)
    assert "epoch=1, node='local', gpus=2" in first
    assert "busy=0.5, memory_bytes=32212254720, power_mw=500000, energy_mj=2500, integrated_mj=0, " in first, (
        "of both GPUs"
    )
    assert "busy_each=(1.0, 0.0), memory_bytes_each=(32212254720, 0))" in first, "of each"
    assert "busy=0.5" in rest and "energy_mj=0, integrated_mj=0, " in rest, "what was left at the end"


def test_the_doctor_names_what_the_driver_and_the_kernel_say(stub, tmp_path, monkeypatch):
    (tmp_path / "health").write_text("1 ecc 2\n2 clocks 128\n3 used_gib 40\n")
    kernel = tmp_path / "kmsg"
    kernel.write_text(
        "4,1,9,-;NVRM: Xid (PCI:0000:11:00): 79, pid=1, GPU has fallen off the bus.\n"
        "4,2,9,-;NVRM: Xid (PCI:0000:12:00): 31, pid=7, a program's own fault\n"
        "6,3,9,-;eth0: link up\n"
    )
    monkeypatch.setenv("STUB_HEALTH", str(tmp_path / "health"))
    monkeypatch.setenv("STUB_GPUS", "4")
    show = "print(each.state, each.check, each.figure, sep='|')"
    assert in_driver(f"from pathlib import Path\nfor each in found.findings(Path({str(kernel)!r})): {show}") == [
        "ok|driver|580.95.05, 4 GPUs (NVIDIA H100 80GB HBM3), from NVML",
        "ok|health of GPUs 0, 2, 3|no uncorrectable error",
        "ok|clocks of GPUs 0, 3|not lowered",
        "ok|memory of GPUs 0, 2|free",
        "bad|health of GPU 1|2 uncorrectable memory errors since its last reset; reset it: nvidia-smi --gpu-reset",
        "warn|clocks of GPU 2|lowered because of the power supply's brake",
        "warn|memory of GPU 3|42.9 GB in use by no process that the driver names",
        "bad|Xid of GPU 0|79 (fallen off the bus), 1 in the kernel's log",
    ]


def test_ranks_do_not_start_on_a_gpu_that_has_become_sick_and_it_is_offered_no_more(machine, tmp_path, monkeypatch):
    health = tmp_path / "health"
    health.write_text("")
    monkeypatch.setenv("STUB_HEALTH", str(health))
    world = machine("home")
    assert world.until(lambda: last_node(world)).unavailable == ()
    health.write_text("0 ecc 1\n")  # the next regular check is 30 s away
    world.start(python("raise SystemExit(3)"), gpus=1)
    end = world.ended()
    assert end.outcome is Outcome.LOST and "GPU 0 is sick: 1 uncorrectable memory errors" in end.why
    assert last_node(world).unavailable == (0,)
    sick = next(number for number, each in enumerate(world.log) if isinstance(each, NodeUp) and each.node.unavailable)
    assert sick < world.log.index(end), "the node is known to be sick before the job can be placed again"


@pytest.mark.parametrize(
    ("links", "clique", "islands"),
    [
        ("", None, "0 "),
        ("0 0 1\n1 0 0\n2 5 3\n3 17 2", None, "2 "),
        ("\n".join(f"{gpu} {link} 99" for gpu in range(4) for link in (0, 1)), None, "0 "),
        ("0 0 99\n1 0 99", None, "1 "),
        ("0 0 2\n2 0 0\n1 0 3\n3 0 1", None, "1 "),
        ("\n".join(f"{gpu} 0 99" for gpu in range(4)), "5", f"0 {'ab' * 16}.5"),
    ],
    ids=["no links", "pairs", "switches", "half", "crossed", "fabric over nodes"],
)
def test_islands_follow_the_links(stub, tmp_path, monkeypatch, links, clique, islands):
    (tmp_path / "links").write_text(links)
    monkeypatch.setenv("STUB_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("STUB_GPUS", "4")
    if clique:
        monkeypatch.setenv("STUB_CLIQUE", clique)
    assert in_driver("print(found.islands, found.fabric)") == [islands]


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
    first.executor._engines[0].retire()  # so that no other agent takes the locks again
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
    monkeypatch.setattr("cordee.agent.gpus.nvml_library", lambda: None)
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
