"""Reading a large profile: CPU seconds, memory, and what is found, beside HolisticTraceAnalysis.

`python benchmarks/profiles.py [--megabytes 500] [--file PROFILE ...] [--hta PYTHON] [--json]`.

A file in the form of PyTorch's profiler is written from a fixed seed: steps of operators, launches, flows and kernels
on three streams, with NCCL and DeepEP communication of known length, so that the sums are known without a reader. Each
reader runs in a process of its own, `cordee profile FILE --json` as a user calls it; CPU is user and system time of
that process and its children, memory its largest resident set. PYTHON is an interpreter that has HolisticTraceAnalysis.
"""

import argparse
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

SEED = 20261120
STEP_KERNELS = 4_000
HOST = (1166, 1166)
NAMES = (
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT",
    "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, cute::tuple<>>>>",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, char*>",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float>>>",
)
OPERATORS = ("aten::mm", "aten::scaled_dot_product_attention", "aten::add_", "aten::sum")
DISPATCH = "void deep_ep::internode::dispatch<false, 8, false, 8>(int4*, float*, long*)"
NOTIFY = "void deep_ep::internode::notify_dispatch<false, 8>(int const*, long*)"
REDUCE = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

# What the reader of another project is asked for: its two tables that are ours too.
HTA = """
import gzip, json, resource, shutil, sys, tempfile, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from hta.trace_analysis import TraceAnalysis
with tempfile.TemporaryDirectory() as folder:
    target = Path(folder) / "rank0.json.gz"
    if sys.argv[1].endswith(".gz"):
        shutil.copy(sys.argv[1], target)
    else:
        with open(sys.argv[1], "rb") as source, gzip.open(target, "wb", compresslevel=1) as packed:
            shutil.copyfileobj(source, packed, 1 << 22)
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent_before_s = used.ru_utime + used.ru_stime
    analysis = TraceAnalysis(trace_dir=folder)
    idle = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    try:
        overlap = float(analysis.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"]) / 100
    except Exception:
        overlap = None
own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
figures = {"idle_us": float(idle["idle_time(us)"]), "hidden_fraction": overlap}
spent_s = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime - spent_before_s
print("FIGURES" + json.dumps({**figures, "cpu_s": spent_s}))
"""


@dataclass(slots=True)
class Known:
    """What was written: sums that a reader must find again, in microseconds."""

    kernels: int = 0
    compute_us: float = 0.0
    transfer_us: float = 0.0
    waiting_us: float = 0.0


def write(path: Path, n_bytes: int) -> Known:
    """A profile of about so many bytes."""
    draw, known = random.Random(SEED), Known()
    with path.open("w", encoding="utf-8") as file:
        head = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": 132}],
            "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 64},
            "baseTimeNanoseconds": 1763596800000000000,
        }
        file.write(json.dumps(head, indent=2)[:-2] + ',\n  "traceEvents": [\n')
        for number, step in enumerate(_steps(draw, known)):
            file.write(",\n".join(step) if not number else ",\n" + ",\n".join(step))
            if file.tell() >= n_bytes:
                break
        file.write('\n  ],\n  "traceName": "synthetic.json"\n}\n')
    return known


