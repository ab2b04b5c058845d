"""The ledger: events in, classes of GPU-seconds and dollars out. No clock, no I/O."""

from cordee.account.ledger import AttemptRow, CostRow, Ledger, Totals
from cordee.account.split import Class, Split

__all__ = ["AttemptRow", "Class", "CostRow", "Ledger", "Split", "Totals"]
