"""Curves of retired jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "curves",
        sa.Column("job_id", sa.String, primary_key=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
