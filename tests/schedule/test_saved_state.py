"""The saved form of state, ledger and measurements: what is read back goes on like the fold of the whole log."""

from collections.abc import Sequence

import random_worlds
from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.account.sums import summed
from cordee.control.fold import Fold
from cordee.control.snapshot import decoded_jobs, encoded_jobs, loaded, taken
from cordee.events import Event
from cordee.schedule import Policy, decide
from world import S


def folded(events: Sequence[Event], fold: Fold | None = None) -> Fold:
    fold = fold or Fold(Policy())
    assert not fold.apply(enumerate(events, start=fold.number + 1))
    return fold


def read_back(fold: Fold) -> Fold:
    return loaded(taken(fold), Policy(), fold.number)


def assert_equal(one: Fold, other: Fold, now_us: int) -> None:
    assert (one.number, one.last_us) == (other.number, other.last_us)
    assert one.state.snapshot() == other.state.snapshot()
    assert list(one.state.jobs) == list(other.state.jobs), "in the same order"
    assert taken(one).body == taken(other).body, "and in all that is not compared above"
    assert one.ledger.rows(now_us) == other.ledger.rows(now_us)
    assert one.ledger.totals(now_us) == other.ledger.totals(now_us)


@settings(max_examples=40)
@given(**random_worlds.QUEUES, at=st.floats(0, 1))
def test_a_fold_that_was_read_back_goes_on_like_the_whole_log(
    up, submitted, broken, deaf, breaks, tree, which, at: float
) -> None:
    world = random_worlds.world_of_queues(up, submitted, broken, deaf, breaks, tree, which)
    world.play()
    cut = round(at * len(world.log))
    whole, again = folded(world.log[:cut]), read_back(folded(world.log[:cut]))
    assert_equal(whole, again, world.now_us)
    now_us = whole.last_us
    for later_us in (now_us, now_us + 30 * S):
        assert decide(whole.state, later_us) == decide(again.state, later_us)
    assert_equal(folded(world.log[cut:], whole), folded(world.log[cut:], again), world.now_us)


@settings(max_examples=30)
@given(**random_worlds.QUEUES, at=st.floats(0, 1))
def test_jobs_that_ended_are_retired_and_nothing_else_changes(
    up, submitted, broken, deaf, breaks, tree, which, at: float
) -> None:
    world = random_worlds.world_of_queues(up, submitted, broken, deaf, breaks, tree, which)
    world.play()
    cut = round(at * len(world.log))
    whole, some = folded(world.log[:cut]), folded(world.log[:cut])
    gone = some.retire(some.ended_jobs())
    assert gone.keys() == {job_id for job_id in whole.state.jobs if job_id not in some.state.jobs}
    some = read_back(some)
    for later_us in (whole.last_us, whole.last_us + 30 * S):
        assert decide(whole.state, later_us) == decide(some.state, later_us)
    folded(world.log[cut:], whole)
    folded(world.log[cut:], some)
    now_us = world.now_us
    bodies = encoded_jobs(gone)
    rows = [row for job in decoded_jobs(bodies.values()) for row in job.accounts]
    for by in ("job", "epoch"):
        assert whole.ledger.cost(by, now_us) == summed(by, (*some.ledger.rows(now_us), *rows))
    for by in ("user", "queue"):
        assert whole.ledger.cost(by, now_us) == some.ledger.cost(by, now_us)
    assert whole.ledger.totals(now_us) == some.ledger.totals(now_us)
    # Retired at the end, both are the same.
    whole.retire(whole.ended_jobs())
    some.retire(some.ended_jobs())
    assert whole.state.snapshot() == some.state.snapshot()
    assert taken(whole).body == taken(some).body
