"""A leader that is killed or frozen: the standby takes over, ranks go on, and nothing is lost or runs twice.

So it is when the database crashes under both.
"""

import random
from pathlib import Path

from pair import Pair

from postgres import Postgres


def test_the_leader_is_killed_and_then_frozen_and_the_database_crashes(tmp_path: Path, postgres: Postgres) -> None:
    pair = Pair(tmp_path, postgres.database())
    try:
        draw = random.Random(1953)
        pair.play("kill", draw)
        pair.play("freeze", draw)
        pair.restart(postgres)
        pair.end()
    finally:
        pair.close()
