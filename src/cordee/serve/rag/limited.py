"""`python -m cordee.serve.rag.limited BYTES COMMAND...`: a command that may not have more anonymous memory than this.

RLIMIT_DATA counts the heap and private mappings: an engine's KV cache and its buffers. Weights that it maps from their
file are not counted; they are pages that the system may drop.
"""

import os
import resource
import sys


def main(words: list[str]) -> None:
    """Limit this process, and become the command."""
    limit = int(words[0])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    os.execvp(words[1], words[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
