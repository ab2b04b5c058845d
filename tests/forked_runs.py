"""Runs a module's `main(argv)` many times, each time in processes of its own that are forked after the imports.

The libraries of these tests take longer to import than their jobs take to run. Reads from standard input one JSON
object a line, `{"world": 2, "argv": [...], "notice": "step 40"}`, and answers each with the exit codes of its ranks and
what they printed. As soon as a rank prints what `notice` says, the last rank gets SIGTERM.

    python forked_runs.py tests/train/integrations/huggingface_script.py
"""

import importlib.util
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Main = Callable[[list[str]], None]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def rank_of(main: Main, argv: list[str], env: dict[str, str], pipe: tuple[int, int]) -> int:
    """The process id of a rank that runs main and prints into the pipe."""
    child = os.fork()
    if child:
        return child
    os.dup2(pipe[1], 1)
    os.close(pipe[0])
    os.close(pipe[1])
    os.environ.update(env)
    code: object = 1
    try:
        main(argv)
        code = 0
    except SystemExit as left:
        code = left.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def run(main: Main, order: dict[str, Any]) -> dict[str, Any]:
    world, notice = order["world"], order["notice"]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(world), **order["env"]}
    pipe = os.pipe()
    ranks = [
        rank_of(
            main, order["argv"], {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else shared, pipe
        )
        for rank in range(world)
    ]
    os.close(pipe[1])
    lines = []
    with os.fdopen(pipe[0]) as printed:
        for line in printed:
            lines.append(line.rstrip())
            if notice and notice in line:
                os.kill(ranks[-1], signal.SIGTERM)
                notice = None
    return {"codes": [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks], "lines": lines}


def main_of(path: Path) -> Main:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Main = module.main
    return found


if __name__ == "__main__":
    its_main = main_of(Path(sys.argv[1]))
    print("{}", flush=True)
    for each in sys.stdin:
        print(json.dumps(run(its_main, json.loads(each))), flush=True)
    sys.stdout.flush()
    os._exit(0)  # Nothing here is worth the seconds that these libraries take to clean up.
