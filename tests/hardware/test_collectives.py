"""What collectives cost, against numbers worked out by hand."""

import numpy as np
import pytest

from cordee.hardware.collectives import (
    Group,
    Link,
    all_gather_s,
    all_reduce_s,
    group_of,
    island_link,
    network_link,
    ring_all_reduce_s,
    send_s,
    switch_all_reduce_s,
    tree_all_reduce_s,
)
from cordee.hardware.load import load_catalogue

CATALOGUE = load_catalogue()
A100, H100, GB200, L40S = (CATALOGUE.find_gpu(name) for name in ("A100", "H100", "GB200", "L40S"))
FREE = Link(0.0, 1e9)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 64])
def test_a_ring_moves_twice_n_minus_1_over_n(ranks: int) -> None:
    assert ring_all_reduce_s(1e9, ranks, FREE) == pytest.approx(2 * (ranks - 1) / ranks)


def test_one_message_and_one_gather_by_hand() -> None:
    link = Link(alpha_s=1e-6, bytes_per_s=100e9)
    assert all_gather_s(8e9, 4, link) == pytest.approx(3e-6 + 0.75 * 0.08)
    assert ring_all_reduce_s(8e9, 4, link) == pytest.approx(2 * (3e-6 + 0.06))
    assert send_s(1e9, link) == pytest.approx(1e-6 + 0.01)


def test_a_tree_wins_where_latency_counts_and_a_ring_where_bytes_do() -> None:
    link = Link(alpha_s=1e-5, bytes_per_s=100e9)
    assert tree_all_reduce_s(1e3, 64, link) < ring_all_reduce_s(1e3, 64, link)
    assert tree_all_reduce_s(1e10, 64, link) > ring_all_reduce_s(1e10, 64, link)
    small = np.array([1e3, 1e10])
    assert all_reduce_s(small, 64, link).tolist() == [
        tree_all_reduce_s(1e3, 64, link),
        ring_all_reduce_s(1e10, 64, link),
    ]


def test_a_switch_that_adds_up_halves_what_large_groups_send() -> None:
    assert float(switch_all_reduce_s(1e9, 8, FREE)) == pytest.approx(1 + 1 / 8)
    assert float(all_reduce_s(1e9, 8, Link(0.0, 1e9, reduces=True))) == pytest.approx(9 / 8)
    assert float(all_reduce_s(1e9, 1, Link(1.0, 1e9, reduces=True))) == 0.0


def test_a_group_knows_which_of_its_members_are_in_one_island() -> None:
    assert (group_of(H100, 8, 1).inside, group_of(H100, 8, 1).outside) == (8, 1)
    assert (group_of(H100, 64, 4).inside, group_of(H100, 64, 4).outside) == (2, 32)
    assert group_of(GB200, 64, 1).outside == 1
    assert group_of(L40S, 8, 1).outside == 1
    assert group_of(L40S, 16, 1).outside == 2


def test_two_levels_share_the_network_among_the_members_of_an_island() -> None:
    near, far = Link(0.0, 100e9), Link(0.0, 10e9)
    whole = Group(16, 1, 8, near, far)
    # A ring over all ranks sends 15/16 of the bytes out of an island, an eighth on each rail; an all-reduce half
    # of them, twice. The island carries 7/8 * 16e9/100e9, and twice that.
    assert float(whole.gather_s(16e9)) == pytest.approx(max(0.1875, 0.14))
    assert float(whole.reduce_s(16e9)) == pytest.approx(max(0.2, 0.28))
    # With tensor parallelism over a whole island each rank is alone in it, and sends all by its own port.
    alone = Group(2, 8, 8, near, far)
    assert float(alone.gather_s(16e9)) == pytest.approx(0.8)


def test_each_message_has_its_latency_and_many_islands_slow_each_other() -> None:
    near, far = Link(1e-6, 100e9), Link(1e-5, 10e9, decay=0.5)
    few, many = Group(16, 1, 8, near, far), Group(128, 1, 8, near, far)
    assert float(few.gather_s(16e9, 100) - few.gather_s(16e9)) == pytest.approx(99 * (7e-6 + 1e-5))
    assert float(few.reduce_s(16e9, 100) - few.reduce_s(16e9)) == pytest.approx(99 * (14e-6 + 2e-5))
    # Sixteen islands are eight times two: the rate is divided by the root of eight.
    assert float(few.network_bytes_per_s / many.network_bytes_per_s) == pytest.approx(8**0.5)
    # Nothing of it where the network has no part.
    assert float(Group(8, 1, 8, near, far).gather_s(16e9)) == pytest.approx(7e-6 + 0.14)


def test_tokens_for_other_islands_leave_by_the_network() -> None:
    near, far = Link(0.0, 100e9), Link(0.0, 10e9)
    assert float(Group(8, 1, 8, near, far).exchange_s(8e9)) == pytest.approx(7 / 8 * 0.08)
    assert float(Group(16, 1, 8, near, far).exchange_s(8e9)) == pytest.approx(1 / 2 * 0.8)
    assert float(Group(1, 1, 8, near, far).exchange_s(8e9)) == 0.0


def test_many_groups_at_once_cost_what_each_costs() -> None:
    ranks, stride = np.array([1, 2, 8, 64]), np.array([1, 8, 1, 2])
    together = group_of(A100, ranks, stride).reduce_s(1e9)
    alone = [float(group_of(A100, int(n), int(s)).reduce_s(1e9)) for n, s in zip(ranks, stride, strict=True)]
    assert together.tolist() == pytest.approx(alone)


def test_links_are_fractions_of_the_nameplate() -> None:
    assert island_link(A100).bytes_per_s < A100.link_bytes_per_s
    assert network_link(A100).bytes_per_s < A100.network_bytes_per_s
    assert not island_link(A100).reduces
    assert island_link(H100).reduces
