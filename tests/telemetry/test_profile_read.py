"""Profiles in: whatever stands in the file, what can be read is read, and the rest is named and counted."""

import gzip
import json
import random
from pathlib import Path

import pytest

from cordee.errors import CatalogueError, ProfileError
from cordee.telemetry.profile import account, load_kernels, read_profile
from cordee.telemetry.profile import read as reading
from cordee.telemetry.profile.read import Profile
from kineto import GEMM, HOST, Kineto, expert_step

TABLE = load_kernels()


def _read(path: Path) -> Profile:
    return read_profile(path, TABLE.categories)


def _defects(read: Profile) -> dict[str, int]:
    return {defect.kind: defect.count for defect in read.defects}


def _written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("block", [1, 3, 61, 4096])
@pytest.mark.parametrize("indent", [None, 1])
def test_blocks_of_any_size_give_what_the_whole_file_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, indent: int | None
) -> None:
    made = expert_step()
    made.add(ph="X", cat="cpu_op", name='odd }, { "name"', pid=HOST, tid=HOST, ts=5, dur=1, args={"a": [{"b": 1}, {}]})
    made.add(ph="X", cat="cpu_op", name="x}]}", pid=HOST, tid=HOST, ts=6, dur=1, args={"a": [{"b": [{}]}], "c": 2})
    path = made.write(tmp_path / "t.json", indent)
    monkeypatch.setattr(reading, "BLOCK_BYTES", block)
    read = _read(path)
    assert _defects(read) == {}
    assert read.events == len(made.events)
    kernels = sorted((e["name"], e["ts"], e["dur"]) for e in made.events if e["cat"] in ("kernel", "gpu_memcpy"))
    base = made.events[0]["ts"]
    told = sorted(
        (read.names[name].text, start / 1000 + base, length / 1000)
        for name, start, length in zip(read.device.name, read.device.start_ns, read.device.length_ns, strict=True)
    )
    assert told == kernels
    assert (read.about.rank, read.about.world_size, read.about.gpus) == (0, 8, ("NVIDIA H100 80GB HBM3",))
    assert {read.names[name].text for name in read.host.name} == {'odd }, { "name"', "x}]}"}


def test_a_packed_file_reads_as_the_plain_one(tmp_path: Path) -> None:
    plain = _read(expert_step().write(tmp_path / "t.json"))
    told: list[int] = []
    packed_path = _written(tmp_path / "t.json.gz", gzip.compress(expert_step().text().encode()))
    packed = read_profile(packed_path, TABLE.categories, told.append)
    assert packed.device.start_ns.tolist() == plain.device.start_ns.tolist()
    assert told[-1] == packed_path.stat().st_size, "the bar ends at the file's end"


def test_what_stands_behind_the_events_is_read_too(tmp_path: Path) -> None:
    text = '{"traceEvents": [%s], "deviceProperties": [{"name": "A"}, {"name": "B"}], "distributedInfo": {"rank": 5}}'
    event = '{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1, "dur": 2}'
    read = _read(_written(tmp_path / "t.json", text % f"{event}, {event}"))
    assert (read.about.rank, read.about.gpus, len(read.device), _defects(read)) == (5, ("A", "B"), 2, {})


@pytest.mark.parametrize("end", ["]", "", ",", ", {}]", ",]"])
def test_a_bare_list_of_events_may_lack_its_end(tmp_path: Path, end: str) -> None:
    events = ", ".join(json.dumps({"ph": "X", "name": "k", "pid": 1, "tid": 1, "ts": at, "dur": 1}) for at in range(3))
    read = _read(_written(tmp_path / "t.json", f"[{events}{end}"))
    assert len(read.device) == 3
    assert set(_defects(read)) <= {"unknown phase ''"}


