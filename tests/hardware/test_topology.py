"""A cluster as a tree, and what collectives cost on it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.errors import InputError
from cordee.hardware.load import load_catalogue
from cordee.hardware.topology import Domain, NodePlace, cluster_of, parse_cluster

H100 = load_catalogue().find_gpu("H100")
GB200 = load_catalogue().find_gpu("GB200")
L40S = load_catalogue().find_gpu("L40S")


def test_blocks_racks_nodes_and_gpus() -> None:
    tree = parse_cluster("2x2x4x8xH100")
    assert tree.gpus == 128
    assert [len(tree.of_kind(kind)) for kind in ("block", "rack", "node")] == [2, 4, 16]
    assert [node.name for node in tree.of_kind("node")] == [f"node{i}" for i in range(16)]
    assert tree.gpu_names()[:2] == ("node0/0", "node0/1")
    assert len(set(tree.gpu_names())) == 128


def test_an_island_may_be_a_part_of_a_node_or_span_nodes() -> None:
    halves = parse_cluster("2x8", gpus_per_island=4)
    assert [island.gpus for island in halves.of_kind("island")] == [4, 4, 4, 4]
    assert halves.gpu_names()[8] == "node1/0"
    nvl = cluster_of(NodePlace(f"n{i}", 4, island=f"nvl{i // 18}") for i in range(36))
    assert [island.gpus for island in nvl.of_kind("island")] == [72, 72]
    assert len(nvl.of_kind("node")) == 36


def test_the_smallest_domain_that_holds_a_gang() -> None:
    tree = parse_cluster("2x2x4x8")

    def name_for(gpus: int) -> str | None:
        domain = tree.smallest_holding(gpus)
        return domain and domain.name

    assert [name_for(n) for n in (1, 8, 9, 33, 65, 129)] == [
        "node0", "node0", "block0/rack0", "block0", "cluster", None,
    ]  # fmt: skip


def test_the_order_of_nodes_does_not_matter() -> None:
    places = [NodePlace(f"n{i}", 8, rack=f"r{i % 2}") for i in range(12)]
    assert cluster_of(places) == cluster_of(reversed(places))
    in_first_rack = cluster_of(places).of_kind("rack")[0].children
    assert [node.name for node in in_first_rack] == ["n0", "n2", "n4", "n6", "n8", "n10"]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 8)), min_size=1, max_size=20))
def test_every_domain_has_the_gpus_of_its_children(rows: list[tuple[int, int, int]]) -> None:
    tree = cluster_of(NodePlace(f"n{i}", gpus, f"b{b}", f"r{r}") for i, (b, r, gpus) in enumerate(rows))
    assert tree.gpus == sum(gpus for _, _, gpus in rows) == len(tree.gpu_names())
    for domain in tree.walk():
        if domain.children:
            assert domain.gpus == sum(child.gpus for child in domain.children)


@pytest.mark.parametrize("text", ["", "8", "8xH100", "0x8", "8x", "axb", "1x1x1x1x1"])
def test_a_cluster_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not a cluster"):
        parse_cluster(text)


def test_two_nodes_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match="two nodes have the name 'a'"):
        cluster_of([NodePlace("a", 8), NodePlace("a", 8, rack="r1")])


def test_a_leaf_is_a_plain_value() -> None:
    assert parse_cluster("1x8").of_kind("node") == (Domain("node", "node0", 8),)
