"""Clusters, failures, spot series, synthetic workloads: draws come from their seed, and bad input is refused."""

from itertools import islice, pairwise
from pathlib import Path

import pytest

from cordee.errors import InputError
from cordee.events import Capacity
from cordee.simulate.cluster import OutageRate, cluster, merged, random_outages, spot_series, vc_clusters
from cordee.simulate.run import run
from cordee.simulate.synthetic import Synthetic
from cordee.simulate.traces import Tally
from cordee.simulate.workload import Costs, submissions

S = 1_000_000
DAY = 86_400 * S


def test_clusters() -> None:
    nodes = cluster("2x8xH100+1x4", micro_usd_per_gpu_hour=5)
    assert [(node.gpu_name, node.gpus) for node in nodes] == [("H100", 8), ("H100", 8), ("GPU", 4)]
    assert {node.micro_usd_per_gpu_hour for node in nodes} == {5}


@pytest.mark.parametrize("text", ["80", "x8", "0x8", "8x0", "80x8x", "-1x8", "nodes"])
def test_cluster_refuses_other_texts(text: str) -> None:
    with pytest.raises(InputError):
        cluster(text)


def test_a_table_of_nodes_and_one_of_virtual_clusters(tmp_path: Path) -> None:
    table = tmp_path / "nodes.csv"
    table.write_text("sn,cpu_milli,memory_mib,gpu,model\na,64000,262144,2,P100\nb,1,1,0,\n")
    (node,) = cluster(str(table))
    assert (node.name, node.gpus, node.gpu_name, node.cpu_milli, node.memory_bytes) == ("a", 2, "P100", 64000, 1 << 38)
    table.write_text("sn,gpu\na,2\n")
    with pytest.raises(InputError, match="line 2"):
        cluster(str(table))
    vcs = tmp_path / "vcs.csv"
    vcs.write_text("vc,node num\nx,3\ny,4\n")
    assert vc_clusters(vcs) == {"x": 3, "y": 4}
    vcs.write_text("vc,node num\nx,three\n")
    with pytest.raises(InputError, match="line 2"):
        vc_clusters(vcs)


def test_failures_come_as_often_as_they_were_asked_for_and_from_their_seed() -> None:
    nodes, rate = cluster("50x8"), OutageRate(per_node_day=0.5, back_us=3600 * S, notice_us=60 * S)
    first, again, other = (list(islice(random_outages(nodes, rate, seed), 2000)) for seed in (1, 1, 2))
    assert first == again != other
    assert all(before.begin_us <= after.begin_us for before, after in pairwise(first))
    days = first[-1].at_us / DAY
    assert 2000 / (50 * days) == pytest.approx(0.5, rel=0.1), "seed 1"
    ends: dict[str, int] = {}
    for outage in first:
        assert outage.begin_us >= ends.get(outage.nodes[0], 0), "no node goes before it is back"
        ends[outage.nodes[0]] = outage.at_us + outage.back_us


