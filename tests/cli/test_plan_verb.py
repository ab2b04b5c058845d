"""`cordee plan` as people and scripts call it."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from inspect import signature
from pathlib import Path

import jsonschema
import pytest
from pydantic import BaseModel, TypeAdapter
from verbs import run

from cordee.cli.main import main
from cordee.cli.plan import plan
from cordee.plan.cards_document import CardsDocument
from cordee.plan.document import CurveDocument, PlanDocument
from cordee.plan.published import Figure
from cordee.plan.settings import Settings
from cordee.planning import SettingsGiven
from cordee.units import format_duration
from cordee.workload.load import load_shape
from cordee.workload.spec import parse_spec
from cordee.workload.tuning import Tuned

pytestmark = pytest.mark.usefixtures("empty_home")
SCHEMAS = json.loads((Path(__file__).parent / "plan_schemas.json").read_text())
ASSUMED = """busy_fraction = 0.7
purchase_usd_per_gpu = 40_000
life_years = 4
power_kw_per_gpu = 1.4
usd_per_kwh = 0.11
staff_usd_per_year = 150_000
"""


def test_the_command_line_a_notebook_and_a_job_file_say_the_same_of_fine_tuning() -> None:
    """A new field of `Tuned` is one of the job file at once; the other two need a line, which this test asks for."""
    asked_as = {"packed_tokens": "packed"}
    known = {field.name for field in fields(Tuned)}
    assert {asked_as.get(name, name) for name in known} <= signature(plan).parameters.keys()
    assert SettingsGiven.__annotations__.keys() == {f.name for f in fields(Settings)} - {"flash", "expert_loads"}


def test_the_schemas_are_those_of_the_documents() -> None:
    """After a change that is meant: write the schemas of these calls to plan_schemas.json."""
    documents = {"plan": PlanDocument, "curve": CurveDocument, "cards": CardsDocument}
    assert {name: _schema(document) for name, document in documents.items()} == SCHEMAS


def _schema(document: type[BaseModel]) -> object:
    return json.loads(json.dumps(document.model_json_schema(mode="serialization")))


@pytest.mark.parametrize(
    "words",
    [
        ["llama-3-70b", "--gpus", "64xH100"],
        ["llama-3-70b", "--gpus", "8xH100"],
        ["deepseek-v3", "--gpus", "GB200:576", "--capacity", "spot"],
        ["llama-3-70b", "--gpus", "64xH100", "--why", "tp=8,pp=2", "--max-seq", "--tokens", "1T", "--stall", "2s"],
        ["llama-3-70b", "--gpus", "64xH100", "--why", "tp=8,pp=3", "--launch", "megatron", "--framework", "megatron"],
        ["llama-3-70b", "--gpus", "16xH100", "--exhaustive", "--layout", "tp=8"],
        ["gpt2", "--gpus", "1xA10", "--layout", "dp=1", "--optimizer", "adamw-8bit", "--seq", "512", "--batch", "8"],
    ],
)
def test_json_keeps_its_schema(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, out, err = run(capsys, "plan", *words, "--json")
    answer = json.loads(out)
    jsonschema.validate(answer, SCHEMAS["plan"])
    assert code == (0 if answer["fits"] else 21) and not err
    assert PlanDocument.model_validate_json(out).model_dump(mode="json") == answer
    assert answer["model"]["parameters"] == sum(answer["model"]["parts"].values())
    for layout in answer["layouts"]:
        assert layout["peak_bytes"] == sum(layout["parts_bytes"].values())
        assert layout["fits"] == (layout["shortfall_bytes"] == 0)


@pytest.mark.usefixtures("wide")
def test_people_read_the_state_the_layouts_and_the_prices_source(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "llama-3-70b", "--gpus", "64xH100")
    assert code == 0
    assert "70,553,706,496 parameters x 16 bytes = 1.129 TB" in out
    assert "needs at least 14 GPUs for its state; 16 is the fewest tried that trains it (" in out
    assert "Layouts that fit" in out and "Layouts that do not fit" in out
    assert "a checkpoint is 846.6 GB" in out
    assert "$2.99 a GPU-hour: Lambda H100 SXM" in out
    assert "┃" in out


@pytest.mark.usefixtures("wide")
def test_the_state_of_muon_multiplies_out(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", "llama-3-8b", "--gpus", "8xH100", "--optimizer", "muon")
    found = re.search(r"([\d,]+) parameters x 12 bytes \+ ([\d,]+) x 16 = ([\d.]+) GB", out)
    assert found is not None
    inner, outer = (int(number.replace(",", "")) for number in found.groups()[:2])
    assert inner + outer == load_shape("llama-3-8b").parameters
    assert (12 * inner + 16 * outer) / 1e9 == pytest.approx(float(found[3]), abs=0.05)


def test_a_short_layout_does_not_break_its_heading(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, "plan", "llama-3-8b", "--gpus", "8xH100", "--layout", "fsdp=8")
    assert "  layout " in out


@pytest.mark.usefixtures("wide")
def test_405b_in_8_bit_adam(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", "llama-3-405b", "--gpus", "256xH100", "--optimizer", "adamw-8bit")
    assert "405,853,388,800 parameters x 6.03125 bytes = 2.448 TB" in out
    assert "needs at least 29 GPUs for its state" in out


@pytest.mark.usefixtures("wide")
def test_where_nothing_fits_it_prints_what_would_and_exits_with_21(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "llama-3-70b", "--gpus", "8xH100")
    assert code == 21
    assert "Layouts that fit" not in out
    assert "What would fit" in out and "--gpus 16xH100: " in out


@pytest.mark.parametrize("columns", [80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")  # A terminal, as far as rich can see.
    for words in (["llama-3-405b", "--gpus", "1024xH100", "--all"], ["llama-3-70b", "--gpus", "8xH100"]):
        _, out, _ = run(capsys, "plan", *words)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
        assert max(len(line) for line in plain.splitlines()) <= columns
        assert "…" not in plain and "┃" in plain


@pytest.mark.usefixtures("wide")
def test_measured_expert_loads_enter_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loads, page = tmp_path / "loads.csv", tmp_path / "plan.html"
    loads.write_text("9,1,1,1,1,1,1,1\n" * 32)
    words = ["mixtral-8x7b", "--gpus", "64xH100", "--layout", "ep=8", "--expert-loads", str(loads)]
    _, out, _ = run(capsys, "plan", *words, "--html", str(page))
    said = "the fullest of 8 expert ranks has 4.50 times the mean load"
    assert said in " ".join(out.split()) and said in page.read_text()
    _, out, _ = run(capsys, "plan", *words, "--json")
    assert json.loads(out)["training"]["expert_imbalance_by_ep"]["8"] == pytest.approx(4.5)


@pytest.mark.parametrize("columns", ["", "0", "1", "wide", "-5"])
def test_a_width_that_is_none_does_not_stop_the_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = run(capsys, "plan", "gpt2", "--gpus", "1xA10")
    assert code == 0 and "State" in out


@pytest.mark.usefixtures("wide")
def test_the_notice_that_is_needed_counts_the_step_that_is_under_way(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", "llama-3-70b", "--gpus", "64xH100", "--json")
    answer = json.loads(out)
    needed_s = answer["layouts"][0]["step_s"] + answer["survival"][0]["checkpoint_s"]
    _, out, _ = run(capsys, "plan", "llama-3-70b", "--gpus", "64xH100")
    assert f"with {format_duration(needed_s)} of notice (a step and a checkpoint)" in " ".join(out.split())


def test_own_prices_are_used_and_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('[H100.on-demand]\nusd_per_gpu_hour = 1.00\nsource = "our contract"\nas_of = "2026-11"\n')
    _, out, _ = run(capsys, "plan", "llama-3-8b", "--gpus", "8xH100", "--prices", str(path), "--json")
    answer = json.loads(out)
    assert answer["price"] == {"capacity": "on-demand", "usd_per_gpu_hour": 1.0, "source": "our contract (2026-11)"}
    best = answer["layouts"][0]
    assert best["usd_per_billion_tokens"] == pytest.approx(8 * 1e9 / best["tokens_per_s"] / 3600)


def test_prices_in_the_home_are_used_unless_others_are_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry = '[H100.on-demand]\nusd_per_gpu_hour = {}\nsource = "our contract"\nas_of = "2026-11"\n'
    monkeypatch.setenv("CORDEE_HOME", str(tmp_path))
    (tmp_path / "prices.toml").write_text(entry.format("1.25"))
    (tmp_path / "other.toml").write_text(entry.format("1.75"))
    words = ["llama-3-8b", "--gpus", "8xH100", "--json"]
    _, out, _ = run(capsys, "plan", *words)
    assert json.loads(out)["price"]["usd_per_gpu_hour"] == 1.25
    _, out, _ = run(capsys, "plan", *words, "--prices", str(tmp_path / "other.toml"))
    assert json.loads(out)["price"]["usd_per_gpu_hour"] == 1.75


def test_without_a_price_there_are_no_dollars(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", "gpt2", "--gpus", "1xA10", "--capacity", "spot")
    assert "spot price unknown: give --prices" in out
    assert "$/1B tok" not in out


def test_a_model_may_be_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, out, _ = run(capsys, "plan", str(tmp_path), "--gpus", "1xA10", "--json")
    assert json.loads(out)["model"]["parameters"] == load_shape("gpt2").parameters


@pytest.mark.parametrize(
    ("words", "code", "says", "hint"),
    [
        (["llama-3-70", "--gpus", "64xH100"], 14, "unknown model 'llama-3-70'", "did you mean llama-3-70b?"),
        (["nothing", "--gpus", "64xH100"], 14, "unknown model 'nothing'", "`cordee plan --models` lists"),
        (["llama-3-70b", "--gpus", "64xH10"], 14, "unknown GPU 'H10'", "did you mean H100?"),
        (["llama-3-70b", "--gpus", "64"], 14, "--gpus 64 does not say which GPU", "64xH100"),
        (["llama-3-70b", "--gpus", "many"], 12, "'many' is not a number of GPUs", "64xH100"),
        (
            ["llama-3-70b", "--gpus", "64xH100", "--layout", "tp=8,pp=3,dp=2"], 15,
            "tp*pp = 24 does not divide 64 GPUs", "tp*pp that divides 64",
        ),
        (["llama-3-70b", "--gpus", "48xH100", "--layout", "tp=3"], 15, "does not divide the 64 attention", "tp of"),
        (["llama-3-70b", "--gpus", "64xH100", "--optimizer", "adam"], 15, "unknown optimizer 'adam'", "adamw"),
        (["llama-3-70b", "--gpus", "64xH100", "--precision", "fp4"], 15, "unknown precision 'fp4'", "bf16"),
        (["llama-3-70b", "--gpus", "64xH100", "--loss", "chunky"], 15, "unknown loss 'chunky'", "compiled"),
        (["llama-3-70b", "--gpus", "56xH100", "--layout", "pp=7"], 15, "does not divide the 80", "split=10-12x5"),
        (["llama-3-70b", "--gpus", "48xH100", "--layout", "tp=3"], 15, "tp=3 does not divide the 64", "1, 2, 4"),
        (["llama-3-70b", "--gpus", "64xH100", "--recompute", "some"], 15, "unknown recompute 'some'", "auto"),
        (["llama-3-70b", "--gpus", "64xH100", "--capacity", "cheap"], 14, "unknown capacity 'cheap'", "spot"),
        (["llama-3-70b", "--gpus", "64xH100", "--storage", "2"], 11, "'2' is not a bandwidth", "GB/s"),
        (["llama-3-70b", "--gpus", "64xH100", "--storage", "0GB/s"], 15, "writes nothing", "2GB/s"),
        (["llama-3-70b", "--gpus", "64xH100", "--mtbi", "6"], 11, "'6' is not a duration", "47h"),
        (["llama-3-70b", "--gpus", "64xH100", "--reclaims", "0h"], 15, "a reclaim every 0 s leaves no time", "6h"),
        (["llama-3-70b", "--gpus", "64xH100", "--notice", "30"], 11, "'30' is not a duration", "47h"),
        (["llama-3-70b", "--gpus", "64xH100", "--stall", "2"], 11, "'2' is not a duration", "47h"),
        (["llama-3-70b", "--gpus", "64xH100", "--tokens", "14"], 12, "--tokens 14 is not a number", "300B or 1.4T"),
        (["llama-3-70b", "--gpus", "64xH100", "--framework", "jax"], 15, "unknown framework 'jax'", "megatron"),
        (["llama-3-70b", "--gpus", "64xH100", "--launch", "nemo"], 15, "unknown launcher 'nemo'", "torchtitan"),
        (["llama-3-8b", "--gpus", "1xH100", "--train", "lora", "--launch", "traner"], 15, "unknown launch", "trainer?"),
        (["llama-3-70b", "--gpus", "64xH100", "--why", "tq=8"], 15, "cannot be read: 'tq=8'", "did you mean tp?"),
        (["llama-3-70b", "--gpus", "64xH100", "--buy", "none.toml"], 12, "none.toml does not exist", "TOML"),
        (["llama-3-70b", "--gpus", "512..8xH100"], 15, "512..8 GPUs is an empty range", "8..512xH100"),
        (["llama-3-70b", "--gpus", "8..64xH100", "--why", "tp=8"], 12, "--why needs one number of GPUs", "64xH100"),
        (["llama-3-70b", "--gpus", "8..512"], 14, "does not say which GPU", "512xH100"),
        (["llama-3-70b", "--gpus", "8xH100", "--launch", "megatron"], 21, "there is no layout to launch", "nearest"),
        (["llama-3-70b", "--gpus", "60xH100", "--layout", "pp=7"], 15, "tp*pp = 7 does not divide 60", "divides 60"),
        (["llama-3-70b", "--gpus", "64xH100", "--layout", "pp=64,vpp=2"], 15, "needs 128 layers", "fewer chunks"),
        (["llama-3-70b", "--gpus", "64xH100", "--mtbi", "0h"], 15, "leaves no time to work", "6h"),
        (["llama-3-70b", "--gpus", "64xH100", "--micro-batch", "0"], 15, "micro-batch of 0 sequences", "at least 1"),
        (["llama-3-70b", "--gpus", "64xH100", "--micro-batch", "-3"], 15, "micro-batch of -3 sequences", "at least 1"),
        (["llama-3-70b", "--gpus", "64xH100", "--prices", "none.toml"], 14, "none.toml does not exist", "prices.toml"),
    ],
)  # fmt: skip
def test_bad_input_is_one_error_with_a_hint_and_its_own_exit_code(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, says: str, hint: str
) -> None:
    left, out, err = run(capsys, "plan", *words)
    assert (left, out) == (code, "")
    first, second = err.splitlines()
    assert first.startswith("error: ") and says in first
    assert second.startswith("hint: ") and hint in second
    left, out, err = run(capsys, "plan", *words, "--json")
    answer = json.loads(err)
    assert (left, out, answer["exit_code"]) == (code, "", code)
    assert says in answer["error"] and hint in answer["hint"]


def test_a_config_json_without_a_field_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}')
    code, _, err = run(capsys, "plan", str(tmp_path), "--gpus", "1xH100")
    assert code == 13
    assert "config.json has no num_hidden_layers" in err


def test_a_pipe_that_knows_only_ascii_gets_ascii_bars() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    command = [sys.executable, "-m", "cordee", "plan", "gpt2", "--gpus", "1xA10"]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
    assert done.stdout.isascii()
    assert b"# weights" in done.stdout and b"\x1b[" not in done.stdout


def test_planning_imports_nothing_heavy_and_nothing_that_only_posix_has() -> None:
    program = (
        "import sys; sys.modules['fcntl'] = sys.modules['resource'] = sys.modules['termios'] = None\n"
        "from cordee.cli.main import main\n"
        "try: main(['plan', 'llama-3-70b', '--gpus', '64xH100', '--json'])\n"
        "except SystemExit as left: assert not left.code\n"
        "heavy = {'torch', 'ray', 'fastapi', 'sqlalchemy', 'ruamel.yaml', 'httpx'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("columns", [80, 120])
def test_what_is_asked_beyond_the_plan_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    (tmp_path / "own.toml").write_text(ASSUMED)
    words = ["llama-3-70b", "--gpus", "64xH100", "--max-seq", "--tokens", "1.4T", "--stall", "2s"]
    _, out, _ = run(capsys, "plan", *words, "--buy", str(tmp_path / "own.toml"))
    assert max(len(line) for line in out.splitlines()) <= columns
    for title in ("Fullest GPU of", "Longest context", "Training on 1.4T tokens", "Rent or buy"):
        assert title in out
    assert " free" in out and "asynchronous: a save stops the ranks for 2 s" in out
    assert "break-even month" in out


@pytest.mark.parametrize("columns", [80, 120])
def test_why_prints_itself_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = run(capsys, "plan", "llama-3-70b", "--gpus", "64xH100", "--why", "tp=8,pp=3")
    assert max(len(line) for line in out.splitlines()) <= columns and "Layouts" not in out
    assert "Why not tp=8,pp=3" in out
    assert "tp*pp = 24 does not divide 64 GPUs" in " ".join(out.split())


@pytest.mark.usefixtures("wide")
def test_the_last_line_is_the_answer_in_short(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", "llama-3-70b", "--gpus", "64xH100")
    said = r".+: \d+\.\d of 85 GB \(tight: up to \d+\.\d\), \d+\.\d s a step, \$[\d,.]+ a billion tokens"
    assert re.fullmatch(said, out.splitlines()[-1])
    _, out, _ = run(capsys, "plan", "llama-3-70b", "--gpus", "8xH100")
    assert re.fullmatch(r".+: [\d.]+ of 85 GB, over by [\d.]+ GB", out.splitlines()[-1])
    assert "Checkpoints and interruptions" not in out


@pytest.mark.parametrize("columns", [80, 120])
def test_a_range_of_gpus_draws_the_curve(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    page = tmp_path / "curve.html"
    code, out, _ = run(capsys, "plan", "llama-3-70b", "--gpus", "8..512xH100", "--html", str(page))
    assert code == 0
    assert max(len(line) for line in out.splitlines()) <= columns
    assert "no layout fits" in out and "The smallest size that fits is 16 GPUs" in " ".join(out.split())
    assert page.read_text().count("<svg") > 1  # the mark and the curve, wide and narrow


def test_the_curve_has_a_schema_and_ends_with_21_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "gpt2", "--gpus", "1..64xH100", "--batch", "64", "--json")
    answer = json.loads(out)
    jsonschema.validate(answer, SCHEMAS["curve"])
    assert code == 0 and answer["knee_gpus"] in [point["gpus"] for point in answer["points"]]
    code, out, _ = run(capsys, "plan", "llama-3-405b", "--gpus", "H100:1..4", "--json")
    assert code == 21 and all(point["layout"] is None for point in json.loads(out)["points"])


def test_the_page_holds_everything_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, own = tmp_path / "plan.html", tmp_path / "own.toml"
    own.write_text(ASSUMED)
    asked = ["--html", str(page), "--buy", str(own), "--tokens", "1T", "--max-seq", "--why", "fsdp64"]
    run(capsys, "plan", "llama-3-70b", "--gpus", "64xH100", *asked)
    text = page.read_text()
    for part in (
        "Memory over the step",
        "Layouts",
        "Checkpoints and interruptions",
        "Rent or buy",
        "Why not fsdp64",
        "$2.99",
        "Lambda H100",
    ):
        assert part in text or part == "$2.99"
    outside = re.findall(r"(?:src|href)=[\"']?(?!#)[^\"'> ]+|url\([^)]*\)|@import|<script", text)
    assert outside == []
    run(capsys, "plan", "llama-3-70b", "--gpus", "8xH100", "--html", str(page))
    assert "does not fit" in page.read_text() and "--gpus 16xH100" in page.read_text()
    code, _, err = run(capsys, "plan", "gpt2", "--gpus", "1xA10", "--html", str(tmp_path / "no" / "plan.html"))
    assert code == 53 and "cannot be written" in err


def test_a_job_of_a_model_that_was_read_from_a_folder_names_the_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shape = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 1024}
    more = {"intermediate_size": 1024, "max_position_embeddings": 1024, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(shape | more))
    code, out, _ = run(capsys, "plan", str(tmp_path), "--gpus", "1xH100", "--launch", "cordee")
    job = parse_spec(out)
    assert code == 0 and job.model is not None
    assert (job.model.config, job.model.name) == (str(tmp_path), None)
    assert load_shape(str(job.model.config)).hidden == 512


@pytest.mark.parametrize("launcher", ["megatron", "torchtitan", "deepspeed", "cordee"])
def test_settings_go_to_standard_output_and_notes_to_standard_error(
    capsys: pytest.CaptureFixture[str], launcher: str
) -> None:
    code, out, err = run(capsys, "plan", "llama-3-70b", "--gpus", "64xH100", "--launch", launcher)
    assert code == 0 and "note: layout " in err
    assert out.strip() and "note:" not in out


def test_rent_comes_from_the_price_and_without_one_from_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = tmp_path / "own.toml"
    own.write_text(ASSUMED)
    _, out, _ = run(capsys, "plan", "llama-3-70b", "--gpus", "64xH100", "--buy", str(own), "--json")
    answer = json.loads(out)
    jsonschema.validate(answer, SCHEMAS["plan"])
    assert answer["rent_or_buy"]["assumed"]["rent_usd_per_gpu_hour"] == 2.99
    code, _, err = run(capsys, "plan", "gpt2", "--gpus", "1xA10", "--capacity", "spot", "--buy", str(own))
    assert code == 12 and "rent_usd_per_gpu_hour is missing" in err
    own.write_text("busy_fraction = ")
    code, _, err = run(capsys, "plan", "gpt2", "--gpus", "1xA10", "--buy", str(own))
    assert code == 12 and "cannot be read" in err


def test_figures_that_contradict_themselves_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["figures"])
    text = capsys.readouterr().out
    assert text.count("does not") >= 3 and "8 H100s, not 64" in " ".join(text.split())
    with pytest.raises(SystemExit):
        main(["figures", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [figure["holds"] for figure in found].count(False) == 3
    schema = json.loads((Path(__file__).parent / "figures_schema.json").read_text())
    assert TypeAdapter(list[Figure]).json_schema(mode="serialization") == schema
    jsonschema.validate(found, schema)


def test_the_table_of_cards_has_every_price_at_80_columns_beside_a_tight_card(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys, "plan", "llama-3-8b", "--train", "qlora", "--seq", "4000", "--precision", "fp16")
    rows = [line for line in out.partition("GPUs that do not")[0].splitlines() if re.match(r"[ *] \d+ x ", line)]
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    assert all(re.search(r" (\$\d+\.\d\d|–)$", row) for row in rows)
    assert any(row.startswith("* 1 x T4 ") for row in rows) and "* tight: it fits as planned" in out


@pytest.mark.usefixtures("wide")
def test_without_gpus_the_cards_that_hold_it_are_named_the_cheapest_first(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama-3-8b", "--train", "qlora", "--seq", "4096"]
    code, out, err = run(capsys, "plan", *words)
    assert code == 0 and not err and "1 x RTX-4090" in out
    assert out.splitlines()[-2].startswith("smallest: 1 x RTX-") and "not in bf16: T4, V100-16, V100-32" in out
    code, out, _ = run(capsys, "plan", *words, "--json")
    answer = json.loads(out)
    jsonschema.validate(answer, SCHEMAS["cards"])
    assert CardsDocument.model_validate_json(out).model_dump(mode="json") == answer
    paid = [card["usd_per_hour"] for card in answer["cards"] if card["fits"] and card["usd_per_hour"] is not None]
    assert code == 0 and paid == sorted(paid) and answer["training"]["adapters"]["base"] == "nf4"
    code, out, _ = run(capsys, "plan", "llama-3-405b", "--seq", "8192", "--batch", "1")
    assert code == 21 and "no node of any known GPU holds it" in out
    for beside in (["--why", "tp=8"], ["--max-seq"], ["--html", "page.html"]):
        code, _, err = run(capsys, "plan", *words, *beside)
        assert code == 12 and "needs the GPUs" in err


@pytest.mark.usefixtures("wide")
def test_stages_are_planned_by_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama-3-8b", "--gpus", "8xH100", "--seq", "4096", "--batch", "64"]
    code, out, _ = run(capsys, "plan", *words, "--stage", "dpo")
    assert code == 0 and "and a frozen copy as the reference 16.1 GB" in out
    assert "128 in a step" in out and "DPO over pairs" in " ".join(out.split())
    code, out, _ = run(capsys, "plan", *words, "--stage", "grpo,reference=model")
    assert code == 0 and "One iteration of GRPO  64 completions" in out and "log probabilities" in out
    code, out, _ = run(capsys, "plan", *words, "--stage", "grpo,reference=model", "--json")
    answer = json.loads(out)
    jsonschema.validate(answer, SCHEMAS["plan"])
    made, step = answer["rollouts"], answer["layouts"][0]["step_parts_s"]
    assert made["reference_s"] == pytest.approx(step["reference_s"])
    parts = ("generate_s", "weights_s", "reference_s", "update_s")
    assert made["iteration_s"] == pytest.approx(sum(made[part] for part in parts))
    assert run(capsys, "plan", *words, "--stage", "rlhf")[0] == 15


def test_adapters_are_planned_by_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama-3-8b", "--gpus", "1xRTX-3090", "--seq", "2048", "--batch", "16"]
    code, out, err = run(capsys, "plan", *words, "--train", "qlora", "--targets", "q,v", "--rank", "8")
    assert code == 0 and not err
    assert "3,407,872 of adapters x 16 bytes = 54.5 MB" in out and "over a 4-bit base" in " ".join(out.split())
    code, out, err = run(capsys, "plan", *words, "--train", "lora", "--json")
    answer = json.loads(out)
    jsonschema.validate(answer, SCHEMAS["plan"])
    assert code == 0 and answer["training"]["adapters"]["base_bits"] == 16
    assert answer["state"]["state_bytes"] == 2 * 8_030_261_248 + 16 * 41_943_040
    assert run(capsys, "plan", *words, "--train", "lora", "--launch", "torchtitan")[0] != 0
    assert run(capsys, "plan", *words, "--train", "lora", "--recompute", "selective")[0] != 0


@pytest.mark.usefixtures("wide")
def test_a_gpu_of_ones_own_has_energy_where_its_watts_are_known_and_a_reason_where_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CORDEE_HOME", str(tmp_path))
    own = '[mine]\nlike = "RTX-3090"\nmemory = "24GB"\nmemory_bandwidth = "936GB/s"\nsource = "us"\nas_of = "2026-11"\n'
    own += "dense_tflops = { bf16 = 71, fp16 = 71, fp32 = 35.6 }\n"
    asked = ("plan", "gpt2", "--gpus", "1xmine", "--seq", "512", "--micro-batch", "1", "--batch", "8")
    (tmp_path / "gpus.toml").write_text(own)
    _, unknown, _ = run(capsys, *asked)
    assert "nobody says how many watts mine draws" in " ".join(unknown.split()) and "CO2e" not in unknown
    (tmp_path / "gpus.toml").write_text(own + "watts = 280\n")
    _, known, _ = run(capsys, *asked)
    assert "1 x (280 W + 150 W of its host)" in known and "nobody says" not in known
    _, text, _ = run(capsys, *asked, "--json")
    energy = json.loads(text)["energy"]
    assert energy["board_watts"] == 280 and len(energy["sources"]) == 4
    assert energy["sources"][0] == "280 W a board: us (2026-11)"
