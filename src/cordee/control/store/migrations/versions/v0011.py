"""Answers to requests with an idempotency key."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "answers",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("request", sa.String, nullable=False),
        sa.Column("at_us", sa.BigInteger, nullable=False, index=True),
        sa.Column("status", sa.Integer),
        sa.Column("body", sa.Text),
    )
