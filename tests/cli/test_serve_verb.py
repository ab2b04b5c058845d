"""`cordee serve plan` as people and scripts call it."""

import json
import re
import sys
from pathlib import Path

import jsonschema
import pytest
from verbs import run

import cordee
from cordee.errors import UnitError
from cordee.plan.serving.document import ServingDocument

sys.path.append(str(Path(__file__).parent.parent))
from pages import PAGES, refreshed

pytestmark = pytest.mark.usefixtures("empty_home")
SCHEMA = json.loads((Path(__file__).parent / "serve_schema.json").read_text())


def test_the_schema_is_that_of_the_document() -> None:
    """After a change that is meant: write this schema to serve_schema.json."""
    assert json.loads(json.dumps(ServingDocument.model_json_schema(mode="serialization"))) == SCHEMA


@pytest.mark.parametrize(
    "words",
    [
        ["llama-3-8b", "--gpus", "8xH100", "--rate", "20/s", "--tpot", "50ms", "--api", "0.5,0.1,1.5"],
        ["llama-3-70b", "--gpus", "2xL40S", "--why", "tp=2"],
        ["llama-3-8b", "--gpus", "H100:1", "--weights", "any", "--kv", "any", "--why", "128"],
        ["mixtral-8x7b", "--gpus", "8xA100-80", "--concurrency", "32", "--layout", "tp=4,ep", "--launch", "vllm"],
        ["llama-3-70b", "--gpus", "8xH100", "--tpot", "1ms", "--context", "4K"],
        ["qwen2.5-7b", "--gpus", "1xL40S", "--engine", "sglang", "--hours", ",".join(["0.5"] * 12 + ["1"] * 12)],
    ],
)
def test_json_keeps_its_schema(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, out, err = run(capsys, "serve", "plan", *words, "--json")
    answer = json.loads(out)
    jsonschema.validate(answer, SCHEMA)
    assert code == (0 if answer["keeps_slo"] else 21) and not err
    assert ServingDocument.model_validate_json(out).model_dump(mode="json") == answer
    for layout in answer["layouts"]:
        assert layout["fits"] == (layout["shortfall_bytes"] == 0)
        assert layout["gpus"] <= answer["gpus"]


@pytest.mark.usefixtures("wide")
def test_people_read_layouts_the_cache_and_the_price(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "serve", "plan", "llama-3-8b", "--gpus", "8xH100", "--rate", "20/s", "--ttft", "500ms", "--tpot", "50ms"
    )
    assert code == 0
    assert "20 requests of 1,000 + 200 tokens a second; p99 of TTFT 500 ms and TPOT 50 ms" in out
    assert "Layouts that meet the SLO" in out and "Memory of one GPU of tp1" in out
    assert "GPU KV cache size: " in out and "blocks of 16 tokens" in out
    assert "Price of a million tokens  1 GPU, $2.99 an hour" in out
    assert "$2.99 a GPU-hour: Lambda H100 SXM" in out and "of electricity for a million tokens" in out
    assert out.rstrip().splitlines()[-1].startswith("1 replica of tp1 on 1 of 8 GPUs: 20.0 requests/s, TTFT ")


@pytest.mark.parametrize("columns", [40, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")  # A terminal, as far as rich can see.
    every = (
        ["llama-3-70b", "--gpus", "16xH100", "--all", "--curve", "--levers", "--tpot", "30ms"],
        ["mixtral-8x7b", "--gpus", "4xH200", "--weights", "bf16,fp8", "--kv", "any"],
        ["llama-3-8b", "--gpus", "1xH100", "--rate", "500/s"],
    )
    for words in every:
        _, out, _ = run(capsys, "serve", "plan", *words)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
        assert max(len(line) for line in plain.splitlines()) <= columns
        assert "…" not in plain and "┃" in plain


@pytest.mark.usefixtures("wide")
def test_llama_cpp_is_planned_as_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(
        capsys, "serve", "plan", "llama-3-8b", "--gpus", "1xH100", "--engine", "llama.cpp", "--weights", "Q4_K_M"
    )
    plain = " ".join(out.split())
    assert "weights in gguf-q4_k_m" in plain and "at most, each in a slot of --context 8192" in plain
    words = ("deepseek-v3", "--gpus", "16xH200", "--layout", "dp=8,ep", "--launch", "llama.cpp")
    code, out, err = run(capsys, "serve", "plan", *words)
    assert code == 15 and not out and "llama.cpp b4000 has no data-parallel attention (dp8)" in err


@pytest.mark.usefixtures("wide")
def test_curve_and_levers_are_printed_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    _, plain, _ = run(capsys, "serve", "plan", "llama-3-8b", "--gpus", "1xH100")
    assert "Levers" not in plain and "knee" not in plain
    _, out, _ = run(capsys, "serve", "plan", "llama-3-8b", "--gpus", "1xH100", "--curve", "--levers", "--tpot", "40ms")
    assert "<- knee" in out and "misses the SLO" in out
    assert re.search(r"^  weights +fp8 +\d\.\d\dx", out, re.MULTILINE)


@pytest.mark.usefixtures("wide")
def test_where_nothing_fits_it_prints_what_would_and_exits_with_21(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "serve", "plan", "llama-3-70b", "--gpus", "2xL40S")
    assert code == 21
    assert "Layouts that do not fit" in out and "short by" in out
    assert "What would work" in out and "--weights fp8: 1 x " in out


@pytest.mark.usefixtures("wide")
def test_where_nothing_keeps_the_slo_the_nearest_has_its_price(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "serve", "plan", "llama-3-70b", "--gpus", "8xH100", "--tpot", "5ms")
    assert code == 21
    assert "Layouts that miss it" in out
    assert re.search(r"\$[\d.]+ a million tokens; [\d.]+ times the SLO$", out.rstrip())


@pytest.mark.usefixtures("wide")
def test_why_prints_nothing_but_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "serve", "plan", "llama-3-8b", "--gpus", "8xH100", "--why", "tp=8")
    assert "Why not tp=8  costs more" in out and "Memory of one GPU" not in out
    _, out, _ = run(capsys, "serve", "plan", "llama-2-7b", "--gpus", "1xA10", "--why", "24")
    assert "Why not 24  does not fit" in out and "room for" in out


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("vllm", ["vllm serve llama-3-8b", "--max-num-seqs", "--gpu-memory-utilization 0.9", "--kv-cache-dtype fp8"]),
        ("sglang", ["--model-path llama-3-8b", "--mem-fraction-static", "--kv-cache-dtype fp8_e4m3"]),
        ("tensorrt-llm", ["trtllm-serve llama-3-8b", "kv_cache_config:", "--config serve.yaml"]),
    ],
)
def test_launch_prints_the_engines_command_alone(
    capsys: pytest.CaptureFixture[str], launcher: str, words: list[str]
) -> None:
    code, out, err = run(capsys, "serve", "plan", "llama-3-8b", "--gpus", "2xH100", "--kv", "fp8", "--launch", launcher)
    assert code == 0 and "note: start it 2 times, each on 1 GPU" in err
    for each in words:
        assert each in out
    assert "Sources" not in out


