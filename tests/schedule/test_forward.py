"""Forward: with perfect run times it says what the simulator then does; the state is left as it was found."""

import random

import pytest
import random_worlds
from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.control.forecast import forecast
from cordee.events import AttemptPlaced, CheckpointCommitted, Event, Job, JobEnded, JobSubmitted, Node, Tier
from cordee.ids import JobId
from cordee.schedule import NAMED, Policy, State, decide
from cordee.schedule.forecast.forward import Ahead, Arrival, Draw, forward
from cordee.schedule.forecast.run_times import drawn_us
from cordee.schedule.forecast.snapshot import Snapshot
from cordee.schedule.gang import Work
from cordee.schedule.state.transitions import apply
from cordee.simulate.run import Submission, run
from world import S, World, job, node

FAR_US = 10**14


def ahead_of(world: World, left_s: int = 100, **more) -> Ahead:
    live = [job_id for job_id, record in world.state.jobs.items() if not record.phase.ended]
    draw = Draw(left_us=dict.fromkeys(live, left_s * S))
    return forward(Snapshot(world.state), world.now_us, draw, live, until_us=FAR_US, **more)


# -- the simulator as the judge ------------------------------------------------------------------------------


def crowd(seed: int, count: int = 40, *, slow: bool = False) -> tuple[list[Node], list[Submission]]:
    """Jobs of all tiers on three nodes, more than they hold; whole seconds throughout; `slow`: half save too slowly."""
    rng = random.Random(seed)
    nodes = [Node(name=f"n{each}", epoch=1, gpu_name="H100", gpus=8) for each in range(3)]
    submissions, at_s = [], 0
    for number in range(count):
        at_s += rng.choice((0, 1, 30, 300))
        gpus, tier = rng.choice((1, 2, 4, 8, 16)), rng.choice(tuple(Tier))
        steps = rng.choice((20, 300, 4_000, 20_000))
        late = slow and rng.random() < 0.5  # it works on until it is killed
        save_us = 120 * S if late else 30 * S
        one = Job(
            job_id=JobId(f"j{number:02}"), name="j", owner=rng.choice("ab"), gpus=gpus, tier=tier, grace_us=60 * S,
            protected=True, min_run_us=60 * S, save_us=save_us, restart_us=60 * S,
        )  # fmt: skip
        work = Work(
            steps=steps, step_us=S, start_us=60 * S, first_start_us=0, stall_us=0, upload_us=save_us,
            saves_at_end=False,
            handles_notice=not late,
        )  # fmt: skip
        submissions.append(Submission(at_us=at_s * S, job=one, work=work))
    return nodes, submissions


def fates_of(log: tuple[Event, ...]) -> dict[JobId, tuple[int | None, int | None]]:
    """When each job of a log was placed first, and when it ended."""
    found: dict[JobId, tuple[int | None, int | None]] = {}
    for event in log:
        if isinstance(event, AttemptPlaced):
            found.setdefault(event.job_id, (event.at_us, None))
        elif isinstance(event, JobEnded):
            found[event.job_id] = (found[event.job_id][0], event.at_us)
    return found


@pytest.mark.parametrize(("policy", "slow"), [("cordee", False), ("cordee", True), ("easy", False), ("las", False)])
@pytest.mark.parametrize("seed", range(4))
def test_perfect_run_times_give_the_result_of_the_simulator(seed: int, policy: str, slow: bool):
    nodes, submissions = crowd(seed, slow=slow)
    log = run(nodes, submissions, policy=NAMED[policy]).log
    happened = fates_of(log)
    state = State(NAMED[policy])
    for event in log[: 1 + len(nodes)]:
        apply(state, event)
    assert len(state.nodes.records) == len(nodes) and not state.jobs
    coming = [Arrival(at_us=each.at_us, job=each.job, left_us=each.work.steps * S) for each in submissions]
    seen = forward(Snapshot(state), 0, Draw(left_us={}, arrivals=coming), list(happened), until_us=FAR_US)
    assert {job_id: (fate.start_us, fate.end_us) for job_id, fate in seen.fates.items()} == happened
    if policy == "cordee":
        assert any(fate.preemptions for fate in seen.fates.values()), "without a preemption this proves little"


