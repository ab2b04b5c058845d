"""The wrapper around an engine on each node of a replica: `python -m cordee.serve.replica`, settings in CORDEE_REPLICA.

It starts the engine on a free port and reports it ready once it has answered a real request of one token. An engine
that ends or hangs is started again once; then the wrapper exits with its last lines. On SIGTERM no new requests are
wanted: it waits until none is open, or until the deadline, and exits with 75, as the job may run again elsewhere.

On several nodes rank 0 is the one that listens, and starts and ends the engine's parts on all of them (gang.py). The
end of any part ends the replica.

Of a service with several models it holds the one that its agent has written into its spool. When another one is written
there it waits until no request is open, ends the engine, and starts one with the other model.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cordee.errors import EXIT_CHECKPOINTED, CordeeError, InputError, ReplicaError
from cordee.imports import end_uncollected
from cordee.serve.engine_process import EngineProcess, EngineWatch
from cordee.serve.engines.known import find_engine
from cordee.serve.engines.port import EngineCapacity, EngineLaunch, EnginePart, Upstream
from cordee.serve.engines.words import masked
from cordee.serve.gang import CONNECT_S, PORTS, STOP_S, Follower, Gang, Lead, visible_gpus
from cordee.serve.models import find_model, models_folder
from cordee.serve.policy.sessions import host_cache_bytes
from cordee.serve.reports import ReplicaReports
from cordee.serve.sessions import IdleSessions
from cordee.telemetry.host import free_port, memory_bytes
from cordee.telemetry.notices import read_model
from cordee.units import format_duration, plural
from cordee.workload.service import SETTINGS_ENV, ReplicaSettings, flag_name

UNREADY_AFTER_S = 5.0
RESTART_AFTER_S = 60.0
LOAD_S_MAX = 3600.0
STABLE_S = 60.0
"""An engine that ran so long is started again when it ends; one that ended sooner twice is given up."""
QUIET_S = 0.3
"""Time without an open request after which a draining engine ends: a request may be on its way."""
MARGIN_S = 2.0
"""Time before the deadline of a notice at which the engine is ended, whatever is open."""
END_S = 1.0
KEEP_S = 1.0
"""Time between two looks at the sessions of an engine that has nothing to do."""
SAVE_S = 0.5
"""Time to save idle sessions in, when open requests took all of the drain."""

_TICK_S = 0.05


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """Seconds that the wrapper waits: for a sign of life before it says so, before a restart, and for open requests."""

    unready_s: float = UNREADY_AFTER_S
    restart_s: float = RESTART_AFTER_S
    drain_s: float = 30.0

    @staticmethod
    def of(settings: ReplicaSettings, environ: Mapping[str, str]) -> "WaitLimits":
        """Return the limits that the agent gives, else those of the service."""
        grace_s = float(environ.get("CORDEE_GRACE_S") or settings.drain_s)
        return WaitLimits(
            float(environ.get("CORDEE_HANG_REPORT_S") or UNREADY_AFTER_S),
            float(environ.get("CORDEE_HANG_RESTART_S") or RESTART_AFTER_S),
            max(grace_s - MARGIN_S, grace_s / 2),
        )


class Replica:
    """One engine, its watch and its reports, until a notice or an error ends it."""

    def __init__(self, settings: ReplicaSettings, environ: Mapping[str, str], notice: threading.Event) -> None:
        """Prepare a replica; `notice` is set when it shall drain and leave."""
        self._declared, self._environ, self._limits = settings, environ, WaitLimits.of(settings, environ)
        self._engine = find_engine(settings.engine)
        self._reports = ReplicaReports(environ)
        spool = environ.get("CORDEE_SPOOL")
        self._orders = Path(spool) if spool and settings.models else None
        self._settings = settings  # With the model that it holds.
        self._launch: EngineLaunch
        self._notice = notice
        gang = Gang.of(environ)
        self._lead = None if gang is None else Lead(gang, self._notice)
        self._process: EngineProcess | None = None
        self._announced: bool | None = None  # What was reported last; None: nothing, or a drain.
        self._restarted_s: float | None = None
        self._load_us: int | None = None
        self._sessions: IdleSessions | None = None

    def run(self) -> int:
        """Serve until a notice, and return the exit code.

        Raises:
            ReplicaError: the engine does not start, ended, or hangs, and a restart did not help.
        """
        try:
            self._gather()
            while not self._notice.is_set():
                ordered = self._ordered()
                if ordered is None:
                    self._notice.wait(_TICK_S)
                    continue
                if self._announced:
                    self._unready(f"it loads {ordered.model} in place of {self._settings.model}")
                self._hold(ordered)
            return EXIT_CHECKPOINTED
        finally:
            if self._process is not None:
                self._process.end(0)
            if self._lead is not None:
                self._lead.close()

    def _gather(self) -> None:
        """Wait until all other nodes have come, or a notice."""
        began_s = time.monotonic()
        while self._lead is not None and (missing := self._lead.missing) and not self._notice.wait(_TICK_S):
            waited_s, which = time.monotonic() - began_s, ", ".join(map(str, missing))
            if waited_s >= CONNECT_S:
                raise ReplicaError(f"node {which} of the replica did not come within {format_duration(CONNECT_S)}")
            if waited_s >= self._limits.unready_s:
                self._unready(f"it waits for node {which} of the replica")

    def _ordered(self) -> ReplicaSettings | None:
        """Return the settings with the model that it shall hold; None: no order has come yet."""
        if self._orders is None:
            return self._declared
        model = read_model(self._orders)
        return None if model is None else self._declared.holding(model)

    def _hold(self, settings: ReplicaSettings) -> None:
        """Serve one model until a notice, or until another one is ordered."""
        self._settings = settings
        self._announced = self._restarted_s = None
        while True:
            self._process = process = self._start()
            watch = EngineWatch(self._engine, process, self._launch.served_names[0], self._settings.health)
            why: str | None = "it ended"
            try:
                why = self._serve(process, watch)
                if why is None:
                    self._drain(process, watch)
                    return
            finally:
                watch.stop()
                self._end_parts(process, why)
            self._unready(why.splitlines()[0])
            now_s = time.monotonic()
            if self._lead is not None:
                raise ReplicaError(f"the engine {self._engine.name} {why}", hint="all its nodes start again")
            if self._restarted_s is not None and now_s - self._restarted_s < STABLE_S:
                raise ReplicaError(f"the engine {self._engine.name} {why}", hint="its log has more lines before")
            self._restarted_s = now_s
            _say(f"the engine {self._engine.name} {why}\nit is started again")

    def _end_parts(self, process: EngineProcess, why: str | None) -> None:
        """End the engine on all nodes at the same time, before the deadline of a notice."""
        until_s = time.monotonic() + (MARGIN_S / 2 + END_S / 2 if self._notice.is_set() else STOP_S)
        if self._lead is not None:
            self._lead.stop(why.splitlines()[0] if why else "rank 0 has drained")
        process.end(END_S)
        if self._lead is not None:
            self._lead.wait_stopped(until_s - time.monotonic())

    def _start(self) -> EngineProcess:
        self._launch = launch_of(self._settings, self._environ)
        if self._lead is not None:
            ports = tuple(free_port(self._launch.host) for _ in range(PORTS))
            self._launch = replace(self._launch, part=self._lead.start(self._settings.model, ports))
        if self._launch.session_folder is not None:
            Path(self._launch.session_folder).mkdir(mode=0o700, parents=True, exist_ok=True)  # llama-server wants it.
        self._sessions = self._idle_sessions()
        port = self._settings.port or free_port(self._launch.host)
        launch = self._launch.at(port)
        command = self._engine.command(launch)
        _say(f"starting {self._engine.name} on port {port}: {' '.join(masked(command.argv))}")
        return EngineProcess(command, launch.host, port)

    def _serve(self, process: EngineProcess, watch: EngineWatch) -> str | None:
        """Report until a notice or another model's order, and return None; else why the engine has to start again."""
        began_s, self._load_us = time.monotonic(), None
        kept_s = began_s
        while not self._notice.wait(_TICK_S) and self._ordered() in (None, self._settings):
            if self._lead is not None and self._lead.problem:
                self._unready(self._lead.problem)
                raise ReplicaError(f"the engine {self._engine.name}: {self._lead.problem}", hint="its log says why")
            if process.exit_code() is not None:
                why = process.why_ended()
                if not watch.ready:
                    self._unready(why.splitlines()[0])
                    raise ReplicaError(f"the engine {self._engine.name} did not start: it {why}")
                return why
            still_s = time.monotonic() - watch.alive_s
            silence = f"no sign of life for {format_duration(still_s)}: {watch.problem or 'it does not answer'}"
            if not watch.ready:
                self._check_start(watch, time.monotonic() - began_s)
            elif still_s < self._limits.unready_s:
                if self._load_us is None:
                    self._load_us = round((time.monotonic() - began_s) * 1e6)
                self._ready(process)
                if watch.is_idle and time.monotonic() - kept_s >= KEEP_S:
                    self._keep_sessions(process)
                    kept_s = time.monotonic()
            elif still_s < self._limits.restart_s:
                self._unready(silence)
            else:
                return f"gave {silence}"
        return None

    def _check_start(self, watch: EngineWatch, took_s: float) -> None:
        if "completion" in watch.problem:
            self._unready(watch.problem)
        limit_s = self._limits.restart_s if "completion" in watch.problem else LOAD_S_MAX
        if took_s >= limit_s:
            raise ReplicaError(
                f"the engine {self._engine.name} is not ready after {format_duration(took_s)}: {watch.problem}"
            )

    def _ready(self, process: EngineProcess) -> None:
        if self._announced is True:
            return
        size = self._capacity(process)
        if self._sessions is not None and not self._sessions.restored:
            restored = self._sessions.restore(lambda upstream: self._ask(process, upstream), size.slots or 1)
            if restored:
                _say(f"restored {plural(restored, 'idle session')}")
        # One of several models has the name by which it was ordered.
        model = str(self._settings.model) if self._settings.models else self._launch.served_names[-1]
        self._reports.ready(
            address=process.address,
            engine=self._engine.name,
            model=model,
            kv_tokens=size.kv_tokens,
            slots=size.slots,
            load_us=self._load_us,
        )
        self._announced = True
        tokens = "" if size.kv_tokens is None else f", {size.kv_tokens:,} KV tokens"
        slots = "" if size.slots is None else f", {size.slots} slots"
        _say(f"{model} is ready at {process.address}{tokens}{slots}")

    def _ask(self, process: EngineProcess, upstream: Upstream) -> bytes:
        status, answer = process.ask(upstream.path, upstream.body, limit_s=UNREADY_AFTER_S)
        if status != 200:
            raise OSError(f"{upstream.path} answers {status}")
        return answer

    def _keep_sessions(self, process: EngineProcess) -> None:
        """Write a session that pauses to disk, if there is one."""
        if self._sessions is not None:
            saved = self._sessions.keep(lambda upstream: self._ask(process, upstream), time.monotonic())
            if saved.sessions:
                _say(str(saved))

    def _idle_sessions(self) -> IdleSessions | None:
        if self._engine.sessions is None or self._launch.session_folder is None:
            return None
        return IdleSessions(self._engine.sessions, self._launch, models_folder(os.environ) / "sessions")

    def _capacity(self, process: EngineProcess) -> EngineCapacity:
        if not self._engine.size_path:
            return EngineCapacity()
        try:
            status, answer = process.ask(self._engine.size_path, limit_s=UNREADY_AFTER_S)
            return self._engine.capacity(answer) if status == 200 else EngineCapacity()
        except (OSError, ValueError, KeyError):  # It serves all the same.
            return EngineCapacity()

    def _unready(self, why: str) -> None:
        if self._announced is not False:
            self._announced = False
            self._reports.unready(why)
            _say(f"not ready: {why}")

    def _drain(self, process: EngineProcess, watch: EngineWatch) -> None:
        """Wait until no request is open; after a notice for the limit at most, before a swap while the engine lives."""
        began_s, leaves = time.monotonic(), self._notice.is_set()
        if leaves:
            self._reports.unready("it got notice", draining=True)
            watch.stop()
        quiet_s = now_s = began_s
        is_open: int | None = None
        while watch.ready and process.exit_code() is None:
            is_limited = leaves or is_open is None  # Else a swap waits as long as the engine lives.
            until_s = began_s + self._limits.drain_s if is_limited else watch.alive_s + self._limits.restart_s
            if (left_s := until_s - now_s) <= 0:
                break
            if self._notice.is_set() and not leaves:
                self._drain(process, watch)
                return
            with suppress(OSError):
                load = watch.read_load(left_s)
                # Of an engine that does not say, requests may be open as long as connections are.
                is_open = process.connections() if load is None else load.open
            now_s = time.monotonic()
            if is_open is None or is_open:
                quiet_s = now_s
            elif now_s - quiet_s >= QUIET_S:
                break
            time.sleep(_TICK_S)
        if watch.ready and process.exit_code() is None and (sessions := self._sessions) is not None:
            until_s = max(began_s + self._limits.drain_s if leaves else 0.0, time.monotonic() + SAVE_S)
            _say(str(sessions.save(lambda upstream: self._ask(process, upstream), until_s)))
        left = "" if is_open is None else f", {plural(is_open, 'request')} open"
        _say(f"drained for {format_duration(time.monotonic() - began_s)}{left}")


