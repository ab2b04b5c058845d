"""Log and report the findings of the watch."""

import logging

from cordee.events import Behind
from cordee.train.report import Reporter
from cordee.train.watch import stacks
from cordee.units import format_duration

log = logging.getLogger("cordee")


class Findings:
    """Findings of one rank about itself and others, in its log and its reports."""

    def __init__(self, rank: int, reporter: Reporter) -> None:
        self._rank, self._reporter = rank, reporter

    def stalled(self, still_s: float) -> None:
        """Report that this rank's loop has made no progress for `still_s` seconds."""
        self._reporter.stalled(still_s)

    def stuck(
        self, rank: int, how: Behind, step: int, still_s: float, *, where: str, stack: tuple[str, ...] = ()
    ) -> None:
        """Report a rank that stands still, or is silent, with the place and the stack of its main thread."""
        does = "has not answered" if how is Behind.SILENT else "has stood still"
        lines = "".join(f"\n    {line}" for line in stack)
        for line in stacks.other_threads() if rank == self._rank else ():
            lines += f"\n    thread {line}"
        place = f", {where}" if where else ""
        last = "last seen" if how is Behind.SILENT else "and is"
        since = format_duration(still_s)
        log.warning("rank %d %s for %s, %s in step %d%s%s", rank, does, since, last, step, place, lines)
        self._reporter.behind(rank, how, step, still_s, where=where, stack=stack)

    def recovered(self, rank: int, step: int) -> None:
        """Report that a rank goes on, or is no longer slow."""
        log.warning("rank %d goes on, in step %d", rank, step)
        self._reporter.behind(rank, Behind.OVER, step, 0.0)

    def slow(self, rank: int, step: int, waited: float) -> None:
        """Report a rank that the others wait for; `waited`: the fraction of the time."""
        log.warning("rank %d is slow: the others wait for it %.0f %% of the time", rank, 100 * waited)
        self._reporter.behind(rank, Behind.SLOW, step, 0.0, waited=waited)

    def lost_store(self, step: int, still_s: float) -> None:
        """Report that the store does not answer. Rank 1 reports rank 0, which may host it."""
        log.warning("rank %d stands still in step %d, and the ranks' store does not answer", self._rank, step)
        if self._rank == 1:
            self._reporter.behind(0, Behind.SILENT, step, still_s, where="nor does the store, which it may host")
