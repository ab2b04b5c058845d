"""KV offload: break-even bandwidth, LRU hits by capacity, sizes of levels, and when an idle session leaves."""

import math
from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.errors import SpecError
from cordee.plan.serving.levers.idle import idle_plan, leave_after_s, session_pauses_s
from cordee.plan.serving.levers.offload import (
    KV_LEVELS,
    KvLevel,
    Offloading,
    best_levels,
    break_even_bytes_per_s,
    level_plan,
    shortest_restore_tokens,
)
from cordee.plan.serving.levers.reuse import block_reuse


class TestBreakEven:
    def test_measured_on_a_cpu(self) -> None:
        # 5 M parameters, 1,024 tokens, 6 KiB a token: 6 MB in 230 ms; 128 M parameters: 40 MB in 3,970 ms.
        assert break_even_bytes_per_s(6e6, 0.230) == pytest.approx(26e6, rel=0.01)
        assert break_even_bytes_per_s(40e6, 3.970) == pytest.approx(10e6, rel=0.01)

    def test_70b_with_grouped_queries(self) -> None:
        assert break_even_bytes_per_s(320 * 1024, 1 / 10_000) == pytest.approx(3.28e9, rel=0.01)

    def test_long_prompts_need_less_bandwidth(self) -> None:
        needed = [break_even_bytes_per_s(1e5 * n, 1e-4 * n + 1e-9 * n * n) for n in (1_000, 10_000, 100_000)]
        assert needed == sorted(needed, reverse=True)
        assert KV_LEVELS[0].restore_s(1e8) == pytest.approx(20e-6 + 1e8 / 25e9)

    def test_latency_sets_the_shortest_prefix(self) -> None:
        level = KvLevel("far", bytes_per_s=1e9, latency_s=0.01, usd_per_gb_hour=0.0)
        found = shortest_restore_tokens(lambda n: 1e4 * n, lambda n: 1e-4 * n, level, 100_000)
        # 0.01 + 1e-5 n < 1e-4 n from n = 111.1 on.
        assert found == 112
        assert shortest_restore_tokens(lambda n: 1e6 * n, lambda n: 1e-4 * n, level, 100_000) is None
        assert shortest_restore_tokens(lambda n: 1.0, lambda n: 1.0, level, 64) == 1


