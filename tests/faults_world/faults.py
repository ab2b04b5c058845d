"""Kinds of faults: how often each comes, and what it does to a `FaultWorld`."""

import random

from cordee.units import US_PER_S
from faults_world.cluster import AGENT_AWAY_S_MAX
from faults_world.network import DOWN, UP
from faults_world.world import Fault, FaultWorld, ServerCrashed


def _agent(world: FaultWorld, rng: random.Random) -> str:
    name, back_us = rng.choice(world.nodes).name, rng.randint(0, AGENT_AWAY_S_MAX) * US_PER_S
    return f"the agent of {name} dies for {back_us} us" if world.cluster.agent_dies(name, back_us) else ""


def _machine(world: FaultWorld, rng: random.Random) -> str:
    name, back_s = rng.choice(world.nodes).name, rng.choice((None, 1, 1, 20, 60, 200))
    back_us = None if back_s is None else back_s * US_PER_S
    return f"{name} is gone, back after {back_us} us" if world.cluster.machine_dies(name, back_us) else ""


def _power(world: FaultWorld, rng: random.Random) -> str:
    name, back_us = rng.choice(world.nodes).name, rng.randint(1, 60) * US_PER_S
    return f"{name} for {back_us} us" if world.cluster.machine_dies(name, back_us, disk=True) else ""


def _reclaim(world: FaultWorld, rng: random.Random) -> str:
    machine = world.cluster.machines[rng.choice(world.nodes).name]
    if machine.agent is None or machine.reclaim_us is not None:
        return ""
    deadline_us = world.engine.now_us() + rng.choice((1, 15, 60)) * US_PER_S
    machine.announce(deadline_us)
    world.engine.at(deadline_us, _take_back, world, machine.node.name, rng.choice((None, 1, 1, 30, 100)))
    return f"{machine.node.name} goes at {deadline_us}"


def _take_back(world: FaultWorld, name: str, back_s: int | None) -> None:
    if world.cluster.machines[name].reclaim_us is None:
        return  # it went by itself
    if world.cluster.machine_dies(name, None if back_s is None else back_s * US_PER_S):
        world.note(f"{name} is taken back")
    else:
        world.engine.at(world.engine.now_us() + US_PER_S, _take_back, world, name, back_s)


def _cut(world: FaultWorld, rng: random.Random) -> str:
    name, for_us = rng.choice(world.nodes).name, rng.choice((3, 20, 29, 33, 42, 90, 300)) * US_PER_S
    return f"{name} for {for_us} us" if world.cluster.cut(name, (UP, DOWN), for_us) else ""


def _half(world: FaultWorld, rng: random.Random) -> str:
    name, for_us = rng.choice(world.nodes).name, rng.choice((3, 20, 33, 42, 90)) * US_PER_S
    direction = rng.choice((UP, DOWN))
    return f"{name} {direction} for {for_us} us" if world.cluster.cut(name, (direction,), for_us) else ""


def _freeze(world: FaultWorld, rng: random.Random) -> str:
    for_us = rng.choice((1, 4, 10, 33, 45, 90)) * US_PER_S
    return f"for {for_us} us" if world.cluster.freeze(for_us) else ""


def _away(world: FaultWorld, rng: random.Random) -> str:
    for_us = rng.choice((5, 30, 50, 200, 3600)) * US_PER_S
    if world.control is None:
        return ""
    world.injected["away"] = world.injected.get("away", 0) + 1
    raise ServerCrashed(f"and is away for {for_us} us", for_us)


def _full(world: FaultWorld, rng: random.Random) -> str:
    name, for_us = rng.choice(world.nodes).name, rng.choice((2, 10, 60)) * US_PER_S
    return f"the disk of {name} for {for_us} us" if world.cluster.fill(name, for_us) else ""


def _flap(world: FaultWorld, rng: random.Random) -> str:
    name, now_us = rng.choice(world.nodes).name, world.engine.now_us()
    for number in range(rng.randint(2, 5)):
        world.engine.at(now_us + number * 3 * US_PER_S, _agent_dies, world, name)
    return name


def _agent_dies(world: FaultWorld, name: str) -> None:
    world.cluster.agent_dies(name, US_PER_S)


def _rank(world: FaultWorld, rng: random.Random) -> str:
    name = rng.choice(world.nodes).name
    return f"a rank on {name}" if world.cluster.machines[name].table.kill(rng.randrange(8)) else ""


def _stop(world: FaultWorld, rng: random.Random) -> str:
    (job, _), now = rng.choice(world.jobs), rng.random() < 0.5
    if job.job_id not in world.accepted:
        return ""
    world.request(lambda control: control.stop(job.job_id, by="ann", now=now))
    return f"{job.job_id} now={now}"


def _down(world: FaultWorld, rng: random.Random) -> str:
    world.request(lambda control: control.shut_down())
    at_us = world.engine.now_us() + rng.randint(1, 90) * US_PER_S
    world.engine.at(at_us, world.request, lambda control: control.up())
    return "the server shuts down"


def _drain(world: FaultWorld, rng: random.Random) -> str:
    name, now_us = rng.choice(world.nodes).name, world.engine.now_us()
    world.cordon(name, drain=rng.random() < 0.5)
    world.engine.at(now_us + rng.randint(1, 200) * US_PER_S, world.uncordon, name)
    return name


FAULTS = {
    "agent": Fault((1.0, 4.0), _agent),
    "machine": Fault((1.0, 3.0), _machine),
    "power": Fault((1.0, 2.0), _power),
    "reclaim": Fault((1.0, 3.0), _reclaim),
    "cut": Fault((1.0, 3.0), _cut),
    "half": Fault((1.0, 2.0), _half),
    "freeze": Fault((1.0, 3.0), _freeze),
    "away": Fault((1.0, 2.0), _away),
    "full": Fault((1.0, 2.0), _full),
    "flap": Fault((1.0,), _flap),
    "rank": Fault((1.0, 4.0), _rank),
    "stop": Fault((1.0, 2.0), _stop),
    "down": Fault((0.5, 1.0), _down),
    "drain": Fault((1.0, 2.0), _drain),
}
