"""The folder that a server owns: checks that it is suitable, and keeps the lock, the tokens and the server's address.

No other module of the control plane uses POSIX file locks.
"""

import fcntl
import json
import os
import secrets
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cordee.control.roles import ADMIN, Bearer, grants_of
from cordee.errors import HomeInUseError, HomeUnsuitableError

# On these file systems SQLite's locks, or its memory shared between processes, are not reliable.
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs"),
    *("pvfs2", "orangefs", "wekafs", "panfs", "davfs", "ncpfs", "coda", "ocfs2", "gfs2"),
}
_NETWORK_FUSE = {"sshfs", "glusterfs", "ceph", "juicefs", "gcsfuse", "s3fs", "rclone", "goofys", "blobfuse2", "davfs"}

_TOKEN_CHARS_MIN = 20
_LOCK_TRIES, _LOCK_RETRY_S = 3, 0.02


SQLITE = "sqlite"  # among the settings: the database is a file in the home


def bearer_of(name: str, terms: Sequence[str], where: str, own: str = "") -> Bearer:
    """Return who a line of the file `tokens` names.

    Args:
        name: the person or program.
        terms: `read`, `until=DAY`, and roles.
        where: the line, for an error.
        own: the operator of the server, who has all rights unless the line names some.

    Raises:
        HomeUnsuitableError: a term is unknown.

    >>> bearer_of("grafana", ["read", "until=1970-01-02"], "line 1").until_us
    172800000000
    """
    until_us, roles = None, list[str]()
    for term in terms:
        key, _, day = term.partition("=")
        try:
            if key == "until":  # the day itself is included
                ends = datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC) + timedelta(days=1)
                until_us = round(ends.timestamp()) * 1_000_000
            elif term != "read":
                grants_of([term])
                roles.append(term)
        except ValueError:
            raise HomeUnsuitableError(
                f"{where}: {term[:20]!r} is no term of a token",
                hint="write NAME TOKEN read until=2026-12-31 operator=QUEUE; roles: viewer, user, operator, admin",
            ) from None
    grants = ADMIN if name == own and not roles else grants_of(roles)
    return Bearer(name, "read" in terms, until_us, grants)


