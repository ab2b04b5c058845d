"""MIG through NVML; the driver is a stub in C that keeps the driver's rules, the binding and all above it are real.

No GPU in MIG mode was there to compare with: profiles, starts and refusals are those of NVIDIA's pages and listings.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from agent_world import World, python
from test_agent_gpus import NVML

from cordee.agent.journal import Journal
from cordee.agent.launch import Assignment
from cordee.control.engines.local import NodeConfig
from cordee.errors import InputError
from cordee.event_json import decode, encode
from cordee.events import AttemptPlaced, Lease, MigInstance, NodeUp, Outcome
from cordee.hardware.labels import parse_label
from cordee.ids import JobId
from world import mig_table

MIG = r"""
/* Profiles of an H100 by NVML's number: id, compute slices, instances, SMs, memory slices, starts as a mask, name. */
typedef struct { unsigned id, slices, most, sms, size, starts; const char *name; } rule;
static const rule RULES[] = {
  {19, 1, 7, 16, 1, 0x7f, "MIG 1g.10gb"}, {14, 2, 3, 32, 2, 0x15, "MIG 2g.20gb"}, {9, 3, 2, 60, 4, 0x11, "MIG 3g.40gb"},
  {5, 4, 1, 64, 4, 0x01, "MIG 4g.40gb"}, {0, 7, 1, 132, 8, 0x01, "MIG 7g.80gb"}, {0}, {0},
  {20, 1, 1, 16, 1, 0x7f, "MIG 1g.10gb+me"}, {0}, {15, 1, 4, 26, 2, 0x55, "MIG 1g.20gb"} };
enum { NUMBERS = sizeof RULES / sizeof *RULES, ROOM = 16 };
typedef struct { int gpu, live, start, compute; const rule *of; unsigned id; } part;
static part parts[ROOM];
static int on[16], begun;
static const rule *by_id(unsigned id) {
  for (int i = 0; i < NUMBERS; i++) if (RULES[i].name && RULES[i].id == id) return &RULES[i];
  return 0; }
static int make(int gpu, const rule *of, unsigned start, part **out) {
  unsigned same = 0, compute = 0;
  if (!on[gpu]) return 3;
  if (!(of->starts >> start & 1)) return 2;
  for (int i = 0; i < ROOM; i++) if (parts[i].live && parts[i].gpu == gpu) {
    const part *p = &parts[i];
    if (p->start < (int)(start + of->size) && (int)start < p->start + (int)p->of->size) return 27;
    same += p->of == of; compute += p->of->slices; }
  if (same >= of->most || compute + of->slices > 7) return 27;
  for (unsigned i = 0; i < ROOM; i++) if (!parts[i].live) {
    parts[i] = (part){gpu, 1, start, 0, of, i + 1}; *out = &parts[i]; return 0; }
  return 27; }
/* STUB_MIG names the GPUs in MIG mode; the file STUB_PARTS holds lines "gpu id start" of instances that are there. */
static void begin(void) {
  if (begun++) return;
  const char *names = getenv("STUB_MIG"), *path = getenv("STUB_PARTS");
  for (; names && *names; names++) if (*names >= '0' && *names <= '9') on[*names - '0'] = 1;
  FILE *f = path ? fopen(path, "r") : 0; int gpu; unsigned id, start; part *p;
  if (f) { while (fscanf(f, "%d %u %u", &gpu, &id, &start) == 3) if (!make(gpu, by_id(id), start, &p)) p->compute = 1;
    fclose(f); } }
static int allowed(void) { const char *root = getenv("STUB_ROOT"); return !root || *root == '1'; }
/* The file STUB_USED holds lines "gpu start" of instances that a process uses. */
static int used(const part *p) {
  int gpu, start, found = 0; const char *path = getenv("STUB_USED"); FILE *f = path ? fopen(path, "r") : 0;
  if (f) { while (fscanf(f, "%d %d", &gpu, &start) == 2) found |= gpu == p->gpu && start == p->start; fclose(f); }
  return found; }
static int gpu_of(void *h) { begin(); return (int)(long)h - 1; }
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *later) {
  if (getenv("STUB_NO_MIG")) return 3;
  *now = *later = on[gpu_of(h)]; return 0; }
