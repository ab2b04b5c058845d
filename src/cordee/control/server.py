"""The server process: it owns a home, runs the control loop in its main thread, and serves HTTP in another.

It writes one JSON line to stdout for its parent, that it is ready or why it failed, and from then on only its log.
A server that is killed or terminated leaves the ranks running, and the next one adopts them; only `down` ends them.
"""

import argparse
import json
import os
import queue
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import structlog
from starlette.types import ASGIApp

from cordee.answers.nodes import JoinTokenRequest
from cordee.client import Client
from cordee.control.agents.committed import CommittedLog
from cordee.control.agents.executor import AgentsExecutor
from cordee.control.agents.leases import LeaseTerms
from cordee.control.agents.link import AgentLinks, read_all
from cordee.control.api import above_jobs, create_app, local_owner
from cordee.control.audited import record_tokens
from cordee.control.collector import collected_when_idle
from cordee.control.engines.choice import LOCAL, NONE, engine_of
from cordee.control.engines.port import Engine, Host
from cordee.control.engines.slurm import SlurmRequest
from cordee.control.gateway_process import gateway_beside, listen_address
from cordee.control.home import Home
from cordee.control.http import WebServer
from cordee.control.listen import OFF, PORT, Listener
from cordee.control.members import Members, PublicAddress, hash_of
from cordee.control.mirror import Mirror
from cordee.control.node_tokens import DerivedTokens, NodeTokens
from cordee.control.notify.notifier import Notifier, jobs_of
from cordee.control.operations import Operations
from cordee.control.precedence import Precedence
from cordee.control.prices import Priced
from cordee.control.secret_store import SecretStore
from cordee.control.server_log import log_format, log_to
from cordee.control.snapshots import Snapshots, newest_fold
from cordee.control.standby import LOOPBACK, LeaderOnly, Standby
from cordee.control.start_options import Offer, Options, database_of
from cordee.control.store.credentials import Credentials
from cordee.control.store.leader import Lead
from cordee.control.store.sql import SqlStore
from cordee.control.tick import Control
from cordee.control.token_file import TokenFile
from cordee.errors import (
    CordeeError,
    ReplacedError,
    ServerError,
    StoreError,
    as_body,
)
from cordee.hardware.load import load_home
from cordee.schedule.policy import Policy
from cordee.schedule.state.state import State
from cordee.schedule.waiting_data import waiting_data

NODE_WAIT_S, CLUSTER_WAIT_S = 20.0, 60.0
_RETRY_S = 1.0
_JOIN_S = 30 * 86_400  # an allocation may wait so long in Slurm's queue
_IDLE_US = 1_000_000  # garbage is collected when nothing is due for this long


class SystemClock:
    """The system's clock."""

    def now_us(self) -> int:
        """Return microseconds since the Unix epoch."""
        return time.time_ns() // 1000


