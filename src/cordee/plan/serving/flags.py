"""Settings that make vLLM, SGLang, TensorRT-LLM or llama.cpp serve the layout that was chosen.

One record for each engine: its names for the same settings, and the values of formats. Names were read in November 2026
in vLLM's engine arguments, SGLang's server arguments, the reference of trtllm-serve and llama-server's README.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from cordee.errors import LayoutError
from cordee.plan.launch import Launch
from cordee.plan.serving.case import ServingCase, ServingLayout
from cordee.plan.serving.engine import find_engine
from cordee.plan.serving.formats import GGUF, KV, WEIGHTS, find_format
from cordee.plan.serving.layouts import missing_axes
from cordee.units import plural
from cordee.workload.service import Flag, flag_name


@dataclass(frozen=True, slots=True)
class Deployment:
    """A case, the checkpoint that it serves, and the number of its replicas."""

    model: str
    case: ServingCase
    replicas: int


@dataclass(frozen=True, slots=True)
class Dialect:
    """The names that one engine has for the settings.

    Attributes:
        command: the words before the settings; `{model}` is the checkpoint.
        settings: return the settings of a case by their names; a value of "" is a switch.
        weights: words for a format of the weights; a format in `checkpoints` is a property of the checkpoint instead.
        kv: the value for a format of the KV cache; "" for the engine's default.
        file: return lines of the configuration file that `--config` reads.
        spanning: return settings of a replica on several nodes, given their number.
        joined: how to start these nodes; `{nodes}`, `{gpus}` and `{here}`, the attention copies on each, are filled in.
        asked: what a setting that a user gives asks of the plan: an axis of the layout, `context`, `contexts` (of all
            sequences together), `max_sequences`, `memory_fraction`, `kv` or `weights`.
    """

    command: str
    settings: Callable[[Deployment], Mapping[str, object]]
    kv_name: tuple[str, ...]
    kv: Mapping[str, str]
    checkpoints: Mapping[str, str]
    weights: Mapping[str, str] = field(default_factory=dict)
    file: Callable[[Deployment], list[str]] = lambda _: []
    spanning: Callable[[ServingLayout, int], Mapping[str, object]] = lambda _, nodes: {}
    joined: Callable[[ServingLayout], str] = lambda _: ""
    asked: Mapping[str, str] = field(default_factory=dict)


def engine_settings(engine: str, deployed: Deployment) -> Launch:
    """Return the settings for this engine as one command.

    Raises:
        LayoutError: no such engine.
    """
    if engine not in DIALECTS:
        raise LayoutError(f"unknown engine {engine!r}", hint="use " + ", ".join(DIALECTS))
    dialect, case = DIALECTS[engine], deployed.case
    cannot = missing_axes(case.layout, find_engine(engine))
    words = [dialect.command.format(model=deployed.model)]
    settings, notes = dict(dialect.settings(deployed)), []
    layout, nodes = case.layout, ceil(case.layout.gpus / case.gpu.gpus_per_node)
    if nodes > 1:
        settings |= dialect.spanning(layout, nodes)
        how = dialect.joined(layout).format(nodes=nodes, gpus=layout.gpus, here=ceil(layout.dp / nodes))
        notes.append(f"a replica takes {layout.gpus} GPUs on {nodes} nodes of {case.gpu.gpus_per_node}: {how}")
    words += [f"{name} {value}".rstrip() for name, value in settings.items() if value is not None]
    if case.weights.name in dialect.weights:
        words.append(dialect.weights[case.weights.name])
    elif case.weights.name in dialect.checkpoints:
        notes.append(f"give a checkpoint in {dialect.checkpoints[case.weights.name]}")
    else:
        cannot.append(f"weights in {case.weights.name}")
    if case.kv.name not in dialect.kv:
        cannot.append(f"a KV cache in {case.kv.name}")
    elif dialect.kv[case.kv.name]:
        words += [f"{name} {dialect.kv[case.kv.name]}" for name in dialect.kv_name]
    if deployed.replicas > 1:
        gpus = plural(case.layout.gpus, "GPU")
        notes.append(f"start it {deployed.replicas} times, each on {gpus} (CUDA_VISIBLE_DEVICES), behind one router")
    text = " \\\n    ".join(words)
    lines = dialect.file(deployed)
    if lines:
        text = "\n".join(["cat > serve.yaml <<'END'", *lines, "END", text + " \\\n    --config serve.yaml"])
    return Launch(engine, str(case.layout), text, tuple(cannot), tuple(notes))


def planned_flags(case: ServingCase) -> dict[str, Flag]:
    """Return the settings with which a replica's engine serves the case, as a job file writes them under `flags`.

    `True` is a switch, `False` takes out what the replica would set by itself. The weights are the checkpoint's: the
    engine reads their format from it.
    """
    dialect = DIALECTS[case.engine.name]
    settings = {**dialect.settings(Deployment("", case, 1))}
    settings |= {name: dialect.kv.get(case.kv.name) or None for name in dialect.kv_name}
    switches: Mapping[object, bool] = {None: False, "": True}
    return {name: switches[value] if value in switches else _plain(value) for name, value in settings.items()}


def _plain(value: object) -> int | str:
    return value if isinstance(value, int) else str(value)


def asked_settings(engine: str, flags: Mapping[str, Flag]) -> dict[str, Any]:
    """Return what the settings that a user gives to an engine ask of its plan, as `serve_plan` takes it.

    >>> asked_settings("vllm", {"max_num_seqs": 64, "kv-cache-dtype": "fp8", "-tp": 2, "enforce-eager": True})
    {'max_sequences': 64, 'kv': 'fp8', 'layout': 'tp=2'}
    >>> asked_settings("llama.cpp", {"parallel": 8, "ctx-size": 32768, "cache-type-v": "q8_0"})
    {'max_sequences': 8, 'kv': 'q8_0', 'context': '4096'}
    """
    meanings = DIALECTS[engine].asked
    named = {flag_name(name): value for name, value in flags.items()}
    found = {meanings[name]: value for name, value in named.items() if name in meanings and value is not False}
    asked: dict[str, Any] = {}
    if "max_sequences" in found:
        asked["max_sequences"] = int(found["max_sequences"])
    if "memory_fraction" in found:
        asked["memory_fraction"] = float(found["memory_fraction"])
    if "kv" in found and (kv := _kv_format(str(found["kv"]))):
        asked["kv"] = kv
    if found.get("weights") in WEIGHTS:
        asked["weights"] = found["weights"]
    if "contexts" in found:
        found["context"] = int(found["contexts"]) // asked.get("max_sequences", 1)
    if "context" in found:
        asked["context"] = str(found["context"])
    axes = [
        axis if found[axis] is True else f"{axis}={found[axis]}" for axis in ("tp", "pp", "dp", "ep") if axis in found
    ]
    return asked | ({"layout": ",".join(axes)} if axes else {})


def _kv_format(text: str) -> str | None:
    """Return the format of a KV cache that an engine calls so; None: its default, or one that is not known."""
    try:
        return find_format(KV, "fp8" if text.startswith("fp8") else text).name
    except LayoutError:
        return None


PHASES: Mapping[str, tuple[str, str]] = {
    "vllm": ('--kv-transfer-config \'{"kv_connector":"NixlConnector","kv_role":"kv_both"}\'',) * 2,
    "sglang": ("--disaggregation-mode prefill", "--disaggregation-mode decode"),
}
"""The words by which an engine computes prompts alone and answers alone."""


def phase_settings(engine: str, prefill: Deployment, decode: Deployment) -> Launch:
    """Return the settings for replicas of prefill and of decode as two commands.

    Raises:
        LayoutError: no such engine, or one for which this has no words.
    """
    if engine not in PHASES:
        hint = f"use --launch {' or '.join(PHASES)}, or leave out --disaggregate"
        raise LayoutError(f"prefill and decode apart have no command for {engine}", hint=hint)
    parts = [engine_settings(engine, each) for each in (prefill, decode)]
    texts = [
        f"# {name}\n{part.text} \\\n    {words}"
        for name, part, words in zip(("prefill", "decode"), parts, PHASES[engine], strict=True)
    ]
    notes = [f"{name}: {note}" for name, part in zip(("prefill", "decode"), parts, strict=True) for note in part.notes]
    notes.append("a router sends each request to a prefill replica, and then to a decode replica")
    cannot = dict.fromkeys(lack for part in parts for lack in part.cannot)
    layout = f"prefill {prefill.case.layout}, decode {decode.case.layout}"
    return Launch(engine, layout, "\n\n".join(texts), tuple(cannot), tuple(notes))


def _many(number: int) -> int | None:
    """Return a degree of parallelism, or None for 1, which is every engine's default."""
    return number if number > 1 else None


