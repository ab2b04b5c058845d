"""How often a job that runs should save: with no history and with its own, with a slow store, in memory."""

import itertools

import pytest

from cordee.plan.interval import SAVE_S_MAX, Lived, SaveCost, interval, mtbi_s
from cordee.plan.survive import LLAMA3_MTBI_GPU_HOURS, best_period_s

H = 3600.0


@pytest.mark.parametrize(
    ("ranks", "history", "hours", "within"),
    [
        (1024, [], LLAMA3_MTBI_GPU_HOURS / 1024, 1e-6),  # nothing known: Llama 3's rate
        (8, [], LLAMA3_MTBI_GPU_HOURS / 8, 1e-6),
        (8, [Lived(8, H, True)] * 30, 1.0, 0.1),  # much known: its own rate
        (64, [Lived(64, 4 * H, True)] * 50, 4.0, 0.1),
        (32, [Lived(64, 4 * H, True)] * 50, 8.0, 0.1),  # half the ranks, half the failures
        (16384, [Lived(16384, 3 * H, True)] * 50, 3.0, 0.1),
        (16384, [Lived(16384, 48 * H, False)] * 20, 960.0, 0.4),  # none in 40 days: about as long again
    ],
)
def test_time_between_failures(ranks, history, hours, within) -> None:
    assert mtbi_s(history, ranks) / H == pytest.approx(hours, rel=within)


def test_failures_shorten_it_and_life_without_them_lengthens_it() -> None:
    failing = [mtbi_s([Lived(64, H, True)] * n, 64) for n in range(6)]
    living = [mtbi_s([Lived(4096, n * 24 * H, False)], 4096) for n in range(6)]
    assert all(a > b for a, b in itertools.pairwise(failing))
    assert all(a < b for a, b in itertools.pairwise(living))


@pytest.mark.parametrize(
    ("ranks", "history", "measured", "save_s", "expected"),
    [
        (1024, [], SaveCost(0.6, 61, 180), None, ("optimum", None)),
        (8, [], SaveCost(0.1, 1, 60), None, (SAVE_S_MAX, None)),  # 1.5 h would be best
        (1024, [], SaveCost(0.6, 1700, 180), None, (1700.0, None)),  # the store is slower: it decides
        (64, [Lived(64, H, True)] * 20, SaveCost(0.1, 900, 60), None, (900.0, "often")),  # fails hourly, drains slowly
        (64, [Lived(64, H, True)] * 20, SaveCost(0.1, 1, 60), 1200.0, (1200.0, "often")),  # asked for rarely
        (64, [Lived(64, H, True)] * 20, SaveCost(0.1, 1, 60), 20.0, (20.0, None)),  # asked for often
    ],
)
def test_intervals(ranks, history, measured, save_s, expected) -> None:
    found = interval(history, ranks, measured, save_s=save_s)
    want, held = expected
    if want == "optimum":
        want = best_period_s(found.mtbi_s, measured.restart_s, measured.stall_s, measured.upload_s)
    assert found.save_s == pytest.approx(want)
    assert (found.hold_s is None) == (held is None)
    if found.hold_s is not None:
        assert measured.stall_s < found.hold_s <= found.save_s / 2
