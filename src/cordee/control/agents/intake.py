"""The intake of agents' records: those that a node may report are kept for the control loop, the others refused."""

import logging
import re
from typing import cast

from cordee.agent.messages import Records, Seen
from cordee.control.agents.claims import Member, Session
from cordee.control.agents.nodes import ClusterLog, Nodes
from cordee.control.ports import Report
from cordee.event_json import decode
from cordee.events import Event, NodeUp, RanksEnded, RanksStarted
from cordee.reports import parse_stream, repair_text

_EPOCH = re.compile(r"[0-9]{1,15}")

_log = logging.getLogger("cordee.control")


class Intake:
    """The intake of one server; hold the nodes' lock.

    Args:
        nodes: with the inbox in which records are kept.
        log: says which attempts a node holds.
    """

    def __init__(self, nodes: Nodes, log: ClusterLog) -> None:
        self._nodes, self._log = nodes, log

    def take(self, member: Member, session: Session, records: Records) -> None:
        """Keep new records; those that are refused are acknowledged, as the agent would else send them for ever.

        Raises:
            StoreError: it cannot be read from the log whether the node may report this.
        """
        source, inbox = records.source, self._nodes.inbox
        why_not = self._why_foreign(member, source)
        for seq, data in zip(records.seqs, records.events, strict=True):
            if why_not:  # the inbox keeps the numbers of this stream's own agent
                self._refuse(member, source, seq, why_not)
                session.send(Seen(source=source, seq=seq))
            elif not inbox.is_new(source, seq, member):
                # A repeated record: if it is committed, the agent has missed the acknowledgement.
                seen = inbox.acknowledged(source)
                if seq <= seen:
                    session.send(Seen(source=source, seq=seen))
            else:
                self._take_new(member, session, source, seq, data)

    def _take_new(self, member: Member, session: Session, source: str, seq: int, data: dict[str, object]) -> None:
        inbox = self._nodes.inbox
        try:
            event = self._read(member, source, data)
        except ValueError as error:
            self._refuse(member, source, seq, str(error))
            session.send(Seen(source=source, seq=inbox.skip(source, seq)))
        else:
            inbox.add(Report(source=source, seq=seq, event=event))
            self._nodes.notify()

    def _refuse(self, member: Member, source: str, seq: int, why: str) -> None:
        member.refused += 1
        _log.error("record %d of %r from node %s is refused: %s", seq, source, member.name, why)

    def _why_foreign(self, member: Member, source: str) -> str:
        """Return why a node must not send this stream; "" if it may."""
        if not is_stream_of(member.name, source):
            return "it is not a stream of this node"
        stream = parse_stream(source)
        return "" if stream is None else self._why_not_leased(member, stream[0], stream[1])

    def _why_not_leased(self, member: Member, job_id: str, epoch: int) -> str:
        leased = member.name in self._log.leased(job_id, epoch)
        return "" if leased else f"attempt {job_id}.{epoch} has no lease on this node"

    def _read(self, member: Member, source: str, data: dict[str, object]) -> Event:
        """Return a record's event.

        Raises:
            ValueError: it is not an event, or not one that this node may report.
            StoreError: it cannot be read from the log whether it may.
        """
        if parse_stream(source) is not None:
            return decode(data)
        event = decode(cast("dict[str, object]", repair_text(data)))
        if isinstance(event, RanksStarted | RanksEnded):
            if event.node != member.name:
                raise ValueError(f"it is about ranks of node {event.node}")
            if why_not := self._why_not_leased(member, event.job_id, event.epoch):
                raise ValueError(why_not)
            return event
        about = event.node.name if isinstance(event, NodeUp) else getattr(event, "node", member.name)
        if about != member.name:
            raise ValueError(f"it is about node {about}")
        return event


def is_stream_of(node: str, source: str) -> bool:
    """Return whether an agent of the node may forward a stream of this name: its own, or a rank's."""
    prefix = f"node/{node}/"  # no pattern for each node: they would be compiled again for each record
    own = source.startswith(prefix) and _EPOCH.fullmatch(source, len(prefix)) is not None
    return own or parse_stream(source) is not None
