"""A gateway process, engines behind it, and clients of its API, for the tests of this folder and the benchmark."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from cordee.telemetry.host import free_port

HERE = Path(__file__).parent
SRC = HERE.parents[2] / "src"
DEADLINE_S = 60.0
T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what} did not come within {deadline_s:g} s")


class Process:
    """A child process that prints its address first."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.command, self.log = list(command), log
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as errors:
            self.process = subprocess.Popen(
                self.command,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": str(SRC)},
                text=True,
            )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address.startswith("http://"), self.log.read_text()[-3000:]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._close()

    def _close(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
        self._close()

    def cpu_s(self) -> float:
        """CPU seconds that it has used, of user and system."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024


class FakeEngine(Process):
    """`fake_engine.py` on a port that it keeps."""

    def __init__(self, folder: Path, name: str, interval_ms: float = 0.0) -> None:
        self.name, self.port = name, free_port()
        script = str(HERE / "fake_engine.py")
        super().__init__(
            [sys.executable, script, str(self.port), "--interval-ms", str(interval_ms)], folder / f"{name}.log"
        )


@dataclass
class Routes:
    """The file of routes that a gateway without a server follows."""

    path: Path
    services: dict[str, dict[str, Any]] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    version: int = 0

    def service(self, name: str = "chat", **keys: Any) -> None:
        self.services[name] = {"models": ["tiny"], "context": 32_768, "endpoints": [], **keys}

    def endpoint(self, name: str, address: str, service: str = "chat", **keys: Any) -> None:
        found = {"id": name, "address": address, "engine": "llama.cpp", "model": "tiny", "state": "ready", **keys}
        old = [each for each in self.services[service]["endpoints"] if each["id"] != name]
        self.services[service]["endpoints"] = [*old, found]

    def write(self) -> None:
        self.version += 1
        services = [{"name": name, **each} for name, each in self.services.items()]
        document = {"version": self.version, "services": services, **self.more}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(document))
        new.replace(self.path)


class Rig:
    """A gateway, its routes and its engines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.routes = Routes(folder / "routes.json")
        self.routes.service()
        self.processes: list[Process] = []
        self.gateway: Process | None = None

    def fake(self, name: str, *, interval_ms: float = 0.0, **keys: Any) -> FakeEngine:
        """Start a fake engine as a replica of the service."""
        engine = FakeEngine(self.folder, name, interval_ms)
        self.processes.append(engine)
        self.routes.endpoint(f"{name}.1", engine.address, **keys)
        return engine

    def start(self, *words: str) -> str:
        """Start the gateway; return its address."""
        self.routes.write()
        command = [
            sys.executable, "-m", "cordee.serve.gateway", "--listen", "127.0.0.1:0", "--name", "g",
            "--routes", str(self.routes.path), "--spool", str(self.folder / "spool"), *words,
        ]  # fmt: skip
        self.gateway = Process(command, self.folder / "gateway.log")
        self.processes.insert(0, self.gateway)
        return self.gateway.address

    @property
    def url(self) -> str:
        assert self.gateway is not None
        return self.gateway.address

    def signal_gateway(self, number: int) -> None:
        assert self.gateway is not None
        self.gateway.signal(number)

    def log(self) -> str:
        return (self.folder / "gateway.log").read_text()

    def usage(self) -> list[dict[str, Any]]:
        """Return the rows of the journals."""
        paths = sorted((self.folder / "spool").glob("*.jsonl"))
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


@contextmanager
def rig(folder: Path) -> Iterator[Rig]:
    made = Rig(folder)
    try:
        yield made
    finally:
        for process in made.processes:
            process.stop()


@dataclass
class Answer:
    """A stream as a client got it."""

    status: int = 0
    text: str = ""
    finish: str | None = None
    usage: dict[str, int] | None = None
    ids: set[str] = field(default_factory=set)
    done: bool = False
    error: dict[str, Any] | None = None
    events: int = 0
    at_s: list[float] = field(default_factory=list)

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.at_s, self.at_s[1:], strict=False)), default=0.0)

    def take(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            assert not line.strip() or line.startswith(b":"), line
            return
        assert not self.done, f"{line!r} after [DONE]"
        data = line[5:].strip()
        if data == b"[DONE]":
            self.done = True
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.error = chunk["error"]
            return
        self.events += 1
        self.at_s.append(time.monotonic())
        self.ids.add(chunk["id"])
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            assert self.finish is None, "text after the finish reason"
            self.text += (choice.get("text") if "text" in choice else choice["delta"].get("content")) or ""
            self.finish = choice.get("finish_reason") or self.finish


def chat(prompt: str, limit: int = 64, *, stream: bool = True, **keys: Any) -> dict[str, Any]:
    """Return the body of a chat request."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], "max_tokens": limit, "temperature": 0}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body | keys


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    *,
    path: str = "/v1/chat/completions",
    on_event: Callable[[Answer], Awaitable[None]] | None = None,
    headers: dict[str, str] | None = None,
    answer: Answer | None = None,
) -> Answer:
    """Send a request, and read its stream to the end."""
    answer = answer or Answer()
    async with session.post(url + path, json=body, headers=headers) as response:
        answer.status = response.status
        if response.status != 200:
            answer.error = (await response.json())["error"]
            return answer
        async for line in response.content:
            before = answer.events
            answer.take(line.rstrip(b"\n"))
            if on_event is not None and answer.events > before:
                await on_event(answer)
    return answer


def run(work: Callable[[aiohttp.ClientSession], Awaitable[T]]) -> T:
    """Run a client."""

    async def inner() -> T:
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            return await work(session)

    return asyncio.run(inner())


async def post(session: aiohttp.ClientSession, url: str, body: Any) -> Any:
    async with session.post(url, json=body) as response:
        return await response.json()


async def get(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as response:
        return await response.json()


async def until(condition: Callable[[], Awaitable[bool]], what: str, deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not await condition():
        assert time.monotonic() < end, f"{what} did not come within {deadline_s:g} s"
        await asyncio.sleep(0.01)
