"""A real server that is suspended for longer than its nodes' lease: their ranks save and leave, and the job goes on."""

import os
import signal
import sys
import time
from pathlib import Path

from cordee.client import Client
from cordee.control.spawn import is_owned, start_server
from cordee.events import AttemptEnded, NodeDown, NodeUp, Outcome, RanksStarted

DEADLINE_S = 60.0
SAVES = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (open(os.environ["OUT"] + "/left", "w"), sys.exit(75)))
open(os.environ["OUT"] + "/began" + os.environ["CORDEE_EPOCH"], "w")
while True: time.sleep(0.1)  # a handler that comes just before a sleep waits for its end
"""


def until(condition, what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not come"
        time.sleep(0.02)


def test_a_suspended_server_finds_its_job_saved_and_starts_it_again(tmp_path: Path) -> None:
    home = tmp_path / "home"
    pid = start_server(home, slots="1", lease="3s").pid
    with Client(home) as client:
        spec = {"name": "long", "run": [sys.executable, "-c", SAVES], "gpus": 1, "env": {"OUT": str(tmp_path)}}
        job_id = client.submit(spec, unprotected=True).job.job_id
        until((tmp_path / "began1").exists, "the first attempt")
        os.kill(pid, signal.SIGSTOP)
        try:
            until((tmp_path / "left").exists, "the notice")
        finally:
            os.kill(pid, signal.SIGCONT)
        until((tmp_path / "began2").exists, "the second attempt")
        client.stop(job_id, now=True)
        events = [event for _, event in client.events()]
        assert [event.outcome for event in events if isinstance(event, AttemptEnded)][:1] == [Outcome.CHECKPOINTED]
        assert len([event for event in events if isinstance(event, RanksStarted)]) == 2
        assert [event.node.epoch for event in events if isinstance(event, NodeUp)] == [1]
        assert not [event for event in events if isinstance(event, NodeDown)], "its own silence proves nothing"
        client.down()
    until(lambda: not is_owned(home), "the server's end")
