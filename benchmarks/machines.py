"""Many machines: how fast orders reach ranks, and what a server costs by the number of its nodes.

    python benchmarks/machines.py [PART ...] [--json] [--out FILE] [--agents 10 100 1000] [--beating 1000 4000 12500]

start     from the decision (its commit included) to the first and the last rank of a gang: 4 ranks over 3 real agents
          among N nodes, and the arrival of the orders at 4 of N simulated agents
reports   reports of ranks a second that the server takes in and commits, from 100 simulated agents
beats     processor time and memory of the server by the number of nodes that beat, and what a claim costs it
virtual   the same in virtual time, without sockets: also where the agents' part does not fit this machine
freeze    time until a node is noticed whose agent and ranks are stopped (SIGSTOP), and what the other nodes lose
local     start of a rank on one machine; beside an earlier version with --before PATH_TO_ITS_SRC
database  fail-over of two servers and commits a second (failover.py)
log       start of a server by the length of its log (long_log.py)

Simulated agents (machines_agents.py) speak the real messages over real WebSockets with a real server process. Without
a PART it runs all of them, one after the other, in half an hour and 2 GB. Each says how busy the
machine was: where the load was above the number of cores, what a clock measured tells of the queue for them too; what
is given as processor time holds. A part that fails says why, and the others go on.
"""

import argparse
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from cordee.errors import CordeeError
from cordee.events import AttemptPlaced, Event, NodeReachable, NodeUnreachable, RanksStarted
from machines_agents import Fleet, SimulatedAgent, percentile
from machines_server import RunningServer, cpu_s, pss_bytes, until
from machines_virtual import virtual

Row = dict[str, object]
BEAT_S = 2.0
US_PER_MS = 1000


def start(sizes: Sequence[int], rounds: int) -> list[Row]:
    """Measure the start of gangs among N nodes."""
    rows: list[Row] = []
    for size in sizes:
        rows += [_start_real(size, rounds), _start_simulated(size, rounds)]
    return rows


def _start_real(size: int, rounds: int) -> Row:
    """Return the times of 4 ranks over 3 real agents, the other nodes being simulated and without free slots."""
    server = RunningServer()
    try:
        for node, slots in (("real0", 2), ("real1", 1), ("real2", 1)):
            server.start_agent(node, slots)
        fleet = _fleet(server, size - 3, usable=False)
        jobs = []
        for _ in range(rounds):
            jobs.append(server.submit(["true"], 4))
            server.until_state(jobs[-1], "done", "failed")
        starts: dict[str, list[int]] = {}
        placed: dict[str, int] = {}
        for _, event in server.client.events():
            if isinstance(event, AttemptPlaced):
                placed[event.job_id] = event.at_us
            elif isinstance(event, RanksStarted):
                starts.setdefault(event.job_id, []).append(event.at_us)
        fleet.close()
    finally:
        server.close()
    times = [[(at_us - placed[job]) / US_PER_MS for at_us in sorted(starts[job])] for job in jobs]
    assert all(len(each) == 3 for each in times), "each gang has ranks on 3 nodes"
    return {"agents": size, "ranks": "4 over 3 real agents", **_first_and_last(times)}


def _start_simulated(size: int, rounds: int) -> Row:
    """Return the times until the orders for a gang of 4 nodes arrive at simulated agents."""
    server = RunningServer()
    try:
        fleet = _fleet(server, size)
        jobs = []
        for _ in range(rounds):
            jobs.append(server.submit(["true"], 4))
            server.until_state(jobs[-1], "done", "failed")
        placed = {event.job_id: event.at_us for _, event in server.client.events() if isinstance(event, AttemptPlaced)}
        orders = fleet.counts.orders
        times = [[(at_us - placed[job]) / US_PER_MS for at_us in sorted(orders[job, 1])] for job in map(str, jobs)]
        fleet.close()
    finally:
        server.close()
    return {"agents": size, "ranks": "orders at 4 simulated agents", **_first_and_last(times)}


