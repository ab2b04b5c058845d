"""The ranks of a pod: one process per GPU, SIGTERM handed on, and an exit code by which a Job knows what happened."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cordee.telemetry.host import free_port
from cordee.workload.kubernetes import Cluster, job_objects
from cordee.workload.spec import parse_spec

SCRIPT = Path(__file__).with_name("job_script.py")
LIMIT_S = 120.0
STEPS = 40


def pod(folder: Path, text: str, index: int = 0, *, gpus_per_node: int = 8, **env: str) -> "subprocess.Popen[str]":
    """Start the container of a rendered job as a process, as the kubelet would."""
    objects = job_objects(parse_spec(text), Cluster(image="i", gpus_per_node=gpus_per_node))
    container: Any = objects[-1]["spec"]["template"]["spec"]["containers"][0]
    # The kubelet reads $$ as $.
    own = {each["name"]: each["value"].replace("$$", "$") for each in container["env"]}
    argv = [sys.executable, *container["command"][1:], *(word.replace("$$", "$") for word in container["args"])]
    more = {"JOB_COMPLETION_INDEX": str(index), "CUDA_VISIBLE_DEVICES": "", "CORDEE_CLOUD": "none"}
    output = (folder / f"pod{index}.txt").open("a")
    with output:
        return subprocess.Popen(
            argv, env=os.environ | own | more | env, cwd=folder, stdout=output, stderr=subprocess.STDOUT, text=True
        )


def until(true: Callable[[], bool], says: Callable[[], str]) -> None:
    by_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < by_s, says()
        time.sleep(0.05)


def test_each_rank_has_its_variables(tmp_path: Path) -> None:
    run = "echo $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR:$MASTER_PORT > rank$RANK"
    assert pod(tmp_path, f"run: '{run}'\ngpus: 4", 1, gpus_per_node=2).wait(LIMIT_S) == 0
    found = sorted(path.read_text().strip() for path in tmp_path.glob("rank*"))
    assert found == ["2 0 4 job-0.job:29500", "3 1 4 job-0.job:29500"]


def test_a_rank_that_fails_ends_the_others_and_its_code_is_the_pods(tmp_path: Path) -> None:
    run = "test $RANK = 1 && exit 3; exec sleep 300"
    started_s = time.monotonic()
    assert pod(tmp_path, f"run: '{run}'\ngpus: 2").wait(LIMIT_S) == 3
    assert time.monotonic() - started_s < 60


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    run = 'trap "" TERM; touch up; while :; do sleep 0.2; done'
    process = pod(tmp_path, f"run: '{run}'\ngpus: 1\non_preempt: {{grace: 1s}}")
    until((tmp_path / "up").exists, lambda: "the rank did not start")
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 137


def test_a_notice_reaches_a_rank_behind_a_shell(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(75)))\n"
        "pathlib.Path('up').touch()\n"
        "while True: time.sleep(0.1)\n"  # a handler that comes just before a sleep waits for its end
    )
    process = pod(tmp_path, f"run: 'cd . && {sys.executable} rank.py'\ngpus: 1")
    until((tmp_path / "up").exists, lambda: "the rank did not start")
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 75


@pytest.mark.gang
def test_a_gang_of_pods_is_preempted_and_resumes_at_the_same_step(tmp_path: Path) -> None:
    """SIGTERM reaches one of two pods; both leave with 75, and the pods that replace them finish."""
    port = str(free_port())

    def pods(*args: str) -> list["subprocess.Popen[str]"]:
        run = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--steps", str(STEPS), *args]
        text = json.dumps({"run": run, "gpus": 2, "checkpoint": {"to": "s3://not-used/here"}})
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CORDEE_CHECKPOINT_TO": str(tmp_path / "to")}
        return [pod(tmp_path, text, index, gpus_per_node=1, **own) for index in range(2)]

    def output() -> str:
        return "\n".join(path.read_text() for path in sorted(tmp_path.glob("pod*.txt")))

    def steps(rank: int) -> list[int]:
        path = tmp_path / f"steps{rank}"
        return [int(step) for step in re.findall(r"\d+", path.read_text())] if path.exists() else []

    first = pods("--hold", "1:3")
    try:
        until(lambda: 3 in steps(1), output)
        first[1].send_signal(signal.SIGTERM)
        assert [each.wait(LIMIT_S) for each in first] == [75, 75], output()
        assert len(steps(0)) < STEPS
        second = pods()
        assert [each.wait(LIMIT_S) for each in second] == [0, 0], output()
    finally:
        for each in first:
            each.kill()
    assert steps(0) == steps(1) == list(range(STEPS)), output()