def _vllm_spanning(layout: ServingLayout, nodes: int) -> Mapping[str, object]:
    if layout.dp == 1:
        head = {"--nnodes": nodes, "--node-rank": "RANK", "--master-addr": "HEAD", "--master-port": 29501}
        return {"--distributed-executor-backend": "mp", **head}
    return {"--data-parallel-size-local": ceil(layout.dp / nodes), "--data-parallel-address": "HEAD"}


def _vllm_joined(layout: ServingLayout) -> str:
    if layout.dp == 1:
        return "start it on each, with RANK 0 on HEAD, and with --headless on all others"
    return "start it on each; on all but HEAD add --headless --data-parallel-start-rank, {here} more on each node"


def _vllm(deployed: Deployment) -> Mapping[str, object]:
    case, layout = deployed.case, deployed.case.layout
    return {
        "--tensor-parallel-size": _many(layout.tp),
        "--pipeline-parallel-size": _many(layout.pp),
        "--data-parallel-size": _many(layout.dp),
        "--enable-expert-parallel": "" if layout.ep else None,
        "--max-num-seqs": case.max_sequences,
        "--max-num-batched-tokens": case.max_batched_tokens,
        "--max-model-len": case.max_context_tokens,
        "--gpu-memory-utilization": f"{case.memory_fraction:.3g}",
    }


