"""`cordee profile` as people and scripts call it; and what writes profiles is read again."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from cordee.account import attempt_segments
from cordee.cli.main import main
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    Lease,
    NoticeGiven,
    NoticeReason,
    Outcome,
    RanksEnded,
    Reported,
    SpanClass,
)
from cordee.ids import JobId
from cordee.telemetry.profile.document import ProfileDocument
from cordee.view.chrome import chrome_trace_text
from cordee.view.chrome_log import log_slices
from kineto import ADD, GEMM, REDUCE, Kineto, expert_step
from world import S, job, node

SCHEMA = json.loads((Path(__file__).parent / "profile_schema.json").read_text())


def test_the_schema_is_that_of_the_document() -> None:
    """After a change that is meant: write this schema to profile_schema.json."""
    assert ProfileDocument.model_json_schema(mode="serialization") == SCHEMA


def _run(*words: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code in (0, None)


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    _run(*words, "--json")
    told: dict[str, object] = json.loads(capsys.readouterr().out)
    jsonschema.validate(told, SCHEMA)
    return told


def _rank(number: int, compute: int) -> Kineto:
    made = Kineto(rank=number)
    for step in range(2):
        made.step(step, 1000 * step - 40, 990).kernel(GEMM, 1000 * step, compute, ahead=20)
        made.kernel(REDUCE, 1000 * step + compute, 900 - compute, stream=20, **{"Collective name": "allreduce"})
    return made


@pytest.fixture
def ranks(tmp_path: Path) -> list[str]:
    return [str(_rank(at, 300 + 200 * at).write(tmp_path / f"r{at}.json")) for at in range(2)]


def test_json_of_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = _json(capsys, "profile", str(expert_step().write(tmp_path / "t.json")))
    (rank,) = told["ranks"]  # type: ignore[misc]
    assert (rank["time"]["exposed_us"], rank["time"]["hidden_fraction"]) == (30, 0.925)
    assert (told["skew"], told["base"], told["plan"]) == (None, None, None)


def test_json_of_ranks_with_a_base_and_a_plan(ranks: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["--plan", "llama-3-8b", "--gpus", "8xH100", "--layout", "tp=2", "--batch", "8"]
    told = _json(capsys, "profile", *ranks, "--base", ranks[0], *plan)
    assert [rank["caused_us"] for rank in told["skew"]["ranks"]] == [0, 400]  # type: ignore[index]
    assert told["plan"]["steps"] == 2  # type: ignore[index]
    step = told["plan"]["times"][0]  # type: ignore[index]
    assert (step["name"], step["after_us"]) == ("step", 950)
    mfu = told["ranks"][0]["efficiency"]["mfu"]  # type: ignore[index]
    assert mfu * 950 == pytest.approx(told["plan"]["mfu"] * step["before_us"]), "the same FLOPs, another time"  # type: ignore[index]


def test_a_job_is_compared_with_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the order that an agent keeps; the profile lies in the job's folder."""
    attempt = tmp_path / "attempts" / "train-1" / "1" / "n0"
    attempt.mkdir(parents=True)
    spec = {"run": "true", "gpus": 8, "gpu": "H100", "model": {"name": "llama-3-8b", "global_batch": 8}}
    leases = [{"node": "n0", "gpus": list(range(8))}]
    order = {"spec": spec, "estimate": {"layout": "tp2 pp2 dp2 zero1"}, "leases": leases}
    (attempt / "order.json").write_text(json.dumps(order))
    for number in range(2):
        _rank(number, 300).write(attempt / f"rank{number}.json")
    found = _json(capsys, "profile", "--job", "train-1", "--home", str(tmp_path))
    assert (found["plan"]["job"], found["plan"]["layout"]) == ("train-1", "tp2 pp2 dp2 zero1")  # type: ignore[index]
    rows = {row["name"]: row for row in found["plan"]["times"]}  # type: ignore[index]
    assert rows["bubble and stage transfers"]["before_us"] > 0
    assert rows["exposed communication"]["after_us"] > 0
    assert len(found["ranks"]) == 2  # type: ignore[arg-type]
    _run("profile", str(attempt / "rank0.json"), "--job", "train-1", "--home", str(tmp_path))
    assert "job train-1: llama-3-8b, 8 x H100, tp2 pp2 dp2 zero1" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main(["profile", "--job", "other", "--home", str(tmp_path)])
    assert left.value.code == 10 and "no attempt of job other" in capsys.readouterr().err


