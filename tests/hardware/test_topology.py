"""A cluster as nodes in their domains, from a word, a table or a list."""

from collections import Counter

import pytest

from cordee.errors import InputError
from cordee.events import Capacity
from cordee.hardware.topology import parse_cluster


@pytest.mark.parametrize(
    ("word", "gpus", "domains"),
    [
        ("8x8", 64, {(): 8}),
        ("2x4x8xH100", 64, {("rack0",): 4, ("rack1",): 4}),
        ("2x2x1x8", 32, {(f"block{b}", f"rack{r}"): 1 for b in range(2) for r in range(2)}),
        ("2x1x4xL4 + 1x2x8xH100", 24, {("rack0",): 1, ("rack1",): 1, ("rack2",): 2}),
        ("1x1x1x8+1x1x1x8", 16, {("block0", "rack0"): 1, ("block1", "rack0"): 1}),
    ],
)
def test_a_word_describes_nodes_and_domains(word, gpus, domains) -> None:
    nodes = parse_cluster(word)
    assert sum(node.gpus for node in nodes) == gpus
    assert Counter(node.domain for node in nodes) == domains
    assert [node.name for node in nodes] == [f"node-{number:04}" for number in range(len(nodes))]


def test_a_table_of_nodes() -> None:
    text = "sn,cpu_milli,memory_mib,gpu,model\na,96000,1024,8,G2\nb,8000,512,0,\nc,64000,2048,2,P100\n"
    nodes = parse_cluster(text)
    assert [(node.name, node.gpu_name, node.gpus, node.cpu_milli) for node in nodes] == [
        ("a", "G2", 8, 96000), ("c", "P100", 2, 64000),
    ]  # fmt: skip
    assert nodes[0].memory_bytes == 1 << 30


LIST = """
nodes:
  - {name: big, count: 2, gpus: 8, gpu: H100, block: b1, rack: r1, cpus: 128, memory: 2TiB, price: $2.50,
     capacity: spot}
  - {name: nvl, count: 18, gpus: 4, gpu: GB200, rack: r2, island: i1, island_gpus: 72}
"""


def test_a_list_of_nodes() -> None:
    nodes = parse_cluster(LIST)
    assert [node.name for node in nodes[:3]] == ["big0", "big1", "nvl0"]
    big, nvl = nodes[0], nodes[-1]
    assert (big.domain, big.cpu_milli, big.memory_bytes) == (("b1", "r1"), 128_000, 2 << 40)
    assert (big.capacity, big.micro_usd_per_gpu_hour) == (Capacity.SPOT, 2_500_000)
    assert (nvl.domain, nvl.island_gpus, nvl.cpu_milli) == (("r2", "i1"), 72, None)


@pytest.mark.parametrize("text", ["", "8", "8xH100", "0x8", "8x", "axb", "1x1x1x1x1", "8x8+x"])
def test_a_word_that_is_no_cluster_is_refused(text) -> None:
    with pytest.raises(InputError, match="is not a cluster"):
        parse_cluster(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: [{name: a, gpus: 8}, {name: a, gpus: 8}]", "two nodes have the name 'a'"),
        ("nodes: [{name: a, gpus: 8, gpuz: H100}]", "here, node 1: gpuz"),
        ("nodes: [{name: a, gpus: 8, memory: 2GX}]", "here, node 1: '2GX' is not a size"),
        ("nodes: [{name: a, gpus: 8, island: i, island_gpus: 8}]", "an island that spans nodes"),
        ("nodes: [{name: a, gpus: 8, capacity: any}]", "on-demand or spot"),
        ("nodes: {}", "here has no list of nodes"),
        ("nodes: [{name: a, gpus: 0}]", "has no GPU"),
        ("nodes: [{name: a", "is not YAML"),
        ("sn,cpu_milli,memory_mib,gpu,model\na,1,2,many,G2", "here, line 2"),
        ("99999999x8", "more than"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(text, message) -> None:
    with pytest.raises(InputError, match=message):
        parse_cluster(text, source="here")
