"""Nodes that are reserved for the jobs of a queue or a user, from one time to another."""

from cordee.events import AttemptPlaced, NoticeGiven, ReservationBegan, ReservationCancelled, ReservationMade
from cordee.ids import JobId
from cordee.schedule import State, explain
from cordee.schedule.reserved import cheapest_nodes, overlap, reserved_nodes
from cordee.schedule.state.transitions import apply
from world import S, World, job, node

N1, N2 = node("n1"), node("n2")


def reserved(*nodes: str, from_s: int = 1000, for_s: int = 500, name: str = "r1", **whom: str) -> ReservationMade:
    whom = whom or {"queue": "eval"}
    times = {"from_us": from_s * S, "until_us": (from_s + for_s) * S}
    return ReservationMade(at_us=0, reservation=name, nodes=nodes, by="ada", **times, **whom)


def placed(world: World, name: str) -> list[tuple[int, str]]:
    found = (each for each in world.log if isinstance(each, AttemptPlaced) and each.job_id == name)
    return [(each.at_us // S, "+".join(lease.node for lease in each.leases)) for each in found]


def on(world: World, name: str) -> set[str]:
    return {job_id for job_id, each in world.state.attempts.items() if any(at.node == name for at in each.held)}


def why(world: World, name: str):
    return explain(world.state, JobId(name), world.now_us)


def replayed(world: World) -> None:
    again = State()
    for event in world.log:
        apply(again, event)
    assert again.snapshot() == world.state.snapshot()


def test_others_leave_in_time_and_the_jobs_of_the_queue_take_their_place():
    jobs = (job("a", 8), job("b", 8, grace_us=60 * S), job("e", 8, queue="eval", at_us=1001 * S))
    world = World(N1, N2, *jobs[:2], reserved("n1"), work={"a": 3000, "b": 3000, "e": 200}).later(jobs[2])
    world.play(until_s=399)
    assert world.state.nodes.records["n1"].reserved_for == ()
    world.play(until_s=400)
    assert world.state.nodes.records["n1"].reserved_for == ("queue eval",)
    world.play(until_s=1000)
    [given] = [each for each in world.log if isinstance(each, NoticeGiven)]
    grace_s = 60 if given.job_id == "b" else 30
    assert (given.reason, given.at_us, given.deadline_us) == ("drain", (1000 - grace_s) * S, 1000 * S)
    assert on(world, "n1") == set()
    waits = why(world, given.job_id)
    assert "n1 is reserved for queue eval from 1970-01-01 00:16 UTC to 1970-01-01 00:25 UTC (r1)" in waits.text
    world.play(until_s=1100)
    assert placed(world, "e") == [(1001, "n1")] and on(world, "n1") == {"e"}
    world.play()
    assert placed(world, given.job_id)[-1] == (1500, "n1"), "after the end all is as before"
    assert not world.state.agenda.reservations and {world.phase(each) for each in "abe"} == {"done"}
    replayed(world)


def test_nothing_starts_that_could_not_leave_in_time_and_backfill_goes_elsewhere():
    small = [job(f"s{number}", 2, at_us=450 * S) for number in range(6)]
    world = World(N1, N2, reserved("n1", user="bob"), work={each.job.job_id: 100 for each in small})
    world.later(*small, job("own", 2, owner="bob", at_us=450 * S)).play(until_s=460)
    assert on(world, "n1") == {"own"} and len(on(world, "n2")) == 4, "own nodes first, and nothing else there"
    assert world.state.waiting.count == 2
    world.play()
    assert all(world.phase(each.job.job_id) == "done" for each in small)
    assert all(at == "n2" for each in small for _, at in placed(world, each.job.job_id))
    replayed(world)


def test_a_job_that_waits_for_reserved_nodes_is_told_and_a_gang_of_the_user_spans_both_kinds():
    world = World(N1, N2, reserved("n1", from_s=0), job("big", 16), job("own", 16, owner="bob"), work={"own": 10})
    world.play(until_s=5)
    told = why(world, "big")
    assert (told.reason, told.until_us, world.state.attempts) == ("nodes-reserved", 500 * S, {})
    assert told.text == (
        "it needs 16 GPUs of one type; the nodes that it may use have 8; "
        "n1 is reserved for queue eval from 1970-01-01 00:00 UTC to 1970-01-01 00:08 UTC (r1)"
    )
    world.tell(ReservationCancelled(at_us=5 * S, reservation="r1", by="ada"), reserved("n1", name="r2", user="bob"))
    world.play(until_s=6)
    assert len(on(world, "n1") & on(world, "n2")) == 1
    again = World(N1, N2, reserved("n1", from_s=0, user="bob"), job("big", 16), job("own", 16, owner="bob"))
    again.play(until_s=5)
    assert on(again, "n1") == on(again, "n2") == {"own"}
    again.play()
    assert placed(again, "big") == [(500, "n1+n2")]
    replayed(world)
    replayed(again)


def test_a_cancelled_reservation_opens_its_nodes_and_what_waits_starts():
    world = World(N1, reserved("n1", from_s=100), job("a", 8), work={"a": 50}).play(until_s=10)
    assert world.phase("a") == "queued" and why(world, "a").reason == "nodes-reserved"
    world.tell(ReservationCancelled(at_us=20 * S, reservation="r1", by="ada")).play()
    assert placed(world, "a") == [(20, "n1")] and world.state.nodes.records["n1"].reservations == ()
    replayed(world)


def test_two_reservations_of_a_node_follow_each_other():
    two = (reserved("n1", from_s=100, for_s=1000), reserved("n1", from_s=1100, for_s=400, name="r2", user="bob"))
    world = World(N1, *two, job("e", 4, queue="eval"), work={"e": 5000})
    world.later(job("late", 4, queue="eval", at_us=600 * S), job("bob", 4, owner="bob", at_us=600 * S))
    world.play(until_s=650)
    assert on(world, "n1") == {"e"}, "from ten minutes before the second one only jobs of both start"
    world.play(until_s=1200)
    assert on(world, "n1") == {"bob"}
    assert [each.reservation for each in world.log if isinstance(each, ReservationBegan)] == ["r1", "r2"]
    assert world.state.nodes.records["n1"].reserved_for == ("user bob",)
    world.play()
    assert placed(world, "e")[1][0] == 1500
    replayed(world)


def test_an_attempt_keeps_its_whole_grace_period_where_the_reservation_begins_sooner():
    world = World(N1, job("a", 8, grace_us=60 * S), work={"a": 300}).play(until_s=100)
    world.tell(reserved("n1", from_s=110, for_s=100)).play()
    [given] = [each for each in world.log if isinstance(each, NoticeGiven)]
    assert given.deadline_us - given.at_us == 60 * S
    assert world.phase("a") == "done"
    replayed(world)


def test_the_cheapest_whole_nodes_are_picked_and_those_that_are_taken_are_not():
    dear, short = job("dear", 8, restart_us=900 * S), job("short", 8, estimate_us=50 * S)
    world = World(N1, dear, work={"dear": 900}).play(until_s=1)
    world.tell(N2, short).play(until_s=2)
    world.tell(node("n3"), node("n4", gpu="A100"))

    def picked(gpus: int, whom: str = "queue eval", from_s: int = 1000) -> tuple[str, ...]:
        return cheapest_nodes(world.state, gpus, whom, from_s * S, 2000 * S, world.now_us)

    assert (on(world, "n1"), on(world, "n2")) == ({"dear"}, {"short"})
    assert picked(9) == ("n2", "n3"), "short has ended by then"
    assert picked(9, "user ann") == ("n1", "n2"), "the jobs there are its own"
    assert picked(17) == ("n1", "n2", "n3") and picked(25) == (), "kinds are not mixed"
    world.tell(reserved("n3"))
    assert picked(9) == ("n1", "n2")
    assert overlap(world.state, "n3", 1400 * S, 1600 * S) == "reserved " + reserved_nodes(world.state)["n3"][0]
    assert overlap(world.state, "n3", 1500 * S, 1600 * S) is None