def test_a_spot_series(tmp_path: Path) -> None:
    path = tmp_path / "spot.csv"
    path.write_text("0,add,a\n0,add,b\n60000,remove,a\n120000,add,c\n180000,add,a\n240000,remove,b\n300000,add,d\n")
    nodes, series = spot_series(path, cluster("4x8"), notice_us=30 * S)
    assert [node.name for node in nodes if node.capacity is Capacity.SPOT] == ["node-0000", "node-0001", "node-0002"]
    outages = list(islice(series.outages(nodes), 6))
    listed = [(each.nodes[0], each.at_us // S, each.notice_us // S, (each.back_us or 0) // S) for each in outages]
    again = [("node-0002", 300, 30, 180), ("node-0000", 360, 30, 60)]
    once = [("node-0002", 0, 0, 180), ("node-0000", 60, 30, 60), ("node-0001", 240, 30, 60)]
    assert listed == [*once, *again, ("node-0001", 540, 30, 60)]
    assert next(series.outages(nodes[:1], 5 * S)).at_us == 65 * S
    assert list(series.outages(nodes[3:])) == []
    path.write_text("0,add,a\n1,gone,a\n")
    with pytest.raises(InputError, match="line 2"):
        spot_series(path, cluster("3x8"))


def test_a_name_that_finds_no_node_takes_the_next_one_that_is_free(tmp_path: Path) -> None:
    """Once only the first names had nodes, and the cluster was empty when all of them were gone."""
    path = tmp_path / "spot.csv"
    path.write_text("0,add,a\n0,add,b\n5000,add,c\n60000,remove,a\n90000,remove,c\n120000,remove,b\n")
    nodes, series = spot_series(path, cluster("2x8"))
    outages = list(islice(series.outages(nodes), 4))
    assert [(each.nodes[0], each.at_us // S, (each.back_us or 0) // S) for each in outages] == [
        ("node-0000", 60, 0),  # c was waiting
        ("node-0000", 90, 30),
        ("node-0001", 120, 0),  # the series begins again
        ("node-0000", 180, 0),
    ]


def test_a_synthetic_workload_has_the_requested_load() -> None:
    drawn = Synthetic(jobs=20_000, diurnal=0.6, tiers=(10, 60, 30)).at_load(640, 0.7, 3)
    jobs = list(drawn.draw(3))
    for seed in range(20):  # few jobs, of which the longest has most of the GPU time
        few = Synthetic(jobs=400).at_load(64, 1.2, seed)
        requested_us = sum(job.gpus * job.duration_us for job in few.draw(seed))
        assert requested_us / (64 * 400 / few.per_hour * 3600 * S) == pytest.approx(1.2), f"seed {seed}"
    assert jobs == list(drawn.draw(3)) and jobs[:9] != list(islice(drawn.draw(4), 9))
    asked = sum(job.gpus * job.duration_us for job in jobs)
    assert asked / (640 * jobs[-1].submit_us) == pytest.approx(0.7, rel=0.05), "seed 3"
    assert all(before.submit_us <= after.submit_us for before, after in pairwise(jobs))
    assert 0.55 < sum(job.tier == "standard" for job in jobs) / len(jobs) < 0.65
    noon = sum(21_600 <= job.submit_us // S % 86_400 < 64_800 for job in jobs)
    assert noon / len(jobs) > 0.6, "more by day than by night"


def test_jobs_that_the_cluster_can_never_hold_are_counted_and_the_window_is_kept() -> None:
    tally, nodes = Tally("x"), cluster("2x8")
    jobs = list(Synthetic(jobs=2000, per_hour=3600).draw(1))
    found = list(submissions(jobs, nodes, tally, costs=Costs(), limit=100, window_us=(10 * S, 1000 * S)))
    assert len(found) == 100 and found[0].at_us >= 10 * S
    assert tally.kinds.keys() == {"larger than the cluster's 16 GPUs"}
    assert len({each.job.job_id for each in found}) == 100


def test_failures_without_end_end_with_the_jobs() -> None:
    nodes, tally = cluster("4x8"), Tally("x")
    drawn = Synthetic(jobs=60, sizes=((1, 5), (8, 3), (16, 1))).at_load(32, 0.9, 5)
    given = submissions(drawn.draw(5), nodes, tally, costs=Costs())
    fails = random_outages(nodes, OutageRate(per_node_day=3, back_us=1800 * S), 5)
    taken = random_outages(nodes, OutageRate(per_node_day=3, back_us=600 * S, notice_us=60 * S, why="reclaimed"), 5)
    done = run(nodes, given, merged(fails, taken), defer_reports=True)
    assert done.errors == 0
    rows = done.ledger.rows(done.at_us)
    assert {row.cause for row in rows} >= {None, "infrastructure"}
    assert len({row.job_id for row in rows if row.outcome == "finished"}) == 60, "seed 5"
