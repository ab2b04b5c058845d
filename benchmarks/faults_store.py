"""The object store of `faults.py`: an S3 server of its own behind the tests' proxy, which fails a share of requests."""

import http.client
import os
import signal
import subprocess
import sys
from pathlib import Path

from faults_scenes import EVERY, UNNOTICED_MAX, die_at, last_uploaders_end
from faults_world import NotRun, Outcome, Run

SHARE = 0.08
TESTS = Path(__file__).parent.parent / "tests"


def bad_network(run: Run) -> Outcome:
    """Two attempts over a network that fails 8 % of all requests, the first one killed."""
    if run.name != "cordee":
        raise NotRun("needs s3fs or a connector, which is not installed")
    port, processes = _serve(run.rng.randrange(1 << 30))
    env = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    try:
        to = "s3://bucket/run"
        run.start(40, to=to, env=env, in_step=die_at(3 * EVERY + 2)).wait()
        last_uploaders_end(run)
        return run.verdict(run.finish(20, to=to, env=env), lost_max=UNNOTICED_MAX)
    finally:
        for each in processes:
            each.kill()
            each.wait()


def _serve(seed: int) -> tuple[int, list[subprocess.Popen[bytes]]]:
    """The port of the proxy, which runs in a process of its own: threads here would not survive a fork."""
    code = (
        "import sys, s3_world, subprocess, os\n"
        "server = subprocess.Popen([sys.executable, '-c', s3_world._SERVE], stdout=subprocess.PIPE, stderr=-3)\n"
        "proxy = s3_world.Proxy(int(server.stdout.readline()))\n"
        f"proxy.fault = proxy.by_chance({seed}, {SHARE})\n"
        "print(proxy.server_port, proxy.behind, server.pid, flush=True)\n"
        "proxy.serve_forever(poll_interval=0.05)\n"
    )
    proxy = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(TESTS)}
    )
    assert proxy.stdout is not None, "it was started with a pipe"
    port, behind, server = map(int, proxy.stdout.readline().split())
    direct = http.client.HTTPConnection("127.0.0.1", behind)
    direct.request("PUT", "/bucket")
    direct.getresponse().read()
    return port, [proxy, _Server(server)]  # type: ignore[list-item]


class _Server:
    """The server behind the proxy, which is its child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Its parent, the proxy, has gone too."""
