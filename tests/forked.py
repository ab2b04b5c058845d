"""Ranks that one process forks after it has imported what they need.

A script calls `gang`, and a test calls `run_script` on it. Or `runs.py` forks this file for a script whose
`main(argv)` a test runs many times: it reads from standard input one JSON object a line, `{"world": 2, "argv": [...],
"notice": "step 40", "env": {}}`, and answers each with the exit codes of the ranks and what they printed. As soon as
one prints what `notice` says, the last rank gets SIGTERM.
"""

import importlib.util
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
from cordee.telemetry.host import free_port

LIMIT_S = 280.0


def environments(world: int) -> list[dict[str, str]]:
    """What torch wants to know, for each rank."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def fork(env: dict[str, str], work: Callable[[], object]) -> int:
    """The process id of a child that does the work and exits as a script would."""
    if child := os.fork():
        return child
    code: object = 1
    try:
        os.environ.update(env)
        work()
        code = 0
    except SystemExit as left:
        code = left.code or 0
    except BaseException:  # A forked child must never go on in its parent's code.
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def code_of(child: int) -> int:
    """The exit code, once it has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def gang(world: int, rank_main: Callable[[int], Any]) -> list[tuple[int, Any]]:
    """Of each rank the exit code, and what `rank_main` returned, or left as `answer` in SystemExit, or None."""
    ranks = []
    for rank, env in enumerate(environments(world)):
        read, write = os.pipe()
        ranks.append((fork(env, lambda rank=rank, write=write: _answer(lambda: rank_main(rank), write)), read))
        os.close(write)
    found = []
    for child, read in ranks:
        with os.fdopen(read) as pipe:
            told = pipe.read()
        found.append((code_of(child), json.loads(told) if told else None))
    return found


def _answer(work: Callable[[], Any], write: int) -> None:
    with os.fdopen(write, "w") as pipe:
        try:
            pipe.write(json.dumps(work()))
        except SystemExit as left:
            pipe.write(json.dumps(getattr(left, "answer", None)))
            raise


def run_script(script: Path, *args: str) -> Any:
    """Run a script of gangs, and read the JSON that it prints last."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("CORDEE_", "SLURM_"))}
    env |= {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1", "PYTHONPATH": str(Path(__file__).parent)}
    ((code, said, errors),) = forks.run([[sys.executable, str(script), *args]], [env], LIMIT_S)
    assert code == 0, errors[-6000:]
    return json.loads(said.splitlines()[-1])


def _run(main: Callable[[list[str]], None], order: dict[str, Any]) -> dict[str, Any]:
    notice, (read, write) = order["notice"], os.pipe()

    def work() -> None:
        os.dup2(write, 1)
        os.close(read)
        os.close(write)
        main(order["argv"])

    envs = environments(order["world"])
    if len(envs) == 1:
        del envs[0]["RANK"], envs[0]["LOCAL_RANK"]  # alone, as without a launcher
    ranks = [fork(env | order["env"], work) for env in envs]
    os.close(write)
    lines = []
    with os.fdopen(read) as printed:
        for line in printed:
            lines.append(line.rstrip())
            if notice and notice in line:
                os.kill(ranks[-1], signal.SIGTERM)
                notice = None
    return {"codes": [code_of(rank) for rank in ranks], "lines": lines}


def _serve(path: Path, folder: str) -> None:
    os.chdir(folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print("{}", flush=True)
    for order in sys.stdin:
        print(json.dumps(_run(module.main, json.loads(order))), flush=True)
    sys.stdout.flush()
    os._exit(0)  # Nothing here is worth the seconds that these libraries take to clean up.


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2])
