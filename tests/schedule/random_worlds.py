"""Random worlds for the scheduler, and what holds in every one of them; played by an ideal executor to the end."""

from dataclasses import replace

from hypothesis import strategies as st

from cordee.events import (
    After,
    AfterEnd,
    AttemptEnded,
    AttemptPlaced,
    Capacity,
    Event,
    HoldReleased,
    Job,
    JobHeld,
    JobPrioritized,
    JobSubmitted,
    KillOrdered,
    Lease,
    MigGpus,
    NodeDown,
    NoticeGiven,
    NoticeReason,
    Outcome,
    Queue,
    QueuesSet,
    RanksEnded,
    RequeueRequested,
    ServerShuttingDown,
    ServerUp,
    StopRequested,
)
from cordee.ids import JobId
from cordee.schedule import Reason, State, decide, explain
from cordee.schedule.state.failed_searches import FailedSearches
from cordee.schedule.state.order import is_below
from cordee.schedule.state.transitions import apply
from world import S, World, job, mig_table, node

NAMES = ("a", "b", "c", "d", "e", "f", "g")
PARTS = (None, None, None, None, None, "1g.10gb", "1g.20gb", "3g.40gb", "4g.40gb")
NEVER_RUN = {Reason.TOO_LARGE, Reason.NO_SUCH_GPU, Reason.NO_NODES}
NOT_NOW = {Reason.HELD, Reason.PAUSED, Reason.WAITS_FOR_JOBS}

H100 = mig_table("H100")
PROFILES = {each.name: each.placed for each in H100.profiles}
MIG = (
    *(None, None, None),
    H100.gpus((1,)),
    H100.gpus((0, 1), switched=True),
    replace(H100.gpus((1,)), fixed=((1, 0, 4, "4g.40gb"), (1, 4, 1, "1g.10gb"), (1, 6, 1, "1g.10gb"))),
)
"""The GPUs of a node that are cut, and the ways in which they are."""

nodes = st.lists(
    st.tuples(
        st.sampled_from([2, 4, 8]),
        st.sampled_from(["H100", "H100", "A100"]),
        st.sampled_from([Capacity.ON_DEMAND, Capacity.ON_DEMAND, Capacity.SPOT]),
        st.sampled_from(["r1", "r2"]),
        st.sampled_from([(), (), (0,)]),
        st.sampled_from(MIG),
    ),
    min_size=1,
    max_size=4,
).map(
    lambda drawn: [
        node(f"n{number}", gpus, gpu, capacity=capacity, domain=(rack,), unavailable=foreign, cpu_milli=4000, mig=mig)
        for number, (gpus, gpu, capacity, rack, foreign, mig) in enumerate(drawn)
    ]
)


@st.composite
def jobs(draw):
    names = NAMES[: draw(st.integers(1, len(NAMES)))]
    return [
        job(
            name,
            gpus := 1 if (mig := draw(st.sampled_from(PARTS))) else draw(st.sampled_from([0, 1, 2, 3, 4, 8, 12])),
            draw(st.sampled_from(["production", "standard", "preemptible"])),
            at_us=draw(st.sampled_from([0, 0, 50, 100, 100, 130, 200])) * S,
            priority=draw(st.integers(0, 1)),
            gpu_name=draw(st.sampled_from([None, None, "H100"])),
            capacity=draw(st.sampled_from(["any", "any", "on-demand", "spot"])),
            protected=draw(st.booleans()),
            requeue=draw(st.integers(0, 5)) > 0,
            grace_us=draw(st.sampled_from([0, 10, 40])) * S,
            min_run_us=draw(st.sampled_from([0, 0, 30])) * S,
            time_limit_us=draw(st.sampled_from([None, None, 120 * S, 400 * S])),
            unit_gpus=draw(st.sampled_from([None, None, None, 1, 2])) if gpus and not mig else None,
            within=draw(st.sampled_from([None, None, None, "node", "rack"])) if gpus and not mig else None,
            sizes=draw(st.sampled_from([(), (), (2,), (1,)])) if gpus and not mig else (),
            mig=mig,
            gpu_milli=H100.gpus(()).milli(PROFILES[mig].size) if mig else 1000,
            cpu_milli=0 if gpus else draw(st.sampled_from([2000, 3000])),
            preemptions_max=draw(st.sampled_from([None, None, 1])),
            after=draw(_after(names[:number])),
        )
        for number, name in enumerate(names)
    ]