def _steps(draw: random.Random, known: Known) -> Iterator[list[str]]:
    at_us, number = 5_000_000.0, 1
    for step in range(1_000_000):
        events, begin_us, free_us = [], at_us, {7: at_us, 20: at_us, 24: at_us}
        for turn in range(STEP_KERNELS):
            which = turn % len(NAMES)
            stream, name, length_us = 7, NAMES[which], round(draw.lognormvariate(3.5, 0.8), 3)
            if turn % 40 == 39:
                stream, name, length_us = 24, REDUCE, round(draw.lognormvariate(6, 0.3), 3)
                known.transfer_us += length_us
            elif turn % 40 == 19:
                stream, name, length_us = 20, DISPATCH, round(draw.lognormvariate(5.5, 0.3), 3)
                known.transfer_us += length_us
            elif turn % 40 == 18:
                stream, name, length_us = 20, NOTIFY, round(draw.lognormvariate(4, 0.6), 3)
                known.waiting_us += length_us
            else:
                known.compute_us += length_us
            known.kernels += 1
            at_us += draw.uniform(4, 60)
            launch_us = round(at_us, 3)
            start_us = round(max(free_us[stream], launch_us + 6) + 0.5, 3)
            free_us[stream] = start_us + length_us
            events += _kernel(
                number,
                OPERATORS[which],
                name,
                stream=stream,
                launch_us=launch_us,
                start_us=start_us,
                length_us=length_us,
            )
            number += 3
        at_us = max(at_us, *free_us.values()) + 100
        events.append(_event("user_annotation", f"ProfilerStep#{step}", HOST, begin_us, at_us - begin_us - 50))
        yield events


def _kernel(
    number: int, operator: str, name: str, *, stream: int, launch_us: float, start_us: float, length_us: float
) -> list[str]:
    """An operator, its launch, the flow to the device and the kernel, as Kineto writes them."""
    shapes = {"External id": number, "Record function id": 0, "Ev Idx": number}
    shapes |= {
        "Input Dims": [[4096, 7168], [7168, 2048], []],
        "Input type": ["c10::BFloat16", "c10::BFloat16", "Scalar"],
    }
    runtime = {"External id": number, "cbid": 211, "correlation": number}
    device = {
        "External id": number, "queued": 0, "device": 0, "context": 1, "stream": stream, "correlation": number,
        "registers per thread": 168, "shared memory": 213_016, "blocks per SM": 1.0, "warps per SM": 12.0,
        "grid": [132, 1, 1], "block": [384, 1, 1], "est. achieved occupancy %": 19,
    }  # fmt: skip
    if name == REDUCE:
        device |= {"Collective name": "_reduce_scatter_base", "In msg nelems": 1 << 24, "Group size": 8,
                   "Process Group Name": "1", "Process Group Ranks": "[0, 8, 16, 24, 32, 40, 48, 56]"}  # fmt: skip
    return [
        _event("cpu_op", operator, HOST, round(launch_us - 2.5, 3), 6.25, **shapes),
        _event("cuda_runtime", "cudaLaunchKernelExC", HOST, launch_us, 3.1, **runtime),
        _flow("s", number, HOST, launch_us),
        _event("kernel", name, (0, stream), start_us, length_us, **device),
        _flow("f", number, (0, stream), start_us),
    ]


def _event(category: str, name: str, at: tuple[int, int], start_us: float, length_us: float, **args: Any) -> str:
    """Broken into lines as Kineto does it."""
    told = ",\n".join(f"      {json.dumps(key)}: {json.dumps(value)}" for key, value in args.items())
    return (
        f'  {{\n    "ph": "X", "cat": "{category}", "name": {json.dumps(name)}, "pid": {at[0]}, "tid": {at[1]},\n'
        f'    "ts": {start_us:.3f}, "dur": {length_us:.3f}'
        + (f',\n    "args": {{\n{told}\n    }}' if told else "")
        + "\n  }"
    )


def _flow(phase: str, number: int, at: tuple[int, int], at_us: float) -> str:
    end = ', "bp": "e"' if phase == "f" else ""
    return (
        f'  {{\n    "ph": "{phase}", "id": {number}, "pid": {at[0]}, "tid": {at[1]}, "ts": {at_us:.3f},\n'
        f'    "cat": "ac2g", "name": "ac2g"{end}\n  }}'
    )


@dataclass(frozen=True, slots=True)
class Read:
    """What one reader took, and what it found; None where it says nothing."""

    reader: str
    cpu_s: float
    memory_bytes_peak: int
    idle_us: float | None
    hidden_fraction: float | None
    communication_us: float | None


