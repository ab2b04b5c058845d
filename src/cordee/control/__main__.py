"""`python -m cordee.control`: the server as a process of its own."""

import gc
import sys

from cordee.imports import end_uncollected, uncollected

if __name__ == "__main__":
    with uncollected():
        from cordee.control.server import main
    gc.freeze()  # a first pass over what was imported would take a tenth of a start
    end_uncollected()
    sys.exit(main())
