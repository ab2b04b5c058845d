"""`cordee experts` as people and scripts call it."""

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from cordee.cli.main import main
from cordee.plan.experts.document import ExpertsDocument, WindowsDocument

FLEET = ["--gpus", "8", "--nodes", "2", "--replicas", "40", "--groups", "4"]
SCHEMAS = json.loads((Path(__file__).parent / "experts_schemas.json").read_text())


def test_the_schemas_are_those_of_the_documents() -> None:
    """After a change that is meant: write these two to experts_schemas.json."""
    found = {
        document.__name__: document.model_json_schema(mode="serialization")
        for document in (ExpertsDocument, WindowsDocument)
    }
    assert found == SCHEMAS


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    """Six layers of 32 experts."""
    rows = np.floor(400 * np.random.default_rng(2).lognormal(0, 0.8, (6, 32))) + 1
    path = tmp_path / "loads.csv"
    np.savetxt(path, rows, "%d", ",")
    return path


def _run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = 0
    try:
        main(["experts", *map(str, words)])
    except SystemExit as left:
        code = int(left.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_json_keeps_its_schema_and_is_what_from_takes(
    capsys: pytest.CaptureFixture[str], loads: Path, tmp_path: Path
) -> None:
    code, out, err = _run(capsys, loads, *FLEET, "--json")
    told = json.loads(out)
    jsonschema.validate(told, SCHEMAS["ExpertsDocument"])
    assert code == 0 and not err and told["rebalance"] is None
    assert told["before"]["mean"] < told["after"]["mean"] <= told["bound"]["mean"]
    plan = tmp_path / "plan.json"
    plan.write_text(out)
    code, out, _ = _run(capsys, loads, *FLEET, "--from", plan, "--json")
    again = json.loads(out)
    jsonschema.validate(again, SCHEMAS["ExpertsDocument"])
    assert code == 0 and not again["rebalance"]["pays"]
    assert again["placement"] == told["placement"]


def test_other_loads_move_few_slots(capsys: pytest.CaptureFixture[str], loads: Path, tmp_path: Path) -> None:
    plan, other = tmp_path / "plan.json", tmp_path / "other.csv"
    _run(capsys, loads, *FLEET, "--out", plan, "--layout", "vllm")
    rows = np.loadtxt(loads, delimiter=",")
    np.savetxt(other, rows[:, ::-1], "%d", ",")
    _, out, _ = _run(capsys, other, *FLEET, "--from", plan, "--moves", "10%", "--json")
    told = json.loads(out)
    assert told["rebalance"]["pays"] and 0 < told["rebalance"]["moved_fraction"] <= 0.1
    assert told["before"]["mean"] < told["after"]["mean"]
    before = json.loads(plan.read_text())["physical_to_logical_map"]
    moved = int((np.array(before) != np.array(told["placement"]["phy2log"])).sum())
    assert moved == told["rebalance"]["moved_slots"]
    code, out, _ = _run(capsys, other, *FLEET, "--from", plan, "--link", "1Kbps", "--expert-bytes", "1TB")
    assert code == 0 and "Do not rebalance" in out


def test_several_windows_show_the_controller(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, loads: Path, tmp_path: Path
) -> None:
    other, maps = tmp_path / "other.csv", tmp_path / "maps.json"
    np.savetxt(other, np.loadtxt(loads, delimiter=",")[:, ::-1], "%d", ",")
    windows = [loads, loads, *[other] * 7]
    _, out, _ = _run(capsys, *windows, *FLEET, "--json", "--out", maps)
    told = json.loads(out)
    jsonschema.validate(told, SCHEMAS["WindowsDocument"])
    actions = [one["action"] for one in told["windows"]]
    assert actions[:5] == ["hold", "hold", "watch", "move", "move"]  # so far a jump that one window cannot follow
    assert actions[-1] in ("rest", "hold")
    assert told["windows"][-1]["balance"] > told["windows"][4]["balance"] > told["windows"][3]["balance"]
    assert json.loads(maps.read_text()) == told["placement"]
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = _run(capsys, *windows, *FLEET)
    assert code == 0 and "9 windows" in out and "watches whether it lasts" in out and "rests" in out
    assert max(map(len, out.splitlines())) <= 80
    small = tmp_path / "small.csv"
    small.write_text("1,2,3,4\n")
    code, out, err = _run(capsys, loads, small, *FLEET)
    assert code == 10 and not out and "small.csv has 1 layers x 4 experts" in err and "hint: " in err
    code, _, err = _run(capsys, loads, other, *FLEET, "--html", tmp_path / "page.html")
    assert code == 10 and "need a single window" in err


@pytest.mark.parametrize("columns", [80, 120])
def test_people_see_balance_bound_and_a_drawing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, loads: Path, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, out, _ = _run(capsys, loads, *FLEET)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert code == 0 and "32 experts in 6 layers on 8 GPUs of 2 nodes" in plain
    assert "upper bound" in plain and "fullest" in plain and "█" in plain
    assert max(len(line) for line in plain.splitlines()) <= columns and "…" not in plain


def test_the_page_and_the_engines_files(capsys: pytest.CaptureFixture[str], loads: Path, tmp_path: Path) -> None:
    page, maps = tmp_path / "page.html", tmp_path / "maps.json"
    words = [loads, *FLEET, "--html", page, "--out", maps, "--layout", "sglang", "--dense-layers", 1]
    code, _, err = _run(capsys, *words)
    assert code == 0 and str(page) in err and str(maps) in err
    assert page.read_text().count("<svg") >= 3
    told = json.loads(maps.read_text())
    assert list(told) == ["physical_to_logical_map"] and np.shape(told["physical_to_logical_map"]) == (7, 40)
    code, out, _ = _run(capsys, loads, *FLEET, "--from", maps, "--dense-layers", 1, "--json")
    again = json.loads(out)
    assert code == 0 and again["placement"]["phy2log"] == told["physical_to_logical_map"][1:]


@pytest.mark.parametrize(
    ("text", "words", "code", "sentence"),
    [
        ("1,2\n1\n", (), 10, "layer 1 has 1 loads, layer 0 has 2"),
        ("1,2\n1,-4\n", (), 10, "layer 1, expert 1 has a load of -4: negative"),
        ("a,b\n1,2\n", (), 10, "line 1: 'a' is not a number"),
        ("", (), 10, "there are no loads"),
        ('{"x": 1}', (), 10, "is JSON, but not a list of rows"),
        ("[[1, 2", (), 10, "is not valid JSON"),
        ("1,2,3\n", (), 15, "2 replicas cannot hold 3 experts"),
        ("1,2\n", ("--gpus", "3", "--replicas", "4"), 15, "4 replicas do not divide over 3 GPUs"),
        ("1,2\n", ("--nodes", "2", "--groups", "3"), 15, "2 experts do not divide over 3 groups"),
        ("1,2\n", ("--moves", "13"), 10, "--moves '13' is not a fraction"),
        ("1,2\n", ("--layout", "tgi"), 10, "unknown layout 'tgi'"),
        ("1,2\n", ("--layout", "vllm"), 10, "--layout vllm needs --out"),
        ("1,2\n", ("--link", "400"), 11, "'400' is not a bandwidth"),
    ],
)
def test_what_cannot_be_used_is_said_with_its_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: tuple[str, ...], code: int, sentence: str
) -> None:
    path = tmp_path / "loads.csv"
    path.write_text(text)
    left, out, err = _run(capsys, path, "--gpus", "2", "--replicas", "2", *words)
    assert left == code and not out
    assert sentence in err and "hint: " in err


def test_a_present_placement_that_is_none(capsys: pytest.CaptureFixture[str], loads: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for text, sentence in (("{}", "has no placement"), ('{"phy2log": [[0]]}', "is 1 x 1, not 6 layers x 40 slots")):
        path.write_text(text)
        code, _, err = _run(capsys, loads, *FLEET, "--from", path)
        assert code == 10 and sentence in err and "hint: " in err
    code, _, err = _run(capsys, tmp_path / "none.csv", *FLEET)
    assert code == 10 and "cannot be read: No such file" in err
