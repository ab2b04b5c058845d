"""Faults of nodes, by a log."""

from cordee.events import Event, Node, NodeDown, NodeReclaimed, NodeUncordoned, NodeUp, ServerShuttingDown
from cordee.view.faults import LEMON, faults_of, lemon_faults

HOT = "too hot: the hardware has lowered its clocks"


def up(at_us: int, epoch: int = 1, **sick: str) -> NodeUp:
    gpus = {int(name.removeprefix("gpu")): why for name, why in sick.items()}
    node = Node(
        name="a", epoch=epoch, gpu_name="H100", gpus=8, unavailable=tuple(gpus), unavailable_why=tuple(gpus.values())
    )
    return NodeUp(at_us=at_us, node=node)


def down(at_us: int, why: str) -> NodeDown:
    return NodeDown(at_us=at_us, node="a", epoch=1, why=why)


def whys(*events: Event) -> list[str]:
    return [fault.why for fault in faults_of(events).get("a", [])]


def test_sick_gpus_and_lost_nodes_are_faults_and_the_third_makes_a_lemon() -> None:
    found = whys(up(1), up(2, gpu0=HOT, gpu1=HOT), up(3), up(4, gpu0=HOT), down(5, "silent"), up(6, 2, gpu0=HOT))
    assert found == [f"GPU 0, 1: {HOT}", "silent", f"GPU 0: {HOT}"] and len(found) == LEMON


def test_an_operator_who_puts_a_node_back_settles_its_faults() -> None:
    events: list[Event] = [down(number, "silent") for number in range(3)]
    assert lemon_faults(faults_of(events)["a"]) == 3
    events += [NodeUncordoned(at_us=4, node="a", by="ann", why="new fan"), down(5, "silent")]
    faults = faults_of(events)["a"]
    assert len(faults) == 4 and lemon_faults(faults) == 0


def test_what_is_not_the_machines_is_no_fault() -> None:
    busy = up(1, gpu0="in use by a process that is not Cordee's", gpu1="offered by another server's agent")
    reclaimed = NodeReclaimed(at_us=2, node="a", epoch=1, deadline_us=9)
    assert whys(busy, reclaimed, down(3, "terminated")) == []
    assert whys(down(1, "it has left"), ServerShuttingDown(at_us=2), down(3, "its agent ended")) == []
