"""Segments of the log, the snapshot, and retired jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "segments",
        sa.Column("first", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("last", sa.BigInteger, nullable=False, unique=True),
        sa.Column("hash", sa.String, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "snapshots",
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("at_us", sa.BigInteger, nullable=False),
        sa.Column("version", sa.String, nullable=False),
        sa.Column("hash", sa.String, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "retired",
        sa.Column("job_id", sa.String, primary_key=True),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_index("ix_jobs_name", "jobs", ["name"])