def test_text_says_where_the_time_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(expert_step().write(tmp_path / "t.json"))
    _run("profile", path, "--flop-per-step", "1e11")
    out = capsys.readouterr().out
    assert "92.50% of the communication is hidden behind compute, 30 us is exposed (3.31% of the time)" in " ".join(
        out.split()
    )
    assert re.search(r"DeepEP notify +1 +100 us +\S+ +10 us", out)
    assert "Utilisation as nvidia-smi shows it: 100.0%" in out
    # 1e11 FLOP in 905 us on an H100 of 989.4 TFLOP/s.
    assert f"MFU: {1e11 / (905e-6 * 989.4e12):.1%}" in out and "More than 100%" not in out


@pytest.mark.parametrize("width", [80, 120])
def test_lines_fit_the_terminal(
    ranks: list[str], width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    _run("profile", *ranks, "--base", ranks[1], "--flop-per-step", "1e12")
    assert max(map(len, capsys.readouterr().out.splitlines())) <= width


def test_the_page_holds_every_stream_and_stands_alone(ranks: list[str], tmp_path: Path) -> None:
    page = tmp_path / "t.html"
    _run("profile", *ranks, "--html", str(page))
    text = page.read_text()
    assert "stream 20" in text
    assert "rank 1 on NVIDIA H100" in text, "the rank that was waited for is told in full"
    assert not re.search(r"<script|https?://(?!www\.w3\.org)", text)
    small = len(text)
    big = Kineto()
    for at in range(5000):
        big.kernel(ADD, at * 10, 1 + at % 9)
    _run("profile", str(big.write(tmp_path / "big.json", None)), "--html", str(page))
    assert len(page.read_text()) < 2 * small, "a picture does not grow with the kernels"


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["none.json"], 19, "No such file"),
        (["{t}", "--rank", "7"], 12, "no such rank"),
        (["{t}", "--layout", "tp=2"], 12, "add --plan MODEL"),
        (["{t}", "--plan", "llama-3-8b"], 12, "on which GPUs"),
        (["{t}", "--plan", "llama-3-8b", "--gpus", "8"], 12, "names no GPU"),
        (["{t}", "--plan", "llama-3-70b", "--gpus", "1xH100"], 21, "no layout"),
        (["{t}", "--kernels", "none.toml"], 14, "does not exist"),
        (["{t}", "--gpu", "H9000"], 14, "unknown GPU"),
        (["{empty}"], 12, "no kernel, operator or slice in empty.json"),
    ],
)
def test_what_cannot_be_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, why: str
) -> None:
    paths = {"t": expert_step().write(tmp_path / "t.json"), "empty": Kineto().write(tmp_path / "empty.json")}
    with pytest.raises(SystemExit) as left:
        main(["profile", *(word.format(**paths) for word in words)])
    said = capsys.readouterr().err
    assert left.value.code == code
    assert why in said
    assert "hint:" in said


def test_work_that_no_gpu_can_do_is_doubted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = str(expert_step().write(tmp_path / "t.json"))
    _run("profile", profile, "--flop-per-step", "1e18")
    assert "More than 100%" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit) as left:
        main(["profile", profile, "--flop-per-step", "-1"])
    assert left.value.code == 2


