"""The server process: it owns a home, runs the control loop in its main thread, and serves HTTP in another.

It writes one JSON line to stdout for its parent, that it is ready or why it failed, and from then on only its log.
A server that is killed or terminated leaves the ranks running, and the next one adopts them; only `down` ends them.
"""

import argparse
import json
import logging
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import structlog

from cordee.client import as_body
from cordee.control.agents.committed import CommittedLog
from cordee.control.agents.executor import AgentsExecutor
from cordee.control.api import create_app, local_owner
from cordee.control.collector import collected_when_idle
from cordee.control.engines.local import LocalEngine, NodeConfig
from cordee.control.home import Home
from cordee.control.listen import Listener
from cordee.control.members import Members, PublicAddress
from cordee.control.node_tokens import DerivedTokens
from cordee.control.prices import Priced
from cordee.control.secret_store import SecretStore
from cordee.control.service import Service
from cordee.control.snapshots import Snapshots, newest_fold
from cordee.control.store.credentials import Credentials
from cordee.control.store.sql import SqlStore
from cordee.control.tick import Control
from cordee.control.web import WebServer
from cordee.errors import CordeeError, InputError, ServerError, StoreError
from cordee.hardware.catalog import Catalogue
from cordee.hardware.load import load_catalogue
from cordee.schedule.policy import Policy

NODE_WAIT_S = 20.0
_RETRY_S = 1.0
_IDLE_US = 1_000_000  # garbage is collected when nothing is due for this long


class SystemClock:
    """The system's clock."""

    def now_us(self) -> int:
        """Return microseconds since the Unix epoch."""
        return time.time_ns() // 1000


@dataclass(frozen=True, slots=True)
class Offer:
    """The GPUs or CPU slots that this machine offers; `price_as` names the GPU that sets the price of a slot."""

    slots: int | None
    price_as: str | None

    @classmethod
    def of(cls, home: Home, slots: str | None, price_as: str | None) -> "Offer":
        """Return the offer of these options; an option that is not given is that of the last `up`.

        Raises:
            InputError: `slots` is not a number.
            CatalogueError: the GPU is unknown.
        """
        last = home.settings()
        slots = last.get("slots", "auto") if slots is None else slots
        price_as = last.get("price_as", "none") if price_as is None else price_as
        if slots != "auto" and not (slots.isdecimal() and int(slots) > 0):
            raise InputError(f"{slots!r} is not a number of CPU slots", hint="write --slots 8, or --slots auto")
        if price_as != "none":
            load_catalogue().find_gpu(price_as)
        home.keep_settings({"slots": slots, "price_as": price_as})
        return cls(None if slots == "auto" else int(slots), None if price_as == "none" else price_as)


