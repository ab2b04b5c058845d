"""Jobs without GPUs: placed by CPU cores and host memory of one node, accounted by cores, and explained."""

import pytest

from cordee.events import AttemptPlaced, NoticeGiven
from cordee.ids import JobId
from cordee.schedule.explain import explain
from cordee.schedule.policy import NAMED
from world import World, job, node

GIB = 1 << 30


def a_node(name: str = "n1", gpus: int = 2, cores: int = 4, **more):
    return node(name, gpus, cpu_milli=1000 * cores, memory_bytes=8 * GIB, **more)


def why(world: World, name: str):
    return explain(world.state, JobId(name), world.now_us)


def test_cores_bound_them_and_not_gpus() -> None:
    world = World(
        a_node(gpus=1),
        job("train", 1),
        job("one", 0, cpu_milli=3000),
        job("two", 0, cpu_milli=2000),
        job("small", 0, cpu_milli=1000),
    )
    placed = {event.job_id: event.leases for event in world.cycle() if isinstance(event, AttemptPlaced)}
    assert placed.keys() == {"train", "one", "small"}
    assert [lease.gpus for lease in placed["one"]] == [()], "no GPU is leased"
    assert why(world, "two").text == (
        "it needs 2 CPU cores on one node; the most on one node is 0 CPU cores free, on n1, and 2 jobs hold the rest"
    )
    assert (why(world, "two").reason, why(world, "two").blocking) == ("not-enough-host", ("one", "small"))
    world.play()
    assert {world.phase(name) for name in ("train", "one", "two", "small")} == {"done"}


def test_memory_bounds_them_and_why_says_so() -> None:
    world = World(a_node(), job("a", 0, memory_bytes=6 * GIB), job("b", 0, memory_bytes=6 * GIB))
    world.cycle()
    assert why(world, "b").text == (
        "it needs 6.442 GB of host memory on one node; "
        "the most on one node is 2.147 GB of host memory free, on n1, and 1 job holds the rest"
    )


def test_a_gpu_job_that_waits_for_cores_is_told_so() -> None:
    world = World(a_node(), job("prepare", 0, cpu_milli=3000), job("train", 2, cpu_milli=4000))
    world.cycle()
    assert why(world, "train").text == (
        "it needs 2 CPU cores for each GPU; the most on one node is 1 CPU core free, on n1, and 1 job holds the rest"
    )


def test_one_that_no_node_can_hold_waits_and_says_why() -> None:
    world = World(a_node(), a_node("n2", cores=6), job("a", 0, cpu_milli=8000))
    world.play()
    found = why(world, "a")
    assert found.reason == "too-large"
    assert found.text == "it needs 8 CPU cores on one node; the most on one node is 6 CPU cores, on n2"


def test_it_preempts_no_job_and_none_preempts_it() -> None:
    world = World(a_node(cores=2), job("train", 2, "preemptible", cpu_milli=2000))
    world.cycle()
    assert not world.tell(job("eval", 0, "production", cpu_milli=1000)).cycle()
    noticed = world.tell(job("urgent", 2, "production")).cycle()
    assert [(event.job_id, event.for_job) for event in noticed if isinstance(event, NoticeGiven)] == [
        ("train", "urgent")
    ]
    world.play()
    assert all(world.phase(name) == "done" for name in ("train", "eval", "urgent"))


def test_its_cores_are_accounted_and_it_holds_no_gpu_time() -> None:
    dollar_an_hour = 1_000_000
    priced = {"cpu_milli": 2500, "micro_usd_per_cpu_hour": dollar_an_hour, "restart_us": 0}
    world = World(a_node(), job("a", 0, **priced), job("free", 0, cpu_milli=500), work={"a": 1440}).play()
    rows = {row.job_id: row for row in world.ledger.rows(world.now_us)}
    assert rows["a"].gpu_us.held == 0 and rows["free"].micro_usd.held == 0
    assert rows["a"].micro_usd.held == 1_000_000, "2.5 cores for 0.4 hours"
    assert rows["a"].price_sources == ("CPU cores: the server's price when the job was submitted",)


def test_its_cost_limit_counts_its_cores() -> None:
    priced = {"cpu_milli": 1000, "micro_usd_per_cpu_hour": 3_600_000_000, "cost_limit_micro_usd": 50_000_000}
    world = World(a_node(), job("a", 0, grace_us=0, **priced), work={"a": 1000}).play()
    ended = world.state.jobs[JobId("a")].ended
    assert ended is not None and ended.why == "its limit is reached (cost $50.00): it used 50.1 s and $50.10"


@pytest.mark.parametrize("name", sorted(NAMED))
def test_every_policy_runs_them(name: str) -> None:
    jobs = [job(f"j{n}", n % 3, cpu_milli=2000 if n % 3 == 0 else 0, at_us=n, estimate_us=10**8) for n in range(9)]
    world = World(a_node(), policy=NAMED[name]).later(*jobs).play()
    assert not world.errors
    assert all(record.phase.ended for record in world.state.jobs.values())
