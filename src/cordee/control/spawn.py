"""Start a server in another process, and find out whether one runs. The server's libraries are not imported."""

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from cordee.answers.view import HealthView
from cordee.client import Client
from cordee.errors import HomeInUseError, HomeUnsuitableError, MissingExtraError, NoServerError, from_body
from cordee.servers import read_remote

_NEEDS = ("fastapi", "uvicorn", "websockets", "sqlalchemy", "alembic", "structlog", "cryptography", "blake3", "xxhash")
_RIVAL_WAIT_S = 20.0


def running(home: Path) -> HealthView | None:
    """Return the health of the home's server; None if none answers."""
    try:
        with Client(home) as client:
            return client.health()
    except NoServerError:
        return None


def check_installed() -> None:
    """Raise MissingExtraError if the server's libraries are not installed."""
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"a server needs {', '.join(missing)}: not installed", hint="pip install 'cordee[server]'"
        )


def check_not_connected(home: Path) -> None:
    """Raise HomeUnsuitableError if the home is connected to a server on another machine."""
    remote = read_remote(home)
    if remote is not None:
        raise HomeUnsuitableError(
            f"{home} is connected to the server at {remote.url}",
            hint="choose another folder with --home, or run `cordee connect --forget` first",
        )


def start_server(
    home: Path, *, database: str | None = None, standby: bool = False, **options: str | Path | None
) -> HealthView:
    """Start a server that outlives this process, and wait until it takes jobs.

    Args:
        home: the folder that it will own.
        database: URL of the PostgreSQL that keeps its log; `sqlite`: a file in the home; None: as the last time.
        standby: wait until the server that leads on the database is gone, and then take over.
        options: the others of `cordee up`, such as `slots` and `price_as`; None: as the last time.

    Raises:
        HomeInUseError: a server runs there already.
        HomeUnsuitableError, StoreError, ServerError: the server could not start.
        MissingExtraError: the server's libraries are not installed.
    """
    check_installed()
    check_not_connected(home)
    argv = [sys.executable, "-m", "cordee.control", "--home", str(home.absolute())]
    options |= {"database": database and "-"}
    for name, value in options.items():
        if value is not None:
            absolute = value.absolute() if isinstance(value, Path) else value
            argv += [f"--{name.replace('_', '-')}", str(absolute)]
    argv += ["--standby"] if standby else []
    with tempfile.TemporaryFile() as complaints, tempfile.TemporaryFile() as given:
        given.write((database or "").encode())  # not an argument, which each user of this machine can read
        given.seek(0)
        process = subprocess.Popen(
            argv, stdin=given, stdout=subprocess.PIPE, stderr=complaints, start_new_session=True, cwd="/"
        )
        assert process.stdout is not None, "it is a pipe"
        with process.stdout:
            line = process.stdout.readline()
        if not line.strip():
            code = process.wait()
            complaints.seek(0)
            last = complaints.read().decode(errors="replace").strip().splitlines()[-1:]
            raise NoServerError(
                f"the server ended with exit code {code} before it was ready: {''.join(last)}",
                hint=f"see {home / 'server.log'}",
            )
    answer = json.loads(line)
    error = from_body(answer)
    if error is not None:
        process.wait()
        raise error
    process.returncode = 0  # it outlives this process on purpose; avoids the ResourceWarning
    with Client(home) as client:
        return client.health()


def ensure_server(home: Path, *, slots: str | None = None, gateway: str | None = None) -> HealthView:
    """Return the health of the home's server; start one if none answers, with the gateway of `start_server`."""
    found = running(home)
    if found is not None:
        return found
    try:
        return start_server(home, slots=slots, gateway=gateway)
    except HomeInUseError:
        return _wait_for_rival(home)


def _wait_for_rival(home: Path) -> HealthView:
    """Wait for the server that another process is starting."""
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
    """Return whether a server process holds the home's lock."""
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