def _sglang(deployed: Deployment) -> Mapping[str, object]:
    case, layout = deployed.case, deployed.case.layout
    return {
        # Attention in data-parallel groups divides the tensor-parallel GPUs, so tp-size counts all of them.
        "--tp-size": _many(layout.tp * layout.dp),
        "--pp-size": _many(layout.pp),
        "--dp-size": _many(layout.dp),
        "--enable-dp-attention": "" if layout.dp > 1 else None,
        "--ep-size": layout.tp * layout.dp if layout.ep else None,
        "--max-running-requests": case.max_sequences,
        "--chunked-prefill-size": case.max_batched_tokens,
        "--context-length": case.max_context_tokens,
        "--mem-fraction-static": f"{case.memory_fraction:.3g}",
    }


def _tensorrt_llm(deployed: Deployment) -> Mapping[str, object]:
    case, layout = deployed.case, deployed.case.layout
    return {
        "--tp_size": _many(layout.tp * layout.dp),
        "--pp_size": _many(layout.pp),
        "--ep_size": layout.tp * layout.dp if layout.ep else None,
        "--max_batch_size": case.max_sequences,
        "--max_num_tokens": case.max_batched_tokens,
        "--max_seq_len": case.max_context_tokens,
        "--kv_cache_free_gpu_memory_fraction": f"{case.memory_fraction:.3g}",
    }


def _tensorrt_llm_file(deployed: Deployment) -> list[str]:
    case = deployed.case
    lines = ["enable_chunked_prefill: true"] if case.engine.chunked_prefill else []
    lines += ["enable_attention_dp: true"] if case.layout.dp > 1 else []
    kv = {"fp8": "fp8"}.get(case.kv.name)
    return [*lines, "kv_cache_config:", f"  dtype: {kv}"] if kv else lines


def _llama_cpp(deployed: Deployment) -> Mapping[str, object]:
    case, layout = deployed.case, deployed.case.layout
    gpus = layout.gpus
    return {
        "--n-gpu-layers": "all",
        # The context is divided among the slots.
        "--ctx-size": case.max_sequences * case.max_context_tokens,
        "--parallel": case.max_sequences,
        "--batch-size": case.max_batched_tokens,
        "--flash-attn": "on",
        "--split-mode": None if gpus == 1 else "tensor" if layout.tp > 1 else "layer",
    }


