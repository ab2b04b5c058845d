"""Tokens and those for whom they stand: the file `tokens` of the home, read again when it has changed.

A token that is taken out of it is void at the next request. While the file cannot be used, what it said last stands.
"""

import threading
from collections.abc import Callable, ItemsView, Iterator, Mapping

import structlog

from cordee.control.home import Home
from cordee.control.roles import Bearer
from cordee.errors import CordeeError, HomeUnsuitableError


class TokenFile(Mapping[str, Bearer]):
    """Tokens with those for whom they stand, the home's own first.

    Attributes:
        on_change: is called after the file was read again.
    """

    def __init__(self, home: Home, own: str) -> None:
        """Read the file.

        Args:
            home: of the server.
            own: for whom the home's own token stands.

        Raises:
            HomeUnsuitableError: the file cannot be used.
        """
        self.on_change: Callable[[], None] = lambda: None
        self._home, self._own, self._lock = home, own, threading.Lock()
        self._seen, self._found = self._stamp(), home.owners(own)

    def __getitem__(self, token: str) -> Bearer:
        return self._newest()[token]

    def __iter__(self) -> Iterator[str]:
        return iter(self._newest())

    def __len__(self) -> int:
        return len(self._newest())

    def items(self) -> ItemsView[str, Bearer]:
        """Return the tokens of one moment with their bearers."""
        return self._newest().items()

    def _newest(self) -> dict[str, Bearer]:
        if self._stamp() != self._seen:
            with self._lock:
                if (stamp := self._stamp()) != self._seen:
                    self._seen = stamp
                    self._read()
        return self._found

    def _read(self) -> None:
        try:
            self._found = self._home.owners(self._own)
            self.on_change()
        except HomeUnsuitableError as error:
            structlog.get_logger().error(
                "the file of tokens cannot be used, so the earlier ones stay valid",
                error=error.message,
                hint=error.hint,
            )
        except CordeeError as error:
            structlog.get_logger().error("changed tokens are not in the audit log yet", error=error.message)

    def _stamp(self) -> tuple[int, ...] | None:
        try:
            found = (self._home.path / "tokens").stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode
