"""The command behind `make faults`: play one seed and print its last events, or play many."""

import argparse
from collections.abc import Sequence

from faults_world.play import play


def main(argv: Sequence[str] | None = None) -> int:
    """Play seeds; return 1 if any of them breaks an invariant."""
    parser = argparse.ArgumentParser(prog="make faults", description="Play worlds that fail.")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds")
    parser.add_argument("--steps", type=int, help="stop after this many steps and print the last events")
    parser.add_argument("--sql", action="store_true", default=None, help="use SQLite for every seed")
    asked = parser.parse_args(argv)
    failed = 0
    for seed in range(asked.seed, asked.seed + asked.seeds):
        try:
            world = play(seed, asked.steps, sql=asked.sql)
        except AssertionError as error:
            print(error)
            failed += 1
            continue
        if asked.seeds == 1:
            print("\n".join(world.recent))
            print(f"seed {seed}: {world.steps} steps, {world.crashes} crashes of the server, {world.events} events")
    print(f"{asked.seeds - failed} of {asked.seeds} seeds kept every invariant")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