int nvmlDeviceSetMigMode(void *h, unsigned mode, unsigned *status) {
  int gpu = gpu_of(h); *status = getenv("STUB_RESET") ? 27 : 0;
  if (!allowed()) return 4;
  for (int i = 0; i < ROOM; i++) if (parts[i].live && parts[i].gpu == gpu) return 19;
  if (!*status) on[gpu] = mode;
  return 0; }
typedef struct {
  unsigned version, id, p2p, slices, most, sms, copy, dec, enc, jpeg, ofa; unsigned long long mb; char name[96]; } info;
int nvmlDeviceGetGpuInstanceProfileInfoV(void *h, unsigned n, info *o) {
  if (n >= NUMBERS || !RULES[n].name) return 3;
  if (o->version != 0x02000098) return 25;
  const rule *r = &RULES[n];
  o->id = r->id; o->slices = r->slices; o->most = r->most; o->sms = r->sms; o->mb = 9984 * r->size;
  snprintf(o->name, 96, "%s", r->name); return 0; }
typedef struct { unsigned start, size; } spot;
int nvmlDeviceGetGpuInstancePossiblePlacements_v2(void *h, unsigned id, spot *o, unsigned *count) {
  const rule *r = by_id(id); unsigned found = 0;
  for (unsigned at = 0; at < 8; at++) if (r->starts >> at & 1) { if (o) o[found] = (spot){at, r->size}; found++; }
  *count = found; return 0; }
int nvmlDeviceGetGpuInstances(void *h, unsigned id, part **o, unsigned *count) {
  int gpu = gpu_of(h); unsigned found = 0;
  if (!on[gpu]) return 3;
  for (part *p = parts; p < parts + ROOM; p++) if (p->live && p->gpu == gpu && p->of->id == id) o[found++] = p;
  *count = found; return 0; }
typedef struct { void *device; unsigned id, profile; spot place; } gi_info;
int nvmlGpuInstanceGetInfo(part *p, gi_info *o) {
  *o = (gi_info){(void *)(long)(p->gpu + 1), p->id, p->of->id, {p->start, p->of->size}}; return 0; }
int nvmlDeviceCreateGpuInstanceWithPlacement(void *h, unsigned id, spot *at, part **o) {
  if (!allowed()) return 4;
  if (at->size != by_id(id)->size) return 2;
  return make(gpu_of(h), by_id(id), at->start, o); }
int nvmlGpuInstanceDestroy(part *p) {
  if (!allowed()) return 4;
  if (p->compute || used(p)) return 19;
  p->live = 0; return 0; }
typedef struct { unsigned version, id, slices, most, sms, copy, dec, enc, jpeg, ofa; char name[96]; } ci_info;
int nvmlGpuInstanceGetComputeInstanceProfileInfoV(part *p, unsigned n, unsigned engine, ci_info *o) {
  static const unsigned SLICES[] = {1, 2, 3, 4, 7};
  if (n >= 5 || SLICES[n] > p->of->slices) return 3;
  o->id = n; o->slices = SLICES[n]; o->most = p->of->slices / SLICES[n]; return 0; }
int nvmlGpuInstanceCreateComputeInstance(part *p, unsigned id, part **o) {
  static const unsigned SLICES[] = {1, 2, 3, 4, 7};
  if (!allowed()) return 4;
  p->compute = id + 1; *o = p; return SLICES[id] == p->of->slices ? 0 : 27; }
int nvmlGpuInstanceGetComputeInstances(part *p, unsigned id, part **o, unsigned *count) {
  *count = p->compute == (int)id + 1; if (*count) *o = p; return 0; }
int nvmlComputeInstanceDestroy(part *p) {
  if (!allowed()) return 4;
  if (used(p)) return 19;
  p->compute = 0; return 0; }
int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *n) { *n = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned n, part **o) {
  int gpu = gpu_of(h);
  for (int i = 0; i < ROOM; i++) if (parts[i].live && parts[i].compute && parts[i].gpu == gpu && !n--) {
    *o = &parts[i]; return 0; }
  return 6; }
