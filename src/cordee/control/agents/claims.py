"""Claims of nodes: which agent may have a node, and with which epoch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cordee.agent.messages import PROTOCOL, Claim, Confirm, FromServer, Neighbourhood, Refused
from cordee.control.agents.leases import LeaseTerms


class Session:
    """A connection of an agent (`link.LinkSession`)."""

    peer: str = ""  # the agent's host
    own_address: str = ""  # the address at which the agent reached this server
    servers: Sequence[str] = ()  # the URLs of all servers as the agent has them
    queued: Sequence[str] | None = None  # the datasets of waiting jobs as the agent has them; None: it was not told
    neighbours: Neighbourhood | None = None  # that the agent was told of

    def send(self, message: FromServer) -> None:
        """Send a message, unless the connection ends before it is sent; never wait. Callable from any thread."""

    def close(self) -> None:
        """Drop the connection. Callable from any thread."""


@dataclass(slots=True)
class Member:
    """One node as this server sees it.

    Attributes:
        name: the node's name.
        epoch: the newest one that was granted; 0: none.
        up: no NodeDown of this epoch was reported.
        machine: the machine of the agent with this epoch; "": not known.
        incarnation: that agent, if it has claimed the node since this server started.
        session: its connection.
        heard_s: monotonic time of its last message; of the executor's start before the first one.
        reachable: no NodeUnreachable of this epoch is open.
        lost: its ranks are gone for certain, and were reported as lost.
        sent: numbers of the commands sent over this connection and not confirmed.
        confirmed: the confirmations of commands, by number.
        leaves: its agent was dismissed.
        refused: the number of reports refused.
        announced: what engines said of it, deadlines of reclaims and reasons of deaths, with the epoch that each is of.
        clock_off_us: the agent's clock minus the server's when it claimed the node.
    """

    name: str
    epoch: int = 0
    up: bool = False
    machine: str = ""
    incarnation: str = ""
    session: Session | None = None
    heard_s: float = 0.0
    reachable: bool = True
    lost: bool = False
    sent: set[int] = field(default_factory=set)
    confirmed: dict[int, Confirm] = field(default_factory=dict)
    leaves: bool = False
    refused: int = 0
    clock_off_us: int = 0
    announced: dict[int | str, int] = field(default_factory=dict)

    def must_send(self, number: int) -> bool:
        """Return whether a command must be sent: the agent is connected, and the command was not sent yet."""
        return self.session is not None and number not in self.sent and number not in self.confirmed

    def disconnect(self) -> None:
        """Drop the connection; commands that are not confirmed are sent again over the next one."""
        if self.session is not None:
            self.session.close()
        self.session = None
        self.sent.clear()

    def is_other(self, claim: Claim) -> bool:
        """Return whether a claim comes from another machine than that of the newest epoch, whose ranks may run."""
        return bool(self.machine) and claim.machine != self.machine and not self.lost


def judge(member: Member, claim: Claim, terms: LeaseTerms, now_s: float, *, held: bool = False) -> int | Refused:
    """Return the epoch that a claim gets, or its refusal; `held` says whether ranks of the node have not ended."""
    if claim.protocol != PROTOCOL:
        return Refused(
            why=f"this server speaks protocol {PROTOCOL}, the agent (Cordee {claim.cordee}) {claim.protocol}",
            hint="install the same version of Cordee on the server and on the node",
        )
    known = member.incarnation == claim.incarnation
    if known and member.up:
        return member.epoch
    if (member.up or held) and member.is_other(claim):
        silent_s = now_s - member.heard_s
        if member.session is not None or silent_s < terms.down_s:
            host = member.machine.partition("/")[0]
            return Refused(
                why=f"node {member.name} is here already: agent on {host}, heard {silent_s:.1f} s ago",
                hint="join with another --name; a name is free again when its agent's lease has ended",
            )
    if claim.epoch and not known and (claim.epoch < member.epoch or member.incarnation):
        why = f"epoch {claim.epoch} of node {member.name} is over: its agent has epoch {member.epoch}"
        return Refused(why=why, final=True)
    if claim.epoch and not known and (member.up or claim.epoch > member.epoch):
        return claim.epoch
    return max(claim.epoch_min, member.epoch + 1)
