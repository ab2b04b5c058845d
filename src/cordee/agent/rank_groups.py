"""The rank groups of one node: started by orders, followed while they run, and reported when they have ended."""

import logging
import selectors
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from cordee.agent.clock import Clock
from cordee.agent.copies import Copied
from cordee.agent.gpus import Devices
from cordee.agent.interpreters import Interpreters, Software
from cordee.agent.journal import Journal
from cordee.agent.launch import Assignment, LaunchError, RankGroupLaunch, prepare
from cordee.agent.logs import LogPump
from cordee.agent.messages import Dial
from cordee.agent.mig import MigError
from cordee.agent.preflight import Preflights
from cordee.agent.process import Processes
from cordee.agent.rank_group import RankGroup, RankGroupResult
from cordee.agent.samples import Samples
from cordee.agent.spools import Spools
from cordee.agent.takeover import end_survivors
from cordee.agent.transfers import Transfers
from cordee.events import Event, Outcome, RanksEnded, RanksStarted
from cordee.ids import JobId
from cordee.telemetry.notices import write_hint, write_model
from cordee.units import plural

FOLLOW_S = 0.05  # between two reads of the spools while ranks run

_log = logging.getLogger("cordee.agent")


class RankGroups:
    """The rank groups that run on one node.

    Args:
        node: the node's name.
        devices: its GPUs or slots.
        journal: their files.
        spools: the reports of their ranks.
        selector: the loop's; logs are read when it says so.
        report: reports an event to the server.
        clock: the time.
        processes: those of the machine.
        transfers: copies of submitted files, and logs for the server.
        interpreters: of the jobs.

    Attributes:
        transfers, interpreters: as given.
    """

    def __init__(
        self,
        node: str,
        devices: Devices,
        journal: Journal,
        spools: Spools,
        selector: selectors.BaseSelector,
        report: Callable[[Event], None],
        clock: Clock,
        processes: Processes,
        transfers: Transfers,
        interpreters: Interpreters,
    ) -> None:
        self._node, self._devices, self._journal, self._spools = node, devices, journal, spools
        self._selector, self._report, self._clock = selector, report, clock
        self._processes, self.transfers, self.interpreters = processes, transfers, interpreters
        self._running: dict[str, RankGroup] = {}
        self._waiting: dict[
            str, tuple[Mapping[str, str], Mapping[str, str]]
        ] = {}  # for a copy or a preflight: secrets, environment
        self._next_follow_s = 0.0
        self._samples = Samples(node, devices, report, clock)
        self._preflights = Preflights(node, devices, transfers.gpu_files)

    def __bool__(self) -> bool:
        """Return whether a rank group runs."""
        return bool(self._running)

    def __iter__(self) -> Iterator[RankGroup]:
        """Iterate over the rank groups that run."""
        return iter(list(self._running.values()))

    def pids(self) -> set[int]:
        """Return the pids of all processes of all groups."""
        return {each.pid for group in self._running.values() for each in group.processes()}

    def take_over(self, ended: set[str]) -> None:
        """End the processes that an earlier agent of this node left, except of attempts with these tags."""
        self._journal.recover()
        orders = self._journal.unsettled()
        for order in orders:
            self._spools.complete(order, self._journal.folder(order.job_id, order.epoch))
        for order in orders:
            if order.tag in ended:
                continue
            n_ended = end_survivors(order, self._journal.ranks(order), self._processes, self._clock.machine)
            why = f"the agent of {self._node} died; its successor ended {plural(n_ended, 'process', 'processes')}"
            self._report_end(order, RankGroupResult(Outcome.LOST, why))

    def close(self) -> None:
        """Stop the transfers, and follow no rank group any more; the ranks go on."""
        self.transfers.close()
        for log in [log for group in self._running.values() for log in group.logs]:
            log.close()

    # -- orders ----------------------------------------------------------------------------------------------

    def start(
        self,
        order: Assignment,
        secrets: Mapping[str, str],
        base_env: Mapping[str, str],
        kept: Callable[[], None] = lambda: None,
        sick: str = "",
    ) -> None:
        """Start the ranks of an order that is new to this node, unless one of its GPUs is sick.

        `kept` is called as soon as the order is on disk, and before a process starts: other nodes may wait for that.

        Raises:
            OSError: the order cannot be kept.
        """
        folder = self._journal.folder(order.job_id, order.epoch)
        if self._journal.has(order.job_id, order.epoch, "killed"):
            self._refuse(order, Outcome.KILLED, "it was killed before it started", kept)
            return
        if not order.master_port:
            self._refuse(order, Outcome.LOST, "the ranks of rank 0's node ended before it started", kept)
            return
        if sick:
            self._refuse(order, Outcome.LOST, f"{self._node}: {sick}", kept, node_fault=True)
            return
        group = RankGroup(order, folder, self._clock, self._processes)
        self._samples.begin(order, self._clock.now_s())
        copied = order.spec.get("files") is None and not order.spec.get("artifacts")
        if copied and not self._preflights.wanted(order.spec) and not self.transfers.prefetches.wanted(order.spec):
            self._launch(group, order, secrets, base_env, kept)
            return
        self._journal.keep_order(order)
        kept()
        self._running[order.tag], self._waiting[order.tag] = group, (secrets, base_env)
        if not copied:
            self.transfers.copies.make(order, folder)
        elif self._preflights.wanted(order.spec):
            self._preflights.begin(order, folder, base_env)
        else:
            self._prefetch(group, order, secrets, base_env)

    def _prefetch(
        self,
        group: RankGroup,
        order: Assignment,
        secrets: Mapping[str, str],
        base_env: Mapping[str, str],
        preflight: str = "",
    ) -> None:
        """Start the ranks of a group when the datasets that its job names have arrived, or the wait is over."""
        if not self.transfers.prefetches.wanted(order.spec):
            self._launch(group, order, secrets, base_env, says=preflight)
            return
        try:
            launch = self._prepared(group, order, secrets, base_env)
        except (LaunchError, MigError):
            self._launch(group, order, secrets, base_env)  # which says why
            return
        self._waiting[order.tag] = secrets, base_env
        self.transfers.prefetches.begin(order, group.folder, launch.processes[0].env, preflight)

    def _prepared(
        self, group: RankGroup, order: Assignment, secrets: Mapping[str, str], base_env: Mapping[str, str]
    ) -> RankGroupLaunch:
        return prepare(
            order,
            folder=group.folder,
            base_env=base_env,
            secrets=_declared(secrets, order.spec.get("secrets") or ()),
            real_gpus=self._devices.real,
            gpus=self._devices.count,
            visible=self._devices.visible(order.leases[order.node_rank]),
        )

    def _launch(
        self,
        group: RankGroup,
        order: Assignment,
        secrets: Mapping[str, str],
        base_env: Mapping[str, str],
        kept: Callable[[], None] = lambda: None,
        says: str = "",
    ) -> None:
        """Start the ranks of a group; `says`: what its preflight and its prefetch have found."""
        try:
            launch = self._prepared(group, order, secrets, base_env)
        except MigError as error:  # of the node, not of the job
            self._running.pop(order.tag, None)
            self._refuse(order, Outcome.LOST, f"{self._node}: {error}", kept)
            return
        except Exception as error:  # an error in one job's spec must not end the node's other rank groups
            why = str(error) if isinstance(error, LaunchError) else f"its spec cannot be used: {error!r}"
            self._running.pop(order.tag, None)
            self._refuse(order, Outcome.FAILED, why, kept)
            return
        if says:
            launch = replace(launch, says=f"{launch.says}; {says}")
        self._journal.keep_order(order, launch=launch.says, omp_num_threads=launch.omp_num_threads)
        kept()
        self._running[order.tag] = group
        group.start(launch, secrets)
        started_us = self._clock.now_us()
        self._keep(lambda: self._journal.keep_ranks(order, group.known))
        for log in group.logs:
            self._selector.register(log.read_fd, selectors.EVENT_READ, partial(self._pump, log))
        self.transfers.started(order.job_id, order.epoch, group.folder)
        _log.info("%s started: %s", order.tag, launch.says)
        started = RanksStarted(
            at_us=started_us,
            job_id=JobId(order.job_id),
            epoch=order.epoch,
            node=self._node,
            launch=launch.says,
        )
        self._report(started)

    def _launch_copied(self, copied: Copied) -> None:
        """Start the ranks of a group whose copy was made, or its preflight, unless it was ended meanwhile."""
        tag = copied.order.tag
        group, (secrets, base_env) = self._running.get(tag), self._waiting.pop(tag)
        if group is None or group.ends:
            return
        order = replace(copied.order, spec=dict(copied.spec))
        if copied.why:
            group.refuse(copied.why)
        elif self._preflights.wanted(order.spec):
            self._waiting[tag] = secrets, base_env
            self._preflights.begin(order, group.folder, base_env)
        else:
            self._prefetch(group, order, secrets, base_env)

    def _launch_prefetched(self) -> None:
        """Start the ranks of groups that wait for their data no longer, unless they were ended meanwhile."""
        for each in self.transfers.prefetches.ended():
            tag = each.order.tag
            group, (secrets, base_env) = self._running.get(tag), self._waiting.pop(tag)
            if group is not None and not group.ends:
                self._launch(group, each.order, secrets, base_env, says=each.says)

    def examined(self) -> bool:
        """Start the ranks, or end the groups, whose preflight has ended; return whether GPUs are out of use for it."""
        found_bad = False
        for each in self._preflights.ended():
            tag, devices = each.order.tag, self._devices
            group, (secrets, base_env) = self._running.get(tag), self._waiting.pop(tag)
            if group is None or group.ends:
                continue
            if not each.problem:
                self._prefetch(group, each.order, secrets, base_env, f"preflight: {each.says}" if each.says else "")
                continue
            all_gpus = dict.fromkeys(range(devices.count), f"preflight: {each.node}") if each.node else {}
            devices.failed |= all_gpus | {gpu: f"preflight: {why}" for gpu, why in each.gpus.items()}
            found_bad = found_bad or each.is_nodes_fault
            why = f"{self._node}: preflight: {each.problem}"
            group.refuse(why, Outcome.LOST, node_fault=each.is_nodes_fault)
        return found_bad

    def compare(self, order: Assignment, first: Software, base_env: Mapping[str, str]) -> None:
        """End a rank group whose interpreter does not fit that of rank 0: the gang would hang, or compute nonsense."""

        def judge(own: Software) -> None:
            group = self.get(order.job_id, order.epoch)
            if group is not None and not group.ends and not own.fits(first):
                group.refuse(
                    f"the job's interpreter on {self._node} is {own}, on {order.leases[0].node}, the node of rank 0, "
                    f"{first}; hint: install the same versions on both, or let `run` name an interpreter that both have"
                )

        if first.python:
            self.interpreters.ask(order.spec, base_env, judge)

    def kill(self, job_id: str, epoch: int, why: str) -> None:
        """Kill a rank group, or make sure that it never starts.

        Raises:
            OSError: that cannot be kept.
        """
        group = self.get(job_id, epoch)
        if group is not None:
            group.kill(why, self._clock.now_s())
        elif not self._journal.has(job_id, epoch, "order"):
            self._journal.keep_tombstone(job_id, epoch, why)

    def hold(self, job_id: str, epoch: int, model: str, number: int) -> None:
        """Pass a replica the order of this number to hold a model, also before it starts; not after its end.

        Raises:
            OSError: that cannot be kept.
        """
        if self.get(job_id, epoch) is not None or not self._journal.has(job_id, epoch, "order"):
            write_model(self._journal.folder(job_id, epoch) / "spool", model, number)

    def dial(self, dial: Dial) -> None:
        """Dial a tunnel to a rank group; to one that does not run, to say so."""
        group = self.get(dial.job_id, dial.epoch)
        launch = None if group is None or group.ends else group.launch
        self.transfers.tunnels.open(dial, launch, self._journal.folder(dial.job_id, dial.epoch) / "spool")

    def kept_order(self, job_id: str, epoch: int) -> Assignment | None:
        """Return the order for a rank group, if this node has had it."""
        return self._journal.order(job_id, epoch) if self._journal.has(job_id, epoch, "order") else None

    def settle(self, ended: RanksEnded) -> None:
        """Forget a rank group, since the server has committed its end."""
        self._keep(lambda: self._journal.settle(ended))
        self._spools.drop(ended.job_id, ended.epoch)
        self.transfers.copies.remove(f"{ended.job_id}.{ended.epoch}", self._journal.folder(ended.job_id, ended.epoch))

    def _keep(self, write: Callable[[], None]) -> None:
        """Write what only spares a later agent some work; a full disk must not end this one."""
        try:
            write()
        except OSError as error:
            _log.warning("the folder of a rank group is not up to date: %s (hint: free space on this disk)", error)

    def get(self, job_id: str, epoch: int) -> RankGroup | None:
        """Return a rank group that runs."""
        return self._running.get(f"{job_id}.{epoch}")

    def hint(self, why: str) -> None:
        """Pass a hint that the machine may go soon on to the ranks, which save and go on."""
        for group in self._running.values():
            write_hint(group.folder / "spool", self._clock.now_us(), why)

    def _refuse(
        self, order: Assignment, outcome: Outcome, why: str, kept: Callable[[], None], *, node_fault: bool = False
    ) -> None:
        self._journal.keep_order(order)
        kept()
        self._samples.end(order, self._clock.now_s())
        self._report_end(order, RankGroupResult(outcome, why, node_fault=node_fault))

    # -- the loop --------------------------------------------------------------------------------------------

    @property
    def due_s(self) -> list[float]:
        """The monotonic times at which `step` has something to do."""
        due = [group.wake_at_s for group in self._running.values() if group.wake_at_s is not None]
        return [*due, self._next_follow_s, self._samples.next_s] if self._running else [self._samples.next_s]

    def step(self, now_s: float) -> None:
        """Reap children, do the work that is due, and follow the spools."""
        self._reap(now_s)
        self.interpreters.step()
        for copied in self.transfers.copies.made():
            self._launch_copied(copied)
        self._launch_prefetched()
        for tag, group in list(self._running.items()):
            if group.tick(now_s):
                del self._running[tag]
                self._finish(group)
        self._samples.step(now_s, [group.order for group in self._running.values() if group.known])
        if now_s >= self._next_follow_s:
            self._next_follow_s = now_s + FOLLOW_S
            for tag, group in self._running.items():
                self._spools.follow(group.order, group.folder)
                if group.noticed_left_s is not None:
                    self.transfers.tunnels.notice(tag, group.noticed_left_s)

    def _reap(self, now_s: float) -> None:
        # When a rank is killed, others may fail because of it before this loop sees either: report the killed one.
        for pid, code in sorted(self._processes.reap(), key=lambda each: each[1] != -signal.SIGKILL):
            if not any(group.reaped(pid, code, now_s) for group in self._running.values()):
                live = {tag for tag, group in self._running.items() if not group.ends}
                self.transfers.tunnels.reaped(pid, code, live)

    def _finish(self, group: RankGroup) -> None:
        for log in group.logs:
            if log.read_fd in self._selector.get_map():
                self._selector.unregister(log.read_fd)
            log.close()
        result = group.result()
        self._spools.complete(group.order, group.folder)
        self.transfers.ended(group.order.job_id, group.order.epoch)
        self._samples.end(group.order, self._clock.now_s())
        self._report_end(group.order, result)
        self.transfers.tunnels.ended(group.order.tag, f"{group.order.tag} has ended: {result.why}")

    def _pump(self, log: LogPump) -> None:
        if not log.pump():
            self._selector.unregister(log.read_fd)

    def _report_end(self, order: Assignment, result: RankGroupResult) -> None:
        _log.info("%s ended: %s: %s", order.tag, result.outcome, result.why)
        ended = RanksEnded(
            at_us=self._clock.now_us(),
            job_id=JobId(order.job_id),
            epoch=order.epoch,
            node=self._node,
            outcome=result.outcome,
            failure=result.failure,
            why=result.why,
            node_fault=result.node_fault,
        )
        self._report(ended)


def _declared(secrets: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the secrets that a job declares.

    Raises:
        LaunchError: the server has not sent one of them.
    """
    missing = [name for name in names if name not in secrets]
    if missing:
        raise LaunchError(
            f"the secret {missing[0]} is not in the server's home: submit the job again with `cordee run`"
        )
    return {name: secrets[name] for name in names}
