"""Rows of the ledger and measurements of jobs, as parts of answers."""

from cordee.account.measured import Measurement
from cordee.account.sums import CostRow
from cordee.answers.cost import CostRowView, LostView
from cordee.answers.jobs import ComparisonView


def compared(measurement: Measurement | None) -> list[ComparisonView]:
    """Return what was planned of an attempt beside what was measured."""
    return [] if measurement is None else [ComparisonView.of(row) for row in measurement.comparisons()]


def cost_row_view(row: CostRow, measured: list[ComparisonView] | None = None) -> CostRowView:
    """Return a row of the ledger as an answer."""
    lost = [LostView.of(each) for each in row.lost_by_cause]
    return CostRowView.of(row, lost_by_cause=lost, measured=measured or [])
