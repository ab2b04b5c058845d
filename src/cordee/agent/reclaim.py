"""The cloud's notices about the agent's machine, passed from the polling thread to the agent's loop."""

import logging
import queue
from collections.abc import Callable, Mapping
from functools import partial

from cordee.errors import InputError
from cordee.telemetry.cloud import CloudWatch, Hint, Reclaim, cloud_here

_log = logging.getLogger("cordee.agent")


class Reclaims:
    """The cloud's notices; there are none on a machine that is not in a cloud.

    Args:
        wake: makes the loop call `take_in`; called on another thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._notices: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = wake
        self._watch: CloudWatch | None = None

    def start(
        self,
        reclaimed: Callable[[Reclaim], None],
        withdrawn: Callable[[Reclaim], None],
        hinted: Callable[[Hint], None],
        located: Callable[[Mapping[str, str]], None],
    ) -> None:
        """Start polling; `take_in` calls the callbacks, `located` once with the labels of this machine.

        A variable that cannot be read is only logged, so that the agent still runs.
        """
        try:
            cloud = cloud_here()
        except InputError as error:
            _log.error("notices of the cloud are not read: %s", error)
            return
        if cloud is not None:
            self._watch = CloudWatch(
                cloud,
                on_reclaim=lambda reclaim: self._put(partial(reclaimed, reclaim)),
                on_withdrawn=lambda reclaim: self._put(partial(withdrawn, reclaim)),
                on_hint=lambda hint: self._put(partial(hinted, hint)),
                on_labels=lambda labels: self._put(partial(located, labels)),
            )

    def take_in(self) -> None:
        """Handle the notices that have arrived, on the loop's own thread."""
        while not self._notices.empty():
            self._notices.get()()

    def close(self) -> None:
        """Stop polling."""
        if self._watch is not None:
            self._watch.close()

    def _put(self, notice: Callable[[], None]) -> None:
        self._notices.put(notice)
        self._wake()