def lru_hits(requests: Sequence[Sequence[int]], capacity: int) -> int:
    """A cache that is looked up for a whole prompt first, and then filled from its last block to its first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for blocks in requests:
        hits += sum(block in cache for block in blocks)
        for block in reversed(blocks):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


class TestReuse:
    @given(st.lists(st.lists(st.integers(0, 12), unique=True, max_size=6), min_size=1, max_size=40), st.integers(0, 20))
    def test_distances_give_the_hits_of_an_lru_cache(self, prompts: list[list[int]], capacity: int) -> None:
        if not any(prompts):
            return
        reuse = block_reuse(list(enumerate(prompts)), 16)
        assert reuse.hits(capacity * 16) == lru_hits(prompts, capacity)

    def test_a_prefix_is_never_evicted_before_what_follows_it(self) -> None:
        reuse = block_reuse([(0, (1, 2, 3)), (1, (9,)), (2, (1, 2, 3))], 1)
        assert list(reuse.distances) == [1, 2, 3]
        assert reuse.hits(2) == 1

    def test_capacity_for_a_hit_fraction(self) -> None:
        reuse = block_reuse([(0, (1, 2, 3)), (1, (9,)), (5, (1, 2, 3))], 10)
        assert reuse.hit_fraction_max == pytest.approx(3 / 7)
        capacity = reuse.capacity_tokens(2 / 7)
        assert capacity == 30
        assert reuse.hit_fraction(capacity) == pytest.approx(2 / 7)
        assert reuse.capacity_tokens(0.9) is None
        assert reuse.capacity_tokens(0.0) == 0
        assert session_pauses_s(reuse) == (5.0, 5.0, 5.0)

    def test_no_blocks_are_refused(self) -> None:
        with pytest.raises(SpecError, match="no request has blocks"):
            block_reuse([(0, ())], 16)


class TestLevels:
    # 200 sessions of 10 blocks, each asked twice with all others in between.
    REUSE = block_reuse([(turn * 200 + s, range(s * 10, s * 10 + 10)) for turn in range(2) for s in range(200)], 100)
    REPLICA = Offloading(
        gpu_tokens=10_000, token_bytes=327_680, prefix_tokens=1_000, recompute_s=0.1, usd_per_replica_hour=16.0
    )

    def test_a_level_large_enough_finds_all(self) -> None:
        host = KV_LEVELS[0]
        plan = level_plan(self.REUSE, self.REPLICA, host, 200_000 * 327_680, 10_000)
        assert plan.hit_fraction == pytest.approx(0.5)
        # 200,000 tokens in 399 s, each saving 0.1 ms less 13.1 us.
        assert plan.saved_gpu_fraction == pytest.approx(200_000 / 399 * (1e-4 - 20e-9 - 327_680 / 25e9))
        assert plan.usd_per_hour == pytest.approx(65.5 * 0.0036, rel=0.01)
        assert plan.pays
        assert "65.5 GB of host memory pays: it has 50.0% of the tokens" in str(plan)

    def test_half_the_size_finds_nothing_here(self) -> None:
        plan = level_plan(self.REUSE, self.REPLICA, KV_LEVELS[0], 90_000 * 327_680, 10_000)
        assert plan.hit_fraction == 0
        assert not plan.pays

    def test_disk_is_taken_where_it_is_fast_enough_and_cheaper(self) -> None:
        host, disk = best_levels(self.REUSE, self.REPLICA)
        assert host.capacity_bytes == pytest.approx(190_000 * 327_680)
        assert disk.capacity_bytes == 0
        dear = KvLevel("host memory", 25e9, 20e-6, usd_per_gb_hour=1.0)
        host, disk = best_levels(self.REUSE, self.REPLICA, (dear, KV_LEVELS[1]))
        assert host.capacity_bytes == 0
        assert disk.pays

    def test_a_slow_disk_is_never_taken(self) -> None:
        slow = KvLevel("slow disk", 1e9, 1e-3, 0.0)
        assert best_levels(self.REUSE, self.REPLICA, (slow,))[0].saved_usd_per_hour == 0


class TestPause:
    def test_it_is_the_time_to_move_the_pool_whatever_the_session(self) -> None:
        for kv_bytes in (1e8, 1e9, 4e9):
            assert leave_after_s(50e9, kv_bytes, kv_bytes / 25e9) == pytest.approx(2.0)
        assert leave_after_s(50e9, 1e9, 0.5) == pytest.approx(25.0)  # by recomputation
        assert leave_after_s(50e9, 1e9, 0.5, worth_fraction=0.0) == math.inf

    @given(
        st.lists(st.floats(0, 1000) | st.just(math.inf), min_size=1, max_size=20),
        st.floats(0.001, 1),
        st.floats(0.001, 10),
    )
    def test_no_other_limit_costs_less(self, pauses: list[float], hold: float, back: float) -> None:
        plan = idle_plan(pauses, hold, back)

        def cost(limit: float) -> float:
            return sum(hold * p if p <= limit else hold * limit + back for p in pauses) / len(pauses)

        for limit in (0.0, *pauses, 0.5, 5.0, 50.0):
            assert plan.gpu_s <= cost(limit) * (1 + 1e-9) + 1e-12
        assert plan.gpu_s == pytest.approx(cost(plan.limit_s), rel=1e-9)
        assert plan.gpu_s <= min(plan.always_s, plan.never_s) * (1 + 1e-9)

    def test_no_pauses_are_refused(self) -> None:
        with pytest.raises(SpecError, match="no pauses"):
            idle_plan([], 0.1, 1.0)
