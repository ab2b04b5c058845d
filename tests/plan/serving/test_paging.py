"""The pool under both allocators: invariants of any run, and the comparison on published means."""

import importlib
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.plan.serving.memory.paging import Contiguous, Paged, pool_use
from cordee.workload.requests import Request

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
LENGTHS = st.lists(
    st.builds(Request, st.floats(0, 100), st.integers(1, 300), st.integers(1, 100)), min_size=1, max_size=40
)


@given(LENGTHS, st.sampled_from(["maximum", "power of two", "exact"]))
def test_a_contiguous_pool_is_whole_again_at_the_end(requests: list[Request], reservation) -> None:
    pool = Contiguous(1000, reservation, 400)
    use = pool_use(requests, pool, 1000, 1.0)
    assert pool.holes == [(0, 1000)]
    assert use.used <= 1.0
    assert use.fragmented <= use.waits


@given(LENGTHS, st.sampled_from([1, 16, 64]))
def test_a_paged_pool_never_waits_with_room(requests: list[Request], block: int) -> None:
    pool = Paged(1000, block)
    use = pool_use(requests, pool, 1000, 1.0)
    assert pool.free_blocks == 1000 // block
    assert use.fragmented == use.too_long == 0
    assert use.makespan_s >= max(request.arrival_s + request.output_tokens for request in requests) - 1e-9


def test_holes_keep_a_request_out_by_hand() -> None:
    pool = Contiguous(100, "exact", 100)
    first, second, third = (pool.allocate(size) for size in (40, 20, 40))
    assert (first, second, third) == (0, 40, 60)
    pool.free(0)
    pool.free(60)
    assert pool.free_tokens == 80
    assert pool.allocate(50) is None
    pool.free(40)
    assert pool.allocate(100) == 0


def test_a_request_that_no_pool_holds_is_left_out() -> None:
    use = pool_use([Request(0, 2000, 1), Request(0, 10, 1)], Paged(1000, 16), 1000, 1.0)
    assert (use.too_long, use.makespan_s) == (1, 1.0)


def test_blocks_fill_the_pool_that_runs_of_tokens_leave_in_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On lognormal draws with the means of Mooncake's conversations, not on its trace."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHMARKS)])
    paging = importlib.import_module("serving.paging")  # beside the package: importable only from here
    found = paging.compare(paging.sample(requests=1500))
    longest, power, exact, paged = (
        found[name]["used"]
        for name in ("contiguous, longest", "contiguous, power of two", "contiguous, exact", "paged, 16")
    )
    assert longest < 0.2 < power < 0.65 < exact < 0.85 < 0.95 < paged
    assert found["contiguous, exact"]["fragmented"] > 0.9 * found["contiguous, exact"]["waits"]
    assert found["paged, 16"]["fragmented"] == 0
