"""Play seeds of the fault simulation; a failing seed prints its last events and the command that replays it."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

from cordee.control.ports import Store
from cordee.control.store.sql import SqlStore
from faults_world.faults import FAULTS
from faults_world.world import FaultWorld

SQL_EVERY = 50  # seeds; these play on the production store, in SQLite


def play(seed: int, steps: int | None = None, *, sql: bool | None = None) -> FaultWorld:
    """Play one seed to the end, or for a number of steps.

    Raises:
        AssertionError: an invariant was broken; the message has the last events and the command that replays the seed.
    """
    with ExitStack() as stack:
        store: Store | None = None
        if sql or (sql is None and seed % SQL_EVERY == 0):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            database = SqlStore(f"sqlite:///{Path(folder) / 'log.db'}")
            stack.callback(database.close)
            store = database
        world = FaultWorld(seed, FAULTS, store)
        try:
            world.play(steps)
        except Exception as error:
            command = f"make faults SEED={seed}" + (" SQL=1" if sql else "")
            lines = (f"{world.policy_name}; {len(world.nodes)} nodes, {len(world.jobs)} jobs", *world.recent)
            text = "\n".join(lines)
            raise AssertionError(f"{text}\nstep {world.steps}: {error!r}\nreplay: {command}") from error
        return world
