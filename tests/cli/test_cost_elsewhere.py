"""`cordee cost --from`: what it prints of a cluster that Cordee does not run."""

import csv
import io
import json
from pathlib import Path

import pytest
from verbs import run

SAMPLE = str(Path(__file__).parents[1] / "data" / "sacct.txt")


def test_the_table_adds_up_and_says_what_it_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "cost", "--from", SAMPLE, "--cluster", "4x8xH100", "--price-as", "$2")
    assert code == 0
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert " ".join(lines["all"][1:]) == "15 404 140 16.0 2.0 2.0 32.0 48.0 64.0 64.0 772 212 $1,544 $424.00"
    assert "idle: 188 GPU-h, $376.00 (19.6 % of 32 GPUs)" in out
    assert "assumed: jobs do not save their state" in out
    assert "left out: 1 row, 7 columns in place of 19: cut off (first: line 65)" in out
    assert "price: $2/GPU-h, as given" in out


def test_csv_and_json_have_the_same_hours(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("cost", "--from", SAMPLE, "--by", "account")
    _, out, _ = run(capsys, *words, "--csv")
    rows = {row["account"]: row for row in csv.DictReader(io.StringIO(out))}
    assert rows["nlp"]["preempted_gpu_h"] == "64.0000" and rows["vision"]["lost_gpu_h"] == "50.0000"
    _, out, _ = run(capsys, *words, "--json", "--what-if", "--policy", "fifo")
    answer = json.loads(out)
    assert answer["cost"]["total"]["gpu_us"]["preempted"] == 64 * 3600 * 10**6
    assert [each["name"] for each in answer["what_if"]["replayed"]] == ["fifo"]
    assert answer["price_sources"][0].startswith("H100 on-demand")


def test_the_replay_stands_below_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "cost", "--from", SAMPLE, "--what-if", "--since", "2026-03-02")
    assert code == 0
    assert "the log" in out and "cordee would have held" in out and "easy would have held" in out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--from", SAMPLE, "--by", "queue"), 10, "unknown --by 'queue'"),
        (("--from", SAMPLE, "--timezone", "Berlin"), 10, "there is no time zone 'Berlin'"),
        (("--from", "nowhere.txt"), 18, "nowhere.txt cannot be read"),
        (("--from", SAMPLE, "--price-as", "H1000"), 14, "H1000"),
        (("--from", SAMPLE, "--what-if", "--policy", "slurm"), 10, "slurm"),
        (("--what-if",), 10, "need an export"),
    ],
)
def test_a_mistake_is_named(
    words: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    left, _, err = run(capsys, "cost", *words)
    assert left == code and message in err and "hint:" in err
