"""Kinds of faults, how often they come, and what each does to a `FaultWorld`; faults.py plays them."""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from cordee.events import NodeCordoned, NodeUncordoned
from cordee.units import US_PER_S

if TYPE_CHECKING:
    from cordee.simulate.faults import FaultWorld

RATES: dict[str, tuple[float, ...]] = {
    "lost": (0.05, 0.3),
    "late": (0.1, 0.4),
    "doubled": (0.1, 0.4),
    "dies": (0.002, 0.01),
    "refuses": (0.005, 0.02),
    "skew": (0.5, 20.0),
    "agent": (1.0, 4.0),
    "machine": (1.0, 3.0),
    "power": (1.0, 2.0),
    "reclaim": (1.0, 3.0),
    "cut": (1.0, 3.0),
    "flap": (1.0,),
    "rank": (1.0, 4.0),
    "stop": (1.0, 2.0),
    "down": (0.5, 1.0),
    "drain": (1.0, 2.0),
}
"""Chances of each message or call, or how many for each node."""


def _agent(world: "FaultWorld", dice: random.Random) -> str:
    name, back_us = dice.choice(world.nodes).name, dice.randint(0, 30) * US_PER_S
    return f"the agent of {name} dies for {back_us} us" if world.cluster.agent_dies(name, back_us) else ""


def _machine(world: "FaultWorld", dice: random.Random) -> str:
    name, back_s = dice.choice(world.nodes).name, dice.choice((None, 1, 1, 20, 60, 200))
    back_us = None if back_s is None else back_s * US_PER_S
    return f"{name} is gone, back after {back_us} us" if world.cluster.machine_dies(name, back_us) else ""


def _power(world: "FaultWorld", dice: random.Random) -> str:
    name, back_us = dice.choice(world.nodes).name, dice.randint(1, 60) * US_PER_S
    return f"{name} for {back_us} us" if world.cluster.machine_dies(name, back_us, disk=True) else ""


def _reclaim(world: "FaultWorld", dice: random.Random) -> str:
    machine = world.cluster.machines[dice.choice(world.nodes).name]
    if not machine.reachable or machine.reclaim_us is not None:
        return ""
    deadline_us = world.engine.now_us() + dice.choice((1, 15, 60)) * US_PER_S
    world.cluster.announce(machine.node.name, deadline_us)
    world.engine.at(deadline_us, _take_back, world, machine.node.name, dice.choice((None, 1, 1, 30, 100)))
    return f"{machine.node.name} goes at {deadline_us}"


def _take_back(world: "FaultWorld", name: str, back_s: int | None) -> None:
    if world.cluster.machines[name].reclaim_us is None:
        return  # it went by itself
    if world.cluster.machine_dies(name, None if back_s is None else back_s * US_PER_S):
        world.say(f"{name} is taken back")
    else:
        world.engine.at(world.engine.now_us() + US_PER_S, _take_back, world, name, back_s)


def _cut(world: "FaultWorld", dice: random.Random) -> str:
    name, for_us = dice.choice(world.nodes).name, dice.choice((3, 20, 39, 42, 90)) * US_PER_S
    return f"{name} for {for_us} us" if world.cluster.cut(name, for_us) else ""


def _flap(world: "FaultWorld", dice: random.Random) -> str:
    name, now_us = dice.choice(world.nodes).name, world.engine.now_us()
    for number in range(dice.randint(2, 5)):
        world.engine.at(now_us + number * 3 * US_PER_S, _agent_dies, world, name)
    return name


def _agent_dies(world: "FaultWorld", name: str) -> None:
    world.cluster.agent_dies(name, US_PER_S)


def _rank(world: "FaultWorld", dice: random.Random) -> str:
    name = dice.choice(world.nodes).name
    return f"a rank on {name}" if world.cluster.rank_dies(name, dice.randrange(4)) else ""


def _stop(world: "FaultWorld", dice: random.Random) -> str:
    (job, _), now = dice.choice(world.jobs), dice.random() < 0.5
    if job.job_id not in world.accepted:
        return ""
    world.ask(lambda control: control.stop(job.job_id, by="ann", now=now))
    return f"{job.job_id} now={now}"


def _down(world: "FaultWorld", dice: random.Random) -> str:
    world.ask(lambda control: control.shut_down())
    at_us = world.engine.now_us() + dice.randint(1, 90) * US_PER_S
    world.engine.at(at_us, world.ask, lambda control: control.up())
    return "the server shuts down"


def _drain(world: "FaultWorld", dice: random.Random) -> str:
    name, now_us = dice.choice(world.nodes).name, world.engine.now_us()
    world.operator(NodeCordoned(at_us=now_us, node=name, by="ann", drain=dice.random() < 0.5))
    over = NodeUncordoned(at_us=now_us, node=name, by="ann")
    world.engine.at(now_us + dice.randint(1, 200) * US_PER_S, world.operator, over)
    return name


BEFALLS: dict[str, Callable[["FaultWorld", random.Random], str]] = {
    "agent": _agent,
    "machine": _machine,
    "power": _power,
    "reclaim": _reclaim,
    "cut": _cut,
    "flap": _flap,
    "rank": _rank,
    "stop": _stop,
    "down": _down,
    "drain": _drain,
}
