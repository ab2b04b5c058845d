"""Wake a loop that waits in a selector, from another thread or by SIGCHLD, SIGTERM or SIGINT."""

import selectors
import signal
import socket


class Wakeup:
    """A pair of sockets that the loop waits for.

    Attributes:
        terminated: whether SIGTERM or SIGINT arrived.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.terminated = self._watches = False
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        selector.register(self._reader, selectors.EVENT_READ, self._drop)

    def watch_signals(self) -> None:
        """Wake the loop on SIGCHLD, SIGTERM and SIGINT from now on; call on the main thread only."""
        self._watches = True
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._terminate)

    def wake(self) -> None:
        """Wake the loop; callable on any thread."""
        try:
            self._writer.send(b"\0")
        except BlockingIOError:
            pass  # the socket is full, so the loop wakes up anyway

    def close(self) -> None:
        """Close the sockets; do not use the selector afterwards."""
        if self._watches:
            signal.set_wakeup_fd(-1)
        self._reader.close()
        self._writer.close()

    def _terminate(self, *_: object) -> None:
        self.terminated = True  # the loop does the rest: a handler may interrupt any code

    def _drop(self) -> None:
        try:
            while self._reader.recv(4096):
                pass
        except BlockingIOError:
            pass