def _after(names):
    """One of the jobs before, seldom."""
    if not names:
        return st.just(())
    one = st.builds(After, of=st.sampled_from(names), end=st.sampled_from(AfterEnd)).map(lambda each: (each,))
    return st.one_of(st.just(()), st.just(()), st.just(()), one)


faults = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "down",
                "rank",
                "stop",
                "stop now",
                "drain",
                "hold",
                "pause",
                "release",
                "release",
                "requeue",
                "prioritize",
            ]
        ),
        st.integers(1, 400),
        st.integers(0, 6),
    ),
    max_size=5,
)


def break_in(world: World, kind: str, at_s: int, which: int) -> None:
    """A fault at a time."""
    world.when(at_s, lambda it: list(FAULTS[kind](it, which)))


def _node_down(world: World, which: int):
    names = sorted(world.state.nodes.records)
    name = names[which % len(names)]
    record = world.state.nodes.records[name]
    if record.up:
        world.when(world.now_us / S + 7, lambda it: list(_node_back(it, name)))
        yield NodeDown(at_us=world.now_us, node=name, epoch=record.node.epoch, why="silent")


def _node_back(world: World, name: str):
    """The new agent first ends what its predecessor left."""
    yield from _rank_group_ends(world, name)
    old = world.state.nodes.records[name].node
    more = {name: getattr(old, name) for name in ("capacity", "domain", "unavailable", "cpu_milli", "mig")}
    yield node(name, old.gpus, old.gpu_name, epoch=old.epoch + 1, at_us=world.now_us, **more)


def _rank_group_ends(world: World, name: str):
    for job_id, attempt in sorted(world.state.attempts.items()):
        if any(lease.node == name for lease in attempt.held):
            ids = {"job_id": job_id, "epoch": attempt.epoch, "node": name}
            yield RanksEnded(at_us=world.now_us, outcome=Outcome.LOST, **ids)


def _rank_killed(world: World, which: int):
    live = sorted(world.state.attempts)
    if live:
        attempt = world.state.attempts[live[which % len(live)]]
        for lease in attempt.held[:1]:
            ids = {"job_id": attempt.job.job_id, "epoch": attempt.epoch, "node": lease.node}
            yield RanksEnded(at_us=world.now_us, outcome=Outcome.LOST, **ids)


def _drain(world: World, which: int):
    world.when(world.now_us / S + 60, lambda it: [ServerUp(at_us=it.now_us)])
    yield ServerShuttingDown(at_us=world.now_us)


FAULTS = {
    "down": _node_down,
    "rank": _rank_killed,
    "stop": lambda world, which: [StopRequested(at_us=world.now_us, job_id=JobId(NAMES[which]), by="ann")],
    "stop now": lambda world, which: [
        StopRequested(at_us=world.now_us, job_id=JobId(NAMES[which]), by="ann", now=True)
    ],
    "drain": _drain,
    "hold": lambda world, which: _asked(world, JobHeld, which),
    "pause": lambda world, which: _asked(world, JobHeld, which, leave=True),
    "release": lambda world, which: _asked(world, HoldReleased, which),
    "requeue": lambda world, which: _asked(world, RequeueRequested, which),
    "prioritize": lambda world, which: _asked(world, JobPrioritized, which),
}


def _asked(world: World, kind, which: int, **more):
    yield kind(at_us=world.now_us, job_id=JobId(NAMES[which]), by="ann", **more)


def check_log(log: list[Event]) -> None:
    """What can be read off a log alone."""
    leased: dict[tuple[str, int], str] = {}
    boards: dict[tuple[str, int], dict[int, Lease]] = {}
    held: dict[str, dict[str, Lease]] = {}
    submitted: dict[str, JobSubmitted] = {}
    kinds: dict[str, tuple[str, Capacity]] = {}
    racks: dict[str, tuple[str, ...]] = {}
    mig: dict[str, MigGpus | None] = {}
    up: set[str] = set()
    noticed: dict[tuple[str, str, int], int] = {}
    for event in log:
        match event:
            case JobSubmitted():
                submitted[event.job.job_id] = event
            case NodeDown():
                up.discard(event.node)
            case AttemptPlaced():
                asked = submitted[event.job_id].job
                assert event.job_id not in held, "at most one live attempt a job"
                gpus = sum(len(lease.gpus) for lease in event.leases)
                smaller = {size for size in asked.sizes if size < asked.gpus}
                assert gpus in {asked.gpus, *smaller}, "a gang is whole, or of a size that it can have"
                units = [len(lease.gpus) // asked.unit_gpus for lease in event.leases] if asked.unit_gpus else []
                assert not units or sum(units) == gpus // asked.unit_gpus, "units are not divided"
                assert asked.within != "node" or len(event.leases) == 1, "within one node"
                assert asked.within != "rack" or len({racks[lease.node] for lease in event.leases}) == 1, "one rack"
                assert len({kinds[lease.node][0] for lease in event.leases}) == 1, "a gang has one kind of GPU"
                for lease in event.leases:
                    gpu_name, capacity = kinds[lease.node]
                    assert lease.node in up and asked.gpu_name in (None, gpu_name)
                    assert asked.capacity in (Capacity.ANY, capacity)
                    for gpu in lease.gpus:
                        at = (lease.node, gpu)
                        assert at not in leased, "no GPU is leased twice"
                        if lease.instance is not None:
                            boards.setdefault(at, {})[lease.instance.start] = lease
                            the_instances_may_stand_together(mig[lease.node], gpu, boards[at], asked)
                            continue
                        cut = mig[lease.node]
                        assert not boards.get(at) and (cut is None or cut.switched or gpu not in cut.gpus)
                        leased[at] = event.job_id
                held[event.job_id] = {lease.node: lease for lease in event.leases}
            case RanksEnded():
                ended = held.get(event.job_id, {}).pop(event.node, None)  # an end can be reported twice
                for gpu in () if ended is None else ended.gpus:
                    if ended.instance is not None:
                        del boards[event.node, gpu][ended.instance.start]
                    else:
                        del leased[(event.node, gpu)]
            case AttemptEnded():
                assert not held.pop(event.job_id), "an attempt ends when all its rank groups have"
            case NoticeGiven() | KillOrdered():
                key = (type(event).__name__, event.job_id, event.epoch)
                assert key not in noticed, "one notice, one kill"
                noticed[key] = 1
                if isinstance(event, NoticeGiven) and event.reason is NoticeReason.PREEMPT:
                    above = submitted[event.for_job].job
                    assert is_below(submitted[event.job_id].job.tier, above.tier), "only lower tiers are preempted"
            case _ if type(event).__name__ == "NodeUp":
                up.add(event.node.name)
                kinds[event.node.name] = (event.node.gpu_name, event.node.capacity)
                racks[event.node.name] = event.node.domain
                mig[event.node.name] = event.node.mig


def the_instances_may_stand_together(cut: MigGpus | None, gpu: int, board: dict[int, Lease], asked: Job) -> None:
    """By rules written anew: starts, overlaps, the most of a profile, compute slices, and instances that are there."""
    assert cut is not None and gpu in cut.gpus
    instances = [lease.instance for lease in board.values()]
    slices = [at for each in instances for at in range(each.start, each.start + each.size)]
    assert len(set(slices)) == len(slices) and max(slices) < 8, "two instances overlap"
    assert sum(PROFILES[each.profile].compute for each in instances) <= 7
    for each in instances:
        rule = PROFILES[each.profile]
        assert each.size == rule.size and each.start in rule.starts, "an illegal start"
        assert sum(other.profile == each.profile for other in instances) <= rule.instances
        assert cut.fixed is None or (gpu, each.start, each.size, each.profile) in cut.fixed
    assert all(lease.milli == 125 * lease.instance.size for lease in board.values())
    assert asked.mig in {each.profile for each in instances}


def check_now(world: World) -> None:
    """After each cycle: nothing is lost, decide() leaves no trace, and says the same of what it just did."""
    state = world.state
    cores = {name: record.node.cpu_milli for name, record in state.nodes.records.items()}
    for attempt in state.attempts.values():
        for lease in attempt.held:
            cores[lease.node] -= attempt.job.cpu_milli
    assert all(left >= 0 for left in cores.values()), "no core is leased twice"
    waiting = state.waiting.job_ids()
    for job_id, record in state.jobs.items():
        places = (job_id in waiting) + (job_id in state.attempts) + record.phase.ended + record.phase.deferred
        assert places == 1, f"{job_id} is in {places} places"
    before, idle = state.snapshot(), state.idle
    state.idle = None  # as if it had not decided yet
    decision = decide(state, world.now_us)
    state.idle = idle
    assert state.snapshot() == before
    assert decision.errors == ()
    # A notice without any grace is followed by its kill in the next cycle, which is due at once; and a job that starts
    # again with its limit of time used up gets notice in the next one.
    kills = [event for event in decision.events if isinstance(event, KillOrdered)]
    more = [event for event in decision.events if event not in kills and not is_limit(event)]
    # Where queues have quotas, a notice may let in another job, which is decided when the victim leaves at the latest.
    follows_notice = bool(state.quotas.queues) and any(each.leaving for each in state.attempts.values())
    assert not more or follows_notice, "all is decided"
    assert not any(state.attempts[event.job_id].job.grace_us for event in kills)
    if not decision.events and not follows_notice:
        check_sleep(world, decision.wake_at_us)
        assert state.snapshot() == before
    for job_id in state.jobs:
        reason = explain(state, job_id, world.now_us).reason
        assert reason is not Reason.ERROR and (reason is not Reason.STARTS_NOW or follows_notice)
    assert state.snapshot() == before
    totals = world.ledger.totals(world.now_us)
    assert totals.gpu_us.held == held_gpu_us(world.log, world.now_us)


def check_sleep(world: World, wake_at_us: int | None) -> None:
    """At the last whole minute before the scheduler wakes a cycle decides nothing, whatever searches failed before."""
    state, minute_us = world.state, 60 * S
    until_us = world.now_us + 60 * minute_us if wake_at_us is None else wake_at_us
    last_us = (until_us - 1) // minute_us * minute_us
    if last_us <= world.now_us:
        return
    idle, searches = state.idle, state.failed_searches
    state.idle, state.failed_searches = None, FailedSearches()
    assert decide(state, last_us).events == ()
    state.idle, state.failed_searches = idle, searches


def is_limit(event: Event) -> bool:
    """Whether it is the notice of a job's own limit."""
    return isinstance(event, NoticeGiven) and event.reason is NoticeReason.LIMIT


def held_gpu_us(log: list[Event], now_us: int) -> int:
    """GPU-microseconds under lease, counted anew."""
    total, since = 0, {}
    for event in log:
        if isinstance(event, AttemptPlaced):
            for lease in event.leases:
                since[(event.job_id, event.epoch, lease.node)] = (event.at_us, lease.gpu_milli)
        elif isinstance(event, RanksEnded):
            at_us, gpus = since.pop((event.job_id, event.epoch, event.node), (event.at_us, 0))
            total += gpus * (event.at_us - at_us)
    return total // 1000 + sum(gpus * (now_us - at_us) for at_us, gpus in since.values()) // 1000


def comes_to_its_end_and_keeps_its_promises(up, submitted, broken, deaf, breaks):
    """Draw nodes, jobs, jobs with a failing script, jobs that ignore notices, and faults."""
    world = World(*up, broken=broken, deaf=deaf).later(*submitted)
    world.checks.append(check_now)
    for fault in breaks:
        break_in(world, *fault)
    world.play()
    check_log(world.log)
    assert not world.errors and not world.state.attempts
    assert len(world.state.jobs) == len(submitted), "no job is lost"
    for job_id, record in world.state.jobs.items():
        if not record.phase.ended:
            assert explain(world.state, job_id, world.now_us).reason in NEVER_RUN | NOT_NOW, "a job that can has run"
    again = State()
    for event in world.log:
        apply(again, event)
    assert again.snapshot() == world.state.snapshot(), "replaying the log gives the same state"


def does_not_depend_on_the_order_of_reports(up, submitted, later, data):
    """Apply the same nodes, jobs and ends of rank groups in another order within the same moment."""
    submitted = [replace(each, job=replace(each.job, after=())) for each in submitted]  # it names earlier jobs only
    first = World(*up, *submitted)
    first.play(until_s=250)
    second = World(*data.draw(st.permutations(up)), *data.draw(st.permutations(submitted)))
    second.play(until_s=250)
    events: list[Event] = [job(f"new-{each.job.job_id}", each.job.gpus, each.job.tier) for each in later]
    for job_id, attempt in sorted(first.state.attempts.items()):
        ids = {"job_id": job_id, "epoch": attempt.epoch, "outcome": Outcome.FINISHED}
        events += [RanksEnded(at_us=first.now_us, node=lease.node, **ids) for lease in attempt.held]
    assert decide(first.state, first.now_us) == decide(second.state, first.now_us)
    first.tell(*events)
    second.tell(*data.draw(st.permutations(events)))
    assert decide(first.state, first.now_us) == decide(second.state, first.now_us)


@st.composite
def trees(draw):
    """Two levels over 8 guaranteed GPUs; whether they are there depends on the nodes."""
    left, tree = 8, []
    for name in ("q", "r"):
        quota = draw(st.integers(0, left))
        left -= quota
        inner = draw(st.integers(0, quota))
        more = {"lend": draw(st.booleans()), "limit_gpus": draw(st.sampled_from([None, None, 8, 12]))}
        tree += [
            Queue(name=name, quota_gpus=quota, weight=draw(st.integers(1, 2)), **more),
            Queue(name=f"{name}1", parent=name, quota_gpus=inner, user_gpus=draw(st.sampled_from([None, None, 4]))),
        ]
    return [
        queue if queue.limit_gpus is None or queue.limit_gpus >= queue.quota_gpus else Queue(name=queue.name)
        for queue in tree
    ]


def world_of_queues(up, submitted, broken, deaf, breaks, tree, which):
    """Return a world of these draws that was not played yet."""
    asked = [
        replace(each, job=replace(each.job, queue=which[index], owner="ann" if index % 2 else "bob"))
        for index, each in enumerate(submitted)
    ]
    world = World(*up, QueuesSet(at_us=0, queues=tuple(tree)), broken=broken, deaf=deaf).later(*asked)
    for fault in breaks:
        break_in(world, *fault)
    return world


def keeps_the_rules_of_queues(up, submitted, broken, deaf, breaks, tree, which):
    """Draw nodes, jobs and faults as above, a tree of queues, and the queue of each job."""
    world = world_of_queues(up, submitted, broken, deaf, breaks, tree, which)
    world.checks += [check_now, limits_hold]
    world.play()

    check_log(world.log)
    the_log_keeps_the_rules(world)
    assert not world.errors and not world.state.attempts
    again = State()
    for event in world.log:
        apply(again, event)
    assert again.snapshot() == world.state.snapshot(), "replaying the log gives the same state"
    for job_id, record in world.state.jobs.items():
        if not record.phase.ended and world.state.quotas.never(record.job) is None:
            reason = explain(world.state, job_id, world.now_us).reason
            assert reason in {*NEVER_RUN, *NOT_NOW, Reason.KEPT}, f"{job_id} could run, and waits: {reason}"


def limits_hold(world: World) -> None:
    """Counted anew from the attempts."""
    quotas = world.state.quotas
    counted: dict[str, dict[str, int]] = {}
    for attempt in world.state.attempts.values():
        gpus = sum(lease.gpu_milli for lease in attempt.held) / 1000
        for name in {holder.queue.name for holder in quotas.leaf(attempt.job.queue).path}:
            users = counted.setdefault(name, {})
            users[attempt.job.owner] = users.get(attempt.job.owner, 0) + gpus
    for queue in quotas.queues:
        users = counted.get(queue.name, {})
        assert queue.limit_gpus is None or sum(users.values()) <= queue.limit_gpus
        assert queue.user_gpus is None or max(users.values(), default=0) <= queue.user_gpus


def the_log_keeps_the_rules(world: World) -> None:
    """Replay the log: preempted jobs had borrowed, or were below and not shielded; started jobs were not refused."""
    state = State()
    for event in world.log:
        if isinstance(event, NoticeGiven) and event.reason in (NoticeReason.PREEMPT, NoticeReason.QUOTA):
            assert event.for_job is not None
            attempt, victims = state.attempts[event.job_id], state.quotas.victims(state.jobs[event.for_job].job)
            below = event.reason is NoticeReason.PREEMPT
            gpu_milli = sum(lease.gpu_milli for lease in attempt.held)
            assert victims.allows(attempt.job, gpu_milli, below=below), f"{event.job_id} is shielded: {event.reason}"
        if isinstance(event, AttemptPlaced):
            state.nodes.end_quarantines(event.at_us)  # time alone ends a quarantine
            gpus = sum(len(lease.gpus) for lease in event.leases)
            refusal = state.quotas.admits(state.jobs[event.job_id].job, event.at_us, gpus)
            assert refusal is None, f"{event.job_id} was placed although {refusal.text}"
        apply(state, event)


WORLDS = {
    "up": nodes,
    "submitted": jobs(),
    "broken": st.sets(st.sampled_from(NAMES), max_size=1),
    "deaf": st.sets(st.sampled_from(NAMES), max_size=2),
    "breaks": faults,
}
ORDERS = {"up": nodes, "submitted": jobs(), "later": jobs(), "data": st.data()}
QUEUES = {
    **WORLDS,
    "tree": trees(),
    "which": st.lists(st.sampled_from(("q", "q1", "r", "r1", "default")), min_size=7, max_size=7),
}
