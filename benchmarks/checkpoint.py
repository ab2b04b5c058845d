"""What a checkpoint costs, beside torch.save, safetensors and DCP, and beside what this machine can do at best.

One state (GPT-like weights in fp32 with AdamW's moments) on 1 process and on 4 gloo ranks with FSDP2. All ways take
turns in one run: the stall of the caller, when the bytes are durable, CPU seconds of trainer and uploader, and loads
from the disk and from the page cache. Medians; the first two saves of each way, which take new memory, are apart.

    python benchmarks/checkpoint.py [--gb 1.143] [--repeat 5] [--ranks 1,4] [--only cordee,memcpy] [--json]
"""

import argparse
import json
import math
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WARM_UP = 2
COLUMNS = ("stall_s", "durable_s", "cpu_s", "cold_load_s", "warm_load_s", "cold_load_cpu_s")
LIMITS = ("memcpy", "O_DIRECT and fsync")


def on_this_rank(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything, with the ways in turn; each repetition begins with another one."""
    import torch
    import torch.distributed as dist

    from checkpoint_ways import WAYS, State, Timer, lora

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    timer, state = Timer(world), State(args.gb, world)
    names = [name for name in WAYS if not args.only or name in args.only]
    ways = {name: WAYS[name](state, folder / name.replace(" ", "_"), rank, world) for name in names}
    rows: dict[str, dict[str, list[float]]] = {name: {} for name in names}

    def note(name: str, found: dict[str, float]) -> None:
        for column, value in found.items():
            rows[name].setdefault(column, []).append(value)

    def say(text: str) -> None:
        if rank == 0:
            print(f"  {world} rank{'s' * (world > 1)}: {text}", file=sys.stderr, flush=True)

    for turn in range(-WARM_UP, args.repeat):
        say(f"save {turn + 1} of {args.repeat}" if turn >= 0 else "warming up")
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found = timer.save(ways[name])
            if turn == -WARM_UP:
                note(name, {"first_stall_s": found["stall_s"]})
            elif turn >= 0:
                note(name, found)
        state.step()
    for name in names:  # The state of now, so that a load can be checked.
        timer.save(ways[name])
    for turn in range(args.repeat):
        say(f"load {turn + 1} of {args.repeat}")
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            note(name, timer.load(ways[name], cold=True))
            note(name, timer.load(ways[name], cold=False))
    for way in ways.values():
        way.close()
    captured = sum(timer.all_of(sum(each.nbytes for each in state.local().values()))[0])
    told: dict[str, Any] = {"ranks": world, "bytes": int(captured), "rows": rows, "torch": torch.__version__}
    if world == 1 and (not args.only or "cordee" in args.only):
        told["lora"] = lora(args.gb / 2, folder / "lora")
    dist.barrier()
    return told


def run(world: int, args: argparse.Namespace) -> dict[str, Any]:
    """One world, in processes of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    # torch asks the name server about each of its peers; a slow one would be measured.
    common |= {"RES_OPTIONS": "timeout:1 attempts:1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        command = [sys.executable, *sys.argv, "--in", folder]
        ranks = [
            subprocess.Popen(
                command,
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            )
            for rank in range(world)
        ]
        out = ranks[0].communicate()[0]
        if any(rank.wait() for rank in ranks):
            raise SystemExit(f"a rank of {world} failed")
    told: dict[str, Any] = json.loads(out)
    return told


def median(world: dict[str, Any], name: str, column: str) -> float:
    """Of one way; NaN if it was not run."""
    values = world["rows"].get(name, {}).get(column, [])
    return statistics.median(values) if values else float("nan")


def targets(worlds: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(what, at most, measured)."""
    found: list[tuple[str, float, float]] = []
    for world in worlds:
        ranks = world["ranks"]

        def over(column: str, *others: str, world: dict[str, Any] = world) -> float:
            """Ours over the best of the others."""
            known = [value for name in others if not math.isnan(value := median(world, name, column))]
            return median(world, "cordee", column) / min(known, default=float("nan"))

        dcp = [name for name in world["rows"] if name.startswith("dcp.")]
        stall, whole = 1.5 if ranks == 1 else 2.0, f"{ranks} rank{'s' * (ranks > 1)}"
        found += [
            (f"{whole}: stall over memcpy", stall, over("stall_s", "memcpy")),
            (f"{whole}: durable over O_DIRECT with fsync", 2.0, over("durable_s", "O_DIRECT and fsync")),
            (f"{whole}: durable over the best DCP way", 1.0, over("durable_s", *dcp)),
            (f"{whole}: durable over safetensors", 1.5, over("durable_s", "safetensors")),
            (f"{whole}: CPU seconds over dcp.save", 0.5, over("cpu_s", "dcp.save")),
            (f"{whole}: cold load over the raw read", 1.3, over("cold_load_s", "O_DIRECT and fsync")),
            (f"{whole}: warm load over the raw read", 1.3, over("warm_load_s", "O_DIRECT and fsync")),
        ]
        if "lora" in world:
            second, first = world["lora"]["second_bytes"], world["lora"]["first_bytes"]
            found.append(("LoRA: bytes of the second checkpoint over the first", 0.05, second / first))
    return found


def show(worlds: list[dict[str, Any]]) -> None:
    """Tables."""
    for world in worlds:
        copy, disk = median(world, "memcpy", "stall_s"), median(world, "O_DIRECT and fsync", "durable_s")
        print(f"\n{world['ranks']} rank(s), {world['bytes'] / 1e9:.3f} GB; seconds, medians (ratio to the limit)\n")
        heads = ("held (/memcpy)", "durable (/O_DIRECT)", "CPU s", "cold load", "warm load", "first held")
        print(f"{'':30}" + "".join(f"{head:>20}" for head in heads))
        for name in world["rows"]:
            stall, durable = median(world, name, "stall_s"), median(world, name, "durable_s")
            cells = [f"{stall:.3f} ({stall / copy:.2f})", f"{durable:.3f} ({durable / disk:.2f})"]
            for column in ("cpu_s", "cold_load_s", "warm_load_s", "first_stall_s"):
                cells.append(f"{median(world, name, column):.3f}")
            print(f"{name:30}" + "".join(f"{cell:>20}" for cell in cells))
        print(f"\n{'smallest to largest':30}" + "".join(f"{head:>20}" for head in heads[:-1]))
        for name, columns in world["rows"].items():
            spread = [columns.get(column, [float("nan")]) for column in COLUMNS[:5]]
            print(f"{name:30}" + "".join(f"{f'{min(each):.3f} to {max(each):.3f}':>20}" for each in spread))
    print(f"\n{'target':55}{'at most':>10}{'measured':>10}  met")
    for what, most, measured in targets(worlds):
        met = "not run" if math.isnan(measured) else "yes" if measured <= most else "no"
        print(f"{what:55}{most:10.2f}{measured:10.3f}  {met}")


def main() -> None:
    """Measure, print tables or with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.143, help="of the whole state, in GB")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--ranks", default="1,4")
    parser.add_argument("--only", type=lambda text: text.split(","), help="ways, with commas between")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to be measured")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--in", dest="inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside is not None:
        told = on_this_rank(args, args.inside)
        if os.environ["RANK"] == "0":
            print(json.dumps(told), flush=True)
        os._exit(0)  # Threads of DCP's stagers are not worth waiting for.
    worlds = [run(int(world), args) for world in args.ranks.split(",")]
    if args.json:
        verdicts = [
            {"what": what, "at_most": most, "measured": measured, "met": measured <= most}
            for what, most, measured in targets(worlds)
        ]
        print(json.dumps({"python": platform.python_version(), "worlds": worlds, "targets": verdicts}))
        return
    show(worlds)


if __name__ == "__main__":
    main()
