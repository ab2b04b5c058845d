"""The wrapper around a real engine, with its faults: ready, drained, killed, frozen, lying, and out of memory."""

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

from engines_world import running, until
from replica_world import Wrapper, plain_flags, wrapped

from cordee.demo import tiny_model
from cordee.errors import EXIT_CHECKPOINTED, InputError, ReplicaError
from cordee.events import ReplicaReady, ReplicaUnready
from cordee.serve.engines.llama_cpp import LlamaCpp, LlamaSessions
from cordee.serve.engines.openai import COMPLETIONS
from cordee.serve.engines.port import EngineLaunch, Upstream
from cordee.serve.sessions import PAUSE_S, IdleSessions
from cordee.telemetry.host import free_port
from cordee.telemetry.notices import write_model

FLAGS = plain_flags(tiny_model.FLAGS)
LONG = {"prompt": "def main", "stream": True, "temperature": 0, "max_tokens": 1500}


def llama(tiny_folder: Path) -> dict[str, object]:
    return {"engine": "llama.cpp", "model": str(tiny_folder / "tiny.gguf"), "context": 2048, "flags": FLAGS}


def test_a_replica_reports_its_engine_and_drains_on_notice(tiny_folder: Path, tmp_path: Path) -> None:
    with wrapped(tmp_path, llama(tiny_folder)) as wrapper:
        engine = wrapper.ready()
        (ready,) = wrapper.read()
        assert isinstance(ready, ReplicaReady)
        assert (ready.job_id, ready.epoch, ready.rank, ready.engine) == ("chat-abcdef", 1, 0, "llama.cpp")
        assert (ready.kv_tokens, ready.slots) == (4 * 2048, 4)
        assert set(json.loads(engine.ask("/v1/models")[1])["data"][0]["aliases"]) == {"chat", ready.model}
        got: list[bytes] = []
        events = engine.events(Upstream(COMPLETIONS, {**LONG, "prompt": "a secret prompt"}, stream=True))
        got.append(next(events))
        rest = threading.Thread(target=lambda: got.extend(events))
        rest.start()
        wrapper.notice()
        assert wrapper.unready().draining
        rest.join()
        assert got[-1].endswith(b"data: [DONE]\n\n"), "the open request came to its end"
        assert wrapper.exit_code() == EXIT_CHECKPOINTED
        assert "secret" not in wrapper.output and b"".join(got)[:20].decode() not in wrapper.output


def test_a_replica_of_several_models_holds_the_one_that_was_ordered(tiny_folder: Path, tmp_path: Path) -> None:
    other, spool = tmp_path / "other.gguf", tmp_path / "spool"
    other.symlink_to(tiny_folder / "tiny.gguf")
    settings = llama(tiny_folder) | {"models": [str(other), "./nowhere.gguf"]}
    with wrapped(tmp_path, settings) as wrapper:
        write_model(spool, str(other), 7)
        engine = wrapper.ready()
        write_model(spool, "./nowhere.gguf", 6)  # An order that was overtaken.
        got: list[bytes] = []
        events = engine.events(Upstream(COMPLETIONS, LONG, stream=True))
        got.append(next(events))
        rest = threading.Thread(target=lambda: got.extend(events))
        rest.start()
        write_model(spool, str(settings["model"]), 8)
        assert wrapper.ready(2).ask("/health")[0] == 200
        rest.join()
        assert got[-1].endswith(b"data: [DONE]\n\n"), "the open request came to its end before the swap"
        first, between, second = wrapper.read()
        assert isinstance(first, ReplicaReady) and isinstance(second, ReplicaReady)
        assert (first.model, second.model) == (str(other), settings["model"])
        assert first.load_us and second.load_us and second.load_us <= second.at_us - between.at_us
        assert isinstance(between, ReplicaUnready) and not between.draining
        assert between.why == f"it loads {settings['model']} in place of {other}"
        write_model(spool, "./nowhere.gguf", 9)
        assert wrapper.exit_code() == InputError.exit_code
        assert "nowhere.gguf is not here" in wrapper.output


