"""The ranks of one attempt on one node while they run, from the first spawn to the end of the last process.

The agent's loop calls it when a child was reaped, when a command arrives, and when a time is reached.
"""

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cordee.agent.clock import Clock
from cordee.agent.launch import Assignment, RankGroupLaunch, RankLaunch
from cordee.agent.logs import LogPump, tail, torchrun_root_cause
from cordee.agent.process import Child, Process, Processes
from cordee.agent.spools import last_reports
from cordee.errors import EXIT_CHECKPOINTED
from cordee.events import Behind, Failure, Outcome, RankBehind, RankLeft
from cordee.storage.rescue import RESCUE_S_MAX, UPLOADER_MARKS
from cordee.telemetry.notices import Notice, write_notice
from cordee.units import US_PER_S, plural

_STANDING = (Behind.STUCK, Behind.SILENT)
SWEEP_S_MIN, SWEEP_S_MAX = 0.01, 0.2
STILL_S_MAX = 30.0  # An uploader that uses no processor time for this long is stopped or waits for a disk.


@dataclass(slots=True)
class _Rank:
    launch: RankLaunch
    popen: Child
    process: Process
    log: LogPump
    exit_code: int | None = None  # negative: the signal that ended it


@dataclass(frozen=True, slots=True)
class RankGroupResult:
    """The outcome of a rank group."""

    outcome: Outcome
    why: str
    failure: Failure | None = None
    node_fault: bool = False  # its node is known to be at fault, and offers what failed no more


class _Uploaders:
    """The uploaders of a group that is being ended; each may go on while it works and time is left.

    Args:
        processes: those of the machine.

    Attributes:
        until_s: monotonic time at which every uploader is killed.
    """

    def __init__(self, processes: Processes) -> None:
        self.until_s = 0.0
        self._processes = processes
        self._worked: dict[Process, tuple[float, float]] = {}  # processor time, and the time at which it last changed

    def is_spared(self, each: Process, now_s: float) -> bool:
        """Return whether a process is an uploader that may go on."""
        if now_s >= self.until_s or not any(self._processes.has(each, mark) for mark in UPLOADER_MARKS):
            return False
        worked = self._processes.worked(each)
        before, since_s = self._worked.get(each, (-1.0, now_s))
        if worked != before:
            self._worked[each] = (worked, now_s)
            return True
        return now_s - since_s < STILL_S_MAX


