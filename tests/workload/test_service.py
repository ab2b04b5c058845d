"""The section `service` of a job file: its defaults, its refusals, and the JSON that the API gets."""

import pytest

from cordee.errors import SpecError
from cordee.workload.service import Replicas, ServiceSpec, Slo
from cordee.workload.spec import JobSpec, parse_spec

CHAT = """
name: chat
gpus: 1
service:
  model: ./tiny
  engine: llama.cpp
  replicas: 0..4
  standby: 1
  slo: {ttft: 500ms, tpot: 50ms}
  context: 4096
  drain: 1m30s
  flags: {parallel: 4, flash-attn: true}
"""


def test_a_service_is_read_in_base_units() -> None:
    assert parse_spec(CHAT).service == ServiceSpec(
        model="./tiny",
        engine="llama.cpp",
        replicas=Replicas(min=0, max=4),
        standby=1,
        slo=Slo(ttft_s=0.5, tpot_s=0.05),
        context=4096,
        drain_s=90.0,
        flags={"parallel": 4, "flash-attn": True},
    )


def test_a_service_is_a_production_job_whose_grace_is_its_drain() -> None:
    spec = parse_spec(CHAT)
    assert (spec.tier, spec.launch, spec.run, spec.on_preempt.grace_s) == ("production", "node", (), 90.0)
    spec = parse_spec(CHAT + "tier: standard\non_preempt: {grace: 5s}\n")
    assert (spec.tier, spec.on_preempt.grace_s) == ("standard", 5.0)


def test_a_service_survives_its_own_json() -> None:
    spec = parse_spec(CHAT)
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    bare = {"service": {"model": "./tiny"}, "gpus": 1, "name": "chat"}
    assert JobSpec.model_validate(bare).tier == "production"


def test_flags_make_the_same_service_as_a_file() -> None:
    section = {"model": "./tiny", "replicas": "1..4", "slo": {"ttft": "500ms"}}
    made = JobSpec.from_flags(run=(), gpus="1", name="chat", service=section)
    assert made == parse_spec("{name: chat, gpus: 1, service: {model: ./tiny, replicas: 1..4, slo: {ttft: 500ms}}}")


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("{model: x, replicas: 4..1}", r"1:21: service.replicas: '4..1': the fewest are more .*\n.*write 1..4"),
        ("{model: x, replicas: 0}", r"'0': the most must be 1 to 10,000\n.*cordee serve stop NAME"),
        ("{model: x, replicas: two}", "'two' is not a number of replicas\n.*write 2, or the fewest and the most"),
        ("{model: x, engine: vlm}", "unknown service.engine 'vlm'\n.*did you mean vllm"),
        ("{modle: x}", "unknown key 'modle' in service\n.*did you mean model"),
        ("{model: x, slo: {tfft: 3s}}", "unknown key 'tfft' in service.slo\n.*did you mean ttft"),
        ("{model: x, slo: {ttft: 3}}", "service.slo.ttft: '3' is not a duration\n.*500ms or 2s"),
        ("{model: x, drain: 30}", "service.drain: '30' is not a duration\n"),
        ("{model: x, context: -4}", "service.context = -4.*\n.*use 1 or more"),
        ("{model: x, flags: {a: []}}", "service.flags.a cannot be"),
        ("{model: x, health: ready}", "service.health = 'ready'"),
        ("{engine: command}", r"the engine command needs run: a command that listens on \$CORDEE_PORT"),
        ("{engine: vllm}", "the engine vllm needs a model"),
        ("{}", "a service needs service.model, or run"),
    ],
)
def test_a_refusal_names_the_place_the_number_and_the_remedy(written: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parse_spec(f"service: {written}\ngpus: 1")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("elastic: {at_least: 1}\n", "elastic is for a job that trains"),
        ("model: {name: llama-3-8b}\n", "model is for a job that trains"),
        ("checkpoint: {to: ./ckpt}\n", "checkpoint is for a job that trains"),
        ("run: serve it\n", "run is given, and service.engine = vllm has a command of its own"),
    ],
)
def test_what_a_job_that_trains_has_is_refused(more: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parse_spec("service: {model: x, engine: vllm}\ngpus: 2\n" + more)
