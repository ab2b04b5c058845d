"""The gateway's overhead, its streams under failing replicas, and the way of a replica back into rotation.

    python benchmarks/gateway.py [--json] [--peers VENV] [--quick] [--busy N] [--only overhead,churn,rotation]

Engines are `tests/serve/gateway/fake_engine.py`: what is measured is the gateway. CPU is that of the gateway's process,
user and system, and counts on a loaded machine too; wall times only beside those of a peer in the same run. `--peers`
names a virtual environment with vllm-router and smg (`pip install vllm-router smg`).
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "serve" / "gateway"))

from fake_engine import expected, template  # noqa: E402
from gateway_rig import FakeEngine, Process, Rig, free_port, post, rig  # noqa: E402

CHAT = "/v1/chat/completions"
TOKENS = 64
KEY = "sk-benchmark"
NICE = 3


@dataclass
class Overhead:
    """CPU of one gateway's process."""

    name: str
    paced_us_per_token: float = 0.0
    burst_ms: float = 0.0
    json_ms: float = 0.0
    added_p50_ms: float = 0.0
    direct_p50_ms: float = 0.0
    rss_mb: float = 0.0


@dataclass
class Churn:
    """Streams while replicas fail."""

    name: str
    streams: int = 0
    broken: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    wrong: int = 0
    clean_end_of_broken: int = 0
    tokens: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    moved: int = 0
    longest_gap_s: float = 0.0
    gap_p99_s: float = 0.0
    gap_p50_s: float = 0.0


