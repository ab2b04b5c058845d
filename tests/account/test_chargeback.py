"""The chargeback of a month: it is the ledger's to the microsecond and micro-dollar, whatever lies in which month."""

from datetime import UTC, datetime
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cordee.account.chargeback import IDLE, About, Amount, by_month, charge_lines
from cordee.account.split import Split
from cordee.units import US_PER_DAY, US_PER_HOUR, format_month, month_start_us
from world import PRICE, S, World, job, node

DAY_S = US_PER_DAY // S
ABOUT = {"a": About("alpha", "llama"), "b": About("alpha", "")}


def months_of(world: World) -> dict[int, tuple[int, int]]:
    return world.ledger.idle_months(world.now_us)


def charged(world: World, **how: bool):
    return charge_lines(world.ledger.rows(world.now_us), months_of(world), ABOUT, world.now_us, **how)


moments = st.integers(0, 100 * DAY_S)
drawn_jobs = st.lists(
    st.tuples(
        moments,
        st.integers(1, 12),
        st.sampled_from(["preemptible", "standard", "production"]),
        st.sampled_from(["ann", "bob"]),
        st.sampled_from(["x", "y"]),
        st.integers(1, 40 * DAY_S),
        st.booleans(),
    ),
    max_size=6,
)


@given(
    drawn_jobs,
    st.lists(st.tuples(st.sampled_from([0, 1_234_567, PRICE]), moments), min_size=1, max_size=3),
    moments,
    st.booleans(),
)
def test_the_chargeback_is_the_ledger_to_the_micro(drawn, prices, end_s, divides):
    names = "abcdef"
    first = node("n0", micro_usd_per_gpu_hour=prices[0][0])
    world = World(first, work={names[at]: each[5] for at, each in enumerate(drawn)})
    world.later(
        *(
            node(f"n{at}", micro_usd_per_gpu_hour=price, at_us=up_s * S)
            for at, (price, up_s) in enumerate(prices[1:], 1)
        ),
        *(
            job(names[at], gpus, tier, at_us=at_s * S, owner=owner, queue=queue, protected=protected)
            for at, (at_s, gpus, tier, owner, queue, _, protected) in enumerate(drawn)
        ),
    )
    world.play(until_s=end_s)
    world.now_us = max(world.now_us, end_s * S)
    lines, totals = charged(world, divides_idle=divides), world.ledger.totals(world.now_us)
    assert sum((line.gpu_us for line in lines), Split()) == totals.gpu_us
    assert sum((line.micro_usd for line in lines), Split()) == totals.micro_usd
    idle = Amount(sum(line.idle.gpu_us for line in lines), sum(line.idle.micro_usd for line in lines))
    assert idle == (totals.idle_gpu_us, totals.idle_micro_usd)
    billed = sum(line.billed.micro_usd for line in lines), sum(line.billed.gpu_us for line in lines)
    assert billed == (totals.micro_usd.held + idle.micro_usd, totals.gpu_us.held + idle.gpu_us)
    for row in world.ledger.cost("user", world.now_us):
        mine = [line for line in lines if line.key.user == row.key]
        assert sum(line.micro_usd.held for line in mine) == row.micro_usd.held
        assert sum(line.charged.micro_usd for line in mine) == row.charged_micro_usd
        assert min((min(line.gpu_us.held, line.billed.micro_usd) for line in mine), default=0) >= 0


@given(st.integers(0, 400 * US_PER_DAY), st.integers(0, 400 * US_PER_DAY))
def test_months_of_a_stretch_follow_each_other(from_us, lasts_us):
    found = list(by_month(from_us, from_us + lasts_us))
    assert found[0][1] == 0 and found[-1][2] == lasts_us
    assert all(after == before for (_, _, after), (_, before, _) in pairwise(found))
    for month_us, before_us, after_us in found:
        assert month_start_us(month_us) == month_us == month_start_us(from_us + before_us)
        assert after_us == lasts_us or format_month(from_us + after_us - 1) == format_month(month_us)


def test_a_job_pays_for_what_others_lost_for_its_sake_and_says_so():
    world = World(node("n1"), work={"a": 3000, "c": 100})
    world.tell(job("a", 8, "preemptible", protected=False, queue="x"))
    world.later(job("c", 8, "production", at_us=1000 * S, owner="bob", queue="y")).play()
    lines = {line.key.user: line for line in charged(world)}
    lost = lines["ann"].micro_usd.lost
    assert lost > 0 and lines["ann"].passed_on.micro_usd == lines["bob"].charged.micro_usd == lost
    assert lines["ann"].payers == {("bob", "y")} and lines["ann"].key[3:] == ("alpha", "llama")
    assert lines["bob"].billed.micro_usd == lines["bob"].micro_usd.held + lost
    assert lines["bob"].micro_usd_per_gpu_hour == PRICE and lines["bob"].sources


def test_idle_time_is_a_line_of_its_own_or_divided_by_use():
    world = World(node("n1"), work={"a": 100, "b": 100})
    world.tell(job("a", 6, owner="ann"), job("b", 2, owner="bob")).play()
    world.at(1000)
    apart = {line.key.user: line for line in charged(world)}
    assert apart[IDLE].idle == world.ledger.idle_months(world.now_us)[0] and apart["ann"].idle == Amount()
    divided = {line.key.user: line for line in charged(world, divides_idle=True)}
    assert IDLE not in divided
    assert divided["ann"].idle.micro_usd == 3 * divided["bob"].idle.micro_usd > 0


def test_idle_months_are_those_of_the_calendar():
    world = World(node("n1", 1)).at(60 * DAY_S)
    starts = [round(datetime(1970, month, 1, tzinfo=UTC).timestamp()) * S for month in (1, 2, 3)]
    gpu_us = [31 * US_PER_DAY, 28 * US_PER_DAY, US_PER_DAY]
    cost = [each * PRICE // US_PER_HOUR for each in gpu_us]
    assert months_of(world) == dict(zip(starts, zip(gpu_us, cost, strict=True), strict=True))
    world.tell(job("late", 1, at_us=60 * DAY_S * S)).play()  # the clock passed two ends of months with one event
    assert list(months_of(world))[:2] == starts[:2] and months_of(world)[0] == (gpu_us[0], cost[0])