def test_a_file_cut_anywhere_gives_the_events_before_the_cut(tmp_path: Path) -> None:
    made = Kineto(gpu=None).kernel(GEMM, 0, 5).operator("aten::mm", 1, 2).kernel(GEMM, 9, 5)
    text = made.text(None)
    first = text.index('"traceEvents"')
    seen = []
    for cut in range(first, len(text) - 1):
        path = _written(tmp_path / "t.json", text[:cut])
        try:
            read = _read(path)
        except ProfileError as error:
            assert cut < text.index("[", first) + 1, error
            continue
        assert "truncated" in _defects(read) or read.events == len(made.events), f"cut at byte {cut}"
        seen.append(read.events)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, len(made.events))


def test_a_packed_file_that_breaks_off_is_named(tmp_path: Path) -> None:
    rng = random.Random(4)
    made = Kineto()
    for at in range(2000):
        made.kernel(f"{GEMM}_{rng.random()}", at * 20, rng.randrange(1, 9))
    packed = gzip.compress(made.text().encode())
    read = _read(_written(tmp_path / "t.json.gz", packed[: len(packed) // 2]))
    assert 0 < len(read.device) < 2000
    assert _defects(read)["truncated"] >= 1
    damaged = bytearray(packed)
    damaged[len(packed) // 2] ^= 255
    assert _defects(_read(_written(tmp_path / "d.json.gz", bytes(damaged))))


@pytest.mark.parametrize("seed", range(12))
def test_damage_costs_only_the_events_that_it_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    made = Kineto()
    for at in range(300):
        made.kernel(GEMM, at * 20, 5)
    data = bytearray(made.text().encode())
    first = data.index(b"traceEvents") + 40
    for _ in range(3):
        data[rng.randrange(first, len(data) - 40)] = rng.choice(b'"{}[],x\x00')
    from cordee.telemetry.profile import batches

    monkeypatch.setattr(batches, "SALVAGE_BYTES", 4000)
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1000)
    read = _read(_written(tmp_path / "t.json", bytes(data)))
    # A quote or a brace more may swallow a few neighbours, of the 600 events and of each of the three.
    assert read.events >= 600 - 3 * 8, f"seed {seed}: {read.events}, {_defects(read)}"


@pytest.mark.parametrize("block", [50, 4 << 20])
def test_numbers_and_bytes_that_json_has_not_cost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", block)
    text = expert_step().text(None)
    broken = text.replace('"device": 0', '"device": 0, "est. achieved occupancy %": nan, "memory bandwidth": -inf')
    latin = broken.encode().replace(b"cudaLaunchKernel", b"cudaLaunch\xe9Kernel", 1)
    read = _read(_written(tmp_path / "t.json", latin))
    assert read.events == len(expert_step().events)
    assert _defects(read) == {"nan or inf, read as nothing": 16, "bytes that are no UTF-8, replaced": 1}


def test_each_kind_of_fault_is_named_counted_and_left_out(tmp_path: Path) -> None:
    made = expert_step()
    good = len(made.events)
    made.add(ph="X", cat="kernel", name="backwards", pid=0, tid=7, ts=10, dur=-5)
    made.add(ph="X", cat="kernel", name="backwards", pid=0, tid=7, ts=20, dur=-5)
    made.add(ph="X", cat="kernel", name="endless", pid=0, tid=7, ts=10)
    made.add(ph="X", cat="kernel", name="eternal", pid=0, tid=7, ts=10, dur=1e300)
    made.add(ph="X", cat="kernel", name="remote", pid=0, tid=7, ts=-1e18, dur=1)
    made.add(ph="X", cat="kernel", name="timeless", pid=0, tid=7, dur=3)
    made.add(ph="X", cat="kernel", name="worded", pid=0, tid=7, ts="soon", dur=3)
    made.add(ph="X", cat="quantum_kernel", name="strange", pid=0, tid=7, ts=10, dur=3)
    made.add(ph="B", name="begun", pid=0, tid=7, ts=10)
    made.add(ph="@", name="new", pid=0, tid=7, ts=10)
    made.add(ph="C", name="a counter", pid=0, tid=7, ts=10, args={"name": 7})
    read = _read(made.write(tmp_path / "t.json"))
    assert _defects(read) == {
        "negative duration": 2, "times beyond a century": 2, "without a duration": 1,
        "without a start": 1, "fields of another type": 1,
        "category 'quantum_kernel', which is not in the table": 1, "phase 'B', which is not read": 1,
        "unknown phase '@'": 1,
    }  # fmt: skip
    assert "'backwards' at 10 us lasts -5 us" in [defect.example for defect in read.defects]
    assert read.events == good + 10
    (report,) = account(read, TABLE)
    (alone,) = account(_read(expert_step().write(tmp_path / "u.json")), TABLE)
    assert report.time == alone.time


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b"PK\x03\x04 a zip", "it begins with"),
        (b'{"a": 1}', "hold no traceEvents"),
        (b"<html>", "it begins with b'<html>'"),
    ],
)
def test_what_is_not_a_profile_says_why(tmp_path: Path, content: bytes, why: str) -> None:
    with pytest.raises(ProfileError, match=why):
        _read(_written(tmp_path / "t.json", content))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="No such file"):
        _read(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("name", "kernel_class"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "NCCL"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_float(ncclWorkElem)", "NCCL"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "NCCL point-to-point"),
        ("void deep_ep::internode_ll::dispatch<true, 3, 10, 7168>(void*)", "DeepEP dispatch"),
        ("void dpsk::ep::internode::combine<false, 8>(int4*)", "DeepEP combine"),
        ("void deep_ep::intranode::notify_dispatch<8>(int const*)", "DeepEP notify"),
        ("void dpsk::ep::internode::cached_notify<false>(int)", "DeepEP notify"),
        ("void deep_ep::intranode::barrier<8>(int**, int)", "barrier"),
        ("nvshmemi_barrier_all_on_stream_kernel()", "barrier"),
        ("void dpsk::ep::cuda::get_dispatch_layout<256, 32, 8>(long const*)", "routing"),
        ("void cross_device_reduce_2stage<__nv_bfloat16, 8>(RankData*)", "symmetric memory"),
        ("Memcpy PtoP (Device -> Device)", "peer copy"),
        ("Memcpy HtoD (Pinned -> Device)", "host copy"),
        ("Memset (Device)", "device copy, fill"),
        (GEMM, "GEMM"),
        ("void flash::compute_attn_ws<Flash_fwd_kernel_traits<192>>(int)", "attention"),
        ("triton_poi_fused_add_0", "elementwise"),
        ("gloo:all_reduce", "gloo"),
        ("something_new", "other"),
    ],
)
def test_kernels_are_told_by_their_names(name: str, kernel_class: str) -> None:
    assert TABLE.of(name).name == kernel_class