def body(prompt: str, limit: int, *, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": "tiny", "messages": messages, "max_tokens": limit, "temperature": 0, "stream": stream}


def run(work: Callable[[aiohttp.ClientSession], Awaitable[Any]]) -> Any:
    async def inner() -> Any:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
        headers = {"Authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=headers
        ) as session:
            return await work(session)

    return uvloop.run(inner())


# -- gateways ------------------------------------------------------------------------------------------------


@contextmanager
def cordee(folder: Path, engines: int, interval_ms: float) -> Iterator[tuple[str, Process, Rig]]:
    """Our gateway with keys, tenants and accounting on."""
    import hashlib

    with rig(folder) as made:
        for i in range(engines):
            made.fake(f"e{i}", interval_ms=interval_ms, slots=1_000, kv_tokens=10_000_000)
        made.routes.more = {
            "keys": [{"hash": hashlib.sha256(KEY.encode()).hexdigest(), "id": "k", "tenant": "t", "models": ["tiny"]}],
            "tenants": [{"name": "t", "weight": 2.0, "rate_per_s": 1e6, "budget_micro_usd": 10**12}],
        }
        made.start()
        assert made.gateway is not None
        yield made.url, made.gateway, made


@contextmanager
def peer(name: str, venv: Path, folder: Path, engines: int, interval_ms: float) -> Iterator[tuple[str, Process, Rig]]:
    """A router that others wrote, over the same engines."""
    port, metrics = free_port(), free_port()
    made = Rig(folder)
    for i in range(engines):
        made.fake(f"e{i}", interval_ms=interval_ms)
    urls = [each.address for each in made.processes]
    program = {"vllm-router": ["vllm-router"], "smg": ["smg", "launch"], "sglang-router": ["sglang-router"]}[name]
    policy = {"vllm-router": "round_robin", "smg": "power_of_two", "sglang-router": "round_robin"}[name]
    words = [str(venv / "bin" / program[0]), *program[1:], "--worker-urls", *urls, "--host", "127.0.0.1", "--port"]
    words += [str(port), "--policy", policy, "--prometheus-port", str(metrics)]
    with (folder / "peer.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    shown = Process.__new__(Process)
    shown.process, shown.address = process, f"http://127.0.0.1:{port}"
    try:
        run(lambda session: _answers(session, shown.address, process))
        yield shown.address, shown, made
    finally:
        process.kill()
        process.wait()
        for each in made.processes:
            each.stop()


async def _answers(session: aiohttp.ClientSession, url: str, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert process.poll() is None, "the peer has ended"
        try:
            async with session.post(url + CHAT, json=body("x", 1, stream=False)) as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.2)
    raise RuntimeError("the peer answers no request")


def gateways(venv: Path | None) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"cordee": cordee}
    for name in ("vllm-router", "smg", "sglang-router"):
        if venv is not None and (venv / "bin" / name).exists():
            found[name] = lambda *given, name=name: peer(name, venv, *given)
    return found


# -- overhead ------------------------------------------------------------------------------------------------


async def count_events(session: aiohttp.ClientSession, url: str, asked: dict[str, Any]) -> int:
    events = 0
    async with session.post(url + CHAT, json=asked) as response:
        assert response.status == 200, await response.text()
        async for data in response.content.iter_any():
            events += data.count(b"\n\n")
    return events


async def one(session: aiohttp.ClientSession, url: str, asked: dict[str, Any]) -> float:
    began = time.perf_counter()
    async with session.post(url + CHAT, json=asked) as response:
        assert response.status == 200, await response.text()
        await response.read()
    return time.perf_counter() - began


def overhead(name: str, start: Callable[..., Any], quick: bool) -> Overhead:
    found = Overhead(name)
    streams, tokens, requests = (32, 100, 600) if quick else (32, 400, 4_000)
    with tempfile.TemporaryDirectory() as folder, start(Path(folder), 2, 10.0) as (url, gateway, made):

        async def paced(session: aiohttp.ClientSession) -> int:
            asked = [count_events(session, url, body(f"{i}", tokens, stream=True)) for i in range(streams)]
            return sum(await asyncio.gather(*asked))

        run(lambda session: count_events(session, url, body("warm", 20, stream=True)))
        cpu_s = gateway.cpu_s()
        events = run(paced)
        found.paced_us_per_token = (gateway.cpu_s() - cpu_s) * 1e6 / events

        async def fast(session: aiohttp.ClientSession) -> None:
            for each in made.processes:
                if isinstance(each, FakeEngine):
                    await post(session, f"{each.address}/fault", {"interval_ms": 0})

        run(fast)

        async def many(session: aiohttp.ClientSession, number: int, stream: bool) -> None:
            async def client(k: int) -> None:
                for i in range(number // 16):
                    await one(session, url, body(f"{k} {i}", TOKENS, stream=stream))

            await asyncio.gather(*[client(k) for k in range(16)])

        for stream in (False, True):
            number = requests if not stream else requests // 4
            run(lambda session, stream=stream: many(session, 64, stream))
            cpu_s = gateway.cpu_s()
            run(lambda session, stream=stream, number=number: many(session, number, stream))
            spent_ms = (gateway.cpu_s() - cpu_s) * 1e3 / (number // 16 * 16)
            if stream:
                found.burst_ms = spent_ms
            else:
                found.json_ms = spent_ms

        async def added(session: aiohttp.ClientSession) -> tuple[float, float]:
            direct, through = [], []
            engine = next(each for each in made.processes if isinstance(each, FakeEngine))
            for _ in range(requests // 8):
                direct.append(await one(session, engine.address, body("x", 1, stream=False)))
                through.append(await one(session, url, body("x", 1, stream=False)))
            return statistics.median(direct) * 1e3, statistics.median(through) * 1e3

        found.direct_p50_ms, through_ms = run(added)
        found.added_p50_ms = through_ms - found.direct_p50_ms
        found.rss_mb = gateway.rss_bytes() / 1e6
    return found


# -- streams while replicas fail -----------------------------------------------------------------------------


@dataclass
class Stream:
    prompt: str
    limit: int
    data: bytearray = field(default_factory=bytearray)
    at_s: float = 0.0
    gap_s: float = 0.0
    cut: bool = False
    error: str = ""

    async def read(self, session: aiohttp.ClientSession, url: str) -> None:
        try:
            async with session.post(url + CHAT, json=body(self.prompt, self.limit, stream=True)) as response:
                if response.status != 200:
                    self.cut, self.error = True, f"status {response.status}: {(await response.text())[:300]}"
                    return
                async for data in response.content.iter_any():
                    now = time.monotonic()
                    if self.at_s:
                        self.gap_s = max(self.gap_s, now - self.at_s)
                    self.at_s = now
                    self.data += data
        except (aiohttp.ClientError, TimeoutError) as error:
            self.cut, self.error = True, f"the client says: {error!r}"

    def verdict(self) -> tuple[bool, bool, bool, int]:
        """Return whether it broke off, is wrong, and broke off with a clean end; and its tokens."""
        text, finish, ids, done = "", None, set(), False
        for line in self.data.split(b"\n\n"):
            if not line.startswith(b"data:"):
                continue
            if line == b"data: [DONE]":
                done = True
                continue
            chunk = json.loads(line[5:])
            if "error" in chunk:
                self.error = str(chunk["error"].get("message", chunk["error"]))
                return True, False, done or b"[DONE]" in self.data, text.count(" w")
            ids.add(chunk["id"])
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                finish = choice.get("finish_reason") or finish
        good, ending, _ = expected(template([{"role": "user", "content": self.prompt}]), self.limit)
        if self.cut or not done:
            return True, not good.startswith(text), done, text.count(" w")
        wrong = (text, finish, len(ids)) != (good, ending, 1)
        return False, wrong, False, text.count(" w")


async def faults(made: Rig, seconds: float, every_s: float, rng: random.Random, may_drain: bool) -> dict[str, int]:
    """Kill, freeze or drain one engine after the other; each is back before the next one fails."""
    engines = [each for each in made.processes if isinstance(each, FakeEngine)]
    counts = {"killed": 0, "frozen": 0, "drained": 0}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        engine, kind = (
            rng.choice(engines),
            rng.choice(["killed", "frozen", "drained"] if may_drain else ["killed", "frozen"]),
        )
        counts[kind] += 1
        if kind == "killed":
            engine.kill()
            await asyncio.sleep(every_s / 3)
            await asyncio.to_thread(engine.start)
        elif kind == "frozen":
            engine.signal(signal.SIGSTOP)
            await asyncio.sleep(every_s * 2 / 3)
            engine.signal(signal.SIGCONT)
        else:
            made.routes.endpoint(f"{engine.name}.1", engine.address, slots=1_000, state="draining")
            made.routes.write()
            await asyncio.sleep(every_s * 2 / 3)
            made.routes.endpoint(f"{engine.name}.1", engine.address, slots=1_000)
            made.routes.write()
        await asyncio.sleep(every_s / 3)
    return counts


@contextmanager
def starved(made: Any, loops: int) -> Iterator[None]:
    """Keep gateway, engines and client on one core beside so many busy loops of a higher priority; 0: leave them be."""
    core = {max(os.sched_getaffinity(0))}
    pids = [os.getpid(), *(each.process.pid for each in made.processes)] if loops else []
    for pid in pids:
        os.sched_setaffinity(pid, core)
        os.setpriority(os.PRIO_PROCESS, pid, NICE)
    first = f"import os; os.sched_setaffinity(0, {core}); os.setpriority(os.PRIO_PROCESS, 0, 0)"
    spin = f"{first}\nwhile True: pass"
    spinning = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(loops)]
    try:
        yield
    finally:
        for each in spinning:
            each.kill()
            each.wait()


def churn(name: str, start: Callable[..., Any], quick: bool, busy: int) -> Churn:
    found = Churn(name)
    streams, tokens, interval_ms, every_s = (100, 60, 100.0, 3.0) if quick else (1_000, 150, 400.0, 5.0)
    with tempfile.TemporaryDirectory() as folder, start(Path(folder), 4, interval_ms) as (url, _, made):

        async def work(session: aiohttp.ClientSession) -> list[Stream]:
            rng = random.Random(0)
            # The lengths differ so that streams end and others go on.
            all_streams = [Stream(f"{i}", rng.randint(tokens // 2, tokens)) for i in range(streams)]
            reading = [asyncio.create_task(each.read(session, url)) for each in all_streams]
            await asyncio.sleep(1.0)
            last_s = tokens * interval_ms / 1e3 * 0.8
            found.faults = await faults(made, last_s, every_s, rng, name == "cordee")
            await asyncio.gather(*reading)
            if name == "cordee":
                async with session.get(url + "/metrics") as response:
                    lines = [each for each in (await response.text()).splitlines() if "requests_moved_total{" in each]
                found.moved = sum(int(float(each.split()[-1])) for each in lines)
            return all_streams

        with starved(made, busy):
            done = run(work)
        found.streams = len(done)
        gaps = sorted(each.gap_s for each in done)
        found.longest_gap_s, found.gap_p99_s = gaps[-1], gaps[int(0.99 * len(gaps))]
        found.gap_p50_s = gaps[len(gaps) // 2]
        for each in done:
            broken, wrong, clean, got = each.verdict()
            found.broken += broken
            if broken:
                when = "in the middle" if got else "before its first token"
                error = f"{when}: {re.sub(r'[0-9]+([.][0-9]+)?', 'N', each.error or 'it ended without [DONE]')}"
                found.errors[error] = found.errors.get(error, 0) + 1
            found.wrong += wrong
            found.clean_end_of_broken += broken and clean
            found.tokens += got
    return found


# -- back in rotation ----------------------------------------------------------------------------------------


def rotation(name: str, start: Callable[..., Any], quick: bool) -> dict[str, Any]:
    """Seconds from the moment an engine answers again to the first request that it gets."""
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder, start(Path(folder), 2, 1.0) as (url, _, made):
        engine = next(each for each in made.processes if isinstance(each, FakeEngine))

        async def work(session: aiohttp.ClientSession) -> None:
            async def ask() -> None:
                try:
                    async with session.post(url + CHAT, json=body(f"{random.random()}", 1, stream=False)) as response:
                        await response.read()
                except aiohttp.ClientError:
                    pass

            for _ in range(2 if quick else 8):
                engine.kill()
                for _ in range(10):
                    await ask()
                await asyncio.to_thread(engine.start)
                began = time.monotonic()
                while time.monotonic() - began < 90:
                    await ask()
                    async with session.get(engine.address + "/stats") as response:
                        if (await response.json())["requests"]:
                            break
                    await asyncio.sleep(0.02)
                times.append(time.monotonic() - began)

        run(work)
    return {"name": name, "seconds_median": statistics.median(times), "seconds_max": max(times), "times": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="churn on one core beside N busy loops")
    parser.add_argument("--only", default="overhead,churn,rotation")
    given = parser.parse_args()
    only = given.only.split(",")
    result: dict[str, Any] = {"load": os.getloadavg(), "overhead": [], "churn": [], "rotation": []}
    for name, start in gateways(given.peers).items():
        if "overhead" in only:
            result["overhead"].append(asdict(overhead(name, start, given.quick)))
        if "rotation" in only:
            result["rotation"].append(rotation(name, start, given.quick))
        if "churn" in only:
            result["churn"].append(asdict(churn(name, start, given.quick, given.busy)))
        if given.json:
            sys.stderr.write(f"{name} is done\n")
    if given.json:
        print(json.dumps(result, indent=1))
        return
    print(f"load {result['load'][0]:.1f}")
    for key in ("overhead", "churn", "rotation"):
        for row in result[key]:
            print(
                key,
                " ".join(
                    f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items() if k != "times"
                ),
            )


if __name__ == "__main__":
    main()
