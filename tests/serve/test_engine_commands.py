"""The commands of engines: on the GPUs that the agent gives, laid out as planned; and vLLM for real where it is."""

import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from engines_world import follow, free_port, running, running_llama, seen

from cordee.demo import tiny_model
from cordee.errors import InputError, MissingExtraError
from cordee.serve.engines import llama_cpp, vllm
from cordee.serve.engines.known import find_engine
from cordee.serve.engines.openai import CHAT, COMPLETIONS
from cordee.serve.engines.port import EngineCapacity, EngineLoad
from cordee.serve.engines.token_ids import TokenIdDialect
from cordee.serve.engines.vllm import Vllm
from cordee.serve.replica import launch_of
from cordee.workload.service import ReplicaSettings

PLAN = '{"layout": "tp2 pp2", "peak_bytes": 1, "gpu_memory_bytes": 1, "gpus": 4, "sequences": 96, "kv_tokens": 1}'


def words(engine: str, environ: Mapping[str, str], flags: Mapping[str, object] | None = None) -> str:
    given = {"service": "chat", "revision": 1, "engine": engine, "model": "org/model", "context": 4096}
    settings = ReplicaSettings.model_validate({**given, "flags": flags or {}})
    return " ".join(find_engine(engine).command(launch_of(settings, environ).at(9000)).argv)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all engines on PATH, where they are not."""
    monkeypatch.setattr(vllm.shutil, "which", lambda name: f"/bin/{name}")


@pytest.mark.usefixtures("installed")
def test_vllm_gets_the_gpus_and_the_layout_of_the_plan() -> None:
    planned = words("vllm", {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "CORDEE_ESTIMATE": PLAN, "MASTER_ADDR": "10.0.0.7"})
    assert planned.startswith("/bin/vllm serve org/model --host 10.0.0.7 --port 9000 ")
    assert "--tensor-parallel-size 2 --pipeline-parallel-size 2 --max-num-seqs 96 --max-model-len 4096" in planned
    assert planned.endswith("--served-model-name chat org/model")
    assert "--tensor-parallel-size 4" in words("vllm", {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}), "without a plan"
    assert "parallel" not in words("vllm", {"CUDA_VISIBLE_DEVICES": ""}), "on CPU slots"
    own = words("vllm", {}, {"max_num_seqs": 7, "enforce-eager": True, "--enable-prompt-tokens-details": False})
    assert "--max-num-seqs 7" in own and "--enforce-eager" in own and "details" not in own


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
        words("vllm", {"NNODES": "2"})
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
