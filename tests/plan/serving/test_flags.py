"""Settings of engines that reproduce a plan."""

from dataclasses import replace

import pytest

from cordee.errors import LayoutError
from cordee.hardware.load import load_catalogue
from cordee.plan.serving.case import ServingCase, ServingLayout
from cordee.plan.serving.engine import Engine, find_engine
from cordee.plan.serving.flags import DIALECTS, Deployment, engine_settings
from cordee.plan.serving.formats import KV, WEIGHTS
from cordee.workload.load import load_shape

CASE = ServingCase(
    shape=load_shape("llama-3-8b"),
    gpu=load_catalogue().find_gpu("H100"),
    layout=ServingLayout(tp=2),
    weights=WEIGHTS["bf16"],
    kv=KV["fp8"],
    engine=Engine("vllm", "0.11", 16, 0.9, 256, 8192),
    max_sequences=256,
    max_batched_tokens=8192,
    max_context_tokens=16384,
    memory_fraction=0.9,
)
DEPLOYED = Deployment("meta-llama/Meta-Llama-3-8B", CASE, 1)


def test_vllm_serves_the_case() -> None:
    launch = engine_settings("vllm", DEPLOYED)
    assert " ".join(launch.text.replace("\\\n", "").split()) == (
        "vllm serve meta-llama/Meta-Llama-3-8B --tensor-parallel-size 2 --max-num-seqs 256 "
        "--max-num-batched-tokens 8192 --max-model-len 16384 --gpu-memory-utilization 0.9 --dtype bfloat16 "
        "--kv-cache-dtype fp8"
    )
    assert not launch.cannot and not launch.notes


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm", ["--tensor-parallel-size 2", "--data-parallel-size 4", "--enable-expert-parallel"]),
        # SGLang and TensorRT-LLM count the GPUs of all attention copies in the tensor-parallel size.
        ("sglang", ["--tp-size 8", "--dp-size 4", "--enable-dp-attention", "--ep-size 8"]),
        ("tensorrt-llm", ["--tp_size 8", "--ep_size 8", "enable_attention_dp: true"]),
    ],
)
def test_each_engine_has_its_own_names_for_a_mixture(engine: str, words: list[str]) -> None:
    # TensorRT-LLM's attention is data-parallel on all GPUs or on none.
    layout = ServingLayout(dp=8, ep=True) if engine == "tensorrt-llm" else ServingLayout(tp=2, dp=4, ep=True)
    case = replace(CASE, shape=load_shape("deepseek-v3"), layout=layout)
    launch = engine_settings(engine, replace(DEPLOYED, case=case))
    assert not launch.cannot
    for each in words:
        assert each in launch.text


def test_what_an_engine_cannot_do_is_said() -> None:
    case = replace(CASE, layout=ServingLayout(tp=2, dp=2, ep=True), weights=WEIGHTS["fp8"])
    launch = engine_settings("llama.cpp", replace(DEPLOYED, case=case))
    assert launch.cannot == (
        "data-parallel attention (dp2)",
        "expert parallelism",
        "weights in fp8",
        "a KV cache in fp8",
    )


def test_replicas_are_started_one_by_one_and_formats_of_a_checkpoint_are_named() -> None:
    launch = engine_settings("vllm", replace(DEPLOYED, case=replace(CASE, weights=WEIGHTS["int4"]), replicas=4))
    assert any("AWQ or GPTQ" in note for note in launch.notes)
    assert any("4 times, each on 2 GPUs" in note for note in launch.notes)


@pytest.mark.parametrize(
    ("engine", "layout", "words", "note"),
    [
        (
            "vllm",
            ServingLayout(tp=8, pp=2),
            ["--nnodes 2", "--node-rank RANK", "--master-addr HEAD"],
            "--headless on all",
        ),
        (
            "vllm",
            ServingLayout(dp=16, ep=True),
            ["--data-parallel-size-local 8", "--data-parallel-address"],
            "--headless",
        ),
        ("sglang", ServingLayout(dp=16, ep=True), ["--nnodes 2", "--node-rank RANK"], "start it on each"),
        ("tensorrt-llm", ServingLayout(dp=16, ep=True), [], "-N 2 -n 16 trtllm-llmapi-launch"),
        ("llama.cpp", ServingLayout(pp=16), ["--rpc NODE1:50052"], "rpc-server"),
    ],
)
def test_a_replica_on_two_nodes_says_how_they_are_joined(
    engine: str, layout: ServingLayout, words: list[str], note: str
) -> None:
    case = replace(CASE, shape=load_shape("deepseek-v3"), layout=layout)
    launch = engine_settings(engine, replace(DEPLOYED, case=case))
    assert all(word in launch.text for word in words)
    assert any("16 GPUs on 2 nodes of 8" in each and note in each for each in launch.notes)
    alone = engine_settings(engine, replace(DEPLOYED, case=replace(case, layout=ServingLayout())))
    assert not any("nodes" in each for each in alone.notes) and not any(word in alone.text for word in words)


def test_the_context_of_llama_cpp_is_divided_among_its_slots() -> None:
    case = replace(CASE, layout=ServingLayout(), kv=KV["int8"], max_context_tokens=4096, max_sequences=8)
    text = engine_settings("llama.cpp", replace(DEPLOYED, case=case)).text
    assert "--ctx-size 32768" in text and "--parallel 8" in text and "--cache-type-v q8_0" in text


@pytest.mark.parametrize("engine", DIALECTS)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kv", KV)
def test_every_format_is_a_setting_a_property_of_the_checkpoint_or_refused(engine: str, weights: str, kv: str) -> None:
    case = replace(CASE, weights=WEIGHTS[weights], kv=KV[kv], layout=ServingLayout())
    launch = engine_settings(engine, replace(DEPLOYED, case=case))
    assert "None" not in launch.text and launch.text.count("\n\n") == 0
    dialect = DIALECTS[engine]
    known = weights in dialect.weights or weights in dialect.checkpoints
    assert known == (weights in find_engine(engine).weights)
    assert (kv in dialect.kv) == (kv in find_engine(engine).kv)
    assert known != (f"weights in {weights}" in launch.cannot)


def test_an_unknown_engine_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(LayoutError, match="unknown engine 'tgi'"):
        engine_settings("tgi", DEPLOYED)