def run(command: Sequence[str]) -> tuple[str, float, int]:
    """Output, CPU seconds with children, and the largest resident set of a command."""
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(command, stdout=said, stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        output = said.read()
    if child.returncode:
        raise SystemExit(f"{' '.join(command[:3])} left with {child.returncode}")
    return output, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def ours(path: Path) -> tuple[Read, dict[str, Any]]:
    """Cordee's reader, as a user calls it."""
    output, cpu_s, peak = run([sys.executable, "-m", "cordee", "profile", str(path), "--json"])
    rank = json.loads(output)["ranks"][0]
    time = rank["time"]
    found = Read("Cordee", cpu_s, peak, time["idle_us"], time["hidden_fraction"], time["communication_us"])
    return found, rank


def theirs(python: str, path: Path) -> Read:
    """HolisticTraceAnalysis; it reads packed files, and the packing is not counted."""
    output, _, peak = run([python, "-c", HTA, str(path)])
    line = next(line for line in output.splitlines() if line.startswith("FIGURES"))
    told = json.loads(line.removeprefix("FIGURES"))
    share = told["hidden_fraction"]
    hidden = None if share is None or math.isnan(share) else share
    return Read("HolisticTraceAnalysis", told["cpu_s"], peak, told["idle_us"], hidden, None)


def agree(known: Known, rank: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Written and found, for each sum; a difference beyond rounding ends the benchmark."""
    found = {"kernels": sum(row["count"] for row in rank["classes"])}
    for kind in ("compute", "transfer", "waiting"):
        found[f"{kind}_us"] = sum(row["total_us"] for row in rank["classes"] if row["kind"] == kind)
    both = {name: (written, found[name]) for name, written in asdict(known).items()}
    for name, (written, read) in both.items():
        if abs(written - read) > 1e-6 * written + 0.5:
            raise SystemExit(f"{name}: {written} written, {read} read")
    return both


def print_reads(rows: Sequence[tuple[str, int, Read]], file: TextIO = sys.stdout) -> None:
    """The table."""
    print("| profile | reader | CPU s | memory MB | idle us | hidden | communication us |", file=file)
    print("|---|---|---|---|---|---|---|", file=file)
    for name, size, read in rows:
        hidden = "nothing" if read.hidden_fraction is None else f"{read.hidden_fraction:.2%}"
        talk = "-" if read.communication_us is None else f"{read.communication_us:,.0f}"
        print(
            f"| {name}, {size / 1e6:,.1f} MB | {read.reader} | {read.cpu_s:.2f} | {read.memory_bytes_peak / 1e6:,.0f} "
            f"| {read.idle_us or 0:,.0f} | {hidden} | {talk} |", file=file,
        )  # fmt: skip


def main() -> None:
    """Write, read, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500, help="size of the synthetic profile; 0 leaves it out")
    parser.add_argument("--file", type=Path, action="append", default=[], help="a profile of your own as well")
    parser.add_argument("--hta", metavar="PYTHON", help="an interpreter that has HolisticTraceAnalysis")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows, both = [], {}
    with tempfile.TemporaryDirectory() as folder:
        paths = list(options.file)
        if options.megabytes:
            paths.append(Path(folder) / "synthetic.json")
            known = write(paths[-1], options.megabytes * 10**6)
        for path in paths:
            own, rank = ours(path)
            rows.append((path.name, path.stat().st_size, own))
            if path.parent == Path(folder):
                both = agree(known, rank)
            if options.hta:
                rows.append((path.name, path.stat().st_size, theirs(options.hta, path)))
    if options.json:
        reads = [{"profile": name, "bytes": size, **asdict(read)} for name, size, read in rows]
        print(json.dumps({"python": platform.python_version(), "reads": reads, "written_and_read": both}, indent=2))
        return
    print_reads(rows)
    for name, (written, read) in both.items():
        print(f"{name}: {written:,.1f} written, {read:,.1f} read")


if __name__ == "__main__":
    main()