@pytest.mark.parametrize("seed", range(4))
def test_from_the_middle_of_a_run_too(seed: int):
    policy = NAMED["easy"]
    nodes, submissions = crowd(seed)
    log = run(nodes, submissions, policy=policy).log
    happened = fates_of(log)
    cut_us = sorted(end_us for _, end_us in happened.values())[10] + S
    state = State(policy)
    for event in log:
        if event.at_us <= cut_us:
            apply(state, event)
    left_us, coming = {}, []
    for each in submissions:
        job_id, long_us = each.job.job_id, each.work.steps * S
        if job_id in state.attempts:
            left_us[job_id] = long_us - (cut_us - state.attempts[job_id].placed_us)
        elif job_id in state.jobs:
            left_us[job_id] = long_us
        else:
            coming.append(Arrival(at_us=each.at_us, job=each.job, left_us=long_us))
    live = [job_id for job_id in happened if job_id not in state.jobs or not state.jobs[job_id].phase.ended]
    assert 5 < len(live) < len(submissions) and left_us
    before = state.snapshot()
    seen = forward(Snapshot(state), cut_us, Draw(left_us=left_us, arrivals=coming), live, until_us=FAR_US)
    assert {job_id: (fate.start_us, fate.end_us) for job_id, fate in seen.fates.items()} == {
        job_id: happened[job_id] for job_id in live
    }
    assert state.snapshot() == before


# -- what always holds ---------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    up=random_worlds.nodes, submitted=random_worlds.jobs(), until_s=st.integers(0, 250), grain=st.sampled_from([0, 0.1])
)
def test_a_state_is_left_as_it_was_and_a_copy_equals_it(up, submitted, until_s, grain):
    world = World(*up)
    world.later(*submitted).play(until_s=until_s)
    world.at(until_s)
    for event in submitted:  # what is still to come, comes now
        if event.job.job_id not in world.state.jobs:
            world.tell(JobSubmitted(at_us=world.now_us, job=event.job, spec=""))
    before, idle = world.state.snapshot(), world.state.idle
    snapshot = Snapshot(world.state)
    copy = snapshot.restore()
    assert copy.snapshot() == before
    one, other = ahead_of(world, grain=grain), ahead_of(world, grain=grain)
    assert one == other, "the same draws, the same answer"
    assert world.state.snapshot() == before and world.state.idle is idle
    live = list(one.fates)
    again = forward(
        snapshot, world.now_us, Draw(left_us=dict.fromkeys(live, 100 * S)), live, until_us=FAR_US, grain=grain
    )
    assert again.fates == one.fates and snapshot.restore().snapshot() == before
    decision = decide(world.state, world.now_us)
    assert decide(copy, world.now_us) == decision
    for event in decision.events:
        if isinstance(event, AttemptPlaced):
            assert one.fates[event.job_id].start_us == world.now_us, "a job that is placed now starts now"
            assert one.fates[event.job_id].leases == event.leases


def test_a_copy_goes_its_own_way():
    world = World(node("n", 8), job("a", 4), job("b", 8))
    world.cycle()
    before = world.state.snapshot()
    copy = Snapshot(world.state).restore()
    apply(copy, job("c", 4, "production"))
    for event in decide(copy, world.now_us).events:
        apply(copy, event)
    assert JobId("c") in copy.attempts
    assert world.state.snapshot() == before


def test_a_job_that_is_preempted_starts_again_and_ends_later():
    world = World(node("n", 8), job("low", 8, "preemptible", save_us=20 * S, restart_us=60 * S))
    world.cycle()
    world.tell(job("high", 8, "production", at_us=0)).at(10).tell()
    world.now_us = 10 * S
    fates = ahead_of(world, left_s=100).fates
    low, high = fates[JobId("low")], fates[JobId("high")]
    assert (high.start_us, high.end_us, high.preemptions) == (30 * S, 130 * S, 0)
    # It saves for 20 s, waits for 100 s, starts for 60 s, and has all of its 100 s to do: it was preempted at once.
    assert (low.start_us, low.end_us, low.preemptions) == (0, 290 * S, 1)


