"""`cordee pipeline` as people and scripts call it."""

import json
import re
from pathlib import Path

import jsonschema
import pytest

from cordee.cli.main import main
from cordee.plan.pipeline import build, table_csv
from cordee.plan.pipeline.document import PipelineDocument, TableDocument

SCHEMAS = json.loads((Path(__file__).parent / "pipeline_schemas.json").read_text())


def test_the_schemas_are_those_of_the_documents() -> None:
    """After a change that is meant: write these two to pipeline_schemas.json."""
    found = {
        document.__name__: document.model_json_schema(mode="serialization")
        for document in (PipelineDocument, TableDocument)
    }
    assert json.loads(json.dumps(found)) == SCHEMAS


def _output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(["pipeline", *words])
    assert left.value.code == 0
    return capsys.readouterr().out


def _refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(["pipeline", *words])
    assert left.value.code not in (0, 1, 2)
    return capsys.readouterr().err


def test_the_table_says_which_to_use_and_when_overlap_pays(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # the picture takes the width there is
    said = _output(capsys)
    row = {line.split()[0]: line.split() for line in said.splitlines() if line.startswith("  ") and line.split()}
    assert row["1f1b"][1:6] == ["81", "21", "25.9%", "8", "20.9%"]
    assert row["zb-h1"][1:6] == ["67", "7", "10.4%", "8", "0.0%"]
    assert row["dualpipe"][1:6] == ["66", "6", "9.1%", "9", "4.8%"]
    flat = " ".join(said.split())
    assert "Use zb-v: 63.5 a step" in flat
    assert "DualPipeV beats ZB-V once an overlapped cell saves 7.8% of F and B" in flat
    assert re.search(r"rank 0 +0?1?234", said)


def test_json_holds_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--times", "f=1,b=1,w=1,fb=2.6", "--no-search"],
        ["--ranks", "3", "--microbatches", "4", "--times", "f=10ms,b=11ms,w=9ms", "--latency", "1ms"],
        ["--ranks", "4", "--microbatches", "8", "--memory", "60GB", "--activation", "8GB", "--weights", "20GB"],
        ["--ranks", "4", "--microbatches", "8", "--stages", "1,1,1,1.4", "--chunks", "3", "--schedule", "interleaved"],
    ):
        found = json.loads(_output(capsys, *words, "--json"))
        jsonschema.validate(found, SCHEMAS["PipelineDocument"])
    # 60 GB less 20 GB of weights are 5 activations of 8 GB; a second copy of the weights takes half of them.
    tight = json.loads(_output(capsys, "--ranks", "4", "--microbatches", "8", "--memory", "60GB", "--activation", "8GB",
                             "--weights", "20GB", "--json"))  # fmt: skip
    assert tight["memory_limit_activations"] == 5
    assert {row["schedule"]: row["fits"] for row in tight["schedules"]}["dualpipe"] is False
    assert all(max(each["run"]["peak_activations"]) <= 5 for each in tight["searched"])


def test_what_it_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("html", "svg", "trace", "csv")}
    flags = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    _output(
        capsys, "--ranks", "4", "--microbatches", "8", "--times", "f=1,b=1,w=1,fb=2.5", "--schedule", "dualpipe", *flags
    )
    page, svg = files["html"].read_text(), files["svg"].read_text()
    assert page.count('class="pipeline wide"') >= 8
    assert "<script" not in page
    table = build("dualpipe", 4, 8)
    assert svg.count("<title>") == sum(len(cell) for row in table.cells for cell in row)
    assert files["csv"].read_text() == table_csv(table)
    trace = json.loads(files["trace"].read_text())
    passes = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(passes) == svg.count("<title>")
    assert {event["pid"] for event in passes} == {0, 1, 2, 3}
    flows = [event for event in trace["traceEvents"] if event["ph"] in "sf"]
    assert len(flows) == 2 * (2 * 2 * 3 * 4), "two models, forward and backward, three hops, four micro-batches"
    ends = {event["id"]: event["ts"] for event in flows if event["ph"] == "f"}
    assert all(event["ts"] <= ends[event["id"]] for event in flows if event["ph"] == "s")