def test_a_replica_of_several_models_leaves_before_one_is_ordered(tiny_folder: Path, tmp_path: Path) -> None:
    with wrapped(tmp_path, llama(tiny_folder) | {"models": ["./other"]}) as wrapper:
        until(lambda: notified(wrapper), "it takes a notice")
        assert wrapper.exit_code() == EXIT_CHECKPOINTED
        assert wrapper.read() == []


def notified(wrapper: Wrapper) -> bool:
    """Give a notice once the wrapper handles signals, and return whether that was done."""
    status = Path(f"/proc/{wrapper.process.pid}/status").read_text()
    caught = int(status.split("SigCgt:")[1].split()[0], 16)
    if caught >> (signal.SIGTERM - 1) & 1:
        wrapper.notice()
        return True
    return False


def test_a_notice_has_a_deadline(tiny_folder: Path, tmp_path: Path) -> None:
    limits = {"CORDEE_GRACE_S": "1"}
    with wrapped(tmp_path, llama(tiny_folder), limits) as wrapper:
        engine = wrapper.ready()
        events = engine.events(Upstream(COMPLETIONS, {**LONG, "max_tokens": 2000}, stream=True))
        next(events)
        os.kill(wrapper.engine_pid(), signal.SIGSTOP)
        began_s = time.monotonic()
        wrapper.notice()
        assert wrapper.exit_code() == EXIT_CHECKPOINTED
        assert time.monotonic() - began_s < 20
        events.close()


def test_an_engine_that_ends_is_started_again_once(tiny_folder: Path, tmp_path: Path) -> None:
    with wrapped(tmp_path, llama(tiny_folder)) as wrapper:
        wrapper.ready()
        os.kill(wrapper.engine_pid(), signal.SIGKILL)
        assert "SIGKILL, as the kernel does to a process when memory runs out" in wrapper.unready().why
        assert wrapper.ready(2).ask("/health")[0] == 200
        os.kill(wrapper.engine_pid(), signal.SIGKILL)
        assert wrapper.exit_code() == ReplicaError.exit_code
        assert "error: the engine llama.cpp was ended by SIGKILL" in wrapper.output


def test_a_frozen_engine_is_not_ready_and_is_started_again(tiny_folder: Path, tmp_path: Path) -> None:
    limits = {"CORDEE_HANG_REPORT_S": "1", "CORDEE_HANG_RESTART_S": "2"}
    with wrapped(tmp_path, llama(tiny_folder), limits) as wrapper:
        wrapper.ready()
        os.kill(wrapper.engine_pid(), signal.SIGSTOP)
        assert "no sign of life" in wrapper.unready().why
        assert wrapper.ready(2).ask("/health")[0] == 200


def test_an_engine_that_does_not_start_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with wrapped(tmp_path, {"engine": "llama.cpp", "model": str(broken)}) as wrapper:
        assert wrapper.exit_code() == ReplicaError.exit_code
        assert "the engine llama.cpp did not start" in wrapper.output
        (report,) = wrapper.read()
        assert isinstance(report, ReplicaUnready)
    with wrapped(tmp_path, {"engine": "llama.cpp", "model": "./nowhere.gguf"}) as wrapper:
        assert wrapper.exit_code() == InputError.exit_code
        assert "nowhere.gguf is not here" in wrapper.output


LIAR = """
import http.server, json, os, sys
class Liar(http.server.BaseHTTPRequestHandler):
    def answer(self, status, body):
        self.send_response(status); self.end_headers(); self.wfile.write(body)
    def do_GET(self):
        self.answer(200, b"ok")
    def do_POST(self):
        self.answer(int(sys.argv[1]), b'{"error": "CUDA out of memory"}')
    def log_message(self, *args): pass
http.server.HTTPServer((os.environ["CORDEE_HOST"], int(os.environ["CORDEE_PORT"])), Liar).serve_forever()
"""


def test_an_engine_that_lies_about_its_health_is_not_ready(tmp_path: Path) -> None:
    (tmp_path / "liar.py").write_text(LIAR)
    limits = {"CORDEE_HANG_RESTART_S": "0.5"}
    command = {"engine": "command", "run": 'exec "$CORDEE_PYTHON" liar.py '}
    with wrapped(tmp_path, {**command, "run": command["run"] + "500"}, limits) as wrapper:
        assert wrapper.exit_code() == ReplicaError.exit_code
        (report,) = wrapper.read()
        assert isinstance(report, ReplicaUnready)
        assert "a completion of one token answers 500" in report.why and "CUDA out of memory" in report.why


