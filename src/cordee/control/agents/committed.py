"""The log as the executor reads it: the live state, and the tables for what has ended."""

import json
import logging
from collections.abc import Iterator, Sequence

from cordee.control.agents.claims import Member
from cordee.control.secret_store import SecretStore
from cordee.control.store.sql import SqlStore
from cordee.control.tick import Control
from cordee.errors import HomeUnsuitableError
from cordee.ids import JobId

_LEASE = "lease_ms"  # among the marks: no stream has this name

_log = logging.getLogger("cordee.control")


class CommittedLog:
    """Implements `nodes.ClusterLog` for a server.

    Attributes:
        control: the control plane; it needs the executor, so it comes after this object.
    """

    control: Control

    def __init__(self, store: SqlStore, secrets: SecretStore) -> None:
        self._store, self._secrets = store, secrets
        self.marks = store.marks

    def leased(self, job_id: str, epoch: int) -> tuple[str, ...]:
        """Return the nodes of an attempt in the order of its leases; empty if there was no such attempt."""
        # Without the lock: a tick may try changes meanwhile, so an attempt that is absent is looked up in the tables.
        attempt = self.control.state.attempts.get(JobId(job_id))
        if attempt is not None and attempt.epoch == epoch:
            return tuple(lease.node for lease in attempt.leases)
        rows = [row for row in self._store.attempts(job_id) if row["epoch"] == epoch]
        return tuple(lease["node"] for row in rows for lease in json.loads(row["leases"]))

    def held(self, job_id: str, epoch: int) -> tuple[str, ...]:
        """Return the nodes on which an attempt's ranks have not ended."""
        attempt = self.control.state.attempts.get(JobId(job_id))
        return tuple(lease.node for lease in attempt.held) if attempt and attempt.epoch == epoch else ()

    def held_on(self, node: str) -> list[tuple[str, int]]:
        """Return the attempts (job, epoch) whose ranks on a node have not ended; waits for the end of a tick."""
        with self.control.changed:
            attempts = self.control.state.attempts
            return [
                (job_id, attempt.epoch)
                for job_id, attempt in attempts.items()
                if any(lease.node == node for lease in attempt.held)
            ]

    def secrets(self, job_id: str, names: Sequence[str]) -> dict[str, str]:
        """Return the values of these secrets of a job, as far as they exist and can be read.

        A job with a secret that cannot be read must not keep the others from starting: its ranks fail for want of it.
        """
        try:
            return {name: value.rstrip("\n") for name, value in self._secrets.of(job_id, names).items()}
        except (HomeUnsuitableError, OSError, UnicodeDecodeError) as error:
            _log.error("the secrets of %s cannot be read, so that it cannot start: %s", job_id, error)
            return {}

    def lease_before_s(self, lease_s: float) -> float:
        """Return the lease that the server before granted, on this home or another one, and note this server's.

        Raises:
            StoreError: the log cannot be read or written now.
        """
        before_ms = self.marks([_LEASE])[_LEASE]
        self._store.commit([], seen=[(_LEASE, round(1000 * lease_s))])
        return before_ms / 1000

    def members(self) -> Iterator[Member]:
        """Yield the nodes of the log."""
        for record in self.control.state.nodes.records.values():
            node = record.node
            reachable = not record.unreachable
            yield Member(node.name, epoch=node.epoch, up=record.up, machine=node.machine, reachable=reachable)
