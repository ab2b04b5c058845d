"""Runs a script's `main(argv)` many times, each time in processes of its own that are forked after the imports.

The libraries of these tests take longer to import than their jobs take to run. Reads from standard input one JSON
object a line, `{"world": 2, "argv": [...]}`, and answers each with the exit codes of its ranks.

    python loop_forked.py huggingface_script < plan
"""

import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def rank_of(main: Callable[[list[str]], None], argv: list[str], env: dict[str, str]) -> int:
    """The process id of a rank that runs main."""
    child = os.fork()
    if child:
        return child
    code: object = 1
    try:
        os.environ.update(env)
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


def serve(main: Callable[[list[str]], None]) -> None:
    for line in sys.stdin:
        order = json.loads(line)
        world = order["world"]
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(world)}
        ranks = [
            rank_of(main, order["argv"], {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {})
            for rank in range(world)
        ]
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    serve(importlib.import_module(sys.argv[1]).main)
