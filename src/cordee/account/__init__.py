"""The ledger: events in, classes of GPU-seconds and dollars out. No clock, no I/O."""

from cordee.account.attempt import AttemptRow
from cordee.account.ledger import Ledger, attempt_segments
from cordee.account.split import Class, Split
from cordee.account.sums import CostRow, Totals
from cordee.account.timeline import Segment

__all__ = ["AttemptRow", "Class", "CostRow", "Ledger", "Segment", "Split", "Totals", "attempt_segments"]
