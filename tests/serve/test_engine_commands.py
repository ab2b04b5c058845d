"""The commands of engines: on the GPUs that the agent gives, laid out as planned; and vLLM for real where it is."""

import argparse
import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines_world import follow, running, running_llama, seen

from cordee.control.services.planned import planned_settings
from cordee.control.services.replica_spec import place_of, replica_of
from cordee.demo import tiny_model
from cordee.errors import InputError, MissingExtraError, SpecError, TooLargeError
from cordee.events import Node
from cordee.plan.serving.ask import ask
from cordee.plan.serving.estimate import whole_replica
from cordee.plan.serving.flags import Deployment, asked_settings, engine_settings, planned_flags
from cordee.plan.serving.request import Traffic
from cordee.plan.serving.tuning import TuningBase, changes
from cordee.planning import serving_request
from cordee.serve.engines import llama_cpp, llama_server, vllm
from cordee.serve.engines.known import find_engine
from cordee.serve.engines.llama_cpp import LlamaCpp
from cordee.serve.engines.openai import CHAT, COMPLETIONS
from cordee.serve.engines.port import EngineCapacity, EngineLoad, EnginePart
from cordee.serve.engines.token_ids import TokenIdDialect
from cordee.serve.engines.vllm import Vllm
from cordee.serve.policy.tuning import merged_flags
from cordee.serve.replica import launch_of
from cordee.telemetry.host import free_port
from cordee.workload.service import SETTINGS_ENV, EngineKind, ReplicaSettings
from cordee.workload.spec import JobSpec, Place

PLAN = {"--tensor-parallel-size": 2, "--pipeline-parallel-size": 2, "--data-parallel-size": False, "--max-num-seqs": 96}
H100 = Node(name="a", epoch=1, gpu_name="H100", gpus=8)
VLLM_VALUES = (
    "--host", "--port", "--served-model-name", "--tensor-parallel-size", "--pipeline-parallel-size",
    "--data-parallel-size", "--max-num-seqs", "--max-num-batched-tokens", "--max-model-len", "--dtype",
    "--gpu-memory-utilization", "--quantization", "--kv-cache-dtype", "--speculative-config",
    "--distributed-executor-backend", "--nnodes", "--node-rank", "--master-addr", "--master-port",
    "--data-parallel-rpc-port", "-dp",
)  # fmt: skip
VLLM_SWITCHES = (
    "--enable-expert-parallel", "--enable-prefix-caching", "--no-enable-prefix-caching", "--enable-chunked-prefill",
    "--enable-prompt-tokens-details", "--enforce-eager", "--headless",
)  # fmt: skip
"""Arguments of `vllm serve` as vllm/engine/arg_utils.py and vllm/entrypoints/openai/cli_args.py have them in 0.32."""


def words(engine: str, environ: Mapping[str, str], flags: Mapping[str, object] | None = None) -> str:
    given = {"service": "chat", "revision": 1, "engine": engine, "model": "org/model", "context": 4096}
    settings = ReplicaSettings.model_validate({**given, "flags": flags or {}})
    return " ".join(find_engine(engine).command(launch_of(settings, environ).at(9000)).argv)


def started(engine: EngineKind, model: str, gpus: int, milli: int = 1000, **section: Any) -> list[str]:
    """Return the command of the engine of one replica of a service that is planned for H100s."""
    service = {"model": model, "engine": engine, **section}
    spec = JobSpec.model_validate({"name": "chat", "gpus": gpus, "gpu_milli": milli, "service": service})
    made = replica_of(spec, revision=1, engine=engine, planned=planned_settings(spec, [H100]))
    settings = ReplicaSettings.model_validate_json(made.env[SETTINGS_ENV])
    devices = ",".join(map(str, range(gpus)))
    return list(find_engine(engine).command(launch_of(settings, {"CUDA_VISIBLE_DEVICES": devices}).at(9000)).argv)