int nvmlDeviceGetGpuInstanceId(part *p, unsigned *id) { *id = p->id; return 0; }
int nvmlDeviceGetUUID(void *h, char *b, unsigned n) {
  part *p = h;
  if (p < parts || p >= parts + ROOM) return gpu_uuid(h, b, n);
  snprintf(b, n, "MIG-stub-%d-%s-at-%d", p->gpu, p->of->name + 4, p->start); return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("no gcc to build the stub of libnvidia-ml.so.1 with")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(NVML.replace("int nvmlDeviceGetUUID(", "static int gpu_uuid(") + MIG)
    subprocess.run([gcc, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", folder / "nvml.c"], check=True)
    return folder


@pytest.fixture
def stub(library, tmp_path, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))  # read when a process starts: for agents, not for this one
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("STUB_ID", f"{os.getpid()}")
    monkeypatch.setenv("STUB_PROCESSES", str(tmp_path / "processes"))
    for name in ("PARTS", "USED"):
        (tmp_path / name.lower()).write_text("")
        monkeypatch.setenv(f"STUB_{name}", str(tmp_path / name.lower()))
    monkeypatch.setenv("STUB_MIG", "1")
    return tmp_path


def in_driver(mode, code):
    """Run code in a process that finds the stub; return what it prints."""
    begin = f"""
from cordee.agent.gpus import discover
from cordee.agent.mig import MigError
from cordee.events import Lease, MigInstance
found = discover(None)
found.mig_mode = {mode!r}
SIZE = {{"1g.10gb": 1, "1g.20gb": 2, "3g.40gb": 4, "4g.40gb": 4, "7g.80gb": 8}}
def visible(gpu, profile, start):
    try:
        instance = MigInstance(profile=profile, start=start, size=SIZE[profile])
        print(found.visible(Lease(node="n", gpus=(gpu,), milli=125, instance=instance)))
    except MigError as error:
        print(type(error).__name__, error)
def whole(*gpus):
    try:
        print(found.visible(Lease(node="n", gpus=gpus)))
    except MigError as error:
        print(error)
def there():
    print([(each[0], each[1], each[3]) for each in found._cut.offered("fixed").fixed])
"""
    done = subprocess.run([sys.executable, "-c", begin + code], check=False, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


def test_profiles_are_those_that_the_driver_states_and_the_catalogue_knows(stub):
    lines = in_driver(
        "dynamic",
        "mig = found.mig()\nprint(mig.gpus, mig.slices, mig.compute, mig.fixed, mig.switched)\n"
        "for each in mig.profiles: print(each.name, each.size, each.compute, each.instances, *each.starts)",
    )
    assert lines[0] == "(1,) 8 7 None False"
    known = [each.placed for each in mig_table("H100").profiles]
    assert sorted(lines[1:]) == sorted(
        f"{each.name} {each.size} {each.compute} {each.instances} {' '.join(map(str, each.starts))}" for each in known
    )


@pytest.mark.parametrize(
    ("mode", "says"),
    [("off", "None"), ("fixed", "(1,) ((1, 0, 4, '4g.40gb'), (1, 6, 1, '1g.10gb')) False"),
     ("dynamic", "(1,) None False"), ("switched", "(0, 1, 2) None True")],
)  # fmt: skip
def test_the_label_says_what_is_offered(stub, mode, says):
    (stub / "parts").write_text("1 5 0\n1 19 6\n")
    code = "mig = found.mig()\nprint(mig and (str(mig.gpus) + ' ' + str(mig.fixed) + ' ' + str(mig.switched)))"
    assert in_driver(mode, code) == [says]
    reason = in_driver(mode, "print(found.look(()))")
    expected = '{1: "in MIG mode, and the node\'s label is mig=off"}' if mode == "off" else "{}"
    assert reason == [expected]


def test_gpus_that_cannot_be_cut_offer_nothing(stub, monkeypatch):
    monkeypatch.setenv("STUB_NO_MIG", "1")
    assert in_driver("switched", "print(found.mig())\nwhole(0, 2)") == ["None", "0,2"]
    with pytest.raises(InputError, match="it is off, fixed, dynamic or switched"):
        parse_label("mig=yes")


def test_an_instance_that_is_there_is_found_and_none_is_made_without_leave(stub):
    (stub / "parts").write_text("1 5 0\n1 19 6\n")
    assert in_driver("fixed", "visible(1, '1g.10gb', 6)\nvisible(1, '1g.10gb', 5)\nthere()") == [
        "MIG-stub-1-1g.10gb-at-6",
        "MigError 1g.10gb at 5 of GPU 1 is not there, and the node's label mig=fixed lets nobody make it",
        "[(1, 0, '4g.40gb'), (1, 6, '1g.10gb')]",
    ]


def test_instances_are_made_kept_and_destroyed_only_where_another_is_needed(stub):
    code = """
visible(1, '1g.10gb', 1)
visible(1, '1g.20gb', 4)
there()
visible(1, '1g.20gb', 4)
visible(1, '4g.40gb', 0)
there()
visible(1, '7g.80gb', 0)
there()
"""
    assert in_driver("dynamic", code) == [
        "MIG-stub-1-1g.10gb-at-1",
        "MIG-stub-1-1g.20gb-at-4",
        "[(1, 1, '1g.10gb'), (1, 4, '1g.20gb')]",
        "MIG-stub-1-1g.20gb-at-4",
        "MIG-stub-1-4g.40gb-at-0",
        "[(1, 0, '4g.40gb'), (1, 4, '1g.20gb')]",
        "MIG-stub-1-7g.80gb-at-0",
        "[(1, 0, '7g.80gb')]",
    ]


def test_an_instance_that_a_process_uses_stays(stub):
    (stub / "parts").write_text("1 19 1\n")
    (stub / "used").write_text("1 1\n")
    refused, there = in_driver("dynamic", "visible(1, '4g.40gb', 0)\nthere()")
    assert refused.startswith("MigError 4g.40gb at 0 of GPU 1 cannot be had: ") and there == "[(1, 1, '1g.10gb')]"


def test_without_the_rights_of_root_the_agent_offers_what_is_there(stub, monkeypatch):
    monkeypatch.setenv("STUB_ROOT", "0")
    (stub / "parts").write_text("1 19 6\n")
    first, second, mig = in_driver(
        "dynamic", "visible(1, '1g.10gb', 6)\nvisible(1, '1g.10gb', 5)\nprint(found.mig().fixed)"
    )
    assert first == "MIG-stub-1-1g.10gb-at-6"
    assert second.startswith("MigForbiddenError 1g.10gb at 5 of GPU 1 cannot be made: ") and "label" in second
    assert mig == "((1, 6, 1, '1g.10gb'),)"


def test_mig_is_turned_on_and_off_where_it_may_be(stub, monkeypatch):
    code = "visible(0, '1g.10gb', 6)\nwhole(0)\nprint(found._cut.is_on(0))\nwhole(1, 2)\nprint(found._cut.is_on(1))"
    assert in_driver("switched", code) == ["MIG-stub-0-1g.10gb-at-6", "0", "False", "1,2", "False"]
    monkeypatch.setenv("STUB_RESET", "1")
    (refused,) = in_driver("switched", "visible(0, '1g.10gb', 6)")
    assert refused.startswith("MigError MIG mode of GPU 0 turns on only after a reset; label the node mig=dynamic")


def test_an_order_for_an_instance_is_kept_on_disk_and_read_again(tmp_path):
    lease = Lease(node="n", gpus=(1,), milli=125, instance=MigInstance(profile="1g.10gb", start=6, size=1))
    placed = AttemptPlaced(at_us=1, job_id=JobId("a"), epoch=1, leases=(lease, Lease(node="m", gpus=(0,))))
    data = encode(placed)
    assert decode(data) == placed and "instance" not in data["leases"][1], "agents of earlier versions know none"
    journal = Journal(tmp_path, "n")
    order = Assignment(job_id="a", epoch=1, node="n", leases=placed.leases, spec={}, master_addr="h", master_port=1)
    journal.keep_order(order)
    assert journal.order("a", 1).leases == placed.leases


def test_a_rank_gets_the_device_of_its_instance_and_a_missing_one_is_no_fault_of_the_job(stub, monkeypatch):
    (stub / "parts").write_text("1 19 6\n")
    labels = Path(stub / "node.labels")
    labels.write_text("mig=dynamic\n")
    monkeypatch.setenv("CORDEE_NODE_FILE", str(labels))
    world = World(stub / "home", nodes=(NodeConfig(name="local"),))
    try:
        node = world.until(lambda: next((e.node for e in reversed(world.log) if isinstance(e, NodeUp)), None))
        assert node.mig.gpus == (1,) and node.mig.fixed is None
        instance = MigInstance(profile="3g.40gb", start=4, size=4)
        leases = (Lease(node="local", gpus=(1,), milli=500, instance=instance),)
        world.start(python("import os; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)"), leases=leases)
        assert world.ended().outcome is Outcome.FINISHED
        assert "MIG-stub-1-3g.40gb-at-4" in world.log_text("rank0.log")
    finally:
        world.close()
