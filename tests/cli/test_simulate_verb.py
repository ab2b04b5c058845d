"""`cordee simulate` and `cordee replay`: the same bytes each time, a schema that is held, a page that stands alone,
errors that help."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import TypeAdapter

from cordee.cli.main import main
from cordee.event_json import encode
from cordee.simulate.answer import PolicyComparison, Replay
from cordee.simulate.cluster import cluster
from cordee.simulate.frontier import Recommendation
from cordee.simulate.run import run
from cordee.simulate.services.answer import TogetherAnswer
from cordee.simulate.synthetic import Synthetic
from cordee.simulate.traces import Tally
from cordee.simulate.workload import Costs, submissions

SCHEMAS = Path(__file__).with_name("simulate_schemas.json")
ANSWERS: dict[str, Any] = {
    "simulate": PolicyComparison,
    "recommend": Recommendation,
    "services": TogetherAnswer,
    "replay": Replay,
}
TRACE = """job_id,user,vc,submit_s,gpus,duration_s,status
a,ann,v1,0,8,3600,
b,bob,v2,10,4,600,
c,bob,v2,20,16,1200,
d,eve,v1,30,64,60,
e,eve,v1,-5,1,60,
f,eve,v1,400,1,60,
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.csv"
    path.write_text(TRACE)
    return path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert not left.value.code
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        main(words)
    return int(left.value.code or 0), capsys.readouterr().err