def test_faults_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = expert_step().text()
    (tmp_path / "cut.json").write_text(text[: len(text) // 2])
    _run("profile", str(tmp_path / "cut.json"))
    assert "cut.json: 1 truncated" in capsys.readouterr().out


def test_what_pipelines_and_simulations_write_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe, sim = str(tmp_path / "pipe.json"), str(tmp_path / "sim.json")
    _run("pipeline", "--ranks", "4", "--microbatches", "8", "--schedule", "1f1b", "--no-search", "--chrome-trace", pipe)
    _run("simulate", "synthetic", "--cluster", "2x8", "--jobs", "20", "--policy", "fifo", "--chrome-trace", sim)
    capsys.readouterr()
    ranks = _json(capsys, "profile", pipe)["ranks"]
    # 1F1B: a bubble of (ranks - 1) of 8 + 3 turns.
    assert [rank["time"]["idle_fraction"] for rank in ranks] == [pytest.approx(3 / 11)] * 4  # type: ignore[attr-defined]
    assert {row["name"] for rank in ranks for row in rank["classes"]} == {"forward pass", "backward pass"}  # type: ignore[attr-defined]
    nodes = _json(capsys, "profile", sim)["ranks"]
    assert [rank["label"] for rank in nodes] == ["fifo: node-0000", "fifo: node-0001"]  # type: ignore[attr-defined]
    assert {row["name"] for rank in nodes for row in rank["classes"]} == {"held"}  # type: ignore[attr-defined]


def test_a_log_is_a_trace_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = JobId("one"), JobId("two")
    leases = (Lease(node="n1", gpus=(0, 1, 2, 3)),)
    events = [
        node("n1", gpus=4), job("one", gpus=4), job("two", gpus=4),
        AttemptPlaced(at_us=0, job_id=one, epoch=1, leases=leases),
        Reported(at_us=60 * S, job_id=one, epoch=1, from_us=10 * S, span=SpanClass.USEFUL, first_step=0,
                 steps=5),
        NoticeGiven(at_us=60 * S, job_id=one, epoch=1, reason=NoticeReason.PREEMPT, deadline_us=70 * S,
                    for_job=two),
        RanksEnded(at_us=70 * S, job_id=one, epoch=1, node="n1", outcome=Outcome.FINISHED),
        AttemptEnded(at_us=70 * S, job_id=one, epoch=1, outcome=Outcome.FINISHED, why=""),
        AttemptPlaced(at_us=70 * S, job_id=two, epoch=1, leases=leases),
        Reported(at_us=90 * S, job_id=two, epoch=1, from_us=70 * S, span=SpanClass.USEFUL, first_step=0,
                 steps=2),
        RanksEnded(at_us=90 * S, job_id=two, epoch=1, node="n1", outcome=Outcome.FINISHED),
        AttemptEnded(at_us=90 * S, job_id=two, epoch=1, outcome=Outcome.FINISHED, why=""),
    ]  # fmt: skip
    slices, flows = log_slices(events, attempt_segments(events))
    assert [(each.kind, each.start_us, each.length_us) for each in slices] == [
        ("restart", 0, 10 * S), ("useful", 10 * S, 50 * S), ("restart", 60 * S, 10 * S), ("useful", 70 * S, 20 * S),
    ]  # fmt: skip
    assert [(flow.source.start_us, flow.target.start_us) for flow in flows] == [(60 * S, 70 * S)]
    path = tmp_path / "log.json"
    path.write_text(chrome_trace_text(slices, flows))
    first, second = _json(capsys, "profile", str(path))["ranks"]  # type: ignore[misc]
    assert (first["time"]["compute_us"], first["time"]["waiting_us"], second["time"]["idle_us"]) == (
        50 * S,
        20 * S,
        70 * S,
    )


def test_two_files_of_one_rank_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(_rank(0, 300 + at).write(tmp_path / f"run{at}.json")) for at in range(2)]
    told = _json(capsys, "profile", *paths)
    labels = [rank["label"] for rank in told["ranks"]]  # type: ignore[attr-defined]
    assert labels == ["rank 0 of run0.json", "rank 0 of run1.json"]


def test_without_msgspec_it_says_what_to_install(tmp_path: Path) -> None:
    path = expert_step().write(tmp_path / "t.json")
    code = (
        f"import sys; sys.modules['msgspec'] = None; from cordee.cli.main import main; main(['profile', {str(path)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, "cordee[profile]" in done.stderr) == (70, True), done.stderr