class Server:
    """The parts of one server process, from start to end."""

    def __init__(self, home: Home, offer: Offer, public: Listener | None = None) -> None:
        self._home, self._public = home, public
        self._log = structlog.get_logger()
        self._turn: queue.SimpleQueue[None] = queue.SimpleQueue()  # a signal handler may call its put
        self._signal: int | None = None
        self._logged: set[tuple[str, str]] = set()  # errors of the last tick, so that each is logged once
        catalogue = _catalogue(home.path)
        owners = home.owners(local_owner())
        database = f"sqlite:///{home.path / 'cordee.db'}"
        self._store = SqlStore(database)
        clock = SystemClock()
        credentials = Credentials(self._store)
        secrets = SecretStore(home.path, credentials)
        self._cluster = CommittedLog(self._store, secrets)
        derived = DerivedTokens(home.token())
        engine = LocalEngine(home.path, [NodeConfig(name="local", slots=offer.slots)], derived)
        self._executor = AgentsExecutor(
            log=self._cluster,
            node_of=self._node_of,
            engines=[engine],
            wake=self._wake,
        )
        priced = Priced(self._executor, catalogue, offer.price_as)
        fold = newest_fold(self._store, Policy())
        self._snapshots = Snapshots(self._store, database, fold)
        self.control = Control(clock=clock, store=self._store, executor=priced, fold=fold)
        self._cluster.control = self.control
        self.service = Service(
            control=self.control,
            store=self._store,
            clock=clock,
            home=home.path,
            catalogue=catalogue,
            wake=self._wake,
            owners=owners,
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
            secrets=secrets,
        )

    def run(self, on_ready: Callable[[str], None]) -> None:
        """Serve until a signal or until a shutdown has ended every attempt; call `on_ready` with the URL."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        listener = socket.create_server(("127.0.0.1", 0))
        http = WebServer(create_app(self.service, self._executor), listener, self._public)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        facts = {"pid": os.getpid(), "agents": url}
        shut_down = False
        try:
            self.control.up()
            http.begin()
            self._home.announce(facts)
            self._executor.start(self._cluster.members())
            self._wait_for_node()
            # Clients come last: without a node, every job would be refused as too large.
            self._home.announce(facts | {"url": url})
            self._log.info("ready", url=url, log_number=self.control.number)
            on_ready(url)
            shut_down = self._loop()
        finally:
            self.service.closing = True
            if shut_down:  # an agent that dials only now must still find the server and receive its Shutdown
                self._executor.shutdown()
                self._tick()  # records that the nodes are down, so that they do not count as idle
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
                wake_at_us = self._tick()
                self._snapshots.step(self.control)
                with self.control.changed:
                    if self.control.state.shutting_down and not self.control.state.attempts:
                        return True
                if self._turn.empty() and (wake_at_us is None or wake_at_us > SystemClock().now_us() + _IDLE_US):
                    idle()
                self._wait(wake_at_us)
        return False

    def _tick(self) -> int | None:
        try:
            wake_at_us = self.control.tick()
        except (StoreError, OSError) as error:
            if self.service.problem != str(error):
                self._log.error("a tick failed; nothing is lost, and it is tried again", error=str(error))
            self.service.problem = str(error)
            return SystemClock().now_us() + round(_RETRY_S * 1e6)
        self.service.problem = None
        failures = {(str(job_id), repr(failure)): failure for job_id, failure in self.control.errors}
        for key, failure in failures.items():
            if key not in self._logged:
                self._log.error("a decision about one job failed", job_id=key[0], exc_info=failure)
        self._logged = set(failures)
        return wake_at_us

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
        """Wait for the node, so that the next submission finds it."""
        deadline = time.monotonic() + NODE_WAIT_S
        while self._signal is None and not any(record.up for record in self.control.state.nodes.records.values()):
            if time.monotonic() > deadline:
                raise ServerError(
                    f"the node's agent did not come up within {NODE_WAIT_S:.0f} s",
                    hint=f"its log is in {self._home.path / 'nodes'}",
                )
            self._tick()
            self._wait(SystemClock().now_us() + 100_000)

    def _node_of(self, token: str) -> str | None:
        return self.service.members.node_of(token)

    def _wake(self) -> None:
        self._turn.put(None)

    def _stop(self, number: int, _: FrameType | None) -> None:
        self._signal = number
        self._turn.put(None)


def _catalogue(home: Path) -> Catalogue:
    own = home / "prices.toml"
    return load_catalogue(own if own.exists() else None)


def _report_to_parent(message: dict[str, object]) -> None:
    """Write one line to stdout and then redirect stdout to /dev/null, so that the parent may exit."""
    print(json.dumps(message), flush=True)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _log_to(path: Path) -> None:
    """Write everything that this process logs, through structlog or not, as JSON lines to one file."""
    common: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*common, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    render: list[structlog.typing.Processor] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.JSONRenderer(),
    ]
    handler = logging.FileHandler(path)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=common, processors=render))
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `cordee up`; None: as for the last one."""

    slots: str | None = None
    price_as: str | None = None
    listen: str | None = None
    certificate: Path | None = None
    key: Path | None = None


def serve(path: Path, options: Options, *, on_ready: Callable[[str], None]) -> None:
    """Own a home and serve in this process until a signal or a shutdown.

    Raises:
        CordeeError: the server cannot start; nothing was changed.
    """
    home = Home(path)
    home.lock()
    _log_to(home.path / "server.log")
    try:
        offer = Offer.of(home, options.slots, options.price_as)
        public = Listener.of(home, options.listen, options.certificate, options.key)
        Server(home, offer, public).run(on_ready)
    except CordeeError:
        raise
    except Exception:
        structlog.get_logger().exception("the server ends after an internal error; ranks go on")
        raise


def main(argv: list[str] | None = None) -> int:
    """Run a server under a parent that waits for one line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cordee.control.server", description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--slots")
    parser.add_argument("--price-as")
    parser.add_argument("--listen")
    parser.add_argument("--certificate", type=Path)
    parser.add_argument("--key", type=Path)
    given = vars(parser.parse_args(argv))
    try:
        serve(given.pop("home"), Options(**given), on_ready=lambda url: _report_to_parent({"ready": url}))
    except CordeeError as error:
        _report_to_parent(as_body(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
