"""The secrets of jobs: files in the home for jobs submitted on this machine, else encrypted rows of the database.

A server that shares its database with others keeps all of them there: it may be another that starts the job. Their key
follows from the home's token, which those servers share, so that nothing has to be copied when the first secret comes.
"""

import base64
import hmac
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

from cordee.control.store.credentials import Credentials
from cordee.errors import HomeUnsuitableError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SecretStore:
    """The values of secrets; only the home's token opens those in the database."""

    def __init__(self, home: Path, credentials: Credentials, token: str) -> None:
        self._home, self._credentials = home, credentials
        self._key = Fernet(base64.urlsafe_b64encode(hmac.digest(token.encode(), b"secrets of jobs", "sha256")))

    def has(self, name: str) -> bool:
        """Return whether the home has a file for this secret."""
        return _NAME.fullmatch(name) is not None and (self._home / "secrets" / name).is_file()

    def keep(self, job_id: str, values: Mapping[str, str]) -> None:
        """Encrypt the secrets that came with a job; they are removed when it ends."""
        sealed = {name: self.sealed(value) for name, value in values.items()}
        self._credentials.keep_secrets(job_id, sealed)

    def sealed(self, text: str) -> str:
        """Return a text that only the home's token opens."""
        return self._key.encrypt(text.encode()).decode()

    def opened(self, sealed: str) -> str:
        """Return a sealed text.

        Raises:
            HomeUnsuitableError: this home's token does not open it.
        """
        try:
            return self._key.decrypt(sealed.encode()).decode()
        except InvalidToken:
            raise HomeUnsuitableError(
                f"{self._home / 'token'} cannot decrypt what is stored here: it was encrypted under another token",
                hint="put that token back",
            ) from None

    def pass_on(self, source: str, job_id: str) -> None:
        """Give a job the encrypted secrets that are kept under another name, such as its service's."""
        sealed = self._credentials.sealed_secrets(source)
        if sealed:
            self._credentials.keep_secrets(job_id, sealed)

    def of(self, job_id: str, names: Iterable[str]) -> dict[str, str]:
        """Return the named secrets of a job, those that came with it before the home's; absent ones are left out.

        Raises:
            HomeUnsuitableError: this home's token does not open them.
            StoreError: the database cannot be read.
        """
        wanted = list(names)
        if not wanted:
            return {}
        found = {}
        for name in filter(self.has, wanted):
            found[name] = (self._home / "secrets" / name).read_text()
        sealed = self._credentials.sealed_secrets(job_id)
        for name in sealed.keys() & set(wanted):
            try:
                found[name] = self._key.decrypt(sealed[name].encode()).decode()
            except InvalidToken:
                raise HomeUnsuitableError(
                    f"{self._home / 'token'} cannot decrypt the secret {name} of {job_id}: "
                    "it was encrypted under another token",
                    hint="put that token back, or submit the job again",
                ) from None
        return found
