"""One job of 4, 2 or 3 real ranks for as long as the time allows, and what its life comes to.

Kills of ranks and uploaders, notices, frozen ranks, full disks, flipped bits, changes of the world are drawn from the
seed; when exactly each comes is also the machine's to say, so a replay is a close relative. An hour of it:

    make soak CORDEE_SOAK_S=3600 SOAK=tests/soak/test_soak_survive.py
"""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from soaking import Soak
from survive_job import GLOBAL_BATCH, SAMPLES, SEED
from survive_world import SLOTS, World

from cordee.events import Outcome
from cordee.train.data.order import SampleOrder

STEPS_PER_S = 4.0  # of the time that it is given: more than it can do in it while things befall it
TOLERANCE = 1e-6
CORRUPT = 52


@pytest.fixture
def disk(tmp_path: Path, soak: Soak) -> Iterator[tuple[Path, bool]]:
    """A small file system of its own, if this may be mounted here; else a folder, and no disk is filled."""
    at = tmp_path / "disk"
    at.mkdir()
    size_mib = 16 + round(soak.seconds / 10)  # records of the log stay, a page each
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(at)]
    small = os.geteuid() == 0 and subprocess.run(mount, check=False, capture_output=True).returncode == 0
    if not small:
        print("\nno disk is filled: a small file system needs root and mount()", flush=True)
    yield at, small
    if small:
        subprocess.run(["umount", "-l", str(at)], check=True)


@pytest.mark.gang
def test_a_job_survives_whatever_befalls_it(soak: Soak, tmp_path: Path, disk: tuple[Path, bool]) -> None:
    steps = max(40, round(soak.seconds * STEPS_PER_S))

    def story(seed: int) -> str:
        world = World(tmp_path, disk[0], steps, soak, seed, small=disk[1])
        try:
            world.live()
            _check(world)
            _print(world)
        finally:
            world.close()
        return ", ".join(f"{count} of {what}" for what, count in world.faults.items())

    soak.play(story, at_most=1)


def _check(world: World) -> None:
    alone, weights = world.uninterrupted()
    assert len(alone) == world.steps
    # The numbers of a step tell it from its neighbours (but for a few once it has learnt): another state would be seen.
    alike = sum(_far(one, next_) <= 10 * TOLERANCE for one, next_ in pairwise(alone))
    assert alike <= world.steps // 100, f"{alike} of {world.steps} steps look like the one before"
    order = SampleOrder(length=SAMPLES, global_batch=GLOBAL_BATCH, seed=SEED, drop_last=False)
    done: set[int] = set()
    reached, allowed = 0, 0.0
    for each in world.attempts:
        assert CORRUPT not in each.codes.values(), f"attempt {each.epoch} found no generation\n{world.told()}"
        assert not each.failed, f"attempt {each.epoch} left with {each.codes}"
        for rank, rows in enumerate(each.rows):
            share = GLOBAL_BATCH // each.world
            for row in rows:
                samples = order.samples(row[0] * GLOBAL_BATCH, GLOBAL_BATCH).tolist()
                assert row[1] == samples[rank * share : (rank + 1) * share], f"attempt {each.epoch}: step {row[0]}"
                assert _far(row, alone[row[0]]) < TOLERANCE, f"attempt {each.epoch}: step {row[0]} of rank {rank}"
                done.add(row[0])
            assert [row[0] for row in rows] == [*range(rows[0][0], rows[0][0] + len(rows))] if rows else True
        newest, whole = each.whole
        if each.begun is not None:
            assert each.begun >= whole, f"attempt {each.epoch}: step {whole} verified, {each.begun} was loaded"
            twice = reached - each.begun - (newest - whole)  # what has gone bad since is no fault of the saves
            assert twice <= allowed, f"attempt {each.epoch}: {twice} steps done twice, {allowed:.0f} at most"
            reached, allowed = each.reached or 0, 0.0
        if each.outcome is Outcome.CHECKPOINTED:  # each says that all it had done is durable
            allowed = 0.0
        else:
            allowed += world.lost_max(each)
    assert done == {*range(world.steps)}
    ends = [number for layer in world.weights() for number in layer], [number for layer in weights for number in layer]
    assert ends[0] == pytest.approx(ends[1], abs=TOLERANCE)


def _far(one: list[Any], other: list[Any]) -> float:
    return max(abs(one[at] - other[at]) for at in (2, 3))


def _print(world: World) -> None:
    say = world.soak.say
    ledger = world.ledger()
    (row,) = ledger.cost("job", ledger.at_us)
    held_us = sum(each.world * (each.ended_us - each.placed_us) for each in world.attempts)
    assert row.gpu_us.held == held_us, "each microsecond is in one class"
    total = ledger.totals(ledger.at_us)
    outcomes = [each.outcome for each in world.attempts]
    counts = ", ".join(f"{outcomes.count(each)} {each}" for each in Outcome if each in outcomes)
    twice = sum(max(map(len, each.rows)) for each in world.attempts) - world.steps
    say(f"{len(outcomes)} attempts ({counts}); {world.steps} steps, {twice} done twice")
    say(f"goodput {row.gpu_us.useful / held_us:.1%} of {held_us / 1e6:.1f} slot-s held on {SLOTS} slots")
    capacity_gpu_us = total.gpu_us.held + total.idle_gpu_us
    for name, gpu_us in {**asdict(row.gpu_us), "idle": total.idle_gpu_us}.items():
        say(f"  {name:<12}{gpu_us / 1e6:10.3f} slot-s{gpu_us / capacity_gpu_us:8.1%}")
    for cause, gpu_us, *_ in row.lost_by_cause:
        say(f"  lost by {cause:<16}{gpu_us / 1e6:10.3f} slot-s")
