"""A folder of traces that the benchmarks have not seen: folders inside it, other tables, too few jobs."""

import argparse
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_traces_are_found_in_folders_and_what_is_passed_over_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from trace_clusters import folder_of_traces, virtual_clusters

    head = "job_id,user,gpu_num,state,submit_time,duration,vc"
    for name in ("Earth", "Venus"):
        (tmp_path / name).mkdir()
        rows = [f"{each},ann,2,Pass,2020-06-09 18:{each // 60:02}:{each % 60:02},60,{name[0]}" for each in range(300)]
        (tmp_path / name / "cluster_log.csv").write_text(
            "\n".join((head, *rows, "x,bob,1,Pass,2020-06-09 19:00:00,9,z"))
        )
    (tmp_path / "nodes.csv").write_text("node,gpus\na,8\n")
    found = list(virtual_clusters(tmp_path, 200))
    assert [(each.name, len(each.jobs)) for each in found] == [
        ("Earth/cluster_log/E", 200),
        ("Venus/cluster_log/V", 200),
    ]
    errors = capsys.readouterr().err.splitlines()
    assert errors == [
        "passed over: Earth/cluster_log/z: 1 jobs, fewer than 300",
        "passed over: Venus/cluster_log/z: 1 jobs, fewer than 300",
        "passed over: nodes.csv: no format has the header 'node,gpus'",
    ]
    with pytest.raises(argparse.ArgumentTypeError, match="is no folder"):
        folder_of_traces(str(tmp_path / "none"))


def test_each_target_has_a_verdict_also_where_it_applies_to_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import scheduler

    own = {"policy": "cordee", "jobs": 300, "jct_s": 100, "slowdown_p99": 4, "away_s_max": 10, "lost_gpu_hours": 1}
    las = own | {"policy": "las", "jct_s": 90, "slowdown_p99": 9}
    lines = "\n".join(scheduler.verdicts({"x: 300 jobs, 2 nodes of 8, load 0.80": [own, las]}))
    assert "mean at most 1.05 of 2D-LAS: reached on 0 of 1\n    not on x 2 nodes of 8, load 0.80" in lines
    assert "p99 slowdown at most half of 2D-LAS's, or 1: reached on 1 of 1" in lines
    assert "mean not above EASY's: applies to no cluster here" in lines
    assert "of at least 2,000 jobs: applies to no cluster here" in lines