def _fleet(server: RunningServer, size: int, *, usable: bool = True, ends: bool = True) -> Fleet:
    """Return simulated agents whose nodes are up and beat."""
    fleet = Fleet(server.url, server.secret, usable=usable, ends=ends)
    fleet.beat(BEAT_S)
    fleet.connect(size)
    fleet.wait(lambda counts: counts.up == size)
    return fleet


def _first_and_last(times: Sequence[Sequence[float]]) -> Row:
    first, last = [each[0] for each in times], [each[-1] for each in times]
    return {
        "first_ms_p50": round(statistics.median(first), 1),
        "last_ms_p50": round(statistics.median(last), 1),
        "last_ms_min": round(min(last), 1),
        "last_ms_max": round(max(last), 1),
        "n": len(times),
    }


def reports(seconds: float) -> list[Row]:
    """Measure how many reports of 100 ranks on 100 nodes the server commits a second."""
    size = 100
    server = RunningServer()
    try:
        fleet = _fleet(server, size, ends=False)
        job = server.submit(["true"], size)
        until(lambda: all(agent.attempt is not None for agent in fleet.agents))
        fleet.each(SimulatedAgent.report_much)
        rows: list[Row] = []
        for _ in range(3):
            before, began_s, used_s = fleet.counts.committed, time.perf_counter(), cpu_s(server.pid)
            time.sleep(seconds)
            took_s, done = time.perf_counter() - began_s, fleet.counts.committed - before
            used_s = cpu_s(server.pid) - used_s
            rows.append({"agents": size, "reports_per_s": round(done / took_s), "cpu_us": round(used_s / done * 1e6)})
        fleet.each(SimulatedAgent.report_no_more)
        server.client.stop(job, now=True)
        fleet.close()
    finally:
        server.close()
    return rows


def beats(sizes: Sequence[int], seconds: float) -> list[Row]:
    """Measure one server whose nodes become more and more."""
    rows: list[Row] = []
    server = RunningServer()
    try:
        fleet = Fleet(server.url, server.secret)
        fleet.beat(BEAT_S)
        empty_bytes = pss_bytes(server.pid)
        for size in sizes:
            more, began_s, used_s = size - len(fleet.agents), time.perf_counter(), cpu_s(server.pid)
            try:
                fleet.connect(size, at_once=500)
                fleet.wait(lambda counts, size=size: counts.up >= size, timeout_s=max(100, more / 20))  # type: ignore[misc]
            except AssertionError as error:  # what was measured of fewer stays
                load = round(os.getloadavg()[0], 1)
                rows.append({"agents": size, "up": fleet.counts.up, "not_reached": str(error), "load": load})
                break
            claims_s, claims_cpu_s = time.perf_counter() - began_s, cpu_s(server.pid) - used_s
            rows.append(
                {
                    "agents": size,
                    **_beats(server, fleet, seconds),
                    "memory_bytes": pss_bytes(server.pid),
                    "memory_bytes_per_agent": (pss_bytes(server.pid) - empty_bytes) // size,
                    "claims_per_s": round(more / claims_s),
                    "claim_cpu_ms": round(claims_cpu_s / more * 1e3, 2),
                    "unreachable": sum(isinstance(event, NodeUnreachable) for _, event in server.client.events()),
                    "connections_lost": fleet.counts.lost,
                    "load": round(os.getloadavg()[0], 1),
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr)
        fleet.close()
    finally:
        server.close()
    return rows


def _beats(server: RunningServer, fleet: Fleet, seconds: float) -> Row:
    """Return what the beats of the next seconds cost."""
    time.sleep(BEAT_S)
    answers = fleet.counts.answers_s
    answers.clear()
    began_s, used_s = time.perf_counter(), cpu_s(server.pid)
    time.sleep(seconds)
    took_s, used_s, found = time.perf_counter() - began_s, cpu_s(server.pid) - used_s, list(answers)
    return {
        "beats_per_s": round(len(found) / took_s),
        "beats_due_per_s": round(len(fleet.agents) / BEAT_S),
        "cpu_s_per_s": round(used_s / took_s, 3),
        "cpu_us_per_beat": round(used_s / len(found) * 1e6),
        "answer_ms_p50": round(percentile(found, 0.5) * 1e3, 1),
        "answer_ms_p99": round(percentile(found, 0.99) * 1e3, 1),
    }


def freeze(rounds: int) -> list[Row]:
    """Stop one of three nodes, each with a running rank, until it is noticed; let it go on, until that is noticed."""
    server = RunningServer()
    noticed, back = [], []
    try:
        agents = [server.start_agent(f"real{number}", 1) for number in range(3)]
        jobs = [server.submit(["sleep", "1000"], 1) for _ in agents]
        until(lambda: all(server.client.job(job).state == "running" for job in jobs))
        for number in range(rounds):
            agent = agents[number % 3]
            pids = [agent.pid, *_descendants(agent.pid)]
            for how, kind, times in (
                (signal.SIGSTOP, NodeUnreachable, noticed),
                (signal.SIGCONT, NodeReachable, back),
            ):
                count, at_s = _count(server, kind), time.time()
                for pid in pids:
                    os.kill(pid, how)
                until(lambda kind=kind, count=count: _count(server, kind) > count)  # type: ignore[misc]
                event = [event for _, event in server.client.events() if isinstance(event, kind)][-1]
                times.append(event.at_us / 1e6 - at_s)
        details = [server.client.job(job) for job in jobs]
        lost = sum(detail.state != "running" or len(detail.attempts) != 1 for detail in details)
        others = _count(server, NodeUnreachable) - rounds
    finally:
        server.close()
    return [
        {
            "nodes": 3,
            "rounds": rounds,
            "noticed_s_p50": round(statistics.median(noticed), 2),
            "noticed_s_max": round(max(noticed), 2),
            "back_s_p50": round(statistics.median(back), 2),
            "ranks_lost": lost,
            "other_nodes_unreachable": others,
        }
    ]


def _descendants(pid: int) -> list[int]:
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(each for child in children for each in _descendants(child))]


