"""Refused reports of each attempt; the reason of a notice by its name of today."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the columns of refused reports, and rename the reason `share` to `time-slice`."""
    op.add_column("attempts", sa.Column("refused", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("attempts", sa.Column("refused_why", sa.Text, nullable=False, server_default=""))
    attempts = sa.table("attempts", sa.column("notice_reason", sa.String))
    op.execute(attempts.update().where(attempts.c.notice_reason == "share").values(notice_reason="time-slice"))
