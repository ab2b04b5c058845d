"""The function that runs on a Ray node, as a Ray task: it starts the node's agent as a daemon, and ends.

Ray sends it by value: the node needs Cordee for the agent only, and says so if it is missing.
"""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

START_S = 30.0  # for an agent to take its folder's lock

# A child of this process, in a session of its own, is nobody's child when this process has ended: it outlives the Ray
# worker, the raylet and the head. Ray lowers the priority of its workers and gives them to the kernel's OOM killer
# first; the agent, and with it the ranks, takes the raylet's values.
_LAUNCH = """
import os, subprocess, sys
nice, oom_score, log, *argv = sys.argv[1:]
try:
    os.setpriority(os.PRIO_PROCESS, 0, int(nice))
except PermissionError:
    pass
try:
    open("/proc/self/oom_score_adj", "w").write(oom_score)
except OSError:
    pass
out = open(log, "ab")
agent = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd="/")
print(agent.pid, os.getpriority(os.PRIO_PROCESS, 0))
agent.returncode = 0
"""


def start_agent(folder: str, config: Mapping[str, object], args: Sequence[str]) -> dict[str, object]:
    """Start the agent of this node unless one runs in its folder; return its facts when it holds the folder's lock.

    Args:
        folder: of the agent; `~` is the home of the user that Ray runs as.
        config: the content of `agent.json`.
        args: arguments of the interpreter; `{folder}` stands for the folder.

    Returns:
        `started`: whether there was none; `nice`: the niceness of the agent; `python`: its interpreter.

    Raises:
        RuntimeError: the agent ended at once, or did not start in time; the message has the end of its log.
    """
    place = Path(folder).expanduser()
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    facts: dict[str, object] = {"python": sys.executable, "folder": str(place)}
    _write_private(place / "agent.json", json.dumps(config))  # an agent reads it whenever it dials
    if _is_locked(place / "lock"):
        return facts | {"started": False, "nice": 0}
    log = place / "agent.log"
    before = log.stat().st_size if log.exists() else 0
    pid, nice = _launch([sys.executable, *(arg.replace("{folder}", str(place)) for arg in args)], log)
    until_s = time.monotonic() + START_S
    while not _is_locked(place / "lock"):
        if not _is_running(pid) or time.monotonic() > until_s:
            with log.open("rb") as file:
                file.seek(before)
                last = file.read().decode(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"the agent under {sys.executable} did not start: {''.join(last) or 'no output'}")
        time.sleep(0.02)
    return facts | {"started": True, "nice": nice}


def _launch(argv: list[str], log: Path) -> tuple[int, int]:
    raylet = os.getppid()
    nice, oom_score = os.getpriority(os.PRIO_PROCESS, raylet), Path(f"/proc/{raylet}/oom_score_adj").read_text().strip()
    done = subprocess.run(
        [sys.executable, "-c", _LAUNCH, str(nice), oom_score, str(log), *argv],
        env=_environment(raylet),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=START_S,
    )
    pid, own_nice = done.stdout.split()
    return int(pid), int(own_nice)


def _environment(raylet: int) -> dict[str, str]:
    """Return the environment that the raylet was started with, without what Ray adds for itself and its workers.

    A worker's OMP_NUM_THREADS is the number of its CPUs, or 1, and would change the sums of every rank.
    """
    lines = Path(f"/proc/{raylet}/environ").read_bytes().decode(errors="surrogateescape").split("\0")
    given = dict(line.split("=", 1) for line in lines if "=" in line)
    own = {name: value for name, value in given.items() if name in os.environ and not name.startswith("RAY_")}
    # The indices of the GPUs that Ray has reserved for this task.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return own if visible is None else own | {"CUDA_VISIBLE_DEVICES": visible}


def _is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # in a container nobody may reap it


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _write_private(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    new.replace(path)
