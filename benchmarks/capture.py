"""Capture the code of a folder, and lay it out on one node: read, sent, fetched, copied; against `cp -r` of the folder.

    python benchmarks/capture.py [--files 5000] [--bytes 50_000_000] [--git] [--json]

Server and node are on this machine: their disk is one, and the network is its loopback.
"""

import argparse
import json
import random
import resource
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cordee.agent.copies import Copies
from cordee.agent.launch import Assignment
from cordee.agent.settings import AgentSettings
from cordee.agent.uplink import Uplink
from cordee.cli.capture import capture_job
from cordee.client import Client
from cordee.control.node_tokens import DerivedTokens
from cordee.control.spawn import start_server
from cordee.events import Lease
from cordee.storage.content import Contents
from cordee.workload.spec import JobSpec

RACY_S = 2.5


def make_folder(folder: Path, files: int, n_bytes: int) -> None:
    """Write files of random sizes and contents, 50 a folder."""
    rng = random.Random(1)
    weights = [rng.uniform(0.1, 1.9) for _ in range(files)]
    scale = n_bytes / sum(weights)
    for number, weight in enumerate(weights):
        path = folder / f"part{number // 50}" / f"file{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(rng.randbytes(round(weight * scale)))


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds and the processor seconds of this process and its children that an action takes."""
    began_s, began_cpu_s = time.perf_counter(), cpu_s()
    action()
    return time.perf_counter() - began_s, cpu_s() - began_cpu_s


def cpu_s() -> float:
    """Return the processor seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


class Node:
    """The transfers of a node with a folder of its own, which acts for the server's local node."""

    def __init__(self, client: Client, home: Path, folder: Path, job: JobSpec) -> None:
        self._job_id = client.submit(job.model_dump(mode="json")).job.job_id
        while client.job(self._job_id).state != "running":
            time.sleep(0.05)
        token = DerivedTokens((home / "token").read_text().strip()).issue("local")
        AgentSettings(node="local", servers=(client.url,), token=token).write(folder)
        self._folder, self._digest, self._woken = folder, job.files, threading.Semaphore(0)
        self._copies = Copies(Contents(folder / "files"), lambda: Uplink(folder), self._woken.release)

    def lay_out(self, name: str) -> None:
        """Make one copy."""
        order = Assignment(
            job_id=self._job_id,
            epoch=1,
            node="local",
            leases=(Lease(node="local", gpus=(0,)),),
            spec={"run": ["sleep", "600"], "files": self._digest},
            master_addr="127.0.0.1",
            master_port=1,
        )
        self._copies.make(order, self._folder / name)
        self._woken.acquire()
        [copied] = self._copies.made()
        assert not copied.why, copied.why


def commit(folder: Path) -> None:
    """Make a repository of git of the folder."""
    git = ["git", "-C", str(folder), "-c", "user.name=ada", "-c", "user.email=ada@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)


def measure(scratch: Path, files: int, n_bytes: int, *, git: bool) -> list[tuple[str, float, float]]:
    """Return the steps with their seconds and processor seconds."""
    folder, home = scratch / "folder", scratch / "home"
    folder.mkdir()
    make_folder(folder, files, n_bytes)
    if git:
        commit(folder)
    time.sleep(RACY_S)  # files that have just changed are read again, as by git
    rows = [("cp -r", *timed(lambda: subprocess.run(["cp", "-r", folder, scratch / "cp"], check=True)))]
    start_server(home, slots="1")
    try:
        with Client(home) as client:
            spec = JobSpec(run=("sleep", "600"), gpus=1, cwd=str(folder), name="bench")
            rows.append(("the first time, to an empty server", *timed(lambda: capture_job(client, spec, remote=False))))
            rows.append(("the same folder again", *timed(lambda: capture_job(client, spec, remote=False))))
            with (folder / "part0" / "file0.py").open("ab") as file:
                file.write(b"x = 1\n")
            rows.append(("with one file changed", *timed(lambda: capture_job(client, spec, remote=False))))
            node = Node(client, home, scratch / "node", capture_job(client, spec, remote=False)[0])
            rows.append(("fetch and lay out on a node", *timed(lambda: node.lay_out("attempts/bench/1/local"))))
            rows.append(("lay out for the next attempt", *timed(lambda: node.lay_out("attempts/bench/2/local"))))
    finally:
        with Client(home) as client:
            client.down()
    return rows


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--bytes", type=int, default=50_000_000)
    parser.add_argument("--git", action="store_true", help="a folder that is a repository")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(Path(scratch), args.files, args.bytes, git=args.git)
    if args.json:
        print(json.dumps([{"step": step, "s": s, "cpu_s": cpu} for step, s, cpu in rows], indent=1))
        return
    print(f"{args.files:,} files, {args.bytes:,} bytes\n{'':34}{'s':>8}{'x cp':>8}{'CPU s':>8}")
    for step, took_s, used_s in rows:
        print(f"{step:34}{took_s:8.2f}{took_s / rows[0][1]:8.1f}{used_s:8.2f}")


if __name__ == "__main__":
    main()
