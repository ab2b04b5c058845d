"""Play seeds of the fault simulation; a failing seed prints its last events and the command that replays it."""

import logging
import tempfile
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from cordee.agent import rank_groups
from cordee.control.ports import Store
from cordee.control.store.sql import SqlStore
from faults_world.faults import FAULTS
from faults_world.world import FaultWorld, InvariantBroken

MEMORY = Path("/dev/shm")
FOLLOW_S = 3.0
"""The time between two reads of the spools, longer than in production: each costs the world a turn of the agent."""

SQL_EVERY = 50  # seeds; these play on the production store, in SQLite


def play(seed: int, steps: int | None = None, *, sql: bool | None = None) -> FaultWorld:
    """Play one seed to the end, or for a number of steps.

    Raises:
        AssertionError: an invariant was broken; the message has the last events and the command that replays the seed.
    """
    with ExitStack() as stack:
        store: Store | None = None
        stack.enter_context(mock.patch.object(rank_groups, "FOLLOW_S", FOLLOW_S))
        log = logging.getLogger("cordee")
        stack.callback(log.setLevel, log.level)
        log.setLevel(logging.CRITICAL + 1)
        disks = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)))
        if sql or (sql is None and seed % SQL_EVERY == 0):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            database = SqlStore(f"sqlite:///{Path(folder) / 'log.db'}")
            stack.callback(database.close)
            store = database
        world = FaultWorld(seed, FAULTS, disks, store)
        stack.callback(world.cluster.close)
        try:
            world.play(steps)
        except (Exception, InvariantBroken) as error:
            command = f"make faults SEED={seed}" + (" SQL=1" if sql else "")
            lines = (f"{world.policy_name}; {len(world.nodes)} nodes, {len(world.jobs)} jobs", *world.recent)
            text = "\n".join(lines)
            raise AssertionError(f"{text}\nstep {world.steps}: {error!r}\nreplay: {command}") from error
        return world