@pytest.mark.parametrize(("protected", "grace_s", "left_s"), [(True, 30, 1100), (False, 30, 2000), (True, 0, 1100)])
def test_a_job_that_cannot_save_in_time_does_its_work_again(protected: bool, grace_s: int, left_s: int):
    fields = {"save_us": 60 * S, "protected": protected, "checkpoint_every_us": 900 * S, "restart_us": 60 * S}
    fields["grace_us"] = grace_s * S
    world = World(node("n", 8), job("low", 8, "preemptible", **fields))
    world.cycle()
    high = job("high", 8, "production").job
    draw = Draw(
        left_us={JobId("low"): 2000 * S}, arrivals=[Arrival(at_us=1000 * S, job=high, left_us=50 * S)]
    )  # fmt: skip
    seen = forward(Snapshot(world.state), 0, draw, [JobId("low"), high.job_id], until_us=FAR_US)
    assert seen.fates[high.job_id].start_us == (1000 + grace_s) * S, "it was killed at its deadline"
    end_s = 1000 + grace_s + 50 + 60 + left_s
    assert seen.fates[JobId("low")].end_us == end_s * S, "the last checkpoint was at 900 s, or there was none"


@pytest.mark.parametrize(("reported", "kept_s"), [(True, 1900), (False, 1800)], ids=["reported", "silent"])
def test_checkpoints_go_on_from_the_newest_that_was_reported(reported: bool, kept_s: int):
    """What it had at 1000 s is durable, the next at 1960 s; if it reported none, the declared schedule counts."""
    fields = {"save_us": 60 * S, "protected": True, "checkpoint_every_us": 900 * S, "restart_us": 60 * S}
    world = World(node("n", 8), job("low", 8, "preemptible", grace_us=30 * S, **fields)).play(until_s=2)
    if reported:
        ids = {"job_id": JobId("low"), "epoch": 1, "step": 5, "generation": 1}
        world.tell(CheckpointCommitted(at_us=1060 * S, size_bytes=0, stall_us=0, upload_us=60 * S, **ids))
    high = job("high", 8, "production").job
    draw = Draw(
        left_us={JobId("low"): 1900 * S}, arrivals=[Arrival(at_us=2000 * S, job=high, left_us=50 * S)]
    )  # fmt: skip
    fates = forward(Snapshot(world.state), 1100 * S, draw, [JobId("low"), high.job_id], until_us=FAR_US).fates
    assert fates[high.job_id].start_us == 2030 * S
    assert fates[JobId("low")].end_us == (2030 + 50 + 60 + 3000 - kept_s) * S


def test_the_horizon_the_caller_and_the_grain_bound_a_run():
    world = World(node("n", 8), *(job(f"j{each:03}", 1) for each in range(200)))
    last, live = JobId("j199"), list(world.state.jobs)
    draw = Draw(left_us={job_id: (1000 + 37 * number % 101) * S for number, job_id in enumerate(live)})
    whole = forward(Snapshot(world.state), 0, draw, [last], until_us=FAR_US)
    coarse = forward(Snapshot(world.state), 0, draw, [last], until_us=FAR_US, grain=0.05)
    assert not whole.cut and coarse.decisions < whole.decisions / 1.5
    assert 1 <= coarse.fates[last].end_us / whole.fates[last].end_us < 1.05, "the error does not grow with the queue"
    cut = ahead_of(world, left_s=60, go_on=lambda decisions: decisions < 10)
    assert cut.cut and cut.decisions == 10 and cut.fates[last].start_us is None
    near = forward(Snapshot(world.state), 0, Draw(left_us=dict.fromkeys(live, 60 * S)), live, until_us=3 * 60 * S)
    assert [job_id for job_id, fate in near.fates.items() if fate.end_us is not None] == live[:24]


