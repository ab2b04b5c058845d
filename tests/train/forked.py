"""Gangs of real torch ranks, one after the other, from one process that has imported torch once: a start costs 0.1 s.

A script calls `gangs`; a test calls `run_script` on it.
"""

import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S = 280.0


def gang(world: int, rank_main: Callable[[int], Any]) -> list[tuple[int, Any]]:
    """Fork so many ranks; the exit code of each, and what `rank_main` returned or None."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            _be_rank(write, lambda rank=rank: rank_main(rank))
        os.close(write)
        ranks.append((pid, read))
    found = []
    for pid, read in ranks:
        with os.fdopen(read) as pipe:
            told = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        found.append((code, json.loads(told) if told else None))
    return found


def _be_rank(write: int, work: Callable[[], Any]) -> None:
    code = 1
    os.set_inheritable(write, False)
    try:
        with os.fdopen(write, "w") as pipe:
            answer: list[Any] = []
            try:
                answer.append(work())
                code = 0
            except SystemExit as left:
                code = int(left.code or 0)
                answer.append(getattr(left, "answer", None))
            pipe.write(json.dumps(answer[0]))
    except BaseException:  # A forked child must never go on in its parent's code.
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_script(script: Path, *args: str) -> Any:
    """Run a script of gangs, and read the JSON that it prints last."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("CORDEE_", "SLURM_"))}
    env |= {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
    done = subprocess.run(
        [sys.executable, str(script), *args], env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])
