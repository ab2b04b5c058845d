"""Rows of published measurements as values of the planner: shape, training, layout and GPU of each configuration.

Reads any CSV with the columns of `published_training.csv`. What a row leaves open is filled by rules that hold for all
rows alike, said where they are applied; no rule looks at an identifier or a source's name.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cordee.errors import CatalogueError
from cordee.hardware.catalog import Catalogue, Gpu
from cordee.plan.layout import Layout, Offload, Recompute
from cordee.plan.training import OPTIMIZERS, Attention, Framework, Loss, Optimizer, Precision, Training, Tuning
from cordee.units import GB
from cordee.workload.load import load_shape
from cordee.workload.model import Experts, LatentAttention, ModelShape

# GPT-2's vocabulary padded to 128, for rows of GPT models that do not say theirs.
GPT2_VOCAB = 50_304
DEFAULT_SEQUENCE = 2048
NUMBER = r"-?[0-9]*\.?[0-9]+(e[-+]?[0-9]+)?"


@dataclass(frozen=True)
class Published:
    """One configuration and what was measured of it, by metric; `primary` are the metrics to score time on.

    `unstated` are the columns microbatch and vpp where the row leaves them open; `optimizer_said`: the row has its
    optimizer; `fp4`: it trains in 4 bits.
    """

    config_id: str
    source: str
    trust: int
    note: str
    shape: ModelShape
    training: Training
    layout: Layout
    gpu: Gpu | None
    gpu_type: str
    metrics: Mapping[str, float]
    units: Mapping[str, str]
    zero_said: bool
    recompute_said: bool
    primary: frozenset[str]
    unstated: frozenset[str] = frozenset()
    optimizer_said: bool = True
    fp4: bool = False

    @property
    def gpus(self) -> int:
        """GPUs of the run."""
        return self.layout.gpus


def read_published(path: Path, catalogue: Catalogue) -> tuple[list[Published], dict[str, int]]:
    """All configurations that can be read, and how many could not, by reason."""
    groups: dict[str, list[dict[str, str]]] = defaultdict(list)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            groups[row["config_id"]].append(row)
    found: list[Published] = []
    skipped: dict[str, int] = defaultdict(int)
    for rows in groups.values():
        try:
            found.append(_read(rows, catalogue))
        except _UnreadableError as error:
            skipped[str(error)] += 1
    return found, dict(skipped)


class _UnreadableError(Exception):
    """The row lacks something that no rule fills."""


def _read(rows: Sequence[Mapping[str, str]], catalogue: Catalogue) -> Published:
    row = rows[0]
    shape = read_shape(row)
    layout, training = _read_run(row, shape)
    metrics = {r["metric"]: float(r["value"]) for r in rows if re.fullmatch(NUMBER, r["value"])}
    layout = _with_repeated(layout, training, shape, metrics)
    if layout.pp > shape.layers or not layout.expert_data_ranks:
        raise _UnreadableError("more stages than layers, or more expert ranks than GPUs")
    try:
        gpu = _with_memory(catalogue.find_gpu(_gpu_name(row["gpu_type"])), row["gpu_type"])
    except CatalogueError:
        gpu = None
    return Published(
        config_id=row["config_id"],
        source=row["source"],
        trust=_whole(row["trust"]) or 2,
        note=row["note"],
        shape=shape,
        training=training,
        layout=layout,
        gpu=gpu,
        gpu_type=row["gpu_type"],
        metrics=metrics,
        units={r["metric"]: r["unit"].lower() for r in rows},
        zero_said=bool(re.search(r"^\d(?!/)|FSDP", row["zero_stage"])),
        recompute_said=bool(re.match("none|full|selective", row["recompute"])),
        primary=frozenset(r["metric"] for r in rows if r["primary"] == "1"),
        unstated=_unstated(row),
        # Where the host has all states it does not matter.
        optimizer_said="per recipe" not in row["note"] or "AdamW" in row["note"] or layout.offload == "optimizer",
        fp4="fp4" in row["dtype"].lower(),
    )


def _with_repeated(layout: Layout, training: Training, shape: ModelShape, metrics: Mapping[str, float]) -> Layout:
    """The layout with the layers that its row's own FLOPs say are recomputed whole, where "selective" names no tensors.

    Of four passes' work (one forward, two backward, one again) HFU counts all and MFU three: HFU / MFU = 1 + r / 3.
    """
    if layout.recompute != "selective" or training.framework != "torch" or not {"mfu", "hfu"} <= metrics.keys():
        return layout
    repeated = min(1.0, 3 * (metrics["hfu"] / metrics["mfu"] - 1))
    return replace(layout, recompute="full", recompute_layers=round(repeated * shape.layers / layout.pp))


def _unstated(row: Mapping[str, str]) -> frozenset[str]:
    """A micro-batch that is not given, and chunks that are not given where the schedule is interleaved or not told."""
    told = row["pp_schedule"].lower()
    open_chunks = not row["vpp"] and ("interleaved" in told or not told)
    open_size = not row["microbatch"] and not row["grad_accum"]
    return frozenset(key for key, is_open in (("vpp", open_chunks), ("microbatch", open_size)) if is_open)


def _gpu_name(text: str) -> str:
    """`A100-SXM-80G (400Gbps/node)` is an A100-80GB; `SXM (40 or 80G)` and nodes of assumed GPUs are taken as 80 GB."""
    name = re.sub(r"\(.*?\)", "", text).strip()
    match = re.search(r"A100|A800|H100|H800|H200|B200|GB200|GB300|B300", text)
    chip = {"A800": "A100", "H800": "H100"}.get(match[0], match[0]) if match else name
    if re.search(r"\b(GB200|GB300)\b", text):
        chip = re.search(r"GB[23]00", text)[0]  # type: ignore[index]
    return "A100-40GB" if chip == "A100" and "40G" in name else chip


def _with_memory(gpu: Gpu, text: str) -> Gpu:
    """The same chip with the memory that the row gives it.

    `H100-SXM-96G` is the one with HBM2e of 2.4 TB/s at 500 W, whose rate is between those of the SXM and the NVL part
    (835 TFLOP/s): pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, which says so and knows no more.
    """
    told = re.search(r"-(\d{2,3})GB?\b", text)
    if not told:
        return gpu
    gpu = replace(gpu, memory_bytes=int(told[1]) * GB)
    if gpu.name != "H100" or told[1] != "96":
        return gpu
    slower = (1 + 835 / 989.4) / 2
    rates = {dtype: rate * slower for dtype, rate in gpu.flop_per_s.items()}
    return replace(gpu, memory_bytes_per_s=2.4e12, flop_per_s=rates)


def read_shape(row: Mapping[str, str]) -> ModelShape:
    """The model. Without heads they are as wide as 128, without a vocabulary it is GPT-2's, without layers they follow
    from the number of parameters, in whole stages."""
    note = row["arch_note"].lower()
    hidden = _whole(row["hidden"])
    vocab = _whole(row["vocab"]) or GPT2_VOCAB
    if not hidden:
        raise _UnreadableError("no hidden size")
    layers = _whole(row["layers"])
    if not layers:
        if not row["params_b"]:
            raise _UnreadableError("neither layers nor parameters")
        stages = _whole(row["pp"]) or 1
        layers = stages * round((float(row["params_b"]) * 1e9 - vocab * hidden) / (12 * hidden**2) / stages)
    heads = _whole(row["heads"]) or hidden // 128
    head_dim = _whole(row["head_dim"]) or hidden // heads
    if "on alternate layers" in note:
        return load_shape(row["model"].lower())  # its layers differ, which only its config.json tells
    # A model without a word on it is a GPT if its feed-forward width is four times its hidden one.
    silent = not note and _whole(row["ffn"]) in (0, 4 * hidden)
    gpt = silent or bool(re.search(r"\bgelu|^gpt", note))
    gated = not gpt and "relu" not in note
    seq = _whole(row["seq_len"]) or DEFAULT_SEQUENCE
    return ModelShape(
        name=row["model"],
        family="gpt2" if gpt else "llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_whole(row["kv_heads"]) or heads,
        head_dim=head_dim,
        ffn=_whole(row["ffn"]) or (4 * hidden),
        vocab=vocab,
        positions=seq,
        learned_positions=seq if "learned-pos" in note else 0,
        tied="tied" in note.replace("untied", "") or (gpt and "untied" not in note),
        gated=gated,
        norm="layer" if gpt else "rms",
        qkv_bias=gpt,
        out_bias=gpt,
        mlp_bias=gpt,
        qk_norm="qk-norm" in note,
        latent=_latent(row, note),
        experts=_experts(row, note),
    )


def _latent(row: Mapping[str, str], note: str) -> LatentAttention | None:
    """Ranks and widths that the note does not give are DeepSeek-V3's."""
    if "mla" not in note:
        return None

    def told(pattern: str, otherwise: int) -> int:
        match = re.search(pattern, note)
        return int(match[1]) if match else otherwise

    return LatentAttention(
        q_rank=told(r"q_lora(\d+)", 1536),
        kv_rank=told(r"kv_lora(\d+)", 512),
        nope_dim=told(r"nope(\d+)", 128),
        rope_dim=told(r"rope(\d+)", 64),
        v_dim=told(r"\bv(\d+)", 128),
    )