def _count(server: RunningServer, kind: type[Event]) -> int:
    return sum(isinstance(event, kind) for _, event in server.client.events())


LOCAL = """
import json, sys, tempfile, time
from pathlib import Path
from cordee.client import Client
from cordee.control.spawn import start_server
from cordee.events import AttemptPlaced, RanksStarted
rounds = int(sys.argv[1])
with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
    home = Path(folder) / "home"
    start_server(home, slots="4")
    with Client(home) as client:
        jobs, times = [], []
        for _ in range(rounds):
            spec = {"run": ["true"], "gpus": 4, "name": "bench", "cwd": folder, "launch": "rank"}
            began_s = time.perf_counter()
            jobs.append(client.submit(spec, unprotected=True).job.job_id)
            while client.job(jobs[-1]).state not in ("done", "failed"):
                time.sleep(0.01)
            times.append(1e3 * (time.perf_counter() - began_s))
        events = [event for _, event in client.events()]
        placed = {each.job_id: each.at_us for each in events if isinstance(each, AttemptPlaced)}
        began = {each.job_id: each.at_us for each in events if isinstance(each, RanksStarted)}
        client.down()
print(json.dumps({"start_ms": [(began[job] - placed[job]) / 1e3 for job in jobs], "job_ms": times}))
"""


def local(before: Path | None, rounds: int, turns: int) -> list[Row]:
    """Measure a job of 4 ranks that do nothing on one machine, this version and an earlier one in turn."""
    found: dict[str, dict[str, list[float]]] = {}
    versions = {"now": Path(__file__).absolute().parents[1] / "src"}
    versions |= {} if before is None else {"before": before.absolute()}
    for _ in range(turns):
        for name, src in versions.items():
            env = {**os.environ, "PYTHONPATH": str(src)}
            argv = [sys.executable, "-c", LOCAL, str(rounds)]
            done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
            for key, values in json.loads(done.stdout.splitlines()[-1]).items():
                found.setdefault(name, {}).setdefault(key, []).extend(values)
    return [
        {"version": name, "n": rounds * turns}
        | {f"{key}_{label}": round(of(values), 1) for key, values in kinds.items() for label, of in _SPREAD.items()}
        for name, kinds in found.items()
    ]