class RankGroup:
    """The processes of one rank group.

    Attributes:
        order: the order for the group.
        known: the direct children.
        logs: the logs that the loop pumps, and closes at the end.
        launch: how its ranks were started; None before.
        wake_at_s: monotonic time of the next `tick`; None if only an exit or a command can change the group.
    """

    def __init__(self, order: Assignment, folder: Path, clock: Clock, processes: Processes) -> None:
        self.order = order
        self._clock, self._processes = clock, processes
        self.folder = folder
        self.known: list[Process] = []
        self.logs: list[LogPump] = []
        self.wake_at_s: float | None = None
        self._ranks: list[_Rank] = []
        self.launch: RankGroupLaunch | None = None
        self._machine_stays = True
        self._sweep_s: float | None = None  # time to the next check of processes that are being ended; None: none are
        self._deadline_s = math.inf  # of the notice; infinite: there was none
        self._uploaders = _Uploaders(processes)
        self._verdict: RankGroupResult | None = None  # of whoever ended the group: it could not start, or was killed
        self._first_bad: _Rank | None = None

    def start(self, launch: RankGroupLaunch, secrets: Mapping[str, str]) -> None:
        """Start all processes; if one cannot be started, end the others."""
        self.launch = launch
        for each in launch.processes:
            try:
                (self.folder / "spool").mkdir(parents=True, exist_ok=True)
                log = LogPump(self.folder / "logs" / each.log_name, secrets)
            except OSError as error:
                self.refuse(f"its log cannot be written: {error}")
                break
            self.logs.append(log)
            log.note(f"cordee: attempt {self.order.tag} on {self.order.node}: {launch.says}")
            try:
                popen = self._processes.spawn(each.argv, env=each.env, cwd=launch.cwd, output=log.write_fd)
            except (OSError, ValueError) as error:
                self.refuse(f"{each.argv[0]} cannot be started: {error}")
                break
            finally:
                log.started()
            # A child that has exited is still a zombie of this process, so its pid is not reused.
            child = self._processes.identify(popen.pid) or Process(popen.pid, 0.0)
            self._ranks.append(_Rank(each, popen, child, log))
            self.known.append(child)

    @property
    def ends(self) -> bool:
        """Return whether its processes are being ended, or none may start any more."""
        return self._sweep_s is not None

    def refuse(self, why: str, outcome: Outcome = Outcome.FAILED, *, node_fault: bool = False) -> None:
        """End the group at once, since it cannot be started."""
        self._verdict = RankGroupResult(outcome, why, node_fault=node_fault)
        self._sweep(now_s=0.0)

    def reaped(self, pid: int, exit_code: int, now_s: float) -> bool:
        """Record that a child has exited; return False if it is not a direct child of this group."""
        rank = next((each for each in self._ranks if each.popen.pid == pid and each.exit_code is None), None)
        if rank is None:
            return False
        rank.exit_code = rank.popen.returncode = exit_code
        if self._sweep_s is None and self._is_bad(exit_code):
            self._first_bad = self._first_bad or rank
            self._sweep(now_s)  # a gang is whole or absent
        elif all(each.exit_code is not None for each in self._ranks):
            self._sweep(now_s)  # ends the processes that they left behind
        return True

    def notice(self, deadline_s: float, *, machine_stays: bool = True) -> None:
        """Ask every rank to leave, once, and end the remaining processes at the deadline (monotonic).

        A later notice counts only if it leaves less time, or if the machine goes too.
        """
        again = self._noticed
        if deadline_s < self._deadline_s or self._machine_stays > machine_stays:
            self._deadline_s = min(self._deadline_s, deadline_s)
            self._machine_stays = self._machine_stays and machine_stays
            machine = self._clock.machine
            deadline_us = machine.now_us() + round((self._deadline_s - machine.now_s()) * US_PER_S)
            write_notice(self.folder / "spool", Notice(deadline_us=deadline_us, machine_stays=self._machine_stays))
        if self._sweep_s is None:
            self.wake_at_s = deadline_s if self.wake_at_s is None else min(self.wake_at_s, deadline_s)
        if again:
            return
        if not self._ranks:  # the copy of its files is still being made, or its preflight
            self._sweep(now_s=0.0)
        for rank in self._ranks:
            if rank.exit_code is None:
                for target in self._processes.notice_targets(rank.popen.pid):
                    self._processes.send(target, signal.SIGTERM)

    def kill(self, why: str, now_s: float, *, outcome: Outcome = Outcome.KILLED) -> None:
        """End every process now, except that uploaders may store their captures first: that needs no GPU."""
        if self._sweep_s is None:
            self._verdict = RankGroupResult(outcome, why)
            self._sweep(now_s)

    def tick(self, now_s: float) -> bool:
        """Do the work that is due; return True when every process of the group is gone."""
        if self.wake_at_s is None or now_s < self.wake_at_s:
            return False
        if self._sweep_s is None:
            why = f"it did not leave within its grace period of {self.order.grace_s:g} s"
            self._verdict = RankGroupResult(Outcome.KILLED, why)
        sweep_s = self._sweep_s or SWEEP_S_MIN
        left = self.processes()
        for each in left:
            if now_s >= self._deadline_s or not self._uploaders.is_spared(each, now_s):
                self._processes.send(each, signal.SIGKILL)
        if not left and all(rank.exit_code is not None for rank in self._ranks):
            self.wake_at_s = None
            return True
        self.wake_at_s = now_s + sweep_s
        self._sweep_s = min(2 * sweep_s, SWEEP_S_MAX)
        return False

    def processes(self) -> set[Process]:
        """Return all running processes of this group."""
        return self._processes.find(self.order.tag, self.known, node=self.order.node)

    def result(self) -> RankGroupResult:
        """Return the outcome of the group, after `tick` has returned True and the logs are closed."""
        if self._verdict is not None and self._verdict.outcome is Outcome.FAILED:
            return self._verdict
        if not self._ranks:
            before = RankGroupResult(Outcome.KILLED, "it got notice before its ranks had started")
            return self._verdict or before
        left = self._how_ranks_left()
        codes = [rank.exit_code for rank in self._ranks]
        if self._all_checkpointed(left):
            return RankGroupResult(Outcome.CHECKPOINTED, "every rank left with a checkpoint")
        if self._verdict is not None:
            return self._verdict
        if "hung" in left.values():
            return RankGroupResult(Outcome.LOST, self._why_hung(left))
        if all(code == 0 for code in codes):
            return RankGroupResult(Outcome.FINISHED, "every process exited with 0")
        if self._first_bad is None:
            return self._result_without_failure(codes, left)
        failure = self._failure(self._first_bad)
        subject = f"rank {failure.rank}" if failure.rank is not None else "the node's launcher"
        if failure.signal == signal.SIGKILL:
            why = f"{subject} was killed by SIGKILL that Cordee did not send (out of memory?)"
            return RankGroupResult(Outcome.LOST, why, failure)
        if self._noticed and "aborted" in left.values():
            return RankGroupResult(Outcome.KILLED, "it left on notice without a checkpoint of that step", failure)
        how = f"by {_signal_name(failure.signal)}" if failure.signal else f"with {failure.exit_code}"
        return RankGroupResult(Outcome.FAILED, f"{subject} exited {how}", failure)

    @property
    def noticed_left_s(self) -> float | None:
        """Return the seconds from now to the deadline of its notice; None: it has none."""
        return max(0.0, self._deadline_s - self._clock.now_s()) if self._noticed else None

    @property
    def _is_per_rank(self) -> bool:
        return self.launch is None or self.launch.per_rank

    @property
    def _noticed(self) -> bool:
        return self._deadline_s < math.inf

    def _sweep(self, now_s: float) -> None:
        self._sweep_s = SWEEP_S_MIN
        self._uploaders.until_s = now_s + RESCUE_S_MAX
        self.wake_at_s = now_s

    def _is_bad(self, exit_code: int) -> bool:
        return exit_code not in (0, EXIT_CHECKPOINTED) and not self._left_on_notice(exit_code)

    def _left_on_notice(self, exit_code: int) -> bool:
        # A process that SIGTERM ends, or torchrun that answers it with exit code 1, has left on notice; the others
        # keep their grace period, since they may be saving.
        answers = (-signal.SIGTERM, 128 + signal.SIGTERM) if self._is_per_rank else (-signal.SIGTERM, 143, 1)
        return self._noticed and exit_code in answers

    def _how_ranks_left(self) -> dict[int, str]:
        return {
            event.rank: event.how
            for event in last_reports(self.order, self.folder, self._clock)
            if isinstance(event, RankLeft)
        }

    def _why_hung(self, left: Mapping[int, str]) -> str:
        reports = last_reports(self.order, self.folder, self._clock)
        behind = [event for event in reports if isinstance(event, RankBehind) and event.how in _STANDING]
        ended = sum(how == "hung" for how in left.values())
        why = f"{plural(ended, 'rank')} ended themselves, since no step had gone on for the job's on_hang.restart_after"
        if not behind:
            return why
        last = behind[-1]
        return f"rank {last.rank} stood still in step {last.step}{f', {last.where}' if last.where else ''}; {why}"

    def _all_checkpointed(self, left: Mapping[int, str]) -> bool:
        if self._is_per_rank:
            return all(
                left.get(rank.launch.rank or 0) == "checkpointed" or rank.exit_code == EXIT_CHECKPOINTED
                for rank in self._ranks
            )
        if self._ranks[0].exit_code == EXIT_CHECKPOINTED:
            return True
        # The launcher's number of ranks is not known here; of a killed launcher the records of all GPUs are needed.
        expected = self.order.local_size if self._verdict is not None else 1
        return len(left) >= expected and all(how == "checkpointed" for how in left.values())

    def _result_without_failure(self, codes: list[int | None], left: Mapping[int, str]) -> RankGroupResult:
        saved = sum(code == EXIT_CHECKPOINTED for code in codes)
        if saved and all(code in (0, EXIT_CHECKPOINTED) for code in codes):
            why = f"{saved} of {len(codes)} processes exited with {EXIT_CHECKPOINTED}, the others with 0"
            return RankGroupResult(Outcome.CHECKPOINTED, why)
        return RankGroupResult(Outcome.KILLED, "it left on notice without a checkpoint")

    def _failure(self, rank: _Rank) -> Failure:
        lines = tail(rank.log.path)
        number, code = rank.launch.rank, rank.exit_code
        if not self._is_per_rank and (cause := torchrun_root_cause(lines)):
            number, code = cause
        assert code is not None, "a failed rank has exited"
        if code < 0:
            return Failure(rank=number, exit_code=None, signal=-code, tail=lines)
        return Failure(rank=number, exit_code=code, signal=None, tail=lines)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
