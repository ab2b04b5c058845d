"""A team at its server: what 20 browsers and 100 clients of the API wait for, and whether decisions wait for them.

    python benchmarks/team.py [--json] [--browsers 20] [--clients 100] [--seconds 30] [--jobs 10000] [--nodes 12500]

A real server has a log of 10,000 jobs of a month; 40 simulated agents are its nodes, 24 of their GPUs are held and jobs
wait. Its phases, each `--seconds` long:

alone     one job after the other is submitted, started and stopped
busy      the same, while two processes for each core of this machine only use processor time
clients   the same, while clients of the API each ask for the next route every `--every` seconds
browsers  the same, while pages in Chromium each go to the next page every `--dwell` seconds, and follow it meanwhile
together  the same, with both

Before them each route is asked once, alone: the first answers of a server that has just started.

*busy* tells what of a delay is the machine's: browsers, clients and server share its cores. A decision takes from the
submission as it stands in the log to the placement there; an order until it has arrived at the node's agent, with the
commits. Then /metrics of another server is read whose log has `--nodes` nodes of 8 GPUs without agents.
"""

import argparse
import json
import multiprocessing
import os
import platform
import secrets
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

from cordee.events import AttemptPlaced, JobSubmitted
from machines_agents import Fleet, now_us, percentile
from machines_server import RunningServer, cpu_s, pss_bytes, until
from team_load import Load, Visit, browsers, clients
from team_log import NODES, PEOPLE, large, month

Row = dict[str, object]
BEAT_S, PAUSE_S = 2.0, 0.1
RUNNING, WAITING = 6, 8  # jobs of 4 GPUs in a queue that may hold 24
SCRAPES = 20
SCRAPE_S, SCRAPE_BYTES = 1.0, 10_000_000
PHASES = ("alone", "busy", "clients", "browsers", "together")


def log(text: str) -> None:
    """Say how far it is."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class TeamServer:
    """A server with a month of jobs behind it, and a team's jobs on 40 simulated nodes."""

    def __init__(self, jobs: int) -> None:
        self.tokens = [secrets.token_hex(32) for _ in PEOPLE]
        ended: list[str] = []

        def fill(home: Path) -> None:
            ended.append(month(home, jobs))
            file = home / "tokens"
            file.touch(mode=0o600)
            file.write_text("".join(f"{name} {token}\n" for name, token in zip(PEOPLE, self.tokens, strict=True)))

        self.server = RunningServer(fill, price_as="H100")
        try:
            self.fleet = Fleet(self.server.url, self.server.secret, ends=False)
            self.fleet.beat(BEAT_S)
            self.fleet.connect(NODES)
            self.fleet.wait(lambda counts: counts.up == NODES)
            gangs = [self._submit(4, "batch", "pretrain") for _ in range(RUNNING + WAITING)]
            until(lambda: sum(self.server.client.job(job).state == "running" for job in gangs) == RUNNING)
        except BaseException:
            self.server.close()
            raise
        self.jobs = {"ended": ended[0], "running": gangs[0], "waiting": gangs[-1]}

    def _submit(self, gpus: int, queue: str, name: str) -> str:
        where = {"cwd": str(self.server.folder), "launch": "rank"}
        spec = {"run": ["true"], "gpus": gpus, "name": name, "queue": queue, **where}
        return self.server.client.submit(spec, unprotected=True).job.job_id

    def pages(self) -> dict[str, str]:
        """Return the paths of the pages by what they show."""
        names = ("queues", "cost", "nodes", "sweeps", "services", "artifacts", "audit", "lab")
        jobs = {f"/jobs/JOB, {what}": f"/jobs/{job}" for what, job in self.jobs.items()}
        return {"/": "/", **jobs, **{f"/{name}": f"/{name}" for name in names}}

    def routes(self) -> dict[str, str]:
        """Return the paths of routes of the API by what they answer."""
        running, ended, waiting = (self.jobs[what] for what in ("running", "ended", "waiting"))
        newest = self.server.client.health().log_number
        plain = ("health", "nodes", "queues", "live", "sweeps", "services", "budgets", "cost?by=user", "chargeback")
        return {
            **{f"/v1/{name}": f"/v1/{name}" for name in plain},
            "/v1/jobs, a page of 1,000": "/v1/jobs",
            "/v1/jobs?limit=50": "/v1/jobs?limit=50",
            "/v1/jobs/JOB, running": f"/v1/jobs/{running}",
            "/v1/jobs/JOB, ended": f"/v1/jobs/{ended}",
            "/v1/jobs/JOB/why": f"/v1/jobs/{waiting}/why",
            "/v1/jobs/JOB/metrics": f"/v1/jobs/{running}/metrics",
            "/v1/jobs/JOB/cost": f"/v1/jobs/{ended}/cost",
            "/v1/audit?limit=50": "/v1/audit?newest=true&limit=50",
            "/v1/events, 100 of them": f"/v1/events?after={newest - 100}",
            "/metrics": "/metrics",
        }

    def first(self) -> Row:
        """Return the times of the first answers, in ms."""
        found: Row = {}
        for name, path in self.routes().items():
            from_s = time.perf_counter()
            with urlopen(_asked(self.server.client.url + path, self.tokens[0]), timeout=300) as answer:
                answer.read()
            found[name] = round(1e3 * (time.perf_counter() - from_s), 1)
        return found

    def decisions(self, ends: threading.Event) -> Row:
        """Submit a job, wait for its order, and stop it, again and again until it is told to end."""
        client, orders, sent = self.server.client, self.fleet.counts.orders, dict[str, int]()
        after = client.health().log_number
        while not ends.is_set():
            from_us = now_us()
            job = self._submit(1, "research", "probe")
            until(lambda job=job: (job, 1) in orders)  # type: ignore[misc]
            sent[job] = from_us
            client.stop(job, now=True)
            time.sleep(PAUSE_S)
        submitted, decided = dict[str, int](), list[float]()
        for _, event in client.events(after):
            if isinstance(event, JobSubmitted):
                submitted[event.job.job_id] = event.at_us
            elif isinstance(event, AttemptPlaced) and event.job_id in sent:
                decided.append((event.at_us - submitted[event.job_id]) / 1e3)
        arrived = [(orders[job, 1][0] - from_us) / 1e3 for job, from_us in sent.items()]
        return {"jobs": len(sent), **_times("decision_ms", decided), **_times("order_ms", arrived)}

    def close(self) -> None:
        """End the server and its nodes."""
        self.fleet.close()
        self.server.close()


