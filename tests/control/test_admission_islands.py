"""Admission and placement: ranks that talk in every layer stay together, in islands of any sizes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import pytest
from admitting import H100, admitted, spec

from cordee.events import Job, Node
from cordee.hardware.load import load_catalogue
from cordee.plan.comms import gradient_s, tensor_layer_s
from cordee.plan.layout import Layout
from cordee.plan.training import Training
from cordee.schedule.placement.entry import Used, entry_of
from cordee.schedule.placement.free import FreeIndex
from cordee.schedule.placement.place import place, pools
from cordee.workload.load import load_shape


def islands(*sizes: int) -> list[Node]:
    """Nodes of so many GPUs, each one an island, the first of them in one rack and the last in another."""
    names = [f"n{number}" for number in range(len(sizes))]
    racks = [*["r1"] * (len(sizes) - 1), "r2"]
    return [
        replace(H100, name=name, gpus=gpus, domain=(rack,))
        for name, gpus, rack in zip(names, sizes, racks, strict=True)
    ]


@pytest.mark.parametrize(
    ("layout", "node", "unit"),
    [
        ("tp=8,pp=2", H100, 8),
        ("tp=2,pp=2", H100, 8),  # four groups: as many as the island holds
        ("tp=4,pp=2", replace(H100, island_gpus=4), 4),
        ("tp=4,pp=2", replace(H100, gpus=6), 4),
        ("tp=2,cp=2", replace(H100, gpus=6), 4),
        ("tp=8", replace(H100, gpus=16, island_gpus=4), None),  # no island holds it
        ("fsdp16", H100, None),
    ],
)
def test_the_ranks_of_a_layout_that_talk_in_every_layer_are_not_divided(
    tmp_path: Path, layout: str, node: Node, unit: int | None
) -> None:
    model = {"name": "llama-3-8b", "seq": 8192, "global_batch": 16, "layout": layout}
    nodes = [replace(node, name=f"n{number}") for number in range(4)]
    assert admitted(spec(tmp_path, gpus=16, model=model), *nodes).unit_gpus == unit
    assert admitted(spec(tmp_path, gpus=16, model=model, place={"unit": 2}), *nodes).unit_gpus == 2


@pytest.mark.parametrize(
    ("sizes", "up", "unit", "parts"),
    [
        ((8, 8, 6), 3, 2, [8, 8]),
        ((8, 8, 6), 2, 2, [8, 8]),  # the smallest is down
        ((8, 8, 4), 3, 4, [8, 8]),
    ],
)
def test_the_unit_of_a_layout_packs_into_every_island(
    tmp_path: Path, sizes: tuple[int, ...], up: int, unit: int, parts: list[int]
) -> None:
    model = {"name": "llama-3-8b", "seq": 8192, "global_batch": 16, "layout": "tp=2,dp=8"}
    hurt = [replace(H100, name=f"n{number}", unavailable=tuple(range(size, 8))) for number, size in enumerate(sizes)]
    for nodes in (hurt, islands(*sizes)):
        job = admitted(spec(tmp_path, gpus=16, model=model), *nodes)
        assert job.unit_gpus == unit
        assert placed(job, nodes[:up]) == parts


def test_the_unit_of_a_layout_is_that_of_the_kinds_that_could_hold_the_job(tmp_path: Path) -> None:
    model = {"name": "llama-3-8b", "seq": 8192, "global_batch": 16, "layout": "tp=2,dp=8"}
    small = replace(H100, name="n9", gpu_name="NVIDIA A10", gpus=6)
    nodes = [replace(H100, name="n0"), replace(H100, name="n1"), small]
    job = admitted(spec(tmp_path, gpus=16, model=model), *nodes)
    assert job.unit_gpus == 8 and placed(job, nodes) == [8, 8]
    more = [replace(small, name=f"n{number}") for number in (7, 8)]
    job = admitted(spec(tmp_path, gpus=16, model=model), *nodes, *more)  # either kind could hold it
    assert job.unit_gpus == 2 and placed(job, nodes) == [8, 8]
    assert placed(job, [small, *more]) == [6, 6, 4]


def placed(job: Job, nodes: Sequence[Node]) -> list[int] | None:
    """How many GPUs of each node the job gets where nothing is leased."""
    index = FreeIndex()
    for node in nodes:
        index.put(node.name, entry_of(node, Used()))
    leases = place(index, job, pools(job, index.kinds))
    return None if leases is None else sorted((len(lease.gpus) for lease in leases), reverse=True)


def traffic_s(islands_of_ranks: Sequence[str], layout: Layout) -> float:
    """Seconds of a step's tp and dp traffic if the ranks lie so: each kind is as slow as its most divided group."""
    gpu, shape = load_catalogue().find_gpu("H100"), load_shape("llama-3-8b")
    training = Training(seq_tokens=8192, global_batch=12)

    def near(groups: Sequence[Sequence[int]]) -> int:
        """The fewest members of a group that an island holds of it."""
        return min(min(Counter(islands_of_ranks[rank] for rank in group).values()) for group in groups)

    ranks, tp = range(layout.gpus), layout.tp
    inside = near([ranks[first : first + tp] for first in ranks[::tp]])
    among = near([ranks[first::tp] for first in range(tp)]) * tp
    tensor_s, data_s = (replace(gpu, island_gpus=size, gpus_per_node=size) for size in (inside, among))
    layers_s = 4 * shape.layers * tensor_layer_s(shape, tensor_s, layout, training)
    return float(layers_s + gradient_s(data_s, layout, 2 * shape.parameters / tp))


@pytest.mark.parametrize(("sizes", "gpus"), [((6, 6, 4), 12), ((4, 6, 8), 12), ((8, 4, 4), 8), ((6, 8, 2), 8)])
def test_of_all_places_in_unequal_islands_a_layout_gets_one_of_least_communication(
    tmp_path: Path, sizes: tuple[int, ...], gpus: int
) -> None:
    nodes = islands(*sizes)
    model = {"name": "llama-3-8b", "seq": 8192, "global_batch": 12, "layout": f"tp=4,dp={gpus // 4}"}
    job = admitted(spec(tmp_path, gpus=gpus, model=model), *nodes)
    index = FreeIndex()
    for node in nodes:
        index.put(node.name, entry_of(node, Used()))
    leases = place(index, job, pools(job, index.kinds))
    assert leases is not None
    layout = Layout(tp=4, dp=gpus // 4)
    chosen_s = traffic_s([lease.node for lease in leases for _ in lease.gpus], layout)
    every_s = [
        traffic_s([name for name, count in zip(order, counts, strict=True) for _ in range(count)], layout)
        for order in permutations([node.name for node in nodes])
        for counts in product(*(range(sizes[int(name[1:])] + 1) for name in order))
        if sum(counts) == gpus
    ]
    assert chosen_s == min(every_s) < max(every_s)
