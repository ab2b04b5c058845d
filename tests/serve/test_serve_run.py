"""A service from `cordee serve run` to its end: a real server, agent and gateway, and replicas that really listen."""

import json
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines_world import FLAGS, RunningEngine, until_ended
from replica_world import plain_flags

from cordee.answers.services import ServiceView
from cordee.client import Client
from cordee.control.spawn import start_server
from cordee.demo import tiny_model
from cordee.events import Event, ModelOrdered, ReplicaReady
from cordee.serve.policy.residency import KEEP
from cordee.workload.spec import JobSpec

ENGINE = """
import json, os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Engine(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, document):
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({"ok": True})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": os.environ["WORD"]}
        choice = {"index": 0, "message": message, "text": os.environ["WORD"], "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        self.answer({"id": "1", "object": "chat.completion", "model": "web", "choices": [choice], "usage": usage})

ThreadingHTTPServer(("127.0.0.1", int(os.environ["CORDEE_PORT"])), Engine).serve_forever()
"""
BODY = json.dumps(
    {"model": "web", "temperature": 0, "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
).encode()


@dataclass
class Place:
    """A home with a server and a gateway, and the folder of the engine."""

    home: Path
    client: Client

    def spec(self, word: str, replicas: str, **section: Any) -> dict[str, Any]:
        (self.home.parent / "engine.py").write_text(ENGINE)
        run = [sys.executable, "engine.py"]
        service = {"replicas": replicas, "drain": "1s", **section}
        made = JobSpec.from_flags(run=run, gpus="1", name="web", env={"WORD": word}, service=service)
        return made.model_dump(mode="json") | {"cwd": str(self.home.parent)}

    def wait(self, done: Callable[[ServiceView], bool]) -> ServiceView:
        deadline_s = time.monotonic() + 120
        while not done(found := self.client.service("web")):
            assert time.monotonic() < deadline_s, found
            time.sleep(0.05)
        return found

    def ask(self, url: str) -> str:
        asked = urllib.request.Request(f"{url}/v1/chat/completions", BODY, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])


@dataclass
class Users:
    """A client that asks one question after the other until it is told to stop."""

    place: Place
    url: str
    answers: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Users":
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._over.wait(0.02):
            try:
                self.answers.append(self.place.ask(self.url))
            except OSError as error:
                self.failures.append(repr(error))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    home = tmp_path / "home"
    start_server(home, slots="3", gateway="auto")
    with Client(home) as client:
        yield Place(home, client)
        client.down()
    until_ended(home)


def all_ready(number: int, revision: int = 1) -> Callable[[ServiceView], bool]:
    def done(service: ServiceView) -> bool:
        ready = [each for each in service.replicas if (each.state, each.revision) == ("ready", revision)]
        return service.state == "ready" and len(ready) == number == len(service.replicas)

    return done


def process_of(job_id: str) -> psutil.Process:
    """Return the wrapper of a replica."""
    for process in psutil.process_iter():
        try:
            if "cordee.serve.replica" in process.cmdline() and process.environ().get("CORDEE_JOB") == job_id:
                return process
        except psutil.Error:
            continue
    raise AssertionError(f"{job_id} has no process")


def test_a_service_lives_through_an_update_and_kills_and_ends(place: Place) -> None:
    place.client.declare(place.spec("one", "2"))
    service = place.wait(lambda each: all_ready(2)(each) and bool(each.urls))
    [url] = service.urls
    assert place.ask(url) == "one"
    with Users(place, url) as users:
        # An update replaces every replica, and no request fails.
        place.client.declare(place.spec("two", "2"))
        place.wait(all_ready(2, revision=2))
        # A replica that is killed comes back as the next attempt of its job.
        victim = place.wait(all_ready(2, revision=2)).replicas[0]
        process_of(victim.job_id).kill()
        back = place.wait(lambda each: all_ready(2, 2)(each) and any(one.epoch == 2 for one in each.replicas))
        assert victim.job_id in [each.job_id for each in back.replicas]
        # The gateway serves on without a server, and the next server goes on with the same replicas.
        os.kill(place.client.health().pid, signal.SIGKILL)
        before = len(users.answers)
        deadline_s = time.monotonic() + 60
        while len(users.answers) < before + 5:
            assert time.monotonic() < deadline_s, "the gateway does not answer"
            time.sleep(0.05)
        start_server(place.home)
        with Client(place.home) as client:
            place.client = client
            after = place.wait(all_ready(2, revision=2))
            assert {each.job_id for each in after.replicas} == {each.job_id for each in back.replicas}
            client.scale("web", "1")
            place.wait(all_ready(1, revision=2))
    assert users.failures == []
    assert set(users.answers) <= {"one", "two"} and users.answers[-1] == "two"
    with Client(place.home) as client:
        place.client = client
        client.end_service("web")
        place.wait(lambda each: not each.replicas)


def test_a_service_sleeps_without_requests_and_wakes_for_one(place: Place) -> None:
    place.client.declare(place.spec("hello", "0..1", idle="2s"))
    assert place.wait(lambda each: bool(each.urls)).state == "idle"
    [url] = place.client.service("web").urls
    assert place.ask(url) == "hello", "the first request is held until a replica is ready"
    assert place.client.service("web").wanted == 1
    place.wait(lambda each: each.state == "idle" and not each.replicas)