def follow(settings: ReplicaSettings, environ: Mapping[str, str], gang: Gang, notice: threading.Event) -> int:
    """Start and end this node's part of the engine as rank 0 says, and return the exit code.

    Raises:
        ReplicaError: the part has ended, or rank 0 is gone.
    """
    engine, limits = find_engine(settings.engine), WaitLimits.of(settings, environ)
    lead = Follower.of(gang, notice)
    process: EngineProcess | None = None
    order: Mapping[str, Any] = {}
    noticed_s: float | None = None
    try:
        while lead is not None and not lead.gone:
            if lead.order and lead.order is not order:
                order = lead.order
                if process is not None:
                    process.end(END_S)
                process = None
                if "stop" in order:
                    _say(f"rank 0 ends the engine: {order['stop']}")
                    lead.say(stopped=True)
                else:
                    process = _started_part(settings, environ, lead, order)
            # A part may end because rank 0's has; the order to end was sent before that.
            if process is not None and process.exit_code() is not None and lead.order is order:
                why = f"the engine {engine.name} {process.why_ended()}"
                lead.say(problem=why.splitlines()[0])
                raise ReplicaError(why)
            if notice.is_set():
                if noticed_s is None:
                    noticed_s = time.monotonic()
                    lead.say(notice=True)
                if time.monotonic() - noticed_s >= limits.drain_s + min(MARGIN_S, limits.drain_s) / 2:
                    break  # The deadline is near, whatever rank 0 does.
            time.sleep(_TICK_S)
        if lead is None or notice.is_set():
            return EXIT_CHECKPOINTED
        said = f": {order['stop']}" if "stop" in order else ""
        raise ReplicaError(f"rank 0 of the replica, at {gang.address}, has left{said}", hint="its log says why")
    finally:
        if process is not None:
            process.end(0)


