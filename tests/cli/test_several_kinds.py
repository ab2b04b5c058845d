"""A gang over several kinds of GPU is planned as its worst kind, number by number, at the mean price."""

import json

import pytest
from verbs import run

from cordee.errors import CatalogueError, SpecError
from cordee.hardware.load import load_catalogue
from cordee.hardware.several import joined, pace_of
from cordee.planning import plan, with_several_kinds

CATALOGUE = load_catalogue()


def test_each_number_is_that_of_the_worst_kind() -> None:
    l40s, a100 = CATALOGUE.find_gpu("L40S"), CATALOGUE.find_gpu("A100-80")
    both = joined({l40s: 8, a100: 8})
    assert both.memory_bytes == l40s.memory_bytes and both.memory_bytes_per_s == l40s.memory_bytes_per_s
    assert both.flop_per_s["bf16"] == a100.flop_per_s["bf16"] and "fp8" not in both.flop_per_s
    assert both.island_gpus == l40s.island_gpus and both.measured is None
    assert both.efficiency == min((l40s, a100), key=pace_of).efficiency


@pytest.mark.parametrize("written", ["8xH100+8xA100-80", "16xH100 and A100-80", "8 x H100 + 8 x A100"])
def test_kinds_are_read_and_cost_their_mean(written: str) -> None:
    text, catalogue = with_several_kinds(written, CATALOGUE)
    assert text == "16xH100 and A100-80"
    one, other, both = (
        catalogue.price(catalogue.find_gpu(name), "on-demand") for name in ("H100", "A100-80", "H100 and A100-80")
    )
    assert one is not None and other is not None and both is not None
    assert both.usd_per_gpu_hour == pytest.approx((one.usd_per_gpu_hour + other.usd_per_gpu_hour) / 2)


def test_one_kind_in_two_parts_and_other_texts_are_as_they_were() -> None:
    assert with_several_kinds("8xH100+8xH100-80GB", CATALOGUE) == ("16xH100", CATALOGUE)
    for text in ("64xH100", "H100:64", "8..512xH100", "H100:1g.10gb+me"):
        assert with_several_kinds(text, CATALOGUE) == (text, CATALOGUE)


def test_what_cannot_be_joined_is_refused() -> None:
    with pytest.raises(SpecError, match="17 GPUs do not divide among 2 kinds"):
        with_several_kinds("17xH100 and A100-80", CATALOGUE)
    with pytest.raises(CatalogueError, match="unknown GPU"):
        with_several_kinds("8xH100+8xQ100", CATALOGUE)


def test_a_gang_over_two_kinds_is_as_fast_as_one_of_the_slower_kind() -> None:
    steps = [
        plan("llama-3-8b", gpus, layout="fsdp=16", seq_tokens=8192, global_batch=32).best.step_s
        for gpus in ("16xA100-80", "8xH100+8xA100-80", "16xH100")
    ]
    assert steps[0] == pytest.approx(steps[1], rel=0.02) and steps[2] < 0.7 * steps[1]


def test_the_verb_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "llama-3-8b", "--gpus", "8xH100+8xA100-80", "--layout", "fsdp=16", "--json")
    code, out, err = run(capsys, *words)
    assert code == 0 and json.loads(out)["gpu"]["name"] == "H100 and A100-80"
    assert "each number is that of the worst kind, since ranks have equal work; 80 GB each" in err