class Home:
    """A prepared home. Call `lock` before writing anything in it."""

    def __init__(self, path: Path, *, mounts: str | None = None) -> None:
        """Create the folder if it is missing.

        Args:
            path: the folder.
            mounts: the text of `/proc/mounts`; read from there by default.

        Raises:
            HomeUnsuitableError: it is on a network file system, is not a folder, or cannot be written.
        """
        self.path = path.absolute()
        # Checked first, so that a refused home is not created.
        kind = file_system(self.path, _mounts() if mounts is None else mounts)
        if kind in _NETWORK or kind.removeprefix("fuse.") in _NETWORK_FUSE:
            raise HomeUnsuitableError(
                f"{self.path} is on a network file system ({kind}), where a database's locks do not hold",
                hint="choose a folder on a local disk with --home or CORDEE_HOME",
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock_fd = os.open(self.path / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise HomeUnsuitableError(
                f"{self.path} cannot be used: {error.strerror or error}",
                hint="choose a folder that you can write to with --home or CORDEE_HOME",
            ) from error

    def lock(self) -> None:
        """Lock the home until this process ends; the system releases the lock also after a crash.

        Raises:
            HomeInUseError: another server owns it.
        """
        for _ in range(_LOCK_TRIES - 1):  # `is_owned` in another process holds the lock for a moment
            if self._try_lock():
                break
            time.sleep(_LOCK_RETRY_S)
        if not self._try_lock():
            pid = os.pread(self._lock_fd, 32, 0).decode() or "unknown"
            raise HomeInUseError(
                f"a server already runs on {self.path} (pid {pid})", hint="use it, or stop it with `cordee down`"
            )
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, str(os.getpid()).encode(), 0)

    def unlock(self) -> None:
        """Release the lock for good."""
        os.close(self._lock_fd)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def token(self) -> str:
        """Return the secret that clients and agents present; create it the first time, readable by its owner only."""
        path = self.path / "token"
        try:
            return path.read_text().strip()
        except FileNotFoundError:
            drawn = secrets.token_hex(32)  # a "-" in front would be an option of `connect`
            self._replace(path, drawn + "\n")
            return drawn

    def owners(self, own: str) -> dict[str, Bearer]:
        """Return who each token stands for: `own` for the home's, the others from the file `tokens`.

        Its lines are `NAME TOKEN`, then `read`, `until=2026-12-31`, and roles such as `operator=QUEUE`.

        Raises:
            HomeUnsuitableError: that file cannot be used; the message does not repeat its content.
        """
        found, path = {self.token(): Bearer(own, grants=ADMIN)}, self.path / "tokens"
        try:
            with path.open() as file:
                readable = os.fstat(file.fileno()).st_mode & 0o077
                lines = file.read().splitlines()
        except FileNotFoundError:
            return found
        except (OSError, UnicodeDecodeError):
            raise HomeUnsuitableError(f"{path} cannot be read", hint="make it yours, or remove it") from None
        if readable:
            raise HomeUnsuitableError(f"{path} is open to others than its owner", hint=f"chmod 600 {path}")
        for number, line in enumerate(lines, start=1):
            name, token, *terms = (*line.split(), "", "")[: max(2, len(line.split()))]
            if not name or name.startswith("#"):
                continue
            if len(token) < _TOKEN_CHARS_MIN or token in found:
                raise HomeUnsuitableError(
                    f"{path}, line {number}: not a name and a token of its own, {_TOKEN_CHARS_MIN} characters or more",
                    hint="write NAME TOKEN; openssl rand -hex 32 draws a token",
                )
            found[token] = bearer_of(name, terms, f"{path}, line {number}", own)
        return found

    def settings(self) -> dict[str, str]:
        """Return the options of the last `up`; empty the first time."""
        return read_settings(self.path)

    def keep_settings(self, options: dict[str, str]) -> None:
        """Keep these options of this `up`, and the others as they were."""
        self._replace(self.path / "settings.json", json.dumps(self.settings() | options) + "\n")

    def announce(self, facts: dict[str, object]) -> None:
        """Publish the server's address in `server.json`, which is complete whenever it exists."""
        self._replace(self.path / "server.json", json.dumps(facts) + "\n")

    def withdraw(self) -> None:
        """Remove `server.json`, since the server ends."""
        (self.path / "server.json").unlink(missing_ok=True)

    def _replace(self, path: Path, text: str) -> None:
        """Write a file atomically, readable by its owner only."""
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        new.replace(path)


def file_system(path: Path, mounts: str) -> str:
    """Return the type of the file system that holds `path`, by the longest mount point above it; "" if not known.

    >>> file_system(Path("/home/ada/.cordee"), "/dev/sda / ext4 rw 0 0\\nnas:/h /home nfs4 rw 0 0")
    'nfs4'
    """
    real = path.resolve()
    found, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ").replace("\\011", "\t")
        # A later mount on the same point hides the earlier one.
        if len(point) >= len(found) and real.is_relative_to(point):
            found, kind = point, fields[2]
    return kind


def _mounts() -> str:
    try:
        return Path("/proc/mounts").read_text(errors="replace")
    except OSError:  # not Linux: mounts are not known
        return ""


def read_settings(home: Path) -> dict[str, str]:
    """Return the options of the last `up` of a home; empty before the first."""
    try:
        options = json.loads((home / "settings.json").read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise HomeUnsuitableError(
            f"{home / 'settings.json'} cannot be read: {error}", hint="remove it, and say --slots again"
        ) from error
    return {str(name): str(value) for name, value in options.items()}


def artifact_store(home: Path) -> str:
    """Return the destination of the chunks of artifacts."""
    return read_settings(home).get("artifacts") or str(home / "artifacts")
