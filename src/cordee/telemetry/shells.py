"""Where the process of an interactive job listens: a small file in its spool names the socket.

The socket itself lies in a folder with a short path, since the path of a socket has 107 bytes at most.
"""

import json
from pathlib import Path

_NAME = "shell.json"


def write_shell_socket(spool: Path, path: Path) -> None:
    """Name the socket in the spool."""
    fresh = spool / f".{_NAME}"
    fresh.write_text(json.dumps({"socket": str(path)}))
    fresh.replace(spool / _NAME)


def shell_socket(spool: Path) -> Path | None:
    """Return the socket of the shell; None if there is none yet."""
    try:
        return Path(str(json.loads((spool / _NAME).read_text())["socket"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
