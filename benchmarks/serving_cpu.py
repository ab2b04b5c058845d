"""The serving planner's crossovers on this CPU: llama.cpp with a tiny model, slot files, int8 products, a paged pool.

python benchmarks/serving_cpu.py [--json] [--only batch,offload,int8,paging]

Needs torch with a C++ compiler, and the packages `gguf` and `xllamacpp`. Times are CPU time of one thread, so that
other work on the machine matters little; each figure is the least of three repeats.
"""

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

from cordee.plan.serving.levers.offload import break_even_bytes_per_s
from cordee.plan.serving.levers.quantise import FormatCrossover, unpacking_crossover
from serving import paging

REPEATS = 3
INPUT_TOKENS = OUTPUT_TOKENS = 64
AT_ONCE = (1, 8, 32)
# (slots, requests, input tokens, output tokens): prompts alone, answers alone at 1, 4 and 16 at once, a long context.
PROBES = ((1, 6, 256, 1), (1, 2, 8, 128), (4, 4, 8, 128), (16, 16, 8, 64), (1, 2, 512, 32))
LENGTHS = (512, 1024, 2048)


def batch(folder: Path) -> dict[str, Any]:
    """Calibrate the roofline on the probes and predict the loads, which are not among them."""
    from serving.cpu import calibrate, predicted_cpu_s
    from serving.llama import SHAPE, Llama, Load, write_gguf

    model = folder / "tiny.gguf"
    write_gguf(model)
    loads = [(slots, 2 * slots + 2 * (slots == 1), INPUT_TOKENS, OUTPUT_TOKENS) for slots in AT_ONCE]
    servers = {
        slots: Llama(model, slots=slots, slot_tokens=600) for slots in sorted({row[0] for row in (*PROBES, *loads)})
    }
    for server in servers.values():
        server.load(1, 16, 4)
    runs: dict[tuple[int, ...], list[Load]] = {}
    for _ in range(REPEATS):
        for row in (*PROBES, *loads):
            runs.setdefault(row, []).append(servers[row[0]].load(*row[1:]))
    least = {row: min(found, key=lambda each: each.cpu_s) for row, found in runs.items()}
    core, left = calibrate(SHAPE, [least[row] for row in PROBES])
    rows = []
    for row in loads:
        predicted_s = predicted_cpu_s(core, SHAPE, least[row])
        rows.append({
            "at_once": row[0],
            "measured_tokens_per_cpu_s": least[row].tokens_per_cpu_s,
            "spread": max(each.cpu_s for each in runs[row]) / least[row].cpu_s - 1,
            "predicted_tokens_per_cpu_s": row[1] * row[3] / predicted_s,
        })  # fmt: skip
    return {
        "memory_bytes_per_s": core.memory_bytes_per_s,
        "flop_per_s": core.flop_per_s["fp32"],
        "launch_s": core.efficiency.launch_s,
        "probe_error": left**0.5,
        "loads": rows,
    }


def offload(folder: Path) -> list[dict[str, Any]]:
    """Find the bandwidth at which a restored prompt costs as much as a computed one, by length."""
    from serving.llama import SHAPE, write_gguf
    from serving.slots import crossing

    model = folder / "tiny.gguf"
    write_gguf(model)
    rows = []
    for tokens in LENGTHS:
        found = crossing(model, folder / "slots", tokens)
        kv_bytes = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 2 * tokens
        rows.append({
            "tokens": tokens,
            "kv_bytes": kv_bytes,
            "file_bytes": found.file_bytes,
            "recompute_s": found.recompute_s,
            "restore_s": found.restore_s,
            "measured_bytes_per_s": found.bytes_per_s,
            "predicted_bytes_per_s": break_even_bytes_per_s(kv_bytes, found.recompute_s),
            "same_answer": found.same_answer,
        })  # fmt: skip
    return rows


def int8() -> list[dict[str, Any]]:
    """Find the tokens up to which int8 weights pay: predicted from products of one token, and measured.

    The roofline is calibrated on three products: float32 at 1 and at 256 tokens, and the way itself at 1 token.
    """
    from serving.products_cpu import FINE, measure

    seconds = measure()
    plain = dict(zip(FINE, seconds.pop("float32"), strict=True))
    rows = []
    for name, taken in seconds.items():
        own = dict(zip(FINE, taken, strict=True))
        fine = FormatCrossover("one core", "int8-wo", FINE, tuple(plain[m] / own[m] for m in FINE))
        rows.append({
            "way": name,
            "speedups": dict(zip(FINE, fine.ratios, strict=True)),
            "predicted_tokens": _predicted(name, plain[1], (plain[FINE[-1]] - plain[1]) / (FINE[-1] - 1), own[1]),
            "measured_tokens": _end(fine),
            "measured_first": fine.even_at[0] if fine.even_at else None,
        })  # fmt: skip
    return rows