def test_tables_and_what_was_left_out(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    told = said(capsys, "simulate", str(trace), "--cluster", "2x8", "--policy", "fifo,easy")
    assert "jobs.csv: 4 jobs on 2 nodes, 16 GPUs" in told
    assert "left out: 1 row, larger than the cluster's 16 GPUs (first: line 5)" in told
    assert "left out: 1 row, negative submission time (first: line 6)" in told
    assert "* knows the true run times" in told and "easy*" in told
    fifo = next(line for line in told.splitlines() if line.startswith("fifo"))
    assert fifo.split()[1] == "56m", "(3600 + 600 + 4780 + 4460) / 4: f does not pass c"


def test_jobs_that_have_not_ended_are_told_and_no_figure_is_a_zero(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    words = ("simulate", str(trace), "--cluster", "2x8", "--policy", "fifo", "--until")
    told = said(capsys, *words, "5m", "--html", str(page))
    assert next(line for line in told.splitlines() if line.startswith("fifo  ")).split()[1:4] == ["–", "–", "–"]
    assert "fifo: 3 of 3 jobs had not ended when the run did, 1 never started; times count until then" in told
    assert "no job ended" in page.read_text()
    summary = json.loads(said(capsys, *words, "5m", "--json"))["policies"][0]["summary"]
    assert summary["jct_s"] is summary["slowdown_jain"] is None and summary["unended"] == 3
    alike = said(capsys, "simulate", str(trace), "--cluster", "2x8", "--frontier", "--until", "5m")
    assert alike.count("had not ended when the run did") < 4, "one sentence for all policies with the same numbers"
    assert "no job ended, so there is no knee" in alike


def test_a_gang_that_is_larger_than_any_one_kind_of_gpu_is_left_out(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    """A server refuses it; in a trace it waited until the end."""
    told = said(capsys, "simulate", str(trace), "--cluster", "1x8xA+2x4xB", "--price-as", "none")
    assert "3 jobs on 3 nodes, 16 GPUs" in told and "left out: 2 rows, larger than the cluster's 8 GPUs of one" in told


def test_a_gpu_that_none_of_several_kinds_is_runs_on_any_and_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("job_id,submit_s,gpus,duration_s,gpu_spec\na,0,1,60,A\nb,0,1,60,C\nc,0,1,60,A|C\n")
    words = ("simulate", str(path), "--price-as", "none", "--policy", "fifo", "--cluster")
    changed = "changed: 1 row, asks for a GPU that the cluster does not have: runs on any (first: line 3)"
    assert changed in said(capsys, *words, "1x8xA+1x8xB") and "changed" not in said(capsys, *words, "1x8xA")


def test_json_follows_its_schema_and_the_schema_is_held(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    """Who reads our JSON relies on it: a change is made on purpose, with `REWRITE=1`, and told in the changelog."""
    now = {name: TypeAdapter(shape).json_schema(mode="serialization") for name, shape in ANSWERS.items()}
    if os.environ.get("REWRITE"):
        SCHEMAS.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
    assert now == json.loads(SCHEMAS.read_text())
    printed = json.loads(said(capsys, "simulate", str(trace), "--cluster", "2x8", "--json"))
    jsonschema.validate(printed, now["simulate"])
    assert [each["policy"] for each in printed["policies"]] == ["cordee", "fifo"]
    assert printed["policies"][1]["summary"]["wait_s"]["mean"] == 1995


def test_the_same_bytes_twice_and_under_two_hash_seeds(tmp_path: Path) -> None:
    words = (
        "synthetic --cluster 6x8 --jobs 120 --policy cordee,2d-las --seed 3 --load 1.3 --failures 0.3/1h --spot 0.05"
    )
    words += " --tiers 20,50,30"
    told = []
    for seed in ("1", "2"):
        page = tmp_path / f"{seed}.html"
        done = subprocess.run(
            [sys.executable, "-m", "cordee", "simulate", *words.split(), "--json", "--html", str(page)],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        )
        told.append((done.stdout, page.read_text()))
    assert told[0] == told[1]
    answer = json.loads(told[0][0])
    assert answer["policies"][0]["summary"]["preemptions"] > 0 and answer["policies"][0]["errors"] == 0


def test_a_page_that_loads_nothing(capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    said(capsys, "simulate", str(trace), "--cluster", "2x8", "--policy", "cordee,fifo", "--html", str(page))
    text = page.read_text()
    assert (
        text.count('class="gantt wide"') == text.count('class="gantt narrow"') == 2
        and text.count('class="chart wide"') == text.count('class="chart narrow"') == 4
    )
    assert "src=" not in text and "<script" not in text and "prefers-color-scheme:dark" in text
    assert "Side by side" in text and ">finished<" in text


def test_virtual_clusters_windows_tiers_and_queues(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    vcs, queues = tmp_path / "vcs.csv", tmp_path / "queues.yaml"
    vcs.write_text("vc,nodes\nv1,1\nv2,2\n")
    told = json.loads(said(capsys, "simulate", str(trace), "--cluster", "3x8", "--vc-clusters", str(vcs), "--json"))
    assert told["jobs"] == 4 and told["policies"][1]["summary"]["queues"][1]["name"] == "v2"
    cut = json.loads(said(capsys, "simulate", str(trace), "--cluster", "2x8", "--from", "15s", "--for", "2m", "--json"))
    assert cut["jobs"] == 1 and cut["policies"][0]["summary"]["jct_s"]["mean"] == 1200
    queues.write_text("queues:\n  v1: {quota: 8}\n  v2: {quota: 8}\n")
    with_queues = said(capsys, "simulate", str(trace), "--cluster", "2x8", "--queues", str(queues), "--tiers", "1,1,1")
    assert "cordee" in with_queues


def test_the_limit_is_of_all_virtual_clusters_together(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    vcs = tmp_path / "vcs.csv"
    vcs.write_text("v1,1\nv2,2\n")
    words = ("simulate", str(trace), "--cluster", "3x8", "--vc-clusters", str(vcs), "--policy", "fifo", "--json")
    (policy,) = json.loads(said(capsys, *words, "--jobs", "2"))["policies"]
    assert policy["summary"]["ended"] == 2
    vcs.write_text("v1,3\nv2,2\n")
    assert "have 5 nodes in all, and --cluster has 3" in refused(capsys, *words)[1]


def test_gpus_are_cut_for_jobs_on_mig_instances_and_whole_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "mig.csv"
    small = "".join(f"s{index},0,1,3600,1g.10gb\n" for index in range(7))
    trace.write_text(f"job_id,submit_s,gpus,duration_s,mig\n{small}whole,60,1,3600,\nodd,0,1,60,9g.10gb\n")
    words = ("simulate", str(trace), "--policy", "fifo", "--json", "--cluster")
    found = json.loads(said(capsys, *words, "1x1xH100"))
    (policy,) = found["policies"]
    assert policy["summary"]["ended"] == 8 and policy["summary"]["makespan_s"] == pytest.approx(7200, rel=0.02)
    (left_out,) = found["left_out"]
    assert left_out["kind"] == "asks for a MIG instance 9g.10gb, which no GPU of the cluster can be cut into"
    whole = json.loads(said(capsys, *words, "1x1"))
    assert whole["policies"][0]["summary"]["ended"] == 1, "nobody knows how a GPU without a name is cut"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("{trace} --cluster 2x8 --strict", 18, "line 6: negative submission time"),
        ("{trace} --cluster 2", 10, "is not a cluster"),
        ("{trace} --cluster 2x8 --policy best", 10, "unknown policy 'best'"),
        ("{trace} --cluster 2x8xA7000", 14, "unknown GPU 'A7000'"),
        ("{trace} --cluster 2x8 --failures often", 10, "is not a rate"),
        ("{trace} --cluster 2x8 --tiers 1,2", 10, "not three percentages"),
        ("{trace} --cluster 2x8 --from 2y", 11, "2y"),
        ("{trace} --cluster 2x8 --from 9d", 10, "no job for this cluster"),
        ("{trace}.gone --cluster 2x8", 18, "does not exist"),
        ("{trace} --cluster 2x8 --vc-clusters {trace}.gone", 18, "cannot be read"),
        ("{trace} --cluster 2x8 --queues {trace}.gone", 10, "cannot be read"),
        ("{trace} --cluster {trace}", 10, "jobs.csv does not hold nodes: it begins with 'job_id,user,vc"),
        ("{trace} --cluster 2x8 --load 2", 10, "--load needs the trace `synthetic`"),
        ("{trace} --cluster 2x8 --notice 10s", 10, "--notice needs --spot"),
        ("{trace} --cluster 2x8 --target 0.5", 10, "--target needs --requests and --service"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], trace: Path, words: str, code: int, says: str) -> None:
    left, told = refused(capsys, "simulate", *words.format(trace=trace).split())
    assert (left, says in told) == (code, True), told
    assert "hint: " in told or code == 11


def test_a_log_is_decided_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nodes = cluster("4x8")
    drawn = Synthetic(jobs=50, sizes=((1, 5), (4, 3), (8, 2))).at_load(32, 1.5, 2)
    log = run(nodes, submissions(drawn.draw(2), nodes, Tally("x"), costs=Costs()), defer_reports=True).log
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(encode(event)) + "\n" for event in log))
    told = said(capsys, "replay", str(path), "--policy", "cordee,fifo")
    assert "50 jobs;" in told and "are the same as in the log" in told and "the log" in told
    printed = json.loads(said(capsys, "replay", str(path), "--policy", "fifo", "--json"))
    jsonschema.validate(printed, json.loads(SCHEMAS.read_text())["replay"])
    assert printed["differences"] == [] and printed["moments"] > 50
    assert printed["replayed"][0]["later"] > 0
    assert refused(capsys, "replay", str(tmp_path / "none.jsonl"))[0] == 18
    (tmp_path / "x.csv").write_text("a,b\n")
    assert refused(capsys, "replay", str(tmp_path / "x.csv"))[0] == 10


def test_a_gpu_without_a_price_is_refused_unless_one_stands_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "3", "--cluster", "1x8xT4", "--policy", "fifo"])
    err = capsys.readouterr().err
    assert ended.value.code == 14 and "no on-demand price is known for T4" in err and "--price-as" in err
