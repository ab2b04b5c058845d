"""A service beside training jobs: arrivals, the play by slots against the play by requests, replicas as jobs."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cordee.errors import DoesNotFitError, InputError, TraceError
from cordee.planning import serving_request
from cordee.serve.policy.scale import ScaleRules
from cordee.simulate.cluster import cluster
from cordee.simulate.compare import CachedJobs, Scenario
from cordee.simulate.policies import POLICIES
from cordee.simulate.services import fluid
from cordee.simulate.services.answer import TogetherAnswer
from cordee.simulate.services.arrivals import SyntheticDay, of_requests, read_arrivals
from cordee.simulate.services.cluster_run import ClusterRun, Together
from cordee.simulate.services.exact import ExactPlay
from cordee.simulate.services.fluid import FluidPlay, SlotState
from cordee.simulate.services.replica import replica_model
from cordee.simulate.services.service import ServicePlan, SimulatedService
from cordee.simulate.services.steps import StepTable
from cordee.simulate.services.together import compare, worst_hour
from cordee.simulate.traces import open_trace
from cordee.units import US_PER_HOUR, US_PER_S
from cordee.workload.requests import Request

GPUS = 16


@pytest.fixture(scope="module")
def play() -> Iterator[FluidPlay]:
    """Three hours of requests to a model of 8B on A10, with what plays of one and of three replicas show."""
    patch = pytest.MonkeyPatch()
    patch.setattr(fluid, "POOLS", (1, 3))
    patch.setattr(fluid, "PLAYED", 500)
    patch.setattr(fluid, "PLAYED_MAX", 1500)
    arrivals = SyntheticDay(per_s=3, hours=3, burstiness=1.5).draw(1)
    lengths = {"input_tokens": arrivals.mean_input, "output_tokens": arrivals.mean_output}
    model = replica_model(serving_request("llama-3.1-8b", "1xA10", ttft="5s", tpot="150ms", context="9K", **lengths))
    found = FluidPlay(model, arrivals.shorter_than(9000), most=4)
    yield found
    patch.undo()


def asked(play: FluidPlay, tmp_path: Path, jobs: str, split_gpus: int | None = None) -> Together:
    trace = tmp_path / "jobs.csv"
    trace.write_text("job_id,user,vc,submit_s,gpus,duration_s,status\n" + jobs)
    scenario = Scenario(
        jobs=CachedJobs(open_trace(trace).jobs),
        name="jobs.csv",
        nodes=cluster("2x8xA10", micro_usd_per_gpu_hour=1_000_000, price_source="a test"),
    )
    plan = ServicePlan(
        name="chat",
        gpus=1,
        gpu_name=None,
        load_us=60 * US_PER_S,
        drain_us=30 * US_PER_S,
        kv_tokens=play.model.limits.kv_tokens,
        rules=ScaleRules(min_replicas=1, max_replicas=8),
    )
    return Together(
        scenario=scenario,
        play=play,
        service=plan,
        policy=POLICIES["cordee"],
        warm_up_us=US_PER_HOUR,
        split_gpus=split_gpus,
    )


def test_a_synthetic_day_has_its_rate_its_swing_and_its_bursts() -> None:
    day = SyntheticDay(per_s=5, swing=0.6, burstiness=2)
    drawn = day.draw(7)
    assert np.array_equal(drawn.at_s, day.draw(7).at_s) and not np.array_equal(drawn.at_s[:9], day.draw(8).at_s[:9])
    assert drawn.count == pytest.approx(5 * 86_400, rel=0.02)
    hours = np.bincount((drawn.at_s // 3600).astype(int))
    assert hours.argmax() in (13, 14) and hours.argmin() in (1, 2)
    assert hours.max() / hours.mean() == pytest.approx(1.6, rel=0.05)
    gaps = np.diff(drawn.part(6 * 3600, 7 * 3600).at_s)
    assert gaps.std() / gaps.mean() == pytest.approx(2, rel=0.1)
    assert np.median(drawn.input_tokens) == pytest.approx(1020, rel=0.02)
    with pytest.raises(InputError, match="cannot be drawn"):
        SyntheticDay(per_s=0)


def test_arrivals_of_a_trace_keep_its_prefixes_and_its_order(tmp_path: Path) -> None:
    trace = tmp_path / "requests.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
        '{"timestamp": 2000, "input_length": 9000, "output_length": 5, "hash_ids": [1, 3]}\n'
        '{"timestamp": 4000, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}\n'
    )
    found = read_arrivals(trace)
    assert found.at_s.tolist() == [0, 2, 4] and found.request(1, 9.0).blocks == (1, 3)
    short = found.shorter_than(1000)
    assert short.count == 2 and short.request(1, 0.0).input_tokens == 700
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 5}\n')
    with pytest.raises(TraceError, match="1 request with an answer"):
        read_arrivals(trace)


def test_the_table_of_step_times_is_within_a_few_percent(play: FluidPlay) -> None:
    speed = play.model.speed
    table = StepTable(speed)
    for prefill, sequences, context in (
        ([], 1, 900.0),
        ([], 30, 40_000.0),
        ([(1400, 0)], 12, 15_000.0),
        ([(500, 2048), (700, 0)], 3, 3_000.0),
    ):
        assert table.step_s(prefill, sequences, context) == pytest.approx(
            speed.step_s(prefill, sequences, context), rel=0.06
        )


def test_slots_are_as_good_as_requests_where_the_slo_is_met(play: FluidPlay) -> None:
    """The play by slots has the attainment, the latencies and the open requests of the play by requests."""
    replicas, slots = 4, 90
    stretch = of_requests("stretch", [play.arrivals.request(i, float(at)) for i, at in enumerate(play.arrivals.at_s)])
    exact, quick = ExactPlay(play.model, stretch, steps=StepTable(play.model.speed)), play.restart()
    opens, states = [], []
    for slot in range(slots):
        exact.advance(slot * 10.0, slot * 10.0 + 10, range(replicas))
        states.append(quick.advance(slot, replicas))
        opens.append((exact.open, states[-1].open))
    exact.finish()
    slo, found = play.model.slo, exact.outcomes
    assert slo.ttft_s is not None and slo.tpot_s is not None
    attained = np.mean([each.ttft_s <= slo.ttft_s and each.tpot_s <= slo.tpot_s for each in found])
    assert sum(each.attained for each in states) / sum(each.requests for each in states) == pytest.approx(
        attained, abs=0.03
    )
    (ttft_s, _), (tpot_s, _) = quick.percentiles(0.5, 0.99)
    assert ttft_s == pytest.approx(np.median([each.ttft_s for each in found]), rel=0.25)
    assert tpot_s == pytest.approx(np.median([each.tpot_s for each in found]), rel=0.15)
    exact_open, slot_open = np.mean(opens[20:], axis=0)
    assert slot_open == pytest.approx(exact_open, rel=0.2)


def test_requests_are_held_until_there_is_a_replica(play: FluidPlay) -> None:
    part = of_requests("two", [Request(1.0, 500, 10), Request(2.0, 500, 10)])
    exact = ExactPlay(play.model, part)
    exact.advance(0.0, 10.0, ())
    assert exact.open == 2
    exact.advance(10.0, 20.0, (7,))
    exact.advance(20.0, 30.0, ())
    exact.finish()
    assert [each.ttft_s > 10 - each.arrival_s for each in exact.outcomes] == [True, True]
    quick = play.restart()
    held = quick.advance(0, 0)
    assert held.attained == 0 and held.open == pytest.approx(quick.work[0])
    for slot in range(1, 30):
        last = quick.advance(slot, 4)
    assert last.attained > 0, "what has waited is answered"


def test_too_few_replicas_fall_behind_and_say_so(play: FluidPlay) -> None:
    attained = []
    for replicas in (1, 2, 4, 8):
        quick = play.restart()
        states = [quick.advance(slot, replicas) for slot in range(quick.slots)]
        attained.append(sum(each.attained for each in states))
        assert all(each.open >= 0 and 0 <= each.attained <= each.requests for each in states)
    assert attained == sorted(attained) and attained[0] < 0.9 * attained[-1]


def test_the_worst_hour_is_that_with_the_smallest_fraction() -> None:
    good, bad, empty = SlotState(10, 10.0, 0, 0, 0), SlotState(10, 5.0, 0, 0, 0), SlotState(0, 0.0, 0, 0, 0)
    assert worst_hour([good] * 360 + [bad] * 360 + [empty] * 360, 10) == 0.5
    assert worst_hour([empty], 10) == 1


def test_training_makes_room_and_every_gpu_hour_is_counted(play: FluidPlay, tmp_path: Path) -> None:
    jobs = "".join(f"j{number},u,v,{number},8,{40 * 3600},\n" for number in range(3))
    question = asked(play, tmp_path, jobs)
    service = SimulatedService(question.service, play.restart(), question.start_us)
    done = ClusterRun(question, question.scenario.nodes, service)
    serving_hours, usd = done.serving()
    training = done.training()
    assert max(each.ready for each in service.slots) > min(each.ready for each in service.slots) >= 1
    assert training.preemptions > 0 and training.waiting_gpus > 0
    assert all(each.serving + each.training <= GPUS for each in done.samples)
    assert 0 < training.useful_gpu_hours <= training.held_gpu_hours
    assert serving_hours + training.held_gpu_hours <= GPUS * question.span_us / US_PER_HOUR
    assert usd == pytest.approx(serving_hours * 1e6, rel=1e-6)
    again = SimulatedService(question.service, play.restart(), question.start_us)
    assert ClusterRun(question, question.scenario.nodes, again).training() == training
    assert again.slots == service.slots


def test_a_service_keeps_its_price_in_the_simulation_too(play: FluidPlay, tmp_path: Path) -> None:
    question = asked(play, tmp_path, f"j,u,v,0,8,{40 * 3600},\n")
    for most_usd, replicas in ((100, 8), (2.5, 2)):
        rules = replace(question.service.rules, micro_usd_per_hour=10**6, max_micro_usd_per_hour=int(most_usd * 10**6))
        service = SimulatedService(replace(question.service, rules=rules), play.restart(), question.start_us)
        ClusterRun(question, question.scenario.nodes, service)
        most = max(each.wanted for each in service.slots)
        assert (most == 2) == (replicas == 2) and most <= replicas


def test_one_cluster_beside_two(play: FluidPlay, tmp_path: Path) -> None:
    jobs = "".join(f"j{number},u,v,{60 * number},1,{1800 + 7 * number},\n" for number in range(150))
    steps: list[str] = []
    answer = compare(asked(play, tmp_path, jobs), steps.append)
    assert isinstance(answer, TogetherAnswer) and steps[1] == "one cluster"
    assert answer.two.gpus == answer.one.gpus == GPUS
    assert answer.two.serving_gpus is not None and answer.two.serving.worst_hour >= 0.99
    assert answer.two.micro_usd == answer.one.micro_usd == round(GPUS * answer.hours * 1e6)
    assert answer.one.serving.requests == play.arrivals.count
    held = answer.one.serving.gpu_hours + answer.one.training.held_gpu_hours
    assert held + answer.one.idle_gpu_hours == pytest.approx(GPUS * answer.hours)
    assert answer.enough is not None
    assert answer.enough.training.useful_gpu_hours >= 0.99 * answer.one.training.useful_gpu_hours
    assert answer.summary.startswith("one cluster trains") and answer.saving
    given = compare(asked(play, tmp_path, jobs, split_gpus=5))
    assert (given.two.serving_gpus, given.two.serving.replicas_max) == (5, 5)


def test_a_division_that_cannot_be_is_refused(play: FluidPlay, tmp_path: Path) -> None:
    jobs = "j,u,v,0,1,600,\n"
    with pytest.raises(InputError, match="a serving cluster of 16 GPUs of 16 is no split"):
        compare(asked(play, tmp_path, jobs, split_gpus=16))
    tight = asked(play, tmp_path, jobs)
    small = replace(tight, scenario=replace(tight.scenario, nodes=cluster("1x2xA10")))
    with pytest.raises(DoesNotFitError, match="of the worst hour's requests"):
        compare(small)


def test_a_trace_with_prefixes_finds_them_cached(play: FluidPlay) -> None:
    model = replace(play.model, prefixes=True)
    requests = [Request(0.5 * n, 2048, 20, (n % 5, 10 + n % 5, 20 + n % 5, 100 + n), 512) for n in range(120)]
    exact = ExactPlay(model, of_requests("prefixes", requests))
    exact.advance(0.0, 61.0, range(3))
    exact.finish()
    cached = sum(each.cached_tokens for each in exact.outcomes)
    assert cached > 0.5 * 120 * 1536, "three of the four blocks of a prompt are those of others"