def _started_part(
    settings: ReplicaSettings, environ: Mapping[str, str], lead: Follower, order: Mapping[str, Any]
) -> EngineProcess:
    try:
        held = settings.holding(order["start"]) if order["start"] in settings.models else settings
        launch = launch_of(held, environ)
        ports, gpus = (tuple(int(each) for each in order[name]) for name in ("ports", "gpus"))
        rank = int(environ.get("NODE_RANK") or 0)
        part = EnginePart(rank=rank, gpus=gpus, master=launch.host, ports=ports)
        launch = replace(launch, part=part, host=lead.host).at(free_port(lead.host))
        engine = find_engine(settings.engine)
        command = engine.command(launch)
        _say(f"starting {engine.name} on node {rank} of {len(gpus)}: {' '.join(masked(command.argv))}")
        return EngineProcess(command, launch.host, launch.port)
    except (CordeeError, OSError) as error:
        lead.say(problem=f"could not start {settings.engine}: {error}".splitlines()[0])
        raise


def launch_of(settings: ReplicaSettings, environ: Mapping[str, str]) -> EngineLaunch:
    """Return the engine's settings: of the service with its plan, and of the GPUs that the agent gives.

    Raises:
        InputError: the replica has GPUs on several nodes, and the engine starts on one; or there is no such model.
    """
    if int(environ.get("NNODES") or 1) > 1 and not find_engine(settings.engine).spans_nodes:
        raise InputError(
            f"this replica has GPUs on {environ.get('NNODES')} nodes, and the engine {settings.engine} starts on one",
            hint="declare the service with at most the GPUs of one node (gpus:)",
        )
    found = find_model(settings, environ)
    spool = environ.get("CORDEE_SPOOL")
    address = environ.get("MASTER_ADDR") or "127.0.0.1"
    return EngineLaunch(
        model=found.path,
        served_names=tuple(dict.fromkeys(filter(None, (settings.service, settings.model, found.name)))),
        host="127.0.0.1" if address in ("localhost", "") else address,
        port=settings.port,
        context=settings.context,
        gpus=len(visible_gpus(environ)),
        threads=int(environ["OMP_NUM_THREADS"]) if environ.get("OMP_NUM_THREADS") else None,
        session_folder=str(Path(spool).parent / "sessions") if spool else None,
        host_cache_bytes=host_cache_bytes(memory_bytes()),
        run=settings.run,
        flags={flag_name(name): _value(value) for name, value in settings.flags.items()},
    )


def _value(value: bool | int | float | str) -> object:
    """Return a setting's value: `true` is a switch, and `false` takes a setting out."""
    return value if not isinstance(value, bool) else "" if value else None


def _say(text: str) -> None:
    print(f"cordee: {text}", flush=True)


def main() -> int:
    """Run the replica of this environment, and return the exit code."""
    text = os.environ.get(SETTINGS_ENV)
    try:
        if not text:
            raise InputError(f"{SETTINGS_ENV} is not set", hint="the wrapper is started by `cordee serve run`")
        settings, gang, notice = ReplicaSettings.model_validate_json(text), Gang.of(os.environ), threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: notice.set())
        if gang is not None and gang.rank:
            return follow(settings, os.environ, gang, notice)
        return Replica(settings, os.environ, notice).run()
    except CordeeError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    end_uncollected()
    sys.exit(main())
