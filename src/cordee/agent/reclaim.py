"""What the cloud announces about the agent's machine, handed from the thread that asks to the agent's loop."""

import logging
import queue
from collections.abc import Callable
from functools import partial

from cordee.errors import InputError
from cordee.telemetry.cloud import CloudWatch, Hint, Reclaim, cloud_here

_log = logging.getLogger("cordee.agent")


class Reclaims:
    """Nothing is asked, and nothing ever announced, on a machine that is not in a cloud.

    Args:
        wake: makes the loop look; called on another thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = wake
        self._watch: CloudWatch | None = None

    def start(
        self,
        reclaimed: Callable[[Reclaim], None],
        withdrawn: Callable[[Reclaim], None],
        hinted: Callable[[Hint], None],
    ) -> None:
        """Ask from now on; all three are called by `take_in`.

        A variable that cannot be read is said: it must not cost the node its agent.
        """
        try:
            cloud = cloud_here()
        except InputError as error:
            _log.error("what the cloud announces is not heard: %s", error)
            return
        if cloud is not None:
            self._watch = CloudWatch(
                cloud,
                on_reclaim=lambda reclaim: self._put(partial(reclaimed, reclaim)),
                on_withdrawn=lambda reclaim: self._put(partial(withdrawn, reclaim)),
                on_hint=lambda hint: self._put(partial(hinted, hint)),
            )

    def take_in(self) -> None:
        """Do what is to be done about the news, on the loop's own thread."""
        while not self._news.empty():
            self._news.get()()

    def close(self) -> None:
        """Ask no more."""
        if self._watch is not None:
            self._watch.close()

    def _put(self, news: Callable[[], None]) -> None:
        self._news.put(news)
        self._wake()
