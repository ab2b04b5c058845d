"""The watch over leases and engines, in a thread of its own: nodes that are silent, agents that are dead."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future

from cordee.control.agents.nodes import ClusterLog, Nodes
from cordee.control.engines.port import Engine
from cordee.errors import CordeeError

LOOK_S = 0.1
"""The time between two questions to the engines while a node of theirs is not connected."""

LOOK_S_MAX = 1.0
"""The time between two questions otherwise, and between two looks at the leases."""

FROZEN_S = 3.0
"""A server that stood still for so long has heard nobody meanwhile, so that the silence proves nothing."""

READ_S = 0.05
"""A look waits so long for the web server to read what has arrived; a later one goes on from there."""

_log = logging.getLogger("cordee.control")


class Watch:
    """The watch of one server.

    Args:
        nodes: the nodes.
        log: says which ranks a lost node held.
        engines: say which agents are dead.
    """

    def __init__(self, nodes: Nodes, log: ClusterLog, engines: Sequence[Engine]) -> None:
        self._nodes, self._log, self._engines = nodes, log, engines
        self._reads: Callable[[], Future[None]] | None = None
        self._reading: tuple[float, Future[None]] | None = None  # since when, until when
        self._stopped = False
        self._poke = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cordee-agents", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def count_silence_by(self, reads: Callable[[], "Future[None]"] | None) -> None:
        """Count the silence of nodes only as far as `reads`, which reads all that has arrived, has come to its end."""
        self._reads, self._nodes.read_s = reads, None if reads is None else self._nodes.clock.now_s()

    @property
    def runs(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._poke.set()
        self._thread.join()

    def poke(self) -> None:
        """Look again at once: something has changed."""
        self._poke.set()

    def owner(self, node: str) -> Engine | None:
        """Return the engine that starts the agent of a node; None: it comes by itself."""
        return next((engine for engine in self._engines if engine.owns(node)), None)

    def look(self, before_s: float) -> float:
        """Look after every node and every engine; return the seconds until it is time to do so again.

        Args:
            before_s: the monotonic time at which it was done last.
        """
        nodes = self._nodes
        still_s = nodes.clock.now_s() - before_s
        if still_s > FROZEN_S:
            _log.warning("this server stood still for %.1f s: every node gets a fresh lease", still_s)
            with nodes.changed:
                nodes.renew_leases()
        try:
            self._look()
        except (CordeeError, OSError) as error:
            _log.error("nodes cannot be looked after now, it is tried again: %s", error)
        except Exception:  # whatever an engine raises, the leases of all nodes are looked after
            _log.exception("nodes cannot be looked after now, it is tried again")
        with nodes.changed:
            members = nodes.members.values()
            lonely = any(member.session is None and self.owner(member.name) is not None for member in members)
        nothing_yet = bool(self._engines) and not nodes.members
        return LOOK_S if lonely or nothing_yet else LOOK_S_MAX

    def _run(self) -> None:
        looked_s = self._nodes.clock.now_s()
        while not self._stopped:
            before_s, looked_s = looked_s, self._nodes.clock.now_s()
            self._poke.wait(self.look(before_s))
            self._poke.clear()

    def _read(self) -> None:
        """Move the time up to which messages are read, unless the web server is late."""
        if self._reads is None:
            return
        since_s, future = self._reading or (self._nodes.clock.now_s(), self._reads())
        try:
            future.result(READ_S)
        except TimeoutError:
            self._reading = since_s, future
        except CancelledError:
            self._reading = None  # the web server ends
        else:
            self._nodes.read_s, self._reading = since_s, None

    def _look(self) -> None:
        """Take in the deaths that the engines know, and report nodes that are silent."""
        nodes, members = self._nodes, self._nodes.members
        with nodes.changed:
            before = {name: member.epoch for name, member in members.items()}
        deaths = [death for engine in self._engines for death in engine.ended()]
        gone: list[tuple[str, str]] = []
        with nodes.changed:
            for death in deaths:
                member = members.get(death.node)
                if member is not None and death.ranks_gone:
                    of_epoch = member.announced.setdefault(death.why, before.get(death.node, 0))
                    gone += [(death.node, death.why)] if of_epoch == member.epoch else []
                if member is not None and member.epoch == before.get(death.node) and not death.ranks_gone:
                    member.disconnect()
                    nodes.report_down(member, death.why)
            for reclaim in (each for engine in self._engines for each in engine.reclaims()):
                member = members.get(reclaim.node)
                if member is not None and member.up and member.announced.get(reclaim.deadline_us) != member.epoch:
                    member.announced[reclaim.deadline_us] = member.epoch
                    nodes.report_reclaim(member, reclaim.deadline_us)
        self._read()
        with nodes.changed:
            gone += [(name, nodes.silence(member)) for name, member in members.items() if nodes.is_over(member)]
        for name, why in gone:
            held = self._log.held_on(name)  # without the lock, since a tick takes it too
            with nodes.changed:
                member = members.get(name)
                over = member is not None and (member.epoch == before.get(name)) and not member.lost
                if member is not None and over and (nodes.is_over(member) or not member.session):
                    nodes.report_lost(member, held, why)