def test_the_users_rules_come_first(tmp_path: Path) -> None:
    own = _written(tmp_path / "own.toml", """
[categories]
device = ["npu_kernel"]
ignored = ["cpu_op"]

[[class]]
name = "my all-to-all"
kind = "transfer"
pattern = '^nvjet'
""")  # fmt: skip
    table = load_kernels(own)
    assert (table.of(GEMM).name, table.of("Memset (Device)").name) == ("my all-to-all", "device copy, fill")
    assert "npu_kernel" in table.categories.device
    assert "kernel" in table.categories.device
    assert "cpu_op" not in table.categories.host


@pytest.mark.parametrize(
    ("toml", "why"),
    [
        ("[[class]]\nname = 'a'\nkind = 'talk'\npattern = 'x'", "kind 'talk'"),
        ("[[class]]\nname = 'a'\nkind = 'transfer'", "either pattern or category"),
        ("[[class]]\nname = 'a'\nkind = 'transfer'\npattern = '('", "unterminated|missing"),
        ("[[class]]\nname = 'a'\nkind = 'transfer'\nregex = 'x'", "regex"),
        ("[classes]\na = 1", "classes is not known"),
        ("[categories]\ndevice = 'kernel'", "categories"),
        ("not toml", "cannot be read"),
    ],
)
def test_rules_that_cannot_be_used_say_why(tmp_path: Path, toml: str, why: str) -> None:
    with pytest.raises(CatalogueError, match=why):
        load_kernels(_written(tmp_path / "own.toml", toml))