def parsed(argv: list[str]) -> dict[str, str]:
    """Return the settings of `vllm serve`, all of which vLLM must know; the last of two wins, as there."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    for name in VLLM_VALUES:
        parser.add_argument(name, nargs="+" if name == "--served-model-name" else None)
    for name in VLLM_SWITCHES:
        parser.add_argument(name, action="store_const", const="")
    assert argv[1] == "serve"
    return {name: value for name, value in vars(parser.parse_args(argv[2:])).items() if value is not None}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all engines on PATH, where they are not."""
    monkeypatch.setattr(vllm.shutil, "which", lambda name: f"/bin/{name}")


@pytest.mark.usefixtures("installed")
def test_vllm_gets_the_gpus_and_the_layout_of_the_plan() -> None:
    planned = words("vllm", {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "MASTER_ADDR": "10.0.0.7"}, PLAN)
    assert planned.startswith("/bin/vllm serve org/model --host 10.0.0.7 --port 9000 ")
    for each in ("--tensor-parallel-size 2", "--pipeline-parallel-size 2", "--max-num-seqs 96", "--max-model-len 4096"):
        assert f" {each} " in planned
    assert planned.endswith("--served-model-name chat org/model")
    assert "--tensor-parallel-size 4" in words("vllm", {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}), "without a plan"
    assert "parallel" not in words("vllm", {"CUDA_VISIBLE_DEVICES": ""}), "on CPU slots"
    own = words("vllm", {}, {"max_num_seqs": 7, "enforce-eager": True, "--enable-prompt-tokens-details": False})
    assert "--max-num-seqs 7" in own and "--enforce-eager" in own and "details" not in own


def part_of_vllm(rank: int, gpus: tuple[int, ...], flags: Mapping[str, object]) -> tuple[dict[str, str], str | None]:
    """Return the settings of one node of several, and the address by which vLLM knows it."""
    given = {"service": "chat", "revision": 1, "engine": "vllm", "model": "org/model", "flags": flags}
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus[rank]))), "NNODES": str(len(gpus))}
    launch = launch_of(ReplicaSettings.model_validate(given), {**devices, "MASTER_ADDR": "10.0.0.7"}).at(9000)
    part = EnginePart(rank=rank, gpus=gpus, master="10.0.0.7", ports=(4001, 4002))
    command = Vllm().command(replace(launch, part=part, host=f"10.0.0.{7 + rank}"))
    return parsed(list(command.argv)), command.env.get("VLLM_HOST_IP")


@pytest.mark.usefixtures("installed")
def test_vllm_on_several_nodes_listens_on_the_first_and_has_workers_on_the_others() -> None:
    (first, address), (other, other_address) = (part_of_vllm(rank, (4, 4), {}) for rank in (0, 1))
    where = {"nnodes": "2", "master_addr": "10.0.0.7", "master_port": "4001", "distributed_executor_backend": "mp"}
    layout = {"tensor_parallel_size": "4", "pipeline_parallel_size": "2"}
    assert {**where, **layout, "node_rank": "0", "host": "10.0.0.7"}.items() <= first.items()
    assert {**where, **layout, "node_rank": "1", "headless": ""}.items() <= other.items()
    assert (address, other_address, "headless" in first) == ("10.0.0.7", "10.0.0.8", False)
    wide, _ = part_of_vllm(0, (4, 4), {"tensor-parallel-size": 8})
    assert wide["tensor_parallel_size"] == "8" and "pipeline_parallel_size" not in wide
    planned = {"tensor-parallel-size": 4, "pipeline-parallel-size": False, "data-parallel-size": 2}
    copies, _ = part_of_vllm(1, (4, 4), planned)
    assert copies["data_parallel_size"] == "2" and copies["data_parallel_rpc_port"] == "4002"
    assert "pipeline_parallel_size" not in copies
    short, _ = part_of_vllm(1, (4, 4), {"-dp": 2})
    assert short["data_parallel_rpc_port"] == "4002"
    with pytest.raises(InputError, match="the same number of GPUs on each node, and this replica has 4, 2"):
        part_of_vllm(0, (4, 2), {})


