"""Use over time: the decay of borrowed GPUs, the limits of a day, and the moves that are forgotten."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quota_trees import HOUR, ROOT, a_job, gpus, hold, quotas

from cordee.events import Queue
from cordee.schedule.quota.bounds import MOST_OF_DAY
from cordee.schedule.quota.day import DAY_US, Day
from cordee.schedule.quota.decay import Decay
from cordee.schedule.quota.quotas import Quotas


@given(st.integers(1, 10**13), st.lists(st.integers(0, 10**14), min_size=2, max_size=5))
def test_the_clock_is_an_exponential_within_the_error_that_it_promises(half_life_us, times):
    clock = Decay(half_life_us, 0)
    base = clock.at(0)
    for at_us in (at_us for at_us in times if at_us < 500 * half_life_us):
        halves, rest = divmod(at_us, half_life_us)
        exact = 2.0 ** (rest / half_life_us)
        assert clock.at(at_us) / (base << halves) == pytest.approx(exact, rel=4e-4)
    readings = [clock.at(at_us) for at_us in sorted(set(times)) if at_us < 500 * half_life_us]
    assert readings == sorted(readings)


moves = st.lists(st.tuples(st.integers(0, 3 * DAY_US), st.integers(0, 8), st.integers(0, 5)), max_size=12)


@given(moves, st.integers(0, 5 * DAY_US))
def test_use_within_a_day_is_the_integral_of_holdings(drawn, now_us):
    day, changes = Day(), sorted((at_us, (milli, nano)) for at_us, milli, nano in drawn if at_us <= now_us)
    for at_us, change in changes:
        day.add(at_us, change)
    # Each change holds from its time until now, cut to the last day.
    expected = [sum(change[n] * (now_us - max(at_us, now_us - DAY_US)) for at_us, change in changes) for n in (0, 1)]
    assert list(day.used(now_us)) == expected
    before = day.value()
    day.add(now_us, (3, 4))
    day.add(now_us, (-3, -4))
    assert day.value() == before
    day.forget(now_us)
    assert list(day.used(now_us)) == expected


@given(moves, st.integers(0, 8), st.booleans())
def test_a_day_knows_when_its_use_crosses_a_mark(drawn, quarter, falling):
    day, now_us = Day(), 3 * DAY_US
    for at_us, milli, nano in sorted(drawn):
        day.add(at_us, (milli, nano))
    if drawn and falling:
        day.add(now_us, (-sum(milli for _, milli, _ in drawn), 0))  # nothing is held from now on
    mark = day.used(now_us)[0] * quarter // 4
    at_us = day.crosses_us(0, mark, now_us, falling=falling)
    beyond = (lambda used: used <= mark) if falling else (lambda used: used >= mark)
    if at_us is None:
        assert not any(beyond(day.used(now_us + hour * HOUR)[0]) for hour in range(25))
    else:
        assert beyond(day.used(at_us)[0])
        assert at_us == now_us or not beyond(day.used(at_us - 1)[0])


def test_most_of_a_day_is_one_number_in_the_code_and_in_the_docs():
    tree = Quotas([Queue(name="a", gpu_us_per_day=8 * HOUR)])
    most = 7 * HOUR * 1000
    assert tree.most_of_day(a_job("a", 8), (most, 0)) == "7 GPU-h of the 8 GPU-h that queue a may use"
    assert tree.most_of_day(a_job("a", 8), (most - 1, 0)) is None
    assert Fraction(7, 8) == MOST_OF_DAY
    for page in ("docs/design/queues.md", "docs/how-to/queues.md"):
        assert "seven eighths of" in " ".join((ROOT / page).read_text().split()), page


def test_a_day_limit_that_comes_later_counts_the_whole_day():
    tree = quotas(Queue(name="team"), Queue(name="a", parent="team"))
    job = hold(tree, "a", 8)
    tree.take(job, gpus(8), HOUR)
    hold(tree, "a", 4, at_us=HOUR)
    limited = [Queue(name="team", gpu_us_per_day=100 * HOUR), Queue(name="a", parent="team")]
    later = tree.regrouped(limited, 2 * HOUR)
    refusal = later.admits(a_job("team", 200), 2 * HOUR)
    assert refusal and refusal.text.startswith("queue team used 12 GPU-h of the 100 GPU-h")


def test_forgotten_moves_change_no_answer():
    """The fault simulation found this (--seed 52805): a state that forgot sooner was another one than its log's."""
    trees = [quotas(Queue(name="a", gpu_us_per_day=1000 * HOUR)) for _ in range(2)]
    for tree in trees:
        hold(tree, "a", 2)  # it holds on for days, and nothing that is remembered says since when
    for number in (*range(1, 81), 120):
        for tree in trees:
            job = hold(tree, "a", 8, at_us=number * HOUR)
            tree.take(job, gpus(8), number * HOUR + HOUR // 2)
    trees[0].forget()
    (forgot, knows), now_us = trees, 121 * HOUR
    assert len(forgot._moves) == 2 < len(knows._moves)
    assert forgot.value() == knows.value()
    limited, job = [Queue(name="a", gpu_us_per_day=200 * HOUR)], a_job("a", 200)
    refusals = [tree.regrouped(limited, now_us).admits(job, now_us) for tree in trees]
    assert refusals[0] == refusals[1] and refusals[0].text.startswith("queue a used 52 GPU-h of the 200 GPU-h")
