"""Every joule in exactly one class, whatever is reported and whenever it comes."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ledger import WHO, U, commit, ended, garbled, ledger_of, notice, span

from cordee.account import Ledger, Split
from cordee.account.ledger import SavedLedger
from cordee.control.codec import codec
from cordee.event_json import decode
from cordee.events import GpusSampled, IdleGpusSampled
from world import S


def drew(from_s, to_s, energy_mj, node="n0", epoch=1, integrated_mj=0):
    return GpusSampled(
        at_us=to_s * S, from_us=from_s * S, node=node, gpus=4, busy=0.5, memory_bytes=1, power_mw=1,
        energy_mj=energy_mj, integrated_mj=integrated_mj, job_id="a", epoch=epoch,
    )  # fmt: skip


CASES = {
    # events -> millijoules of each class; the attempt is held from 100 s until 200 s
    "finished": ([drew(100, 200, 1000), U(110, 190, 0, 80), *ended(200, "finished")], {"restart": 200, "useful": 800}),
    "lost": ([drew(100, 200, 1000), U(110, 190, 0, 80), *ended(200, "failed")], {"restart": 100, "lost": 900}),
    "half committed": (
        [drew(100, 130, 300), U(110, 150, 0, 40), span("checkpoint", 150, 160), drew(130, 160, 600), commit(160, 40),
         U(160, 200, 40, 40), drew(160, 200, 400), *ended(200, "lost")],
        {"restart": 100, "useful": 600, "checkpoint": 200, "lost": 400},
    ),
    "uneven: a pause draws less": (
        [drew(100, 150, 500), drew(150, 200, 50), U(100, 150, 0, 5), span("stall", 150, 200), *ended(200, "finished")],
        {"useful": 500, "stall": 50},
    ),
    "samples end before the attempt": ([drew(100, 110, 70), *ended(200, "finished")], {"unreported": 70}),
    "outside its time": (
        [drew(0, 90, 70), drew(90, 200, 30), U(100, 200, 0, 9), *ended(200, "finished")], {"useful": 100},
    ),
    "backwards, negative and empty": (
        [drew(150, 120, 9), drew(100, 110, -5), drew(120, 120, 0), U(100, 200, 0, 9), *ended(200, "finished")],
        {"useful": 9},
    ),
    "none": ([U(100, 200, 0, 9), *ended(200, "finished")], {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_classes(case):
    events, energy = CASES[case]
    (row,) = ledger_of(*events).rows(10**15)
    assert row.energy_mj == Split(**energy)


def test_lost_energy_is_summed_by_cause_and_late_energy_is_accounted_once():
    log = [drew(100, 150, 500, integrated_mj=20), notice("preempt", "p"), *ended(200, "killed"), drew(150, 200, 77)]
    ledger = ledger_of(*log, IdleGpusSampled(at_us=250 * S, node="n0", from_us=0, energy_mj=9))
    (row,) = ledger.cost("job", 0)[:1]
    assert [(each.cause, each.energy_mj) for each in row.lost_by_cause] == [("preempt", 500)]
    totals = ledger.totals(300 * S)
    assert (totals.energy_mj.held, totals.idle_energy_mj, totals.integrated_mj) == (500, 77 + 9, 20)


samples = st.builds(
    drew, st.integers(-50, 400), st.integers(-50, 400), st.integers(0, 10**9), st.sampled_from(["n0", "n1"]),
    st.integers(1, 2),
)  # fmt: skip


@settings(max_examples=60)
@given(events=garbled, drawn=st.lists(samples, max_size=40), seed=st.randoms(use_true_random=False))
def test_the_parts_are_the_whole_to_the_millijoule_whatever_is_reported(events, drawn, seed):
    log = [*events, *drawn]
    seed.shuffle(log)
    ledger = ledger_of(*log, *ended(300, "lost", "n0", "n1"), nodes=2)
    saved = codec(SavedLedger)
    again = Ledger.restored(saved.decode(json.loads(json.dumps(saved.encode(ledger.saved())))))
    for each in (ledger, again):
        totals = each.totals(500 * S)
        assert totals.energy_mj.held + totals.idle_energy_mj == sum(event.energy_mj for event in drawn)
        assert sum(row.energy_mj.held for row in each.cost("queue", 500 * S)) == totals.energy_mj.held


def test_a_long_attempt_stays_small_and_keeps_each_joule():
    ledger = ledger_of(nodes=2)
    for number in range(2000):
        for node in ("n0", "n1"):
            ledger.apply(drew(100 + 30 * number, 130 + 30 * number, 7, node))
    (row,) = ledger.rows(0)
    assert row.energy_mj == Split(unreported=28_000)
    (attempt,) = ledger.saved().open.values()
    assert len(attempt.energy._stretches) <= 128


def test_events_of_earlier_versions_have_no_integrated_energy():
    old = {"kind": "GpusSampled", "at_us": 9, "node": "n", "gpus": 1, "from_us": 1, "busy": 0.5, "memory_bytes": 1}
    assert decode(old | {"power_mw": 1, "energy_mj": 5, **WHO}).integrated_mj == 0