@pytest.mark.parametrize(
    ("gpus", "node_gpus", "engine", "expected"),
    [
        (1, 4, "vllm", Place()),
        (4, 4, "vllm", Place(within="node")),
        (16, 8, "vllm", Place(unit=8)),
        (6, 4, "vllm", Place(unit=3)),
        (16, 0, "vllm", Place()),
        (7, 4, "command", Place()),
        (2, 8, "llama.cpp", Place(within="node")),
        (2, 0, "llama.cpp", Place(within="node")),
    ],
)
def test_a_replica_is_placed_on_one_node_or_with_as_many_gpus_on_each(
    gpus: int, node_gpus: int, engine: EngineKind, expected: Place
) -> None:
    spec = JobSpec.model_validate({"name": "chat", "gpus": gpus, "service": {"model": "m"}})
    assert place_of(spec, engine, node_gpus) == expected
    own = spec.model_copy(update={"place": Place(within="rack")})
    assert gpus == 1 or place_of(own, "vllm", node_gpus) == Place(within="rack")


def test_what_nodes_do_not_hold_is_refused_with_numbers() -> None:
    spec = JobSpec.model_validate({"name": "chat", "gpus": 7, "service": {"model": "m"}})
    with pytest.raises(SpecError, match=r"7 GPUs on 2 nodes of 4, and vLLM takes the same number on each\n.*6 or 8"):
        place_of(spec, "vllm", 4)
    with pytest.raises(TooLargeError, match=r"engine transformers starts on one node: the largest has 4"):
        place_of(spec, "transformers", 4)


def test_a_plan_for_several_nodes_counts_the_gpus_of_each() -> None:
    """A layer that is cut over more GPUs than a node has is slower: the plan keeps it within a node."""
    slo = {"ttft_s": 1.0, "tpot_s": 0.02}
    service = {"model": "llama-3-70b", "engine": "vllm", "context": 4096, "slo": slo}
    spec = JobSpec.model_validate({"name": "chat", "gpus": 8, "service": service})
    found = [
        planned_settings(spec.model_copy(update={"place": place}), [replace(H100, gpus=per_node)])
        for place, per_node in ((Place(within="node"), 8), (Place(unit=2), 2))
    ]
    assert found[0]["--tensor-parallel-size"] == 8
    assert int(found[1]["--tensor-parallel-size"]) <= 2


@pytest.mark.usefixtures("installed")
def test_an_engine_takes_its_part_of_a_gpu_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen2.5-0.5b").touch()
    (tmp_path / "unknown").touch()
    assert parsed(started("vllm", "qwen2.5-0.5b", 1))["gpu_memory_utilization"] == "0.92"
    for model in ("qwen2.5-0.5b", "unknown"):  # with a plan, and without
        assert parsed(started("vllm", model, 1, 250))["gpu_memory_utilization"] == "0.225"
        assert "--memory-fraction 0.25" in " ".join(started("transformers", model, 1, 250))
    assert "--memory-fraction" not in started("transformers", "unknown", 1)
    whole, quarter = (started("llama.cpp", "qwen2.5-0.5b", 1, milli) for milli in (1000, 250))
    tokens = [int(each[each.index("--ctx-size") + 1]) for each in (whole, quarter)]
    assert 0 < tokens[1] < tokens[0] / 4


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("model", "gpus", "flags", "expected"),
    [
        ("llama-3-8b", 1, {}, {"max_num_seqs": "1024", "max_num_batched_tokens": "8192"}),
        (
            "llama-3-8b",
            1,
            {"max_num_seqs": 64, "kv-cache-dtype": "fp8"},
            {"max_num_seqs": "64", "kv_cache_dtype": "fp8"},
        ),
        ("llama-3-70b", 4, {"pipeline-parallel-size": 2}, {"tensor_parallel_size": "2", "pipeline_parallel_size": "2"}),
        ("llama-3-70b", 2, {"quantization": "fp8"}, {"quantization": "fp8"}),
        ("mixtral-8x7b", 4, {"enable-expert-parallel": True}, {"enable_expert_parallel": ""}),
    ],
)
def test_vllm_is_started_as_the_plan_says_by_names_that_it_knows(
    model: str, gpus: int, flags: dict[str, Any], expected: dict[str, str]
) -> None:
    argv = started("vllm", model, gpus, context=4096, flags=flags)
    found = parsed(argv)
    assert expected.items() <= found.items()
    assert found["max_model_len"] == "4096" and found["gpu_memory_utilization"] == "0.92"
    # The command that `cordee serve plan --launch vllm` prints for this replica has the same settings.
    request = serving_request(model, f"{gpus}xH100", context="4096", **asked_settings("vllm", flags))
    whole = whole_replica(ask(request))
    assert whole is not None
    launch = parsed(engine_settings("vllm", Deployment(model, whole.case, 1)).text.replace("\\\n", "").split())
    assert {name: value for name, value in launch.items() if name != "dtype"}.items() <= found.items()


