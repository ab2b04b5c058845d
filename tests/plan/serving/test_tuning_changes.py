"""The changes that a running engine is offered, and what the plan expects of them."""

import json
from dataclasses import replace

import pytest

from cordee.plan.serving.ask import ask
from cordee.plan.serving.estimate import whole_replica
from cordee.plan.serving.request import Traffic
from cordee.plan.serving.tuning import Change, TuningBase, changes
from cordee.planning import serving_request

LOAD = Traffic(input_tokens=2000, output_tokens=300, concurrency=64, cached_fraction=0.5)
LLAMA = TuningBase("llama.cpp", {}, LOAD, slots=4, kv_tokens=16_384)
VLLM = TuningBase("vllm", {}, LOAD)


def planned(gpu: str = "A10", **given: object) -> TuningBase:
    request = serving_request("llama-2-7b", f"1x{gpu}", **given)  # type: ignore[arg-type]
    return replace(VLLM, plan=whole_replica(ask(request)), real_prompts=True, load=replace(LOAD, concurrency=8))


def named(base: TuningBase) -> dict[str, Change]:
    return {each.name: each for each in changes(base)}


def test_llama_cpp_gets_slots_with_their_context_and_a_smaller_cache() -> None:
    found = named(LLAMA)
    assert list(found) == ["8 slots", "16 slots", "KV cache in q8_0", "n-gram look-up"], "what is refused is last"
    assert found["8 slots"].flags == {"--parallel": 8, "--ctx-size": 32_768}
    assert [each.lossless for each in found.values()] == [True, True, False, True]
    assert "give --prompts" in found["n-gram look-up"].refused
    assert all(each.gain is None for each in found.values()), "there is no plan"


def test_what_a_service_has_set_is_not_offered() -> None:
    flags = {"--cache-type-k": "q8_0", "--spec-type": "ngram-simple"}
    assert list(named(replace(LLAMA, flags=flags))) == ["8 slots", "16 slots"]
    assert not named(replace(LLAMA, flags=flags, load=replace(LOAD, concurrency=4))), "four slots are enough for four"
    off = named(replace(LLAMA, flags={**flags, "--no-cache-prompt": True}))
    assert off["prefix cache, 50% of prompts"].flags == {"--no-cache-prompt": False}
    attention = named(replace(LLAMA, flags={"--flash-attn": "off"}))["KV cache in q8_0"]
    assert attention.flags["--flash-attn"] == "on", "a quantised cache needs it"


def test_a_draft_model_is_offered_where_prompts_are_real() -> None:
    found = named(replace(LLAMA, draft="small.gguf", real_prompts=True))
    assert not found["n-gram look-up"].refused
    assert found["draft model"].flags["--model-draft"] == "small.gguf"
    config = json.loads(
        str(named(replace(VLLM, draft="org/small", real_prompts=True))["draft model"].flags["--speculative-config"])
    )
    assert config == {"model": "org/small", "num_speculative_tokens": 4}


def test_the_plan_says_what_a_change_gains_at_this_load() -> None:
    found = named(planned())
    for name in ("weights in fp8", "KV cache in fp8"):
        gain = found[name].gain
        assert gain is None or gain > 1 or found[name].refused
    speculation = found["n-gram look-up"]
    assert speculation.gain is not None and speculation.gain > 1.2, "eight sequences wait for weights"
    config = json.loads(str(speculation.flags["--speculative-config"]))
    assert config["method"] == "ngram" and config["num_speculative_tokens"] >= 2
    gains = [each.gain or 0.0 for each in changes(planned()) if not each.refused]
    assert gains == sorted(gains, reverse=True)
    off = replace(planned(), flags={"--no-enable-prefix-caching": True})
    prefix = named(off)["prefix cache, 50% of prompts"]
    assert prefix.gain is not None and prefix.gain > 1.05


def test_what_the_plan_expects_nothing_of_is_not_tried() -> None:
    busy = planned("H100")
    busy = replace(busy, load=replace(LOAD, concurrency=1, input_tokens=16, output_tokens=16))
    found = named(busy)["KV cache in fp8"]
    assert found.gain is not None and (found.gain > 1) == (not found.refused)
    small = named(planned(kv="fp8", max_sequences=4))["8 slots"]
    assert small.gain is not None and small.gain > 1 and not small.refused


@pytest.mark.parametrize("engine", ["command", "tgi"])
def test_an_engine_whose_settings_are_not_known_has_no_changes(engine: str) -> None:
    assert changes(replace(LLAMA, engine=engine)) == []
