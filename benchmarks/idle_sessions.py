"""A chat that pauses while others use its slot, with a real llama.cpp: what comes back, and what is computed again.

    python benchmarks/idle_sessions.py [--json] [--tokens 2000]

A model with random weights of 27 million parameters is made first (16 KiB of KV a token in 32 bits). The engine has two
slots; a session of `--tokens` tokens pauses, three others of that length come, and it goes on with a new question: with
host memory for idle sessions, without, and from a file in an engine that was started anew.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "serve"))

from engines_world import FLAGS, RunningEngine, free_port, running  # noqa: E402

from cordee.demo import tiny_model  # noqa: E402
from cordee.serve.engines.llama_cpp import LlamaCpp, LlamaSessions  # noqa: E402
from cordee.serve.engines.port import EngineLaunch  # noqa: E402
from cordee.serve.policy.sessions import FileSpeed, shortest_session  # noqa: E402

NEW = " And what follows from that?"


@dataclass
class Return:
    """One return of a session."""

    kept_in: str
    prompt_tokens: int
    computed_tokens: int
    prefill_s: float
    request_s: float


def engine(model: Path, folder: Path, cache_mib: int) -> EngineLaunch:
    return EngineLaunch(
        model=str(model), served_names=("tiny",), host="127.0.0.1", port=free_port(), context=8_192,
        session_folder=str(folder), host_cache_bytes=cache_mib << 20, flags={"--parallel": 2, **FLAGS},
    )  # fmt: skip


def ask(running_engine: RunningEngine, prompt: str) -> tuple[Mapping[str, float], str, float]:
    began = time.perf_counter()
    status, raw = running_engine.ask("/completion", {"prompt": prompt, "n_predict": 8, "temperature": 0})
    answer = json.loads(raw)
    assert status == 200, answer
    return answer["timings"], answer["content"], time.perf_counter() - began


def session(number: int, tokens: int) -> str:
    """Return a text of about so many tokens that has no beginning in common with another one's."""
    words = ["alpha", "parser", "option", "value", "print", "import", "string", "class"]
    return f"{number} " + " ".join(words[(number * 7 + at * at) % len(words)] for at in range(tokens // 3))


def go_on(kept_in: str, at: RunningEngine, prompt: str) -> Return:
    timings, _, took_s = ask(at, prompt)
    computed, cached = int(timings["prompt_n"]), int(timings["cache_n"])
    return Return(kept_in, computed + cached, computed, timings["prompt_ms"] / 1e3, took_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", type=int, default=2_000)
    given = parser.parse_args()
    tiny_model.HIDDEN, tiny_model.LAYERS, tiny_model.INTER = 512, 8, 1_536
    found: list[Return] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = tiny_model.build(folder / "model")
        for cache_mib in (0, 1_024):
            launch = engine(model, folder, cache_mib)
            with running(LlamaCpp().command(launch), launch.port) as at:
                first = session(0, given.tokens)
                _, text, _ = ask(at, first)
                found.append(go_on("its slot", at, first + text + NEW)) if not cache_mib else None
                for number in (1, 2, 3):
                    ask(at, session(number, given.tokens))
                found.append(go_on("host memory" if cache_mib else "nothing", at, first + text + NEW * 2))
                prefill = LlamaSessions().prefill_tokens_per_s(at.ask("/metrics")[1])
                slots = LlamaSessions().idle_slots(at.ask("/slots")[1])
                slot = max(slots, key=lambda each: slots[each])
                saved = FileSpeed(*LlamaSessions().saved(at.call(LlamaSessions().save(slot, "session"))))
        launch = engine(model, folder, 0)
        with running(LlamaCpp().command(launch), launch.port) as at:
            restored = json.loads(at.call(LlamaSessions().restore(0, "session")))
            found.append(go_on("a file", at, first + text + NEW * 3))
    shortest = shortest_session(saved, prefill, 8_192)
    files = {
        "save": asdict(saved), "restore_s": restored["timings"]["restore_ms"] / 1e3, "read_bytes": restored["n_read"],
        "prefill_tokens_per_s": prefill, "shortest_session_tokens": shortest,
    }  # fmt: skip
    if given.json:
        print(json.dumps({"returns": [asdict(each) for each in found], "files": files}, indent=1))
        return
    for each in found:
        print(
            f"kept in {each.kept_in:12} {each.prompt_tokens:6,} tokens, {each.computed_tokens:6,} computed in "
            f"{each.prefill_s:6.3f} s, request {each.request_s:6.3f} s"
        )
    print(
        f"file: {saved.bytes_:,} bytes of {saved.tokens:,} tokens saved in {saved.seconds:.4f} s, restored in "
        f"{files['restore_s']:.4f} s; prefill {prefill:,.0f} tokens/s: files pay from {shortest} tokens on"
    )


if __name__ == "__main__":
    main()
