"""Start a server beside this process, and find out whether one is there. Needs none of the server's libraries."""

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from cordee.client import Client, HealthView, from_body
from cordee.errors import HomeInUseError, MissingExtraError, NoServerError

_NEEDS = ("fastapi", "uvicorn", "sqlalchemy", "alembic", "structlog")
_RIVAL_WAIT_S = 20.0


def running(home: Path) -> HealthView | None:
    """The health of the home's server; None if none answers."""
    try:
        with Client(home) as client:
            return client.health()
    except NoServerError:
        return None


def start_server(home: Path, *, slots: int | None = None, price_as: str | None = None) -> HealthView:
    """Start a server that outlives this process, and wait until it takes jobs.

    Args:
        home: the folder that it will own.
        slots: offer so many CPU slots in place of GPUs.
        price_as: account each slot at this GPU's price.

    Raises:
        HomeInUseError: one runs there already.
        HomeUnsuitableError, StoreError, ServerError: it could not start.
        MissingExtraError: the server's libraries are not installed.
    """
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"a server needs {', '.join(missing)}, which is not installed", hint="pip install 'cordee[server]'"
        )
    argv = [sys.executable, "-m", "cordee.control.server", "--home", str(home.absolute())]
    argv += ["--slots", str(slots)] if slots is not None else []
    argv += ["--price-as", price_as] if price_as is not None else []
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, cwd="/"
    )
    assert process.stdout is not None, "it is a pipe"
    with process.stdout as said, process.stderr as _:  # type: ignore[union-attr]
        line = said.readline()
    answer = json.loads(line) if line.strip() else {}
    error = from_body(answer)
    if error is not None:
        process.wait()
        raise error
    if "ready" not in answer:
        code = process.wait()
        raise NoServerError(
            f"the server ended with exit code {code} before it was ready", hint=f"see {home}/server.log"
        )
    with Client(home) as client:
        return client.health()


def ensure_server(home: Path, *, slots: int | None = None) -> tuple[HealthView, bool]:
    """The home's server, started if none answers; the second value tells whether it was."""
    found = running(home)
    if found is not None:
        return found, False
    try:
        return start_server(home, slots=slots), True
    except HomeInUseError:
        return _wait_for_rival(home), False


def _wait_for_rival(home: Path) -> HealthView:
    """Somebody else is starting a server right now: theirs will do."""
    deadline = time.monotonic() + _RIVAL_WAIT_S
    while True:
        found = running(home)
        if found is not None:
            return found
        if time.monotonic() > deadline:
            raise NoServerError(
                f"a server holds {home}, and did not answer within {_RIVAL_WAIT_S:.0f} s", hint=f"see {home}/server.log"
            )
        time.sleep(0.05)


def is_owned(home: Path) -> bool:
    """Whether a server process holds the home's lock."""
    import fcntl

    try:
        fd = os.open(home / "server.lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