_SPREAD: dict[str, Callable[[list[float]], float]] = {"p50": statistics.median, "min": min, "max": max}


def database(rounds: int) -> list[Row]:
    """Return what failover.py measures."""
    found = _script("failover.py", "--rounds", str(rounds), "--commits", "300")
    parts: dict[str, dict[str, Row]] = json.loads(found)
    return [
        {"what": name, **{key: round(float(str(value)), 3) for key, value in figures.items()}}
        for part in ("commits", "failover")
        for name, figures in parts[part].items()
    ]


def log(lengths: Sequence[int]) -> list[Row]:
    """Return what long_log.py measures."""
    lines = _script("long_log.py", *map(str, lengths)).splitlines()
    keys = ("events", "replay_s", "start_s", "tail", "longest_commit_ms")
    return [{key: row[key] for key in keys} for row in map(json.loads, lines)]


def _script(name: str, *words: str) -> str:
    argv = [sys.executable, str(Path(__file__).with_name(name)), "--json", *words]
    with tempfile.TemporaryFile() as said:
        return subprocess.run(argv, stdout=subprocess.PIPE, stderr=said, text=True, check=True).stdout


def measured(part: Callable[[], list[Row]]) -> Row:
    """Return the rows of a part, or why it failed, with what the part itself took of the machine."""
    load, began_s, used_s = os.getloadavg()[0], time.perf_counter(), _cpu_s()
    found: Row = {}
    try:
        found["rows"] = part()
    except (AssertionError, CordeeError, OSError, subprocess.SubprocessError) as error:
        found["failed"] = f"{type(error).__name__}: {error}"
    wall_s, loads = time.perf_counter() - began_s, [load, os.getloadavg()[0]]
    found |= {"load": [round(each, 1) for each in loads], "wall_s": round(wall_s), "cpu_s": round(_cpu_s() - used_s)}
    found["wall_clock_holds"] = max(loads) <= (os.cpu_count() or 1) + 1
    return found


def _cpu_s() -> float:
    """Return the processor time of this process and of its children that have ended, in seconds."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


def main() -> None:
    """Measure, and print a line for each row or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--agents", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--beating", type=int, nargs="+", default=[1000, 4000, 12_500])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--events", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--before", type=Path, help="src of an earlier version")
    parser.add_argument("--out", type=Path, help="the file for the JSON")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))  # each simulated agent is an open file
    parts: dict[str, Callable[[], list[Row]]] = {
        "start": lambda: start(args.agents, args.rounds),
        "reports": lambda: reports(args.seconds),
        "beats": lambda: beats(args.beating, args.seconds),
        "virtual": lambda: virtual(args.beating, max(10, round(args.seconds))),
        "freeze": lambda: freeze(max(3, args.rounds // 4)),
        "local": lambda: local(args.before, args.rounds, 3),
        "database": lambda: database(args.rounds),
        "log": lambda: log(args.events),
    }
    if unknown := set(args.parts) - set(parts):
        parser.error(f"{', '.join(unknown)}: the parts are {', '.join(parts)}")
    found: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "arguments": sys.argv[1:],
    }
    failed = False
    for name in args.parts or parts:
        part = measured(parts[name])
        failed = failed or "failed" in part
        found[name] = part
        for row in cast("list[Row]", part.get("rows", [])) if not args.json else ():
            print(f"{name:9}", "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rest = "  ".join(f"{key} {value}" for key, value in part.items() if key != "rows")
        print(f"{name:9} {rest}", file=sys.stderr, flush=True)
        if args.out is not None:  # after each part, so that what was measured stays if a later one is ended
            args.out.write_text(json.dumps(found, indent=1) + "\n")
    if args.json:
        print(json.dumps(found))
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
