"""Take over from a dead agent of the node: read its last reports, end the processes that it left."""

import signal
from collections.abc import Sequence
from pathlib import Path

from cordee.agent.clock import MachineClock
from cordee.agent.launch import Assignment
from cordee.agent.process import Process, Processes
from cordee.event_json import decode
from cordee.events import RanksEnded
from cordee.telemetry.stream import StreamReader

_SWEEP_S = 0.01


def read_ends(path: Path) -> tuple[list[tuple[int, RanksEnded]], int]:
    """Return the ends of rank groups in an agent's stream, with their seq, and the stream's last seq."""
    ends: list[tuple[int, RanksEnded]] = []
    reader = StreamReader(path)
    while not reader.at_end:
        for record in reader.read(1000):
            event = decode(record.event)
            if isinstance(event, RanksEnded):
                ends.append((record.seq, event))
    reader.close()
    return ends, reader.after


def end_survivors(order: Assignment, ranks: Sequence[Process], processes: Processes, clock: MachineClock) -> int:
    """Kill every process of a rank group, and wait until none is left; return their number."""
    ended: set[Process] = set()
    while left := processes.find(order.tag, ranks, node=order.node):
        ended |= left
        for each in left:
            processes.send(each, signal.SIGKILL)
        clock.sleep(_SWEEP_S)
    return len(ended)