def test_elastic_jobs_run_longer_on_fewer_gpus():
    world = World(node("n", 4), job("a", 8, sizes=(4,)), policy=Policy())
    fate = ahead_of(world, left_s=100).fates[JobId("a")]
    assert (fate.start_us, fate.end_us) == (0, 200 * S)


# -- run times learnt ----------------------------------------------------------------------------------------


def ended(count: int, length_s: int, gpus: int = 8, **more) -> World:
    """A world in which so many jobs ran, one after the other, each a second longer than the one before."""
    names = [f"e{each:03}" for each in range(count)]
    world = World(node("n", gpus), *(job(name, gpus, restart_us=0, **more) for name in names))
    world.work = {name: length_s + number for number, name in enumerate(names)}
    return world.play()


def test_the_run_time_left_is_learnt_from_jobs_that_ran_longer():
    snapshot, one = Snapshot(ended(20, 100).state), job("x", 8).job
    lefts = [drawn_us(snapshot, one, 0, (u + 0.5) / 21) for u in range(21)]
    assert lefts[:20] == [(100 + number) * S for number in range(20)]
    assert lefts[20] == 2 * 119 * S, "one in 21 is longer than the longest: twice that, by the median"
    assert drawn_us(snapshot, one, 109 * S, 0.5) == 6 * S, "of those beyond 109 s, half are within 115"
    assert drawn_us(snapshot, one, 500 * S, 0.5) == 500 * S, "beyond all that is known: as long again"


def test_an_estimate_is_believed_until_it_is_over():
    one, snapshot = job("x", 8, estimate_us=1000 * S).job, Snapshot(World(node("n")).state)
    assert drawn_us(snapshot, one, 100 * S, 0.9) == 900 * S
    assert drawn_us(snapshot, one, 1000 * S, 0.75) == 3000 * S


@given(ran_us=st.integers(0, 10**12), u=st.floats(0, 0.999))
def test_the_run_time_left_grows_with_u_and_is_never_zero(ran_us, u):
    snapshot, one = Snapshot(World(node("n")).state), job("x", 8).job
    assert 0 < drawn_us(snapshot, one, ran_us, u) <= drawn_us(snapshot, one, ran_us, 0.9999)


# -- forecasts -----------------------------------------------------------------------------------------------


def test_a_forecast_is_a_function_of_its_seed_and_its_spread_is_in_order():
    world = ended(30, 100)
    world.tell(*(job(f"w{each}", 8, at_us=world.now_us) for each in range(3)))
    world.cycle()
    waits = [JobId(f"w{each}") for each in range(3)]
    before = world.state.snapshot()
    made = [forecast(Snapshot(world.state), world.now_us, waits, seed=seed, budget_s=None) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]
    assert world.state.snapshot() == before
    for found in made[0].values():
        for spread in (found.start, found.end):
            assert spread.p10_us <= spread.p50_us <= spread.p90_us
        assert found.draws == 20 and found.learnt_from == 30
    first, second, third = (made[0][each] for each in waits)
    assert first.start.p50_us == world.now_us, "it runs"
    assert second.start.p10_us >= world.now_us + 100 * S and third.start.p10_us >= world.now_us + 200 * S


def test_a_forecast_that_runs_out_of_time_keeps_its_complete_runs():
    world = ended(30, 100)
    world.tell(*(job(f"w{each}", 8, at_us=world.now_us) for each in range(5)))
    last = JobId("w4")
    ticks = iter(range(10**9))
    cut = forecast(Snapshot(world.state), world.now_us, [last], budget_s=3, clock=lambda: next(ticks))[last]
    assert cut.draws == 1 and cut.end.p50_us is None, "the first one stays, however little it saw"
    assert cut.seen_us < world.now_us + 500 * S
    ticks = iter(range(10**9))
    some = forecast(Snapshot(world.state), world.now_us, [last], budget_s=100, clock=lambda: next(ticks))[last]
    assert 1 < some.draws < 20 and some.end.p50_us is not None, "a later one that was cut is not counted"
