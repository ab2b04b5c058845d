"""Nodes that join by a token: who lets them in, under which name and with which token of their own, how they leave."""

import hashlib
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cordee.answers.nodes import Joined, JoinRequest, JoinTokenRequest, JoinTokenView, Leaving
from cordee.control.acts import note
from cordee.control.node_tokens import NEW_TOKEN, DerivedTokens, check_node
from cordee.control.ports import Clock
from cordee.control.store.credentials import Credentials
from cordee.control.tick import Control
from cordee.errors import InputError, NameTakenError, NodeLeftError, NotFoundError, TokenError
from cordee.servers import write_join_token
from cordee.units import US_PER_S, format_duration, plural

_WHY = "it leaves"


@dataclass(frozen=True, slots=True)
class PublicAddress:
    """Where other machines reach the server; `fingerprint` is None if an authority signed its certificate."""

    url: str
    fingerprint: str | None


@dataclass(frozen=True, slots=True)
class Members:
    """The nodes that joined.

    Attributes:
        control: the control plane around the scheduler.
        credentials: tokens, as hashes.
        clock: the time.
        operator: the owner of the home's token, whom others ask for what they may not do.
        public: where other machines reach the server; None: they do not.
        wake: wakes the control loop.
        dismiss: makes the agent of a node exit.
        derived: the tokens of nodes whose agents the server starts itself.
    """

    control: Control
    credentials: Credentials
    clock: Clock
    operator: str
    public: PublicAddress | None = None
    wake: Callable[[], None] = lambda: None
    dismiss: Callable[[str], None] = lambda node: None
    derived: DerivedTokens | None = None
    _joining: threading.Lock = field(default_factory=threading.Lock)

    def issue(self, request: JoinTokenRequest, by: str) -> JoinTokenView:
        """Return a new join token.

        Raises:
            InputError: no other machine reaches the server.
        """
        if self.public is None:
            raise InputError(
                "no other machine reaches this server: it listens on loopback only",
                hint="start it again with `cordee up --listen 0.0.0.0:8470`; ranks go on meanwhile",
            )
        secret, now_us = secrets.token_hex(16), self.clock.now_us()  # a "-" in front would be an option of `join`
        expires_us = now_us + request.for_s * US_PER_S
        note(object=token_id(secret))
        self.credentials.add_join_token(hash_of(secret), uses=request.uses, now_us=now_us, expires_us=expires_us, by=by)
        token = write_join_token(secret, self.public.fingerprint)
        return JoinTokenView(token=token, url=self.public.url, uses=request.uses, expires_us=expires_us)

    def join(self, secret: str, request: JoinRequest, others: Sequence[str] = ()) -> Joined:
        """Let a machine in as a node, and return its token; the same machine may join again.

        Args:
            secret: of a join token.
            request: the machine's.
            others: URLs of the other servers of the database, which accept the node's token too.

        Raises:
            TokenError: the join token is unknown, expired or used up.
            NameTakenError: another machine is the node of this name.
        """
        with self._joining:
            by = self.check_join_token(secret)
            note(object=request.name)
            self._check_name(request)
            token = secrets.token_urlsafe(32)
            row: dict[str, object] = {"node": request.name, "token_hash": hash_of(token), "machine": request.machine}
            row |= {"joined_us": self.clock.now_us(), "by": by}
            if not self.credentials.add_agent(row, join_hash=hash_of(secret)):
                raise TokenError("the join token was used up a moment ago", hint=NEW_TOKEN)
        self._end_cordon(request.name, by)
        assert self.public is not None, "a join token was issued"
        return Joined(node=request.name, token=token, servers=list(dict.fromkeys([self.public.url, *others])))

    def node_of(self, token: str) -> str | None:
        """Return the node whose token this is; None: no node's.

        Raises:
            NodeLeftError: it was that of a node which has left.
        """
        own = None if self.derived is None else self.derived.node_of(token)
        if own is not None:
            return own
        row = self.credentials.agent_with(hash_of(token))
        if row is None:
            return None
        if row["left_us"] is not None:
            raise NodeLeftError(f"node {row['node']} has left: its token is void", hint=f"to join again: {NEW_TOKEN}")
        return str(row["node"])

    def leave(self, name: str, by: str | None = None) -> Leaving:
        """Drain a node that joined; once no attempt is left there, make its token void and end its agent.

        Args:
            name: the node's.
            by: the user who asks; None: the node itself.

        Raises:
            NotFoundError: there is no such node.
            InputError: it did not join.
        """
        row = self.credentials.agent(name)
        with self.control.changed:
            record = self.control.state.nodes.records.get(name)
            if row is None and record is None:
                raise NotFoundError(f"there is no node {name!r}", hint="`cordee nodes` lists them")
            if row is None:
                raise InputError(
                    f"{name} did not join: the server starts its agent itself",
                    hint="`cordee nodes drain` takes it out of use, `cordee down` ends the server",
                )
            attempts = self.control.state.attempts.items()
            held = sum(any(lease.node == name for lease in attempt.held) for _, attempt in attempts)
            if record is not None and not record.drains and row["left_us"] is None:
                self.control.cordon(name, by=by or f"node {name}", why=_WHY, drain=True)
        self.wake()
        if held == 0:
            self.credentials.close_agent(name, self.clock.now_us())
            self.dismiss(name)
        return Leaving(node=name, attempts=held)

    def check_node(self, name: str, token: str) -> None:
        """Check that a token is this node's.

        Raises:
            ForbiddenError: it is another node's.
            TokenError: it is no node's.
        """
        check_node(name, token, self.node_of)

    def gone(self) -> set[str]:
        """Return the nodes that have left."""
        return self.credentials.nodes_that_left()

    def check_join_token(self, secret: str) -> str:
        """Return the user who asked for a join token.

        Raises:
            TokenError: it is unknown, expired or used up.
        """
        row, now_us = self.credentials.join_token(hash_of(secret)), self.clock.now_us()
        if row is None:
            raise TokenError("the join token is unknown to this server", hint=NEW_TOKEN)
        if row["expires_us"] <= now_us:
            ago = format_duration((now_us - row["expires_us"]) / US_PER_S)
            raise TokenError(f"the join token expired {ago} ago", hint=NEW_TOKEN)
        if row["used"] >= row["uses"]:
            raise TokenError(
                f"the join token is used up: it was good for {plural(row['uses'], 'node')}", hint=NEW_TOKEN
            )
        return str(row["by"])

    def _check_name(self, request: JoinRequest) -> None:
        row = self.credentials.agent(request.name)
        with self.control.changed:
            known = request.name in self.control.state.nodes.records
        hint = "choose another with --name"
        if row is None and known:
            raise NameTakenError(f"the name {request.name} is taken: the server starts that node itself", hint=hint)
        if row is not None and row["left_us"] is None and row["machine"] != request.machine:
            host, ago = row["machine"].partition("/")[0], self.clock.now_us() - row["joined_us"]
            raise NameTakenError(
                f"the name {request.name} is taken: {host} joined as it {format_duration(ago / US_PER_S)} ago",
                hint=f"{hint}, or first let it go: cordee nodes leave {request.name}",
            )

    def _end_cordon(self, name: str, by: str) -> None:
        """End the cordon of a node that left and is back."""
        with self.control.changed:
            record = self.control.state.nodes.records.get(name)
            if record is not None and record.cordoned_by is not None and record.cordon_why == _WHY:
                self.control.uncordon(name, by=by, why="it joined again")
        self.wake()


def hash_of(token: str) -> str:
    """Return the hash under which a token is kept: its 128 or more random bits need no salt."""
    return hashlib.sha256(token.encode()).hexdigest()


def token_id(token: str) -> str:
    """Return the id of a token, by which sessions and the audit log remember it."""
    return hash_of(token)[:16]
