"""From a checkpoint to the bill: a job trains a Llama, its weights are served while it trains on, and both are paid."""

import json
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines_world import FLAGS, until_ended

from cordee.cli.main import main
from cordee.client import Client
from cordee.control.spawn import start_server
from cordee.telemetry.host import free_port
from cordee.workload.spec import JobSpec

TRAIN = Path(__file__).parent / "train_llama.py"
PROMPT, TOKENS = "def main(", 24


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the home of a server with three CPU slots at the price of an H100, and of a gateway."""
    home = tmp_path / "home"
    monkeypatch.setenv("CORDEE_MODELS", str(tmp_path / "models"))
    start_server(home, slots="3", gateway=str(free_port()), price_as="H100")
    yield home
    with Client(home) as client:
        client.down()
    until_ended(home)


def until(done: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.2)


def verb(capsys: pytest.CaptureFixture[str], home: Path, *words: str) -> str:
    """Run a verb in this process, and return what it printed."""
    capsys.readouterr()
    try:
        main([*words, "--home", str(home)])
    except SystemExit as end:
        assert not end.code, capsys.readouterr()
    return capsys.readouterr().out


def streamed(url: str) -> tuple[str, dict[str, Any]]:
    """Return the greedy answer to the prompt, put together from its stream, and its usage."""
    asked = {"model": "gpt", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    body = json.dumps(asked | {"stream_options": {"include_usage": True}}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        lines = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]" and len(lines) > TOKENS / 2
    chunks = [json.loads(line) for line in lines[:-1]]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    return text, chunks[-1]["usage"]


@pytest.mark.gang
def test_what_a_job_trains_is_served_as_it_is_and_both_are_on_one_bill(
    home: Path, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with Client(home) as client:
        job = JobSpec.from_flags(
            run=[sys.executable, str(TRAIN), str(tiny_folder), str(out)], gpus="1", name="gpt",
            checkpoint_to=str(tmp_path / "checkpoints"), env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        trained = client.submit(job.model_dump(mode="json") | {"cwd": str(tmp_path)}).job.job_id
        until(lambda: client.job(trained).checkpoint_step == 2, "the job saves its second step")
        flags = [f"--flag={name[2:]}={value if value != '' else 'true'}" for name, value in FLAGS.items()]
        verb(capsys, home, "serve", "run", "--from-job", "gpt", "--like", str(tiny_folder), "--context", "512",
             "--drain", "2s", "--follow", *flags)  # fmt: skip
        [url] = client.service("gpt").urls
        first, used = streamed(url)
        assert first == json.loads((out / "2.json").read_text()), "as the trained weights answer in torch"
        assert [each.model for each in client.service("gpt").replicas] == ["job:gpt@2"]
        # A newer checkpoint: the service goes on with the old one until it is updated.
        (out / "go").touch()
        until(lambda: client.job(trained).state == "done", "the training ends")
        assert streamed(url)[0] == first
        verb(capsys, home, "serve", "update", "gpt", "--follow")
        until(
            lambda: [each.model for each in client.service("gpt").replicas] == ["job:gpt@4"], "the old replica leaves"
        )
        second, more = streamed(url)
        assert second == json.loads((out / "4.json").read_text()) != first
        assert verb(capsys, home, "serve", "update", "gpt").startswith("gpt is declared (revision 2)")

        verb(capsys, home, "serve", "stop", "gpt", "--wait")
        tokens = 2 * used["completion_tokens"] + more["completion_tokens"]
        until(lambda: sum(row.tokens.output for row in client.usage().rows) == tokens, "the gateway reports")
        until(lambda: all(each.ended_us for each in client.jobs()), "all has ended")
        bill = json.loads(verb(capsys, home, "cost", "--by", "service", "--json"))
        jobs = json.loads(verb(capsys, home, "cost", "--by", "job", "--json"))
        shown = verb(capsys, home, "cost", "--by", "service")

    [row] = bill["rows"]
    assert row["key"] == "gpt" and row["tokens"]["requests"] == 3 and row["tokens"]["output"] == tokens == 3 * TOKENS
    gpu_us = {each["key"]: each["gpu_us"]["held"] for each in jobs["rows"]}
    usd = {each["key"]: each["micro_usd"]["held"] for each in jobs["rows"]}
    assert len(gpu_us) == 3, "one that trains, and a replica of each revision"
    # The training on the bill and by itself, the service and its replicas: to the microsecond and the micro-dollar.
    assert bill["training_gpu_us"]["held"] == gpu_us.pop(trained) > 0
    assert bill["training_micro_usd"]["held"] == usd.pop(trained) > 0
    assert row["gpu_us"]["held"] == sum(gpu_us.values()) > 0
    assert row["micro_usd"]["total"] == sum(usd.values()) > 0
    assert row["gpu_us"]["held"] + bill["training_gpu_us"]["held"] == jobs["gpu_us"]["held"]
    assert (
        row["micro_usd"]["total"] + bill["training_micro_usd"]["held"] == bill["micro_usd"] == jobs["micro_usd"]["held"]
    )
    assert row["micro_usd_per_million"]["output"] > 0 and "$/1M OUT" in shown and "training" in shown