def test_a_command_with_another_api_is_ready_when_its_health_is(tmp_path: Path) -> None:
    (tmp_path / "liar.py").write_text(LIAR)
    with wrapped(tmp_path, {"engine": "command", "run": ("python", "liar.py", "404")}, {"CORDEE_GRACE_S": "0.4"}) as it:
        engine = it.ready()
        until(lambda: engine.ask("/anything")[0] == 200, "it answers")
        it.notice()
        assert it.exit_code() == EXIT_CHECKPOINTED


def test_a_command_drains_until_its_connections_are_closed(tmp_path: Path) -> None:
    """It says nothing about its requests; the drain ends long before its deadline."""
    (tmp_path / "liar.py").write_text(LIAR)
    with wrapped(tmp_path, {"engine": "command", "run": ("python", "liar.py", "404")}, {"CORDEE_GRACE_S": "120"}) as it:
        engine = it.ready()
        with socket.create_connection(("127.0.0.1", engine.port)) as request:
            request.sendall(b"POST /v1/completions HTTP/1.1\r\n")
            it.notice()
            assert it.unready().draining
            assert it.process.poll() is None
            began_s = time.monotonic()
        assert it.exit_code() == EXIT_CHECKPOINTED
        assert time.monotonic() - began_s < 60 and "0 requests open" in it.output


def test_a_session_that_pauses_is_on_disk_before_its_engine_crashes(tiny_folder: Path, tmp_path: Path) -> None:
    """A real engine; the pause is played by the clock that is passed in."""
    text = "def main(argv, more): " * 20
    own = tmp_path / "own"
    own.mkdir()
    launch = EngineLaunch(
        model=str(tiny_folder / "tiny.gguf"), served_names=("tiny",), host="127.0.0.1", port=free_port(), context=2048,
        session_folder=str(own), flags=tiny_model.FLAGS,
    )  # fmt: skip
    answers = []
    for engines in (1, 2):
        sessions = IdleSessions(LlamaSessions(), launch, tmp_path / "shared")
        with running(LlamaCpp().command(launch), launch.port) as engine:
            assert sessions.restore(engine.call, 4) == engines - 1
            for prompt in (text, text + "and on")[: 3 - engines]:
                answers.append(json.loads(engine.ask(COMPLETIONS, {"prompt": prompt, "max_tokens": 8})[1]))
                assert sessions.keep(engine.call, 0.0).sessions == 0, "it does not pause yet"
                assert sessions.keep(engine.call, PAUSE_S).sessions == 1
                assert sessions.keep(engine.call, 2 * PAUSE_S).sessions == 0, "it is on disk"
            assert sessions.save(engine.call, time.monotonic() + 60).sessions == 0, "a drain has nothing left to do"
            files = [each for each in (tmp_path / "shared").rglob("*") if each.is_file()]
            assert len(files) == 1, "the session was shorter before"
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
    assert cached[0] == 0 and cached[2] >= answers[2]["usage"]["prompt_tokens"] - 1


def test_idle_sessions_wait_on_disk_for_the_next_replica(tiny_folder: Path, tmp_path: Path) -> None:
    prompt = {"prompt": "def main(argv, more): " * 20, "max_tokens": 8, "temperature": 0}
    models = {"CORDEE_MODELS": str(tmp_path / "models")}
    answers = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        with wrapped(tmp_path / name, llama(tiny_folder), models) as wrapper:
            answers.append(json.loads(wrapper.ready().ask(COMPLETIONS, prompt)[1]))
            wrapper.notice()
            assert wrapper.exit_code() == EXIT_CHECKPOINTED
            assert "saved " in wrapper.output and ("restored " in wrapper.output) == (name == "second")
    cold, warm = (each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers)
    assert cold == 0 and warm >= answers[1]["usage"]["prompt_tokens"] - 1
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