class Server:
    """The parts of one server process, from start to end."""

    def __init__(
        self,
        home: Home,
        offer: Offer,
        public: Listener | None = None,
        *,
        database: str | None = None,
        terms: LeaseTerms | None = None,
    ) -> None:
        """Open the database, SQLite in the home unless `database` is a PostgreSQL's URL, and replay the log."""
        self._home, self._public, self._offer = home, public, offer
        self._log = structlog.get_logger()
        self._turn: queue.SimpleQueue[None] = queue.SimpleQueue()  # a signal handler may call its put
        self._signal: int | None = None
        self._logged: set[tuple[str, str]] = set()  # errors of the last tick, so that each is logged once
        catalogue = load_home(home.path)
        owners = TokenFile(home, local_owner())
        url = database or f"sqlite:///{home.path / 'cordee.db'}"
        lead = None if database is None else _lead(home, public, database)
        self._standby = None if lead is None else Standby(lead, home, self._wake)
        precedence = Precedence()
        self._store = SqlStore(url, lead=lead, precedence=precedence)
        clock = SystemClock()
        credentials = Credentials(self._store)
        job_secrets = SecretStore(home.path, credentials, home.token())
        self._cluster = CommittedLog(self._store, job_secrets)
        derived = DerivedTokens(home.token())
        self._engine = self._make_engine(derived, node=LOCAL if database is None else _node_name(home))
        self._executor = AgentsExecutor(
            log=self._cluster,
            node_of=self._node_of,
            engines=[self._engine],
            terms=terms,
            wake=self._wake,
            servers=self._servers,
            cluster_key=derived.cluster_key(),
        )
        priced = Priced(self._executor, catalogue, offer.price_as)
        fold = newest_fold(self._store, Policy())
        self._snapshots = Snapshots(self._store, url, fold)
        ports: dict[str, Any] = {"clock": clock, "store": self._store, "executor": priced}
        self.control = Control(**ports, patience=offer.patience, fold=fold, precedence=precedence)
        self._cluster.control = self.control
        operations = Operations(
            control=self.control,
            store=self._store,
            clock=clock,
            home=home.path,
            catalogue=catalogue,
            wake=self._wake,
            owners=owners,
            standby=self._standby,
            members=Members(
                control=self.control,
                credentials=credentials,
                clock=clock,
                operator=local_owner(),
                public=None if public is None else PublicAddress(public.url, public.fingerprint),
                wake=self._wake,
                dismiss=self._executor.dismiss,
                derived=derived,
            ),
            secrets=job_secrets,
            machines=self._executor,
        )
        self._above_jobs = above_jobs(operations)

    @property
    def operations(self) -> Operations:
        """Return the requests about jobs, nodes and queues."""
        return self._above_jobs[0].operations

    def run(self, on_ready: Callable[[str], None], *, stand_by: bool = False) -> None:
        """Serve until a signal or until a shutdown has ended every attempt; call `on_ready` with the URL.

        Args:
            on_ready: called when the server takes jobs, or stands by.
            stand_by: follow the log until the server that leads on the database is gone, and then take over.

        Raises:
            ReplacedError: another server has taken over.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        listener = _loopback(self._home)
        app: ASGIApp = AgentLinks(create_app(self.operations, *self._above_jobs, self._executor), self._executor)
        if self._standby is not None:
            app = LeaderOnly(app, self._standby)
        http = WebServer(app, listener, self._public)
        jobs = jobs_of(self.control, self.operations.job, SystemClock())
        notifier = Notifier(self._home.path, self._store, jobs)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        facts = {"pid": os.getpid(), "agents": url}
        shut_down = False
        try:
            if self._standby is not None:
                if stand_by:
                    self._until_stored(self._standby.check_keys)
                http.begin()
                self._standby.locate(url)
                if stand_by:
                    self._announce(facts | {"url": url})
                    on_ready(url)
                if not self._take_the_lead(self._standby, stand_by):
                    return
            if not (stand_by and self.control.state.shutting_down):  # one that the last leader began is completed
                self._until_stored(self.control.up)
            tokens = self.operations.owners
            assert isinstance(tokens, TokenFile), "it was made so"
            tokens.on_change = lambda: record_tokens(self._store, tokens, SystemClock().now_us())
            self._until_stored(tokens.on_change)
            before_s: list[float] = []
            self._until_stored(
                lambda: before_s.append(self._cluster.lease_before_s(self._executor.nodes.terms.lease_s))
            )
            self._executor.nodes.know(self._cluster.members(), lease_before_s=max(before_s, default=0.0))
            if self._standby is None:
                http.begin()
            else:
                self._standby.leads = True
            self._announce(facts)
            self._executor.start(lambda: http.submit(read_all(self._executor)))
            if not stand_by:
                self._wait_for_node()
            # Clients come last: without a node, every job would be refused as too large.
            self._announce(facts | {"url": url})
            notifier.start()
            self._log.info("ready", url=url, log_number=self.control.number, audit=str(self._store.audit.head()))
            if not stand_by:
                on_ready(url)
            shut_down = self._loop()
        finally:
            notifier.end()
            self._end(http, shut_down)
            listener.close()

    def _take_the_lead(self, standby: Standby, stand_by: bool) -> bool:
        """Return whether this server leads now; False after a signal."""
        if not stand_by:
            standby.check_alone()
        else:
            with self._mirror(standby):
                if not standby.wait(self.control.catch_up, lambda: self._signal is not None):
                    return False
        standby.begin()
        self._until_stored(self.control.catch_up)
        self._log.info("this server leads", log_number=self.control.number)
        return True

    def _mirror(self, standby: Standby) -> Mirror:
        token, fingerprint = self._home.token(), None if self._public is None else self._public.fingerprint
        return Mirror(
            self.operations.files,
            unfinished=self._store.unfinished,
            number=lambda: self.control.number,
            leader=lambda: Client(url=standby.servers[0], token=token, fingerprint=fingerprint),
        )

    def _until_stored(self, action: Callable[[], None]) -> None:
        """Do this; repeat it while the database of a pair is away, since a standby must not end by that."""
        while self._signal is None:
            try:
                action()
            except StoreError as error:
                if self._standby is None or isinstance(error, ReplacedError):
                    raise
                self._log.warning("the database does not answer, it is asked again", error=error.message)
                self._wait(SystemClock().now_us() + round(_RETRY_S * 1e6))
            else:
                return

    def _announce(self, facts: dict[str, object]) -> None:
        if self._public is not None:
            facts = facts | {"fingerprint": self._public.fingerprint}
        if self._standby is None:
            self._home.announce(facts)
        else:
            self._standby.announce(facts)

    def _end(self, http: WebServer, shut_down: bool) -> None:
        self.operations.closing = True
        if shut_down:  # an agent that dials only now must still find the server and receive its Shutdown
            self._executor.shutdown()
            self._tick()  # records that the nodes are down, so that they do not count as idle
        if self._standby is not None:
            self._standby.end()
        if self._standby is None or shut_down:  # else clients and agents of this home find the other server by it
            self._home.withdraw()
        self._executor.close()
        http.end()
        self._snapshots.end(self.control)
        self._store.close()
        self._log.info("ended", shut_down=shut_down, signal=self._signal)

    def _loop(self) -> bool:
        """Run the control loop; return True when a shutdown is complete, False after a signal."""
        with collected_when_idle() as idle:
            while self._signal is None:
                began_s = time.perf_counter()
                wake_at_us = self._tick()
                self.operations.ticks.add(time.perf_counter() - began_s)
                if self._standby is not None and self._standby.replaced is not None:
                    raise self._standby.replaced
                self._snapshots.step(self.control)
                with self.control.changed:
                    self._engine.want(_queued_gpus(self.control.state))
                    self._executor.queued = waiting_data(self.control.state)
                    self._executor.neighbours.look(self.control.state.nodes.records.values())
                    if self.control.state.shutting_down and not self.control.state.attempts:
                        return True
                if self._turn.empty() and (wake_at_us is None or wake_at_us > SystemClock().now_us() + _IDLE_US):
                    idle()
                self._wait(wake_at_us)
        return False

    def _tick(self) -> int | None:
        try:
            wake_at_us = self.control.tick()
            others_us = [each.controller.step() for each in self._above_jobs]
        except ReplacedError as error:
            assert self._standby is not None, "only a lead can be lost"
            self._standby.replaced = error
            return None
        except (StoreError, OSError) as error:
            if self.operations.ticks.problem != str(error):
                self._log.error("a tick failed; nothing is lost, and it is tried again", error=str(error))
            self.operations.ticks.problem = str(error)
            return SystemClock().now_us() + round(_RETRY_S * 1e6)
        self.operations.ticks.problem = None
        failures = {(str(job_id), repr(failure)): failure for job_id, failure in self.control.errors}
        for key, failure in failures.items():
            if key not in self._logged:
                self._log.error("a decision about one job failed", job_id=key[0], exc_info=failure)
        self._logged = set(failures)
        return min((at_us for at_us in (wake_at_us, *others_us) if at_us is not None), default=None)

    def _wait(self, until_us: int | None) -> None:
        """Wait for a change, a signal or the given time; several changes cause one tick."""
        timeout = None if until_us is None else max(0.0, (until_us - SystemClock().now_us()) / 1e6)
        try:
            self._turn.get(timeout=timeout)
            while True:
                self._turn.get_nowait()
        except queue.Empty:
            return

    def _wait_for_node(self) -> None:
        """Wait for a node, so that the next submission finds it; a cluster whose nodes are known may be away."""
        wait_s = NODE_WAIT_S if self._offer.on == LOCAL else CLUSTER_WAIT_S
        deadline = time.monotonic() + wait_s
        records = self.control.state.nodes.records
        while self._signal is None and not any(record.up for record in records.values()):
            if self._offer.on == NONE or (records and self._offer.on != LOCAL):
                return
            if time.monotonic() > deadline and SlurmRequest.names(self._offer.on):
                self._log.warning("no node yet", why=self._engine.missing())  # Slurm's queue may be long
                return
            if time.monotonic() > deadline:
                raise ServerError(
                    f"no node's agent came up within {wait_s:.0f} s",
                    hint=self._engine.missing(),
                )
            self._tick()
            self._wait(SystemClock().now_us() + 100_000)

    def _servers(self) -> list[str]:
        """Return the URLs of all servers of the database, and raise StandbyError while another one may lead."""
        standby = self._standby
        if standby is None:
            return []
        if len(standby.servers) > 1:
            standby.check()
        return standby.servers

    def _make_engine(self, tokens: NodeTokens, *, node: str) -> Engine:
        public = self._public
        return engine_of(
            self._offer.on,
            self._home.path,
            tokens,
            Host(self._join_command, self._is_held, self._dismiss),
            node=node,
            slots=self._offer.slots,
            url=None if public is None else public.url,
            fingerprint=None if public is None else public.fingerprint,
        )

    def _join_command(self) -> list[str]:
        request = JoinTokenRequest(uses=1, for_s=_JOIN_S)
        made = self.operations.members.issue(request, local_owner())
        return [sys.executable, "-m", "cordee", "nodes", "join", made.url, made.token]

    def _is_held(self, node: str) -> bool:
        with self.control.changed:
            attempts = self.control.state.attempts.values()
            return any(lease.node == node for attempt in attempts for lease in attempt.held)

    def _dismiss(self, node: str) -> None:
        self._executor.dismiss(node)

    def _node_of(self, token: str) -> str | None:
        return self.operations.members.node_of(token)

    def _wake(self) -> None:
        self._turn.put(None)

    def _stop(self, number: int, _: FrameType | None) -> None:
        self._signal = number
        self._turn.put(None)


def _queued_gpus(state: State) -> int:
    """Return the GPUs that all waiting jobs would use; the jobs of a line are of one shape."""
    lines = state.waiting.lines.values()
    return sum(len(line.places) * state.jobs[line.places[0].job_id].job.gpus for line in lines)


def _report_to_parent(message: dict[str, object]) -> None:
    """Write one line to stdout and then redirect stdout to /dev/null, so that the parent may exit."""
    print(json.dumps(message), flush=True)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one: each agent's link is an open file (`link.AgentLinks`)."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _lead(home: Home, public: Listener | None, database: str) -> Lead:
    """Return this server's claim to the lead, with the keys by which agents and clients know it."""
    if public is None:
        return Lead(database, url="", known_by={"token": hash_of(home.token()), "certificate": LOOPBACK})
    known_by = {"token": hash_of(home.token()), "certificate": public.fingerprint or "of an authority"}
    return Lead(database, url=public.url, known_by=known_by)