def test_a_page_is_written_and_stands_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "serve.html"
    code, _, err = run(
        capsys,
        "serve",
        "plan",
        "llama-3-8b",
        "--gpus",
        "8xH100",
        "--tpot",
        "40ms",
        "--why",
        "tp=2",
        "--html",
        str(page),
    )
    text = page.read_text()
    assert code == 0 and f"written to {page}" in err
    assert "knee: " in text and "limit 40 ms" in text and "Why not tp=2" in text and "Levers" in text
    assert "http" not in re.sub(r"http://www.w3.org/\S+", "", text)


BAD = [
    (["nothing", "--gpus", "1xH100"], 14, "unknown model 'nothing'", "give a path to a config.json"),
    (["lama-3-8b", "--gpus", "1xH100"], 14, "unknown model 'lama-3-8b'", "did you mean llama-3-8b? also near: llama-"),
    (["llama-3-8b", "--gpus", "1xH101"], 14, "unknown GPU 'H101'", "did you mean H100?"),
    (["llama-3-8b", "--gpus", "8"], 14, "does not say which GPU", "write 8xH100"),
    (["llama-3-8b", "--gpus", "1xH100", "--engine", "vlm"], 15, "unknown engine 'vlm'", "did you mean vllm?"),
    (["llama-3-8b", "--gpus", "1xH100", "--engine", "vllm@0.1"], 15, "older than", "from 0.2 on"),
    (["llama-3-8b", "--gpus", "1xH100", "--weights", "fp9"], 15, "unknown format 'fp9'", "did you mean"),
    (["llama-3-8b", "--gpus", "1xH100", "--kv", "int3"], 15, "unknown format 'int3'", "known are"),
    (["llama-3-8b", "--gpus", "1xH100", "--context", "32K"], 15, "32,768 tokens, but llama-3-8b", "--context 8192"),
    (["llama-3-8b", "--gpus", "8xH100", "--layout", "tp=3"], 15, "does not divide the 32 attention", "1, 2, 4, 8"),
    (["llama-3-8b", "--gpus", "8xH100", "--layout", "tq=2"], 15, "cannot be read: 'tq=2'", "did you mean tp?"),
    (["llama-3-8b", "--gpus", "1xH100", "--rate", "5"], 11, "'5' is not a rate", "5/s"),
    (["llama-3-8b", "--gpus", "1xH100", "--ttft", "500"], 11, "'500' is not a duration", "number with a unit: 500ms"),
    (["llama-3-8b", "--gpus", "1xH100", "--context", "all"], 11, "'all' is not a number of tokens", "32K (32,768)"),
    (["llama-3-8b", "--gpus", "1xH100", "--rate", "5/s", "--concurrency", "4"], 12, "two kinds of load", "give one"),
    (["llama-3-8b", "--gpus", "1xH100", "--statistic", "p95"], 12, "unknown statistic 'p95'", "p50, p99, mean"),
    (["llama-3-8b", "--gpus", "1xH100", "--hours", "1,2"], 12, "2 loads is not a day", "24 numbers"),
    (["llama-3-8b", "--gpus", "1xH100", "--input", "9000"], 12, "do not go into a context of 8,192", "shorter"),
    (["llama-3-8b", "--gpus", "1xH100", "--engine", "vllm", "--launch", "sglang"], 15, "not for sglang", "--engine"),
    (["llama-3-8b", "--gpus", "1xH100", "--api", "cheap"], 12, "--api cheap is not a price list", "0.5,0.05,1.5"),
    (["llama-3-8b", "--gpus", "1xH100", "--max-sequences", "0"], 12, "a limit of 0 concurrent sequences", "at least 1"),
    (["llama-3-8b", "--gpus", "1xH100", "--memory-fraction", "90"], 12, "is not between 0 and 1", "0.9"),
    (["llama-3-405b", "--gpus", "1xH100", "--launch", "vllm"], 21, "not even for one request", "--gpus"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "message", "hint"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_refused_with_numbers_and_a_hint(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str, hint: str
) -> None:
    left, out, err = run(capsys, "serve", "plan", *words)
    assert left == code and not out
    error, _, said = err.partition("hint: ")
    assert message in error and hint in said


def test_a_config_without_heads_names_the_field(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "vocab_size": 9,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, err = run(capsys, "serve", "plan", str(tmp_path), "--gpus", "1xH100")
    assert code == 13 and "config.json has no num_attention_heads" in err and "hint: add num_attention_heads" in err


def test_a_trace_with_other_columns_is_refused_with_those_that_it_needs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"time": 0, "prompt": "hello"}\n')
    code, _, err = run(capsys, "serve", "plan", "llama-3-8b", "--gpus", "1xH100", "--requests", str(trace))
    assert code == 18 and "hint: " in err and "input" in err


def test_an_empty_trace_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("")
    code, _, err = run(capsys, "serve", "plan", "llama-3-8b", "--gpus", "1xH100", "--requests", str(trace))
    assert code == 18 and "trace.jsonl has no requests" in err.replace("\n", "")


def test_the_models_of_the_catalogue_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "serve", "plan", "--models")
    assert code == 0 and {"llama-3-8b", "mixtral-8x7b"} <= set(out.split())


def test_the_kinds_of_gpu_are_listed_with_their_memory(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "--kinds")
    assert code == 0 and {("H100", "80 GB"), ("RTX-3090", "24 GB")} <= {
        tuple(line.split(maxsplit=1)) for line in out.splitlines()
    }


def test_a_trace_is_played(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 250 * index, "input_length": 1024, "output_length": 50, "hash_ids": [index % 3, 10 + index % 3]}
        for index in range(60)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = run(capsys, "serve", "plan", "llama-3-8b", "--gpus", "1xH100", "--requests", str(trace), "--json")
    answer = json.loads(out)
    assert code == 0 and answer["traffic"]["traced_requests"] == 60
    assert answer["traffic"]["input_tokens"] == 1024
    assert answer["layouts"][0]["performance"]["played"]


def test_a_notebook_asks_the_same_and_draws_the_answer() -> None:
    answer = cordee.serve_plan("llama-3-8b", "2xH100", rate="5/s", kv="fp8", layout="tp=1")
    assert answer.best is not None and answer.best.case.kv.name == "fp8"
    assert "<svg" in answer._repr_html_() and "<html" not in answer._repr_html_()
    with pytest.raises(UnitError, match="'5' is not a rate"):
        cordee.serve_plan("llama-3-8b", "2xH100", rate=5)  # type: ignore[arg-type]
    rows = answer.table()
    assert rows[0]["layout"] == "tp1" and rows[0]["keeps_slo"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_shows_what_the_commands_print(path: Path) -> None:
    """After a change that is meant: `python tests/pages.py`."""
    text = path.read_text(encoding="utf-8")
    assert refreshed(text) == text
