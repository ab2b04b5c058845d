"""Replicas that fail or hang, and their way back into rotation.

An error takes a replica out at once, and a probe each half second brings it back. A replica with open requests that
sends nothing for a time that adapts to its own pace is probed too: if it does not answer, its requests go elsewhere.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine

from cordee.serve.gateway.attention import TICK_S, Attention
from cordee.serve.gateway.directory import Directory, Endpoint, Service
from cordee.serve.gateway.wire import Pool, UpstreamError

PROBE_S = 0.5
"""Time between two probes of a replica that fails."""
ANSWER_S, ANSWER_S_MAX = 1.0, 10.0
"""Time within which a probe has to be answered; each further one of a replica that failed has twice the time."""
ALONE_S = 60.0
"""Silence for which the last replica that takes requests keeps them, although it answers no probe."""
INTERVALS = 5.0
"""Times the usual interval between two tokens, after which silence is looked into."""
SILENCE_S = (0.5, 5.0)
"""The least and the longest silence before a probe."""
STUCK = 10.0
"""Silences after which one stream moves although its replica answers probes."""
STRIKES = 3
"""Failures in a row after which an answered probe alone brings no replica back at once."""
BACKOFF_S = 10.0

log = logging.getLogger(__name__)


class Health:
    """Watches all replicas of a directory. `changed` is called with a service whose usable replicas changed."""

    def __init__(
        self,
        directory: Directory,
        pool: Pool,
        clock: Callable[[], float],
        attention: Attention,
        changed: Callable[[Service], None],
    ) -> None:
        self._directory, self._pool, self._clock, self._changed = directory, pool, clock, changed
        self._attention = attention
        self._tasks: dict[Endpoint, asyncio.Task[None]] = {}

    def silence_s(self, endpoint: Endpoint) -> float:
        """Return the silence of a replica that is normal."""
        return min(SILENCE_S[1], max(SILENCE_S[0], INTERVALS * endpoint.pace.interval_s))

    def failed(self, service: Service, endpoint: Endpoint, why: str) -> None:
        """Take a replica out of rotation until it answers a probe."""
        endpoint.strikes += endpoint.failing is None  # Once for all requests that a failure ends.
        self._suspect(service, endpoint, why)

    def succeeded(self, endpoint: Endpoint) -> None:
        """Note a whole answer."""
        endpoint.strikes = 0

    async def watch(self) -> None:
        """Look at all replicas, for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock()
            for _ in range(2):  # After a pause of the gateway, what has come up to now is read first.
                await asyncio.sleep(0)
            for service, endpoint in self._directory.endpoints():
                if endpoint.usable:
                    service.usable_s = now
                if endpoint.open and endpoint not in self._tasks:
                    self._look(service, endpoint, now)

    def _look(self, service: Service, endpoint: Endpoint, now: float) -> None:
        """Judge a replica by its silence up to a time; what had come until then has been read."""
        silence = self.silence_s(endpoint)
        if now - endpoint.heard_s > silence:
            self._start(service, endpoint, self._check(service, endpoint))
        for request in list(endpoint.open):
            silent_s = now - request.silent_since()
            if silent_s > STUCK * silence * request.patience:
                request.leave(f"sent nothing for {silent_s:.1f} s")

    async def _check(self, service: Service, endpoint: Endpoint) -> None:
        """Probe a silent replica once; one that does not answer loses its requests."""
        began = self._clock()
        error = await self._probe(endpoint)
        if error is None or endpoint.heard_s > began:
            endpoint.heard_s = max(endpoint.heard_s, self._clock())
            if endpoint.failing is not None:  # A request failed during the probe, and left the way back to it.
                await self._until_it_answers(service, endpoint)
            return
        others = (each for each in service.endpoints.values() if each is not endpoint)
        if self._attention.since(endpoint.heard_s) < ALONE_S and not any(each.usable for each in others):
            return  # There is nowhere to go: a slow replica is better than none.
        self._tasks.pop(endpoint, None)
        self._suspect(service, endpoint, f"it sends nothing, and a probe says: {error}")
        for request in list(endpoint.open):
            request.leave("sends nothing and answers no probe", hung=True)

    def _suspect(self, service: Service, endpoint: Endpoint, why: str) -> None:
        if endpoint.failing is None:
            endpoint.failing = why
            log.warning("replica %s of %s is out of rotation: %s", endpoint.id, service.name, why)
            self._pool.close(endpoint.address)
            self._changed(service)
        if endpoint not in self._tasks:
            self._start(service, endpoint, self._until_it_answers(service, endpoint))

    async def _until_it_answers(self, service: Service, endpoint: Endpoint) -> None:
        limit_s = ANSWER_S
        while service.endpoints.get(endpoint.id) is endpoint and self._directory.services.get(service.key) is service:
            began = self._clock()
            error = await self._probe(endpoint, limit_s)
            limit_s = min(ANSWER_S_MAX, 2 * limit_s)  # It may be slow, and answer the one probe that waits for it.
            if error is None:
                over = endpoint.strikes - STRIKES
                if over >= 0:
                    await asyncio.sleep(min(BACKOFF_S, PROBE_S * 2 ** min(over, 10)))
                endpoint.failing = None
                log.warning("replica %s of %s is back in rotation", endpoint.id, service.name)
                self._changed(service)
                return
            await asyncio.sleep(max(0.0, PROBE_S - (self._clock() - began)))

    async def _probe(self, endpoint: Endpoint, limit_s: float = ANSWER_S) -> str | None:
        """Return why a replica is not well; None: it answers."""
        try:
            answer = await self._pool.fetch(endpoint.address, "GET", "/health", deadline_s=limit_s)
        except UpstreamError as error:
            return str(error)
        return None if answer.status < 500 else f"/health says {answer.status}"

    def _start(self, service: Service, endpoint: Endpoint, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[endpoint] = task

        def ended(done: asyncio.Task[None]) -> None:
            if self._tasks.get(endpoint) is done:
                del self._tasks[endpoint]
            if not done.cancelled() and done.exception() is not None:
                log.error("the probe of %s ended: %r", endpoint.id, done.exception())

        task.add_done_callback(ended)
