"""`python -m cordee.serve.rag.limited BYTES COMMAND...`: a command that dies with us, and has no more memory than this.

RLIMIT_DATA counts the heap and private mappings: an engine's KV cache and its buffers. Weights that it maps from their
file are not counted; they are pages that the system may drop. 0 is no limit. A server that is killed leaves no engine.
"""

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def main(words: list[str]) -> None:
    """Limit this process, tie it to its parent, and become the command."""
    parent, limit = os.getppid(), int(words[0])
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)  # It died before this.
    os.execvp(words[1], words[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
