"""The pledge protocol on real ranks, and alone."""

import os
import sys
from pathlib import Path

import pytest

from cordee.train.stop.agreement import Agreement, BoundaryAction
from forks import run

ROUNDS = Path(__file__).with_name("stop_rounds.py")


@pytest.mark.gang
@pytest.mark.parametrize(("seed", "rounds", "world"), [(1, 24, 4), (1000, 12, 2), (2000, 12, 3)])
def test_all_ranks_meet_at_one_step(seed: int, rounds: int, world: int) -> None:
    command = [sys.executable, str(ROUNDS), "--seed", str(seed), "--rounds", str(rounds), "--world", str(world)]
    ((code, said, errors),) = run([command], [dict(os.environ)], 280)
    assert code == 0, said + errors[-3000:]
    assert f"{rounds} rounds on {world} ranks" in said


def test_one_rank_meets_itself_at_its_next_boundary() -> None:
    agreement = Agreement(first_step=3)
    assert agreement.at(3) is BoundaryAction.BEGIN
    agreement.request()
    assert agreement.at(4) is BoundaryAction.SAVE
    agreement.conclude()
    assert agreement.at(4) is BoundaryAction.BEGIN
    agreement.request(leave_in_s=5.0)
    assert agreement.at(5) is BoundaryAction.LEAVE
    agreement.close()


def test_a_notice_during_a_save_leaves_without_another_step() -> None:
    agreement = Agreement(first_step=0)
    agreement.request()
    assert agreement.at(0) is BoundaryAction.SAVE
    agreement.request(leave_in_s=5.0)
    agreement.conclude()
    assert agreement.at(0) is BoundaryAction.LEAVE
    agreement.close()


def test_one_rank_chooses_what_it_likes_best() -> None:
    agreement = Agreement(first_step=0)
    assert agreement.choose(["save", "finish", "try"], {"try", "finish"}, 1.0) == "finish"
    assert agreement.choose(["save", "finish"], {"try"}, 1.0) is None
    agreement.close()


def test_numbers_of_boundaries_grow_and_may_leave_gaps() -> None:
    agreement = Agreement(first_step=-5)
    assert agreement.at(0) is BoundaryAction.BEGIN and agreement.at(7) is BoundaryAction.BEGIN
    assert agreement.at(7) is BoundaryAction.BEGIN, "a loop that is entered anew"
    agreement.request(leave_in_s=5.0)
    assert agreement.at(100) is BoundaryAction.LEAVE, "the first one that is not below"
    agreement.close()