_HF_CHECKPOINTS = {
    "int4": "4 bits (AWQ or GPTQ): the engine reads the format from it",
    "int8": "W8A8 int8 (compressed-tensors): the engine reads the format from it",
    "int8-wo": "W8A16 int8 (GPTQ): the engine reads the format from it",
    "mxfp4": "MXFP4: the engine reads the format from it",
    "nvfp4": "NVFP4 (ModelOpt): the engine reads the format from it",
    "fp8-block": "FP8 with block scales: the engine reads the format from it",
}

DIALECTS: Mapping[str, Dialect] = {
    "vllm": Dialect(
        command="vllm serve {model}",
        settings=_vllm,
        weights={
            "bf16": "--dtype bfloat16",
            "fp16": "--dtype float16",
            "fp32": "--dtype float32",
            "fp8": "--quantization fp8",
        },
        checkpoints=_HF_CHECKPOINTS,
        kv_name=("--kv-cache-dtype",),
        kv={"bf16": "", "fp16": "", "fp32": "", "fp8": "fp8"},
        spanning=_vllm_spanning,
        joined=_vllm_joined,
        asked={
            "--tensor-parallel-size": "tp",
            "-tp": "tp",
            "--pipeline-parallel-size": "pp",
            "-pp": "pp",
            "--data-parallel-size": "dp",
            "-dp": "dp",
            "--enable-expert-parallel": "ep",
            "--max-num-seqs": "max_sequences",
            "--max-model-len": "context",
            "--gpu-memory-utilization": "memory_fraction",
            "--kv-cache-dtype": "kv",
            "--quantization": "weights",
            "-q": "weights",
        },
    ),
    "sglang": Dialect(
        command="python -m sglang.launch_server --model-path {model}",
        settings=_sglang,
        weights={
            "bf16": "--dtype bfloat16",
            "fp16": "--dtype float16",
            "fp32": "--dtype float32",
            "fp8": "--quantization fp8",
        },
        checkpoints=_HF_CHECKPOINTS,
        kv_name=("--kv-cache-dtype",),
        kv={"bf16": "", "fp16": "", "fp32": "", "fp8": "fp8_e4m3"},
        spanning=lambda _, nodes: {"--nnodes": nodes, "--node-rank": "RANK", "--dist-init-addr": "HEAD:5000"},
        joined=lambda _: "start it on each, with RANK 0 on HEAD",
    ),
    "tensorrt-llm": Dialect(
        command="trtllm-serve {model}",
        settings=_tensorrt_llm,
        checkpoints={
            "bf16": "bf16",
            "fp16": "fp16",
            "fp8": "FP8 (ModelOpt): the engine reads the format from it",
            **_HF_CHECKPOINTS,
        },
        kv_name=(),
        kv={"bf16": "", "fp16": "", "fp8": "fp8"},
        file=_tensorrt_llm_file,
        joined=lambda _: "start it by `srun --mpi=pmix -N {nodes} -n {gpus} trtllm-llmapi-launch`",
    ),
    "llama.cpp": Dialect(
        command="llama-server --model {model}",
        settings=_llama_cpp,
        checkpoints={
            "bf16": "GGUF BF16",
            "fp16": "GGUF F16",
            "fp32": "GGUF F32",
            "mxfp4": "GGUF MXFP4",
            **{name: f"GGUF {name.removeprefix('gguf-').upper()}" for name in GGUF},
        },
        kv_name=("--cache-type-k", "--cache-type-v"),
        spanning=lambda _, nodes: {"--rpc": ",".join(f"NODE{node}:50052" for node in range(1, nodes))},
        joined=lambda _: "start `rpc-server --host 0.0.0.0 --port 50052` on the others",
        kv={"fp16": "", "bf16": "bf16", "fp32": "f32", "int8": "q8_0", "q8_0": "q8_0", "q4_0": "q4_0"},
        asked={
            "--parallel": "max_sequences",
            "-np": "max_sequences",
            "--ctx-size": "contexts",
            "-c": "contexts",
            "--cache-type-k": "kv",
            "-ctk": "kv",
            "--cache-type-v": "kv",
            "-ctv": "kv",
        },
    ),
}
"""Engines, by name."""