def test_a_model_is_served_by_llama_cpp_and_survives_its_replica(place: Place, tiny_folder: Path) -> None:
    service = {"model": str(tiny_folder / "tiny.gguf"), "replicas": "1", "context": 512, "drain": "1s"}
    spec = JobSpec.from_flags(run=(), gpus="1", name="web", service=service)
    place.client.declare(spec.model_dump(mode="json") | {"cwd": str(tiny_folder)})
    [replica] = place.wait(lambda each: all_ready(1)(each) and bool(each.urls)).replicas
    assert (replica.engine, replica.kv_tokens is not None, replica.slots is not None) == ("llama.cpp", True, True)
    [url] = place.client.service("web").urls
    answer = place.ask(url)
    process_of(replica.job_id).kill()
    assert place.ask(url) == answer, "the gateway holds a request that no replica takes"
    place.wait(lambda each: all_ready(1)(each) and each.replicas[0].epoch == 2)
    assert place.ask(url) == answer
    check_that_a_killed_gateway_comes_back(place, url, answer)


def check_that_a_killed_gateway_comes_back(place: Place, url: str, answer: str) -> None:
    """Its open stream breaks off without a clean end, and a client that tries again gets its answer at the same URL."""
    body = json.dumps(json.loads(BODY) | {"stream": True, "max_tokens": 400}).encode()
    pid_file, got = place.home / "gateway.pid", b""
    killed = pid_file.read_text().split()[0]
    asked = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as stream:
        got += stream.readline()
        os.kill(int(killed), signal.SIGKILL)
        with suppress(OSError, HTTPException):
            while line := stream.readline():
                got += line
    assert b"[DONE]" not in got, "a client sees that the answer is not whole"
    deadline_s = time.monotonic() + 60
    while True:
        try:
            assert place.ask(url) == answer
            break
        except OSError:
            assert time.monotonic() < deadline_s, "the gateway is started again"
            time.sleep(0.05)
    assert pid_file.read_text().split()[0] != killed


@dataclass
class Reader:
    """A client that streams one answer of a model after the other until it is told to stop."""

    url: str
    model: str
    answers: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def read(self, over: threading.Event) -> None:
        body = {**json.loads(BODY), "model": self.model, "stream": True, "max_tokens": 16}
        while not over.wait(0.05):
            asked = urllib.request.Request(
                f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            try:
                with urllib.request.urlopen(asked, timeout=120) as answer:
                    events = [line[6:] for line in answer if line.startswith(b"data: ")]
            except OSError as error:
                self.failures.append(repr(error))
                continue
            chunks = [json.loads(each) for each in events if each.strip() != b"[DONE]"]
            if events[-1].strip() != b"[DONE]" or any("error" in each for each in chunks):
                self.failures.append(repr(events[-1]))
            texts = (choice["delta"].get("content") for each in chunks for choice in each["choices"])
            self.answers.append("".join(text or "" for text in texts))


def test_three_models_on_two_replicas_swap_without_thrash_or_a_broken_stream(
    place: Place, tiny_folder: Path, llama: RunningEngine, tmp_path: Path
) -> None:
    """All three are asked all the time: each gets its turn, and each answer is that of its own model."""
    folders = [tiny_folder, tmp_path / "bee", tmp_path / "cat"]
    for seed, folder in enumerate(folders[1:], start=1):
        tiny_model.build(folder, seed=seed)
    service = {"model": str(tiny_folder), "models": [*map(str, folders[1:])], "context": 512, "drain": "1s"}
    service |= {"replicas": "2", "flags": plain_flags(FLAGS)}
    spec = JobSpec.from_flags(run=(), gpus="1", name="web", service=service)
    place.client.declare(spec.model_dump(mode="json") | {"cwd": str(tmp_path)})
    [url] = place.wait(lambda each: all_ready(2)(each) and bool(each.urls)).urls
    readers = [Reader(url, name) for name in ("tiny", "bee", "web/cat")]
    over = threading.Event()
    threads = [threading.Thread(target=each.read, args=(over,)) for each in readers]
    for each in threads:
        each.start()
    log: list[Event] = []

    def orders() -> list[ModelOrdered]:
        log[:] = [event for _, event in place.client.events()]
        return [event for event in log if isinstance(event, ModelOrdered)]

    try:
        deadline_s = time.monotonic() + 180
        while len(orders()) < 2 + 4:  # Each replica begins with a model; then each model comes and goes.
            assert time.monotonic() < deadline_s, log
            time.sleep(0.2)
    finally:
        over.set()
        for each in threads:
            each.join()
    assert [each.failures for each in readers] == [[], [], []]
    texts = [set(each.answers) for each in readers]
    assert [len(each) for each in texts] == [1, 1, 1] and len(set.union(*texts)) == 3
    body = {**json.loads(BODY), "max_tokens": 16}
    assert texts[0] == {json.loads(llama.ask("/v1/chat/completions", body)[1])["choices"][0]["message"]["content"]}

    loads = [event for event in log if isinstance(event, ReplicaReady)]
    took_us = [each.load_us or 0 for each in loads]
    assert {each.model for each in orders()} == {*map(str, folders)}
    elapsed_us = max(each.at_us for each in log) - min(each.at_us for each in loads)
    assert sum(took_us[2:]) <= 2 * elapsed_us / (1 + KEEP) + 2 * max(took_us)
    assert len(took_us[2:]) <= 2 * (elapsed_us / ((1 + KEEP) * min(took_us)) + 1)
    assert place.client.cost().gpu_us.loading >= sum(took_us)