def _experts(row: Mapping[str, str], note: str) -> Experts | None:
    routed = _whole(row["n_experts"])
    if not routed:
        return None
    width = _whole(row["moe_ffn"]) or _whole(row["ffn"])
    dense = re.search(r"dense_layers=(\d+)|first (\d+) layers? dense", note)
    return Experts(
        routed=routed,
        per_token=_whole(row["top_k"]) or 1,
        ffn=width,
        shared_ffn=_whole(row["n_shared"]) * width,
        first_dense=int(next(filter(None, dense.groups()))) if dense else 0,
    )


def _read_run(row: Mapping[str, str], shape: ModelShape) -> tuple[Layout, Training]:
    tp, pp, cp = (_whole(row[axis]) or 1 for axis in ("tp", "pp", "cp"))
    dp = _whole(row["dp"]) or max(1, _whole(row["n_gpus"]) // (tp * pp * cp))
    micro_batch = _whole(row["microbatch"])
    global_batch = _whole(row["global_batch"])
    accumulated = _whole(row["grad_accum"])
    if not micro_batch:
        micro_batch = max(1, global_batch // (dp * accumulated)) if accumulated else 1
    if not global_batch:
        global_batch = dp * micro_batch * max(1, accumulated)
    zero, shard = _zero(row["zero_stage"], _whole(row["gpus_per_node"]) or 8)
    schedule, vpp = _schedule(row, shape, pp)
    framework = _framework(row["framework"])
    layout = Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        zero=zero,
        sp=row["sequence_parallel"] == "yes",
        micro_batch=micro_batch,
        recompute=_recompute(row["recompute"]),
        cp=cp,
        ep=_whole(row["ep"]) or 1,
        etp=_whole(row["etp"]) or (1 if tp * cp * dp % (tp * (_whole(row["ep"]) or 1)) else None),
        shard=shard,
        schedule=schedule,
        vpp=vpp,
        # A row that does not say how the context is parallel is taken as the kind that keeps the most.
        cp_kind="ring" if "ring" in row["note"] or cp == 1 else "ulysses",
        split=_split(row, shape, pp),
        offload=_offload(row["note"].lower()),
    )
    return layout, _training(row, shape, framework, global_batch)


def _training(row: Mapping[str, str], shape: ModelShape, framework: Framework, global_batch: int) -> Training:
    note, dtype = row["note"].lower(), row["dtype"].lower()
    told = re.search(r"seq_len (\d+)", note)
    before_te = "Megatron-LM" in row["framework"] and "TE" not in row["framework"] and not shape.gated
    old = framework == "deepspeed" or before_te
    precision: Precision = "fp8" if "fp8" in dtype or "fp4" in dtype else "bf16"
    return Training(
        seq_tokens=_whole(row["seq_len"]) or (int(told[1]) if told else DEFAULT_SEQUENCE),
        global_batch=global_batch,
        optimizer=_fine_tuner(note) or OPTIMIZERS[_optimizer(framework, dtype)],
        precision=precision,
        # GPT models of Megatron-LM before Transformer Engine: fused softmax with dropout, no flash attention.
        flash=not old,
        dropout=old,
        framework=framework,
        overlap="no comm overlap" not in note,
        loss="fused" if _has_fused_loss(row["framework"], note) else _compiled(note) or _chunked(note),
        attention=_attention(row["framework"]),
        fused=True if _is_fused(row["framework"], note) else None,
        tuning=Tuning(regathers="nanotron" in row["framework"]),
    )


def _has_fused_loss(framework: str, note: str) -> bool:
    """Whether logits stay in 16 bits.

    Scripts that are built on the flash-attn package take its fused cross-entropy; torchtune's recipes have a loss that
    goes over the logits in pieces (`CEWithChunkedOutputLoss` in their configs).
    """
    return "fused ce" in note or "+ FlashAttn" in framework or ("torchtune" in framework and "per recipe" in note)


def _is_fused(framework: str, note: str) -> bool:
    """Whether norms, rotations and activations are one kernel each: compiled, or written so."""
    return bool(re.search("compile|XLA|flash-attn training|nanotron", framework) or "torch.compile of" in note)


def _attention(framework: str) -> Attention | None:
    """The first generation where a framework asks for it.

    LLM Foundry's benchmark sets `attn_impl: triton` (scripts/train/benchmarking/submit_benchmarks.py); InternEvo
    installs flash-attn 1.0.5 (doc/en/install.md). JAX takes the vendor's.
    """
    if re.search("Composer|InternEvo", framework):
        return "first"
    return "vendor" if "JAX" in framework else None


def _compiled(note: str) -> Loss | None:
    """A loss that the note says goes through torch.compile."""
    return "compiled" if re.search(r"compile of (layers and )?(the )?loss", note) else None


# The rungs of torchtune's README from a plain full fine-tuning in 16 bits: each has what those before it have.
LADDER = ("chunked ce, ac", "+ optimizer in backward", "+ activation offload", "+ 8-bit adamw")


def _rungs(note: str) -> int:
    """How many rungs of the ladder a note stands above plain 16-bit training; 0: it names none."""
    return next((at + 1 for at, rung in reversed([*enumerate(LADDER)]) if rung in note), 0)


def _offload(note: str) -> Offload:
    """What a note says that the host keeps: all states, or activations."""
    if "cpu offload" in note:
        return "optimizer"
    return "activations" if _rungs(note) > 2 else "none"


def _fine_tuner(note: str) -> Optimizer | None:
    """The optimizer of a full fine-tuning that says it trains in 16 bits alone; None: it does not say so."""
    if "pure bf16" not in note and not _rungs(note):
        return None
    name = "adamw-bf16" if "8-bit" not in note else "adamw-8bit-paged" if "paged" in note else "adamw-8bit"
    return replace(OPTIMIZERS[name], in_backward="optimizer in backward" in note or _rungs(note) > 1)


def _chunked(note: str) -> Loss | None:
    """A loss over pieces of the output."""
    return "chunked" if "chunked ce" in note or _rungs(note) else None


def _optimizer(framework: Framework, dtype: str) -> str:
    """Megatron-LM, and what says so, keeps fp32 gradients; DeepSpeed's BF16 optimizer 16-bit ones and fp32 sums."""
    if framework == "deepspeed" and "fp32 grad" in dtype:
        return "adamw-fp32-sums"
    return "adamw-fp32-grads" if framework == "megatron" or "fp32 grad" in dtype else "adamw"


def _framework(text: str) -> Framework:
    """An in-house trainer is nearest to Megatron-LM: Meta's frees what a stage has sent on (arXiv:2407.21783, 3.3)."""
    if "DeepSpeed" in text or "InternEvo" in text:
        return "deepspeed" if "DeepSpeed" in text else "internevo"
    return "megatron" if re.search("Megatron|NeMo|MegaScale|internal", text) else "torch"


def _recompute(text: str) -> Recompute:
    if text.startswith("full"):
        return "full"
    return "selective" if text.startswith("selective") else "none"


def _zero(text: str, node: int) -> tuple[int, int | None]:
    """Stage and shard group; an unstated one is 1, as all frameworks' recipes have it."""
    group = re.search(r"shard group (\d+)", text)
    if group:
        return int(text[0]), int(group[1])
    if "intra-node" in text:
        return 3, node
    if text[:1].isdigit() and not text.startswith("0/1"):
        return int(text[0]), None
    if "ZeRO-2" in text:
        return 2, None
    return (3, None) if "FSDP" in text else (1, None)


def _schedule(row: Mapping[str, str], shape: ModelShape, pp: int) -> tuple[str, int]:
    text = row["pp_schedule"].lower()
    if pp == 1:
        return "1f1b", 1
    for word, schedule in (("zb-1p", "zb-h1"), ("zb-2p", "zb-h2"), ("zb-v", "zb-v"), ("dualpipe", "dualpipe")):
        if word in text:
            return schedule, 1  # type: ignore[return-value]
    vpp = -(-shape.layers // pp) if "layer per chunk" in row["vpp"] else _whole(row["vpp"]) or 1
    return ("interleaved", vpp) if vpp > 1 else ("1f1b", 1)


def _split(row: Mapping[str, str], shape: ModelShape, pp: int) -> tuple[int, ...] | None:
    """Embedding and head counted as a layer each, where the note says so."""
    if pp == 1 or "embedding counted as a layer" not in row["note"]:
        return None
    base, extra = divmod(shape.layers + 2, pp)
    counts = [base + (stage < extra) for stage in range(pp)]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


def _whole(text: str) -> int:
    return int(float(text)) if re.fullmatch(r"[0-9.]+(e\d+)?", text) else 0


def memory_bytes(metric: str, value: float) -> float:
    """Bytes that a metric of memory means by its value.

    nvidia-smi counts in MiB and torch's summaries in GiB, and both are called GB: an 80 GB card is full at 80.0.
    """
    return value * (2**20 if metric.endswith("_mib") else 2**30)