def _asked(url: str, token: str) -> Request:
    return Request(url, headers={"Authorization": f"Bearer {token}"})


def _times(name: str, values: Sequence[float]) -> Row:
    """Return the middle, the 99th percentile and the most of measured times."""
    if not values:
        return {}
    shown = {"p50": statistics.median(values), "p99": percentile(values, 0.99), "max": max(values)}
    return {f"{name}_{part}": round(value, 1) for part, value in shown.items()}


def _spin() -> None:
    while True:
        pass


@contextmanager
def busy() -> Iterator[None]:
    """Use the processor with two processes for each core."""
    context = multiprocessing.get_context("spawn")
    spinning = [context.Process(target=_spin, daemon=True) for _ in range(2 * (os.cpu_count() or 1))]
    for each in spinning:
        each.start()
    try:
        yield
    finally:
        for each in spinning:
            each.kill()
            each.join()


def phase(team: TeamServer, loads: dict[str, Load], seconds: float) -> Row:
    """Measure decisions while these ask."""
    ends, pid = threading.Event(), team.server.pid
    timer = threading.Timer(seconds, ends.set)
    used_s, from_s = cpu_s(pid), time.perf_counter()
    for load in loads.values():
        load.begin(seconds)
    timer.start()
    found = team.decisions(ends)
    took_s = time.perf_counter() - from_s
    used_s = cpu_s(pid) - used_s
    row: Row = {
        "seconds": round(took_s, 1),
        "server_cpu_s": round(used_s, 2),
        "server_cpu_s_per_s": round(used_s / took_s, 3),
        "memory_bytes": pss_bytes(pid),
        "load": round(os.getloadavg()[0], 1),
        "decisions": found,
    }
    return row | {name: _visits(load.end(), seconds) for name, load in loads.items()}


def _visits(found: Sequence[Visit], seconds: float) -> Row:
    """Return the times by page or route."""
    names = dict.fromkeys(visit.what for visit in found)
    by_name = {name: [visit for visit in found if visit.what == name] for name in names}
    return {
        "answers": len(found),
        "answers_per_s": round(len(found) / seconds, 1),
        "wrong": dict(Counter(visit.wrong for visit in found if visit.wrong)),
        "bytes": sum(visit.size for visit in found),
        "all": _times_of(found),
        **{name: _times_of(visits) for name, visits in sorted(by_name.items())},
    }