@pytest.mark.usefixtures("installed")
def test_vllm_and_llama_cpp_know_the_settings_of_every_change() -> None:
    load = Traffic(input_tokens=100, output_tokens=100, concurrency=64)
    flags = {"--no-enable-prefix-caching": True, "--max-num-seqs": 8, "--max-num-batched-tokens": 2048}
    base = TuningBase("vllm", flags, load, draft="org/small", real_prompts=True)
    assert len(changes(base)) == 9
    for change in changes(base):
        found = parsed(started("vllm", "llama-3-8b", 1, context=4096, flags=merged_flags(flags, change.flags)))
        name, value = next(item for item in change.flags.items() if item[1] is not False)
        assert found[name.lstrip("-").replace("-", "_")] == ("" if value is True else str(value))
    llama = TuningBase("llama.cpp", {"--no-cache-prompt": True}, load, 4, 4096, draft="a.gguf", real_prompts=True)
    known = {*llama_server.VALUES, *llama_server.SWITCHES}
    assert {name for change in changes(llama) for name in change.flags} <= known


def test_llama_cpp_is_started_as_the_plan_says(installed: None, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    flags = {"parallel": 8, "cache-type-k": "q8_0", "cache-type-v": "q8_0"}
    asked = asked_settings("llama.cpp", flags)
    assert asked == {"max_sequences": 8, "kv": "q8_0"}
    whole = whole_replica(ask(serving_request("llama-3-8b", "1xH100", engine="llama.cpp", context="4096", **asked)))
    assert whole is not None
    planned = planned_flags(whole.case)
    spec = JobSpec.model_validate({"name": "chat", "gpus": 1, "service": {"model": str(tmp_path / "model.gguf")}})
    made = replica_of(spec, revision=1, engine="llama.cpp", planned=planned)
    settings = ReplicaSettings.model_validate_json(made.env[SETTINGS_ENV])
    command = " ".join(find_engine("llama.cpp").command(launch_of(settings, {"CUDA_VISIBLE_DEVICES": "0"})).argv)
    for each in ("--parallel 8", "--ctx-size 32768", "--cache-type-k q8_0", "--cache-type-v q8_0", "--flash-attn on"):
        assert each in command
    assert "--split-mode" not in command
    # A number of slots that only the service names gets as much context for each.
    settings = settings.model_copy(update={"context": 512, "flags": {"parallel": 2}})
    assert "--parallel 2 --ctx-size 1024" in " ".join(LlamaCpp().command(launch_of(settings, {})).argv)


def test_llama_cpp_puts_all_layers_on_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "model").touch()
    assert "--n-gpu-layers all --split-mode tensor" in words("llama.cpp", {"CUDA_VISIBLE_DEVICES": "2,3"})
    alone = words("llama.cpp", {"CUDA_VISIBLE_DEVICES": "2"})
    assert "--n-gpu-layers all" in alone and "split" not in alone
    assert "--n-gpu-layers 0" in words("llama.cpp", {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "3"})