@pytest.mark.soak
@pytest.mark.gang
def test_a_rehearsal_lies_beside_its_prediction(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    words = ["--ranks", "2", "--microbatches", "4", "--times", "f=5ms,b=5ms,w=5ms", "--schedule", "dualpipe", "--run"]
    found = json.loads(_output(capsys, *words, "--json", "--html", str(page), "--trace", str(trace)))
    jsonschema.validate(found, SCHEMAS["PipelineDocument"])
    assert found["rehearsed"]["gradient_error"] <= 1e-14
    assert found["rehearsed"]["step_s_measured"] > 4 * 0.015
    assert page.read_text().count('class="pipeline wide"') >= 10
    names = {event["args"]["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "M"}
    assert {"rank 0, dualpipe, predicted", "rank 1, measured"} <= names


def test_a_table_of_ones_own_is_checked_and_timed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(table_csv(build("zb-v", 4, 8)))
    assert "valid: 25.5 a step, bubble 1.5, 4 activations" in _output(capsys, "--table", str(path))
    jsonschema.validate(json.loads(_output(capsys, "--table", str(path), "--json")), SCHEMAS["TableDocument"])
    _output(capsys, "--table", str(path), "--svg", str(tmp_path / "mine.svg"))
    assert "mine.csv" in (tmp_path / "mine.svg").read_text()
    assert "can be combined with --svg only" in _refused(capsys, "--table", str(path), "--run")
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    with pytest.raises(SystemExit) as left:
        main(["pipeline", "--table", str(path)])
    assert left.value.code == 15
    assert "violation: rank 0 waits for ever before 0B0" in capsys.readouterr().out
    path.write_text("0F0,0X0\n")
    assert "'0X0' is not a cell" in _refused(capsys, "--table", str(path))
    assert "cannot be read" in _refused(capsys, "--table", str(tmp_path / "absent.csv"))


@pytest.mark.parametrize(("words", "says"), [
    (["--times", "f=1,b=1"], "w is missing"),
    (["--times", "f=1,b=1,w=1,x=2"], "'x=2' is not a pass time"),
    (["--times", "f=1,b=1ms,w=1"], "some are plain numbers, some durations"),
    (["--times", "f=1,b=1,w=1", "--latency", "2ms"], "latency=2ms: some are plain numbers"),
    (["--times", "f=0,b=1,w=1"], "forward_s is 0"),
    (["--times", "f=nan,b=1,w=1"], "forward_s is nan"),
    (["--memory", "nan"], "holds nan activations"),
    (["--times", "f=1,b=1,w=1,fb=3.5"], "it must be from 2 to 3"),
    (["--ranks", "0"], "0 ranks"),
    (["--ranks", "300"], "300 ranks"),
    (["--microbatches", "-1"], "-1 micro-batches"),
    (["--stages", "1,x"], "'x' is not a number"),
    (["--stages", "1,-1"], "a slice of the model has size -1"),
    (["--memory", "60GB"], "the size of an activation is missing"),
    (["--memory", "8", "--activation", "2GB"], "counts activations, not bytes"),
    (["--memory", "10GB", "--activation", "2GB", "--weights", "12GB"], "leaves nothing of --memory 10GB"),
    (["--weights", "12GB"], "need --memory"),
    (["--memory", "0.4", "--no-search"], "no schedule fits"),
    (["--schedule", "zb-x"], "unknown schedule 'zb-x'"),
    (["--schedule", "dualpipe", "--ranks", "5"], "dualpipe needs an even number of ranks, not 5"),
    (["--schedule", "best", "--no-search"], "no schedule was searched"),
    (["--svg", "/nowhere/at/all.svg"], "cannot be written"),
    (["--run", "--ranks", "40", "--microbatches", "4", "--no-search"], "40 ranks cannot be rehearsed"),
])  # fmt: skip
def test_bad_input_is_refused_with_the_numbers(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    said = _refused(capsys, *(words if "--no-search" in words else [*words, "--no-search"]))
    assert says in said
