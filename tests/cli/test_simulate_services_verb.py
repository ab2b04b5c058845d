"""`cordee simulate --requests`: tables that fit, JSON that follows its schema, a page that stands alone, errors."""

import json
from pathlib import Path

import jsonschema
import pytest

from cordee.cli.main import main
from cordee.simulate.services import fluid

SCHEMAS = Path(__file__).with_name("simulate_schemas.json")
SERVICE = """name: chat
gpus: 1
service:
  model: llama-3.1-8b
  replicas: 1..4
  slo: {ttft: 5s, tpot: 150ms}
  context: 8192
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with jobs, a service and an hour of requests; the plays are short."""
    monkeypatch.setattr(fluid, "POOLS", (1, 3))
    monkeypatch.setattr(fluid, "PLAYED", 200)
    monkeypatch.setattr(fluid, "PLAYED_MAX", 400)
    jobs = "".join(f"j{number},u,v,{60 * number},1,{1200 + 7 * number},\n" for number in range(80))
    (tmp_path / "jobs.csv").write_text("job_id,user,vc,submit_s,gpus,duration_s,status\n" + jobs)
    (tmp_path / "chat.yaml").write_text(SERVICE)
    rows = "".join(
        f"{number * 0.75},ChatGPT,{400 + 37 * number % 900},{50 + 11 * number % 200}\n" for number in range(4800)
    )
    (tmp_path / "requests.csv").write_text("Timestamp,Model,Request tokens,Response tokens\n" + rows)
    (tmp_path / "job.yaml").write_text("run: python train.py\ngpus: 1\n")
    (tmp_path / "part.yaml").write_text("gpus: 0.5\nservice: {model: qwen2.5-0.5b}\n")
    (tmp_path / "command.yaml").write_text("run: ./listen\ngpus: 1\nservice: {engine: command}\n")
    return tmp_path


def test_the_comparison_fits_80_columns_and_comes_as_json_and_as_a_page(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "simulate {0}/jobs.csv --cluster 1x8xA10 --requests {0}/requests.csv --service {0}/chat.yaml --warm-up 30m"
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        main([*words.format(folder).split(), "--html", str(folder / "page.html")])
    printed = capsys.readouterr().out
    assert not left.value.code
    assert max(map(len, printed.splitlines())) <= 80, printed
    for part in (
        "one cluster",
        "two clusters",
        "within the SLO",
        "useful GPU-hours",
        "█ serving",
        "One cluster trains",
    ):
        assert part in printed
    page = (folder / "page.html").read_text()
    assert "<script" not in page and page.count('class="chart wide"') == 2 and "GPUs held" in page
    with pytest.raises(SystemExit):
        main([*words.format(folder).split(), "--split", "2", "--json"])
    answer = json.loads(capsys.readouterr().out)
    jsonschema.validate(answer, json.loads(SCHEMAS.read_text())["services"])
    assert answer["two"]["serving_gpus"] == 2 and answer["one"]["serving"]["requests"] == 4800


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("--service {0}/chat.yaml", 10, "--service needs --requests"),
        ("--requests synthetic", 10, "--requests needs --service"),
        ("--requests {0}/gone.csv --service {0}/chat.yaml", 18, "gone.csv cannot be read"),
        ("--requests {0}/jobs.csv --service {0}/chat.yaml", 18, "which no trace of requests has"),
        ("--requests {0}/requests.csv --service {0}/gone.yaml", 10, "gone.yaml cannot be read"),
        ("--requests {0}/requests.csv --service {0}/job.yaml", 10, "is a job that does not serve"),
        ("--requests {0}/requests.csv --service {0}/command.yaml", 10, "whose speed is not known"),
        ("--requests {0}/requests.csv --service {0}/part.yaml", 10, "asks for 0.5 of a GPU"),
        ("--requests {0}/requests.csv --service {0}/chat.yaml --until 3h", 10, "--until does not go with --requests"),
        ("--requests {0}/requests.csv --service {0}/chat.yaml --from 9d", 10, "no job for this cluster"),
        ("--requests {0}/requests.csv --service {0}/chat.yaml --warm-up 1s", 10, "is shorter than --load-time"),
        ("--requests {0}/requests.csv --service {0}/chat.yaml --target 0", 10, "is no load to aim at"),
        ("--requests synthetic --rate often --service {0}/chat.yaml", 11, "often"),
    ],
)
def test_bad_input(folder: Path, capsys: pytest.CaptureFixture[str], words: str, code: int, says: str) -> None:
    given = f"simulate {folder}/jobs.csv --cluster 1x8xA10 {words.format(folder)}".split()
    with pytest.raises(SystemExit) as left:
        main(given)
    told = capsys.readouterr().err
    assert (left.value.code, says in told) == (code, True), told
    assert "hint: " in told
