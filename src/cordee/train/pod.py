"""The ranks of one pod of Kubernetes: `python -m cordee.train.pod --gpus 8 --nodes 2 -- python train.py`.

It starts a process per GPU with the variables of torchrun, hands SIGTERM on to them, and leaves with an exit code that
says whether they failed. torchrun would leave with 1, or with 0 for ranks that only checkpointed. Imports no torch.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from cordee.errors import EXIT_CHECKPOINTED, StopError

TURN_S = 0.1  # between two looks at the ranks
LEFT = (EXIT_CHECKPOINTED, StopError.exit_code)
GRACE_S = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks, wait for them, and return the pod's exit code."""
    parser = argparse.ArgumentParser(prog="python -m cordee.train.pod", description="Start the ranks of one pod.")
    parser.add_argument("--gpus", type=int, required=True, help="Ranks of this pod.")
    parser.add_argument("--nodes", type=int, default=1, help="Pods of the job.")
    parser.add_argument("command", nargs="+", help="Command of one rank, after `--`.")
    given = parser.parse_args(argv)
    noticed = False

    def on_notice(number: int, frame: object) -> None:
        nonlocal noticed
        noticed = True

    signal.signal(signal.SIGTERM, on_notice)
    node = int(os.environ.get("JOB_COMPLETION_INDEX", "0"))
    ranks = [
        subprocess.Popen(
            given.command,
            env=os.environ | rank_env(node, local, gpus=given.gpus, nodes=given.nodes),
            start_new_session=True,  # so that a notice reaches the rank behind a shell
        )
        for local in range(given.gpus)
    ]
    kill_at_s = None
    codes: list[int] = []  # in the order in which the ranks ended
    while running := [rank for rank in ranks if rank.returncode is None]:
        codes += [code for rank in running if (code := rank.poll()) is not None]
        # After a failure the other ranks would wait for the failed one for ever.
        if kill_at_s is None and (noticed or any(code not in (0, *LEFT) for code in codes)):
            _signal(running, signal.SIGTERM)
            kill_at_s = time.monotonic() + float(os.environ.get("CORDEE_GRACE_S") or GRACE_S)
        if kill_at_s is not None and time.monotonic() > kill_at_s:
            _signal(running, signal.SIGKILL)
        time.sleep(TURN_S)
    return exit_code(codes)


def rank_env(node: int, local: int, *, gpus: int, nodes: int) -> dict[str, str]:
    """Return the variables of one rank.

    >>> rank_env(1, 3, gpus=8, nodes=2)["RANK"]
    '11'
    """
    numbers = {"RANK": node * gpus + local, "LOCAL_RANK": local, "NODE_RANK": node, "GROUP_RANK": node}
    numbers |= {"WORLD_SIZE": nodes * gpus, "LOCAL_WORLD_SIZE": gpus, "NNODES": nodes}
    return {name: str(number) for name, number in numbers.items()}


def exit_code(codes: Iterable[int]) -> int:
    """Return the pod's exit code by the ranks' codes, first to last: the first failure, else 75, else 60, else 0.

    >>> exit_code([0, 0]), exit_code([75, 60]), exit_code([75, -9, 60]), exit_code([1, -15])
    (0, 75, 137, 1)
    """
    shell = [128 - code if code < 0 else code for code in codes]
    failures = [code for code in shell if code not in (0, *LEFT)]
    return failures[0] if failures else max(shell)


def _signal(ranks: Iterable[subprocess.Popen[bytes]], number: int) -> None:
    for rank in ranks:
        if rank.returncode is not None:
            continue
        with suppress(ProcessLookupError):
            os.killpg(rank.pid, number)


if __name__ == "__main__":
    sys.exit(main())