def _predicted(way: str, weights_s: float, token_s: float, own_s: float) -> float | None:
    """Return the tokens up to which this way is faster, by the roofline; 0: at none; None: at any number."""
    if "8 bits" in way:  # a fourth of the bytes, and products at no lower rate: nothing is unpacked
        return None
    unpack_s = own_s - max(weights_s / 4, token_s)
    where = {"unpack_s": unpack_s} if "before" in way else {"unpack_token_s": unpack_s}
    return unpacking_crossover(4.0, weights_s, token_s, **where)


def _end(found: FormatCrossover) -> float | None:
    """Return from where a format that is faster for one token is slower for good; 0: it never pays; None: always."""
    if found.ratios[0] <= 1:
        return 0.0
    return found.even_at[-1] if found.ratios[-1] < 1 else None


def main() -> None:
    """Run the parts and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="batch,offload,int8,paging")
    chosen = parser.parse_args()
    wanted = chosen.only.split(",")
    found: dict[str, Any] = {}
    has_llama = all(importlib.util.find_spec(name) for name in ("gguf", "xllamacpp"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if not has_llama:
            found["left_out"] = "batch and offload: pip install gguf xllamacpp"
        if has_llama and "batch" in wanted:
            found["batch"] = batch(folder)
        if has_llama and "offload" in wanted:
            found["offload"] = offload(folder)
    if "int8" in wanted:
        found["int8"] = int8()
    if "paging" in wanted:
        found["paging"] = paging.compare(paging.sample())
    print(json.dumps(found, indent=2) if chosen.json else "\n\n".join(_tables(found)))


def _tables(found: dict[str, Any]) -> list[str]:
    tables = [found["left_out"]] if "left_out" in found else []
    if "batch" in found:
        each = found["batch"]
        rates = (
            each["memory_bytes_per_s"] / 1e9,
            each["flop_per_s"] / 1e9,
            each["launch_s"] * 1e6,
            each["probe_error"],
        )
        head = "{:.0f} GB/s, {:.1f} GFLOP/s, {:.0f} us a kernel; error on the probes {:.1%}".format(*rates)
        lines = [
            f"tokens a CPU-second, {INPUT_TOKENS} in and {OUTPUT_TOKENS} out ({head})",
            "",
            *_batch_rows(each["loads"]),
        ]
        tables.append("\n".join(lines))
    if "offload" in found:
        lines = [
            "| tokens | KV | recompute | MB/s predicted | measured | off | same answer |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in found["offload"]:
            mine, its = row["predicted_bytes_per_s"] / 1e6, row["measured_bytes_per_s"] / 1e6
            size, took = f"{row['kv_bytes'] / 1e6:.2f} MB", f"{row['recompute_s'] * 1e3:.0f} ms"
            answer = "yes" if row["same_answer"] else "no"
            lines.append(
                f"| {row['tokens']} | {size} | {took} | {mine:.2f} | {its:.2f} | {mine / its - 1:+.1%} | {answer} |"
            )
        tables.append("\n".join(lines))
    if "int8" in found:
        head = "| int8 weights | 1 | 4 | 8 | 16 | 64 | 256 | pays up to, predicted | measured | first even, measured |"
        lines = [head, "|" + "---|" * 10]
        for row in found["int8"]:
            ratios = " | ".join(f"{row['speedups'][m]:.2f}" for m in (1, 4, 8, 16, 64, 256))
            ends = (row["predicted_tokens"], row["measured_tokens"])
            named = " | ".join("always" if end is None else "never" if not end else f"m = {end:.1f}" for end in ends)
            named += " | " + ("" if row["measured_first"] is None else f"m = {row['measured_first']:.1f}")
            lines.append(f"| {row['way']} | {ratios} | {named} |")
        tables.append("\n".join(lines))
    if "paging" in found:
        lines = ["| pool | used | at once | waits with enough free tokens |", "|---|---|---|---|"]
        for name, use in found["paging"].items():
            lines.append(
                f"| {name} | {use['used']:.1%} | {use['at_once']:.0f} | {use['fragmented']} of {use['waits']} |"
            )
        tables.append("\n".join(lines))
    return tables


def _batch_rows(loads: list[dict[str, Any]]) -> list[str]:
    lines = ["| at once | predicted | measured | off | spread of repeats |", "|---|---|---|---|---|"]
    for row in loads:
        mine, its = row["predicted_tokens_per_cpu_s"], row["measured_tokens_per_cpu_s"]
        lines.append(f"| {row['at_once']} | {mine:.0f} | {its:.0f} | {mine / its - 1:+.1%} | {row['spread']:.1%} |")
    return lines


if __name__ == "__main__":
    main()