def _times_of(visits: Sequence[Visit]) -> Row:
    good = [visit for visit in visits if not visit.wrong]
    sizes = [visit.size for visit in good]
    return {
        "n": len(good),
        **_times("answer_ms", [visit.answer_ms for visit in good if visit.answer_ms is not None]),
        **_times("first_paint_ms", [visit.paint_ms for visit in good if visit.paint_ms is not None]),
        **({"bytes_p50": round(statistics.median(sizes)), "bytes_max": max(sizes)} if sizes else {}),
    }


def measured(given: argparse.Namespace) -> dict[str, Row]:
    """Return what each phase measured."""
    log(f"a log of {given.jobs:,} jobs is written")
    team, rows, loads = TeamServer(given.jobs), dict[str, Row](), dict[str, Load]()
    try:
        log("the server runs; each route is asked once")
        rows["first"] = team.first()
        log("browsers and clients start")
        tokens = [team.tokens[at % len(team.tokens)] for at in range(max(given.browsers, given.clients))]
        url = team.server.client.url
        loads["browsers"] = Load(browsers, url, tokens[: given.browsers], team.pages(), given.dwell)
        loads["clients"] = Load(clients, url, tokens[: given.clients], team.routes(), given.every)
        for name in PHASES:
            log(f"{name}: {given.seconds:g} s")
            if name == "busy":
                with busy():
                    rows[name] = phase(team, {}, given.seconds)
            else:
                here = {each: load for each, load in loads.items() if name in (each, "together")}
                rows[name] = phase(team, here, given.seconds)
            log(json.dumps({key: value for key, value in rows[name].items() if key not in loads}))
    finally:
        for load in loads.values():
            load.close()
        team.close()
    return rows


def scrape(nodes: int) -> Row:
    """Return what /metrics takes on a server of so many nodes."""
    log(f"a log of {nodes:,} nodes is written")
    server = RunningServer(lambda home: large(home, nodes), lease="1h")
    times, text = list[float](), ""
    silent = f'cordee_nodes{{state="silent"}} {nodes}\n'
    asked = _asked(f"{server.client.url}/metrics", server.client.token)
    try:

        def read() -> bool:
            nonlocal text
            with urlopen(asked, timeout=60) as answer:
                text = answer.read().decode()
            return silent in text

        log("the server notices that no agent beats")
        until(read, timeout_s=120)
        used_s = cpu_s(server.pid)
        for _ in range(SCRAPES):
            from_s = time.perf_counter()
            read()
            times.append(1e3 * (time.perf_counter() - from_s))
        used_s = cpu_s(server.pid) - used_s
    finally:
        server.close()
    load = round(os.getloadavg()[0], 1)
    cpu_ms = round(1e3 * used_s / SCRAPES, 1)
    return {"nodes": nodes, "n": SCRAPES, "bytes": len(text), **_times("ms", times), "cpu_ms": cpu_ms, "load": load}


def _machine() -> Row:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {"cpu": model or platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}


def main() -> None:
    """Measure, and print tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--browsers", type=int, default=20)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase")
    parser.add_argument("--jobs", type=int, default=10_000, help="in the log")
    parser.add_argument("--nodes", type=int, default=12_500, help="of the server whose metrics are read")
    parser.add_argument("--dwell", type=float, default=5.0, help="seconds for which a browser stays on a page")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two requests of a client")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.jobs < 1_000:
        parser.error(f"--jobs {given.jobs}: a log of fewer than 1,000 jobs has nothing to retire")
    found: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": _machine(),
        "load_before": round(os.getloadavg()[0], 1),
        "command": "python benchmarks/team.py " + " ".join(sys.argv[1:]),
    }
    phases, metrics = measured(given), scrape(given.nodes)
    met = {"time": metrics["ms_max"] < 1e3 * SCRAPE_S, "bytes": metrics["bytes"] < SCRAPE_BYTES}  # type: ignore[operator]
    found |= {"phases": phases, "scrape": {**metrics, "met": met}}
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for name, row in phases.items():
        print(f"{name}: " + _line({key: value for key, value in row.items() if not isinstance(value, dict)}))
        for part in ("decisions", "browsers", "clients"):
            _print(part, row.get(part))
    print("scrape: " + _line(metrics))


def _print(name: str, row: object) -> None:
    if isinstance(row, dict):
        print(f"  {name:28} " + _line({key: value for key, value in row.items() if not isinstance(value, dict)}))
        for key, value in row.items():
            if isinstance(value, dict):
                print(f"    {key:26} " + _line(value))


def _line(row: Row) -> str:
    return "  ".join(f"{key} {value}" for key, value in row.items())


if __name__ == "__main__":
    main()
