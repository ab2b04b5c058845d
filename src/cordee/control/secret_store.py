"""The secrets of jobs: files in the home for jobs submitted on this machine, else encrypted rows of the database."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

from cordee.control.store.credentials import Credentials
from cordee.errors import HomeUnsuitableError
from cordee.servers import write_private

_KEY = "secret.key"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SecretStore:
    """The values of secrets; only `secret.key` in the home opens those in the database."""

    def __init__(self, home: Path, credentials: Credentials) -> None:
        self._home, self._credentials = home, credentials

    def has(self, name: str) -> bool:
        """Return whether the home has a file for this secret."""
        return _NAME.fullmatch(name) is not None and (self._home / "secrets" / name).is_file()

    def keep(self, job_id: str, values: Mapping[str, str]) -> None:
        """Encrypt the secrets that came with a job; they are removed when it ends."""
        key = self._key(make=True) if values else None
        sealed = {name: key.encrypt(value.encode()).decode() for name, value in values.items()} if key else {}
        self._credentials.keep_secrets(job_id, sealed)

    def of(self, job_id: str, names: Iterable[str]) -> dict[str, str]:
        """Return the named secrets of a job, those that came with it before the home's; absent ones are left out.

        Raises:
            HomeUnsuitableError: this home's key does not open them.
            StoreError: the database cannot be read.
        """
        wanted = list(names)
        if not wanted:
            return {}
        found = {}
        for name in filter(self.has, wanted):
            found[name] = (self._home / "secrets" / name).read_text()
        sealed = self._credentials.sealed_secrets(job_id)
        key = self._key() if sealed else None
        for name in sealed.keys() & set(wanted):
            try:
                assert key is not None, "there is something to open"
                found[name] = key.decrypt(sealed[name].encode()).decode()
            except InvalidToken:
                raise self._unsuitable(f"does not open the secret {name} of {job_id}") from None
        return found

    def _key(self, *, make: bool = False) -> Fernet:
        path = self._home / _KEY
        if make and not path.exists():
            write_private(path, Fernet.generate_key() + b"\n")
        try:
            return Fernet(path.read_bytes().strip())
        except (OSError, ValueError) as error:
            raise self._unsuitable(f"cannot be used: {getattr(error, 'strerror', None) or error}") from None

    def _unsuitable(self, why: str) -> HomeUnsuitableError:
        hint = "copy secret.key from the home of the server that took the job; without it, submit the job again"
        return HomeUnsuitableError(f"{self._home / _KEY} {why}", hint=hint)