def _loopback(home: Home) -> socket.socket:
    """Listen on loopback, at the port of the last time if it is free: other servers and clients know it."""
    last = home.settings().get("port", "0")
    try:
        listener = socket.create_server(("127.0.0.1", int(last)))
    except (OSError, ValueError, OverflowError):
        listener = socket.create_server(("127.0.0.1", 0))
    home.keep_settings({"port": str(listener.getsockname()[1])})
    return listener


def _node_name(home: Home) -> str:
    """Return the name of this machine's node among those of the other servers of a database, drawn the first time."""
    name = home.settings().get("node")
    if name is None:
        name = f"{socket.gethostname().partition('.')[0]}-{secrets.token_hex(2)}"
        home.keep_settings({"node": name})
    return name


def _nobody_waits(_: str) -> None:
    """Ignore that the server is ready: its parent has long had its line."""


def serve(path: Path, options: Options, *, on_ready: Callable[[str], None]) -> None:
    """Own a home and serve in this process until a signal or a shutdown.

    Raises:
        CordeeError: the server cannot start; nothing was changed.
    """
    home = Home(path)
    home.lock()
    _raise_file_limit()
    log_to(home.path / "server.log", log_format(home, options.log_format))
    try:
        offer = Offer.of(home, options.slots, options.price_as, options.on, options.patience)
        database, stand_by = database_of(home, options), options.standby
        listen, terms = options.listen, LeaseTerms.of(home, options.lease)
        gateway = listen_address(home, options.gateway)
        if listen is None and offer.on != LOCAL and home.settings().get("listen", OFF) == OFF:
            listen = f"0.0.0.0:{PORT}"
        while True:
            public = Listener.of(home, listen, options.certificate, options.key)
            server = Server(home, offer, public, database=database, terms=terms)
            try:
                with gateway_beside(server.control.state, home, gateway, on_ready) as ready:
                    server.run(ready, stand_by=stand_by)
                return
            except ReplacedError as error:
                structlog.get_logger().error("this server ends its lead, and stands by", error=str(error))
                stand_by, on_ready = True, _nobody_waits
    except CordeeError as error:
        structlog.get_logger().error("the server ends", error=str(error))
        raise
    except Exception:
        structlog.get_logger().exception("the server ends after an internal error; ranks go on")
        raise


def main(argv: list[str] | None = None) -> int:
    """Run a server under a parent that waits for one line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cordee.control", description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--slots")
    parser.add_argument("--price-as")
    parser.add_argument("--listen")
    parser.add_argument("--certificate", type=Path)
    parser.add_argument("--key", type=Path)
    parser.add_argument("--database", help="its URL; -: it stands in stdin")
    parser.add_argument("--standby", action="store_true")
    parser.add_argument("--on")
    parser.add_argument("--lease")
    parser.add_argument("--gateway")
    parser.add_argument("--log-format")
    parser.add_argument("--patience")
    given = vars(parser.parse_args(argv))
    if given["database"] == "-":
        given["database"] = sys.stdin.read().strip()
    try:
        serve(given.pop("home"), Options(**given), on_ready=lambda url: _report_to_parent({"ready": url}))
    except CordeeError as error:
        _report_to_parent(as_body(error))
        return error.exit_code
    return 0
