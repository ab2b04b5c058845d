"""Prefill and decode on replicas of their own as a plan: what is asked for is kept, transfers and dollars count."""

import pytest

from cordee.errors import LayoutError, SpecError
from cordee.hardware.load import load_catalogue
from cordee.plan.serving.ask import ServingRequest, ask
from cordee.plan.serving.disaggregation import parse_phases, plan_phases
from cordee.plan.serving.engine import find_engine
from cordee.plan.serving.performance import speed_of
from cordee.plan.serving.request import Pricing, Slo, Traffic
from cordee.workload.load import load_shape
from cordee.workload.requests import poisson

CATALOGUE = load_catalogue()


def request(model: str = "llama-3-8b", gpus: str = "8xH100", **more: object) -> ServingRequest:
    count, _, name = gpus.partition("x")
    return ServingRequest(
        shape=load_shape(model), gpu=CATALOGUE.find_gpu(name), gpus=int(count),
        engine=find_engine("vllm"), **{"pricing": Pricing(prices=CATALOGUE.prices), **more},  # type: ignore[arg-type]
    )  # fmt: skip


def test_the_replicas_that_are_asked_for_are_planned_with_the_transfer_by_hand() -> None:
    """1,000 tokens of 131,072 bytes over one NVLink of an H100: 131 MB; dollars are those of both phases."""
    load = Traffic(rate_per_s=40.0)
    found = plan_phases(request(traffic=load), parse_phases("prefill=2xtp1 decode=1xtp2"))
    assert found is not None and found.keeps_slo and found.gpus == 4
    assert (found.prefill.replicas, found.decode.replicas, str(found.decode.case.layout)) == (2, 1, "tp2")
    assert found.sent_bytes == pytest.approx(1000 * 131_072, rel=0.02)
    assert 0.1e-3 < found.sent_s < 1e-3 and found.link == "NVLink 4"
    assert found.usd_per_mtok is not None and found.input_usd is not None and found.output_usd is not None
    assert (1000 * found.input_usd + 200 * found.output_usd) / 1200 == pytest.approx(found.usd_per_mtok)
    assert found.usd_per_mtok == pytest.approx(4 * 2.99 / 3600 / (40 * 1200) * 1e6)


def test_beyond_an_island_the_cache_crosses_the_network_in_as_many_parts_as_both_sides_have() -> None:
    """MLA keeps one copy of a token's latent vector, so tensor parallelism does not divide its transfer."""
    load = Traffic(rate_per_s=1.0)
    grouped = plan_phases(request("llama-3-70b", "40xH100", traffic=load), parse_phases("prefill=2xtp4 decode=4xtp8"))
    assert grouped is not None and "network" in grouped.link
    assert grouped.sent_bytes == pytest.approx(1000 * 327_680, rel=0.02)
    network = CATALOGUE.find_gpu("H100").network_bytes_per_s
    assert grouped.sent_s > grouped.sent_bytes / 4 / network
    latent = plan_phases(
        request("deepseek-v2-lite", "4xH100", traffic=load), parse_phases("prefill=1xtp2 decode=1xtp2")
    )
    assert latent is not None and latent.sent_bytes == pytest.approx(1000 * 27 * 576 * 2, rel=0.02)


def test_a_phase_that_misses_its_limit_gets_replicas() -> None:
    tight, loose = (
        plan_phases(
            request(traffic=Traffic(rate_per_s=60.0), slo=Slo(ttft_s=limit_s)), parse_phases("prefill=tp1 decode=tp1")
        )
        for limit_s in (0.06, 5.0)
    )
    assert tight is not None and loose is not None and tight.keeps_slo and loose.keeps_slo
    assert tight.prefill.replicas > loose.prefill.replicas
    assert tight.ttft.p99 <= 0.06


def test_without_a_load_both_phases_have_the_largest_that_the_latencies_allow() -> None:
    free, limited = (
        plan_phases(request(slo=slo), parse_phases("any")) for slo in (Slo(), Slo(ttft_s=0.1, tpot_s=0.01))
    )
    assert free is not None and limited is not None and free.keeps_slo and limited.keeps_slo
    assert limited.requests_per_s < free.requests_per_s
    assert limited.tpot.p99 <= 0.01 and limited.ttft.p99 <= 0.1


def test_a_trace_is_played_through_both_phases() -> None:
    drawn = tuple(poisson(100, 20.0, [(500, 50), (2000, 200)], seed=3))
    asked = request(traffic=Traffic(input_tokens=1250, output_tokens=125, requests=drawn))
    found = plan_phases(asked, parse_phases("prefill=1xtp1 decode=1xtp1"))
    assert found is not None and found.refused == 0 and found.requests_per_s > 10
    assert found.e2e.mean > found.ttft.mean + 40 * found.tpot.p50


@pytest.mark.parametrize("text", ["prefil=2xtp4", "prefill=0xtp1", "2xtp4", "decode=2xqq4"])
def test_phases_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(LayoutError):
        parse_phases(text)


def test_what_two_pools_cannot_do_is_said() -> None:
    with pytest.raises(SpecError, match="a concurrency of 8 is not divided"):
        _ = plan_phases(request(traffic=Traffic(concurrency=8)), parse_phases("any"))
    alone = ask(request(gpus="1xH100", traffic=Traffic(rate_per_s=1.0)), parse_phases("any"))
    assert alone.phases is None and not alone.meets and "1 x H100" in alone.phases_summary


def test_replicas_that_are_too_few_do_not_keep_up_and_are_not_priced_at_the_load() -> None:
    """Without a latency to miss, a queue that grows for as long as the load lasts misses the load itself."""
    found = plan_phases(request(traffic=Traffic(rate_per_s=200.0)), parse_phases("prefill=1xtp1 decode=1xtp1"))
    assert found is not None and not found.keeps_up and not found.keeps_slo
    assert 10 < found.requests_per_s < 100 and "cannot keep up" in str(found)
    assert found.usd_per_mtok == pytest.approx(2 * 2.99 / 3600 / (found.requests_per_s * 1200) * 1e6)


def test_long_answers_are_judged_in_full_batches() -> None:
    """Little's law: 8 requests a second of 1,500 tokens run in batches whose step their token takes."""
    found = plan_phases(
        request(traffic=Traffic(rate_per_s=8.0, output_tokens=1500)), parse_phases("prefill=1xtp1 decode=2xtp1")
    )
    assert found is not None and found.keeps_slo
    together = 8.0 / 2 * found.tpot.mean * 1499
    assert found.tpot.mean == pytest.approx(
        speed_of(found.decode.case).decode_s(round(together), together * 1750), rel=0.06
    )