def test_what_cannot_be_started_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="serves on one GPU, and a replica has 2"):
        words("transformers", {"CUDA_VISIBLE_DEVICES": "0,1"})
    with pytest.raises(InputError, match="GPUs on 2 nodes"):
        words("llama.cpp", {"NNODES": "2"})
    with pytest.raises(InputError, match="unknown engine 'vlm'"):
        find_engine("vlm")
    monkeypatch.setattr(llama_cpp.shutil, "which", lambda name: None)
    monkeypatch.setattr(llama_cpp.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="the engine vllm is not installed"):
        words("vllm", {})


def test_vllm_says_its_size_and_its_load() -> None:
    metrics = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="chat"} 2.0
vllm:num_requests_waiting{engine="0",model_name="chat"} 1.0
vllm:generation_tokens_total{engine="0"} 40.0
vllm:prompt_tokens_total{engine="0"} 60.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",num_gpu_blocks="5461",num_cpu_blocks="None"} 1.0
"""
    assert Vllm().capacity(metrics) == EngineCapacity(kv_tokens=174_752)
    assert Vllm().load(metrics) == EngineLoad(open=3, progress=100)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None and shutil.which("vllm") is None, reason="vLLM is not installed"
)
def test_a_stream_of_vllm_goes_on_elsewhere(tmp_path: Path) -> None:
    gguf = tiny_model.build(tmp_path / "model", heads=2, kv_heads=1)  # Its attention on the CPU has no heads of 16.
    environ = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    flags = {"dtype": "float32", "enforce-eager": True}
    given = {"service": "chat", "revision": 1, "engine": "vllm", "model": str(gguf.parent), "context": 512}
    launch = launch_of(ReplicaSettings.model_validate({**given, "flags": flags}), environ).at(free_port())
    asked = {
        "model": "chat",
        "stream": True,
        "temperature": 0,
        "max_tokens": 40,
    }
    command = Vllm().command(launch)
    with running_llama(gguf, tmp_path) as llama, running(command, launch.port, wait_s=800) as engine:
        kv_tokens = Vllm().capacity(engine.ask("/metrics")[1]).kv_tokens
        assert kv_tokens is not None and kv_tokens > 512
        for path, body in ((CHAT, {"messages": [{"role": "user", "content": "hi"}]}), (COMPLETIONS, {"prompt": "def"})):
            expected = seen(follow(llama_cpp.LlamaDialect(), [llama], path, {**body, **asked})[1])
            for cuts in ((), (0,), (1, 20, 3), (40,)):
                got = seen(follow(TokenIdDialect("vllm"), [engine], path, {**body, **asked}, cuts)[1])
                assert (got.text, got.finish, len(got.ids), got.ends) == (expected.text, "length", 1, 1)


def test_the_client_gets_no_tokens_that_it_did_not_ask_for() -> None:
    stream = TokenIdDialect("vllm").open(COMPLETIONS, {"prompt": "a", "stream": True})
    same = b'"object":"text_completion","created":1,"model":"chat","choices":[{"index":0,"text":"'
    first = (
        b'data: {"id":"c",'
        + same
        + b'a","logprobs":null,"finish_reason":null,"prompt_token_ids":[7],"token_ids":[5]}]}\n\n'
    )
    second = first.replace(b"[7]", b"null").replace(b"[5]", b"[6,8]")
    assert b"token_ids" not in stream.feed(first + second)
    assert (stream.prompt_ids, list(stream.sent.ids)) == ([7], [5, 6, 8])
