"""Readers of traces of requests, on small inline files."""

from pathlib import Path

import pytest

from cordee.errors import TraceError
from cordee.workload.request_files import load_requests
from cordee.workload.requests import Request, poisson


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_mooncake_counts_milliseconds_and_keeps_the_blocks(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "trace.jsonl",
        '{"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [0, 9]}\n',
    )
    assert load_requests(path) == (Request(0.0, 600, 5, (0, 9), 512), Request(2.0, 1100, 7, (0, 1, 2), 512))


def test_azure_has_dates(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "azure.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0319600,3180,8\n",
    )
    first, second = load_requests(path)
    assert (first.arrival_s, first.input_tokens, first.output_tokens) == (0.0, 4808, 10)
    assert second.arrival_s == pytest.approx(0.052)


def test_burst_leaves_out_failed_requests(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "burst.csv",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,0,1087,Conversation log\n",
    )
    assert load_requests(path) == (Request(0.0, 472, 18),)


def test_unknown_columns_are_named_beside_the_known_ones(tmp_path: Path) -> None:
    path = write(tmp_path, "other.csv", "when,prompt,answer\n1,2,3\n")
    with pytest.raises(TraceError, match="when, prompt, answer") as caught:
        load_requests(path)
    assert "ContextTokens" in str(caught.value.hint) and "input_length" in str(caught.value.hint)


def test_bad_row_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "burst.csv", "Timestamp,Request tokens,Response tokens\n1,2,3\n4,many,5\n")
    with pytest.raises(TraceError, match="row 2"):
        load_requests(path)


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        load_requests(tmp_path / "none.csv")
    with pytest.raises(TraceError, match="line 1"):
        load_requests(write(tmp_path, "half.jsonl", '{"timestamp": '))


def test_poisson_is_the_same_for_one_seed_and_has_the_rate() -> None:
    requests = poisson(20_000, 4.0, [(100, 10)], seed=3)
    assert requests == poisson(20_000, 4.0, [(100, 10)], seed=3)
    assert requests[-1].arrival_s == pytest.approx(5_000, rel=0.03)
