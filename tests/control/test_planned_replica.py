"""The plan of a replica: where there is one, what it says, and its values beside the measured ones."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_scene import TOKEN, Api

from cordee.account.measured import service_comparisons
from cordee.answers.services import GatewayReport, GatewayStatus
from cordee.control.services.planned import check_part, planned_replica
from cordee.control.services.replica_spec import engine_of
from cordee.errors import DoesNotFitError
from cordee.events import Estimate, Node, NodeUp, ReplicaReady
from cordee.view.measured import compared_texts
from cordee.workload.service import SETTINGS_ENV, ReplicaSettings
from cordee.workload.spec import JobSpec

H100 = Node(name="a", epoch=1, gpu_name="NVIDIA H100 80GB HBM3", gpus=8)
A100 = Node(name="b", epoch=1, gpu_name="A100-80GB", gpus=8)
SLOTS = Node(name="c", epoch=1, gpu_name="slot", gpus=8)


def spec(model: str = "llama-3-8b", gpus: int = 1, **section: Any) -> JobSpec:
    given = {"model": model, "engine": "vllm", "slo": {"ttft_s": 0.5, "tpot_s": 0.05}} | section
    return JobSpec.model_validate({"name": "chat", "gpus": gpus, "service": given})


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    api = Api(tmp_path)
    yield api
    api.close()


def test_a_replica_is_planned_where_model_and_gpu_are_known() -> None:
    found = planned_replica(spec(), [H100])
    assert found is not None and (found.layout, found.gpus) == ("tp1", 1)
    assert found.kv_tokens is not None and 400_000 < found.kv_tokens < 500_000
    assert found.ttft_us is not None and found.tpot_us is not None and found.tpot_us <= 50_000
    weights = found.token_weights
    assert weights is not None and 0 < weights.cached < weights.input < weights.output
    two = planned_replica(spec(gpus=2), [H100])
    assert two is not None and two.gpus == 2 and (two.kv_tokens or 0) > 2 * found.kv_tokens
    assert found.peak_bytes <= found.gpu_memory_bytes


def test_a_version_of_an_artifact_is_planned_by_its_config(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    version = {"ref": "gpt:3", "digest": "0" * 64}
    text = (tmp_path / "config.json").read_text()
    named = spec("artifact:gpt", versions={"artifact:gpt": version | {"config": text}})
    found = planned_replica(named, [H100])
    assert found is not None and found == planned_replica(spec(str(tmp_path)), [H100])
    assert planned_replica(spec("artifact:gpt", versions={"artifact:gpt": version}), [H100]) is None
    with pytest.raises(DoesNotFitError, match=r"artifact:gpt does not fit 0.1 of a GPU: 16.* of weights"):
        check_part(named.model_copy(update={"gpu_milli": 100}), [H100])
    for file, engine in (("model.gguf", "llama.cpp"), ("", "vllm")):
        made = spec("artifact:gpt", engine="auto", versions={"artifact:gpt": version | {"file": file}})
        assert made.service is not None and engine_of(made, made.service, {"H100"}) == engine


def test_a_part_of_a_gpu_holds_a_part_and_refuses_what_does_not_fit() -> None:
    whole, half = (planned_replica(spec().model_copy(update={"gpu_milli": milli}), [H100]) for milli in (1000, 500))
    assert whole is not None and half is not None
    assert half.peak_bytes <= half.gpu_memory_bytes == round(whole.gpu_memory_bytes / 2)
    assert half.kv_tokens is not None and whole.kv_tokens is not None and half.kv_tokens < whole.kv_tokens // 2
    assert half.within_slo is not None and whole.within_slo is not None and half.within_slo < whole.within_slo
    tenth = spec().model_copy(update={"gpu_milli": 100})
    assert planned_replica(tenth, [H100]) is None
    check_part(spec().model_copy(update={"gpu_milli": 500}), [H100])
    check_part(tenth, [SLOTS])
    with pytest.raises(DoesNotFitError, match=r"llama-3-8b does not fit 0.1 of a GPU: 16.* of weights"):
        check_part(tenth, [H100])


def test_the_plan_says_how_many_requests_keep_the_slo() -> None:
    strict = planned_replica(spec(slo={"ttft_s": 0.5, "tpot_s": 0.012}), [H100])
    loose = planned_replica(spec(slo={"ttft_s": 0.5, "tpot_s": 0.02}), [H100])
    assert strict is not None and loose is not None and loose.sequences is not None
    assert strict.within_slo is not None and loose.within_slo is not None
    assert 1 <= strict.within_slo < loose.within_slo <= loose.sequences
    for slo in ({}, {"tpot_s": 0.0001}):  # none; one that not even a request alone keeps
        found = planned_replica(spec(slo=slo), [H100])
        assert found is not None and found.within_slo is None


@pytest.mark.parametrize(
    ("asked", "nodes"),
    [
        (spec(), [SLOTS]),
        (spec(), [H100, A100]),
        (spec(), []),
        (spec("./no/such/folder"), [H100]),
        (spec("job:gpt"), [H100]),
        (spec("llama-3-405b"), [H100]),
        (spec(engine="transformers"), [H100]),
    ],
)
def test_elsewhere_it_is_not(asked: JobSpec, nodes: list[Node]) -> None:
    assert planned_replica(asked, nodes) is None


def test_the_engine_gets_the_planned_settings_under_those_of_the_service(api: Api) -> None:
    api.scene.agents.report(NodeUp(at_us=api.scene.time.us, node=H100), source="node/a/1")
    api.scene.control.tick()
    section = {"model": "llama-3-8b", "engine": "vllm", "context": 4096, "flags": {"max_num_seqs": 32}}
    api.client.declare({"name": "chat", "gpus": 1, "gpu": H100.gpu_name, "service": section})
    api.services.controller.step()
    api.scene.control.tick()
    [replica] = api.client.service("chat").replicas
    settings = ReplicaSettings.model_validate_json(api.client.job(replica.job_id).spec["env"][SETTINGS_ENV])
    assert settings.flags["--max-num-seqs"] == 32 and settings.flags["--max-model-len"] == 4096
    assert settings.flags["--gpu-memory-utilization"] == "0.92" and settings.flags["--tensor-parallel-size"] is False
    estimate = api.client.service("chat").estimate
    assert estimate is not None and estimate.sequences == 32, "the plan is made with the service's settings"


def test_planned_measured_off_by() -> None:
    plan = Estimate(layout="tp1", peak_bytes=1, gpu_memory_bytes=1, kv_tokens=400_000, sequences=256, ttft_us=50_000)
    rows = service_comparisons(plan, kv_tokens=380_000, sequences=256, ttft_us=75_000, tpot_us=9_000)
    assert [(str(row.quantity), *compared_texts(row)) for row in rows] == [
        ("KV tokens", "400k", "380k", "-5 %"), ("sequences", "256", "256", "+0 %"),
        ("TTFT", "50 ms", "75 ms", "+50 %"), ("TPOT", "–", "9 ms", "–"),
    ]  # fmt: skip
    assert service_comparisons(None, kv_tokens=None, sequences=None, ttft_us=None, tpot_us=None) == ()


def test_the_view_and_the_metrics_of_a_service_have_what_gateways_measured(api: Api) -> None:
    api.client.declare({"name": "chat", "gpus": 1, "service": {"model": "./tiny", "engine": "llama.cpp"}})
    for _ in range(2):
        api.services.controller.step()
        api.scene.control.tick()
    [replica] = api.client.service("chat").replicas
    at = {"at_us": api.scene.time.us, "job_id": replica.job_id, "epoch": 1, "rank": 0, "slots": 4, "kv_tokens": 1000}
    ready = ReplicaReady(address="http://127.0.0.1:9", engine="llama.cpp", model="tiny", **at)  # type: ignore[arg-type]
    api.scene.agents.report(ready, source=f"{replica.job_id}.1/rank0")
    api.scene.control.tick()
    status = GatewayStatus(service="chat", running=3, queued=1, ttft_p99_us=250_000, tpot_p99_us=9_000)
    api.client.report("edge", GatewayReport(seq=0, at_us=1, status=[status]))
    compared = {row.quantity: row.measured for row in api.client.service("chat").compared}
    assert compared == {"KV tokens": 1000, "sequences": 4, "TTFT": 250_000, "TPOT": 9_000}
    answer = httpx.get(f"{api.url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False, timeout=60)
    for line in (
        'cordee_replicas{service="chat",state="ready"} 1',
        'cordee_num_requests_running{service="chat"} 3',
        'cordee_time_to_first_token_p99_seconds{service="chat"} 0.25',
        'cordee_time_per_output_token_p99_seconds{service="chat"} 0.009',
    ):
        assert line in answer.text.splitlines()
