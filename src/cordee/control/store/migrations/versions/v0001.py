"""The first schema: the log, jobs, attempts, the outbox and the marks of the streams."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create every table."""
    op.create_table(
        "log",
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("at_us", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("job_id", sa.String),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_index("ix_log_job_id", "log", ["job_id"])
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("queue", sa.String, nullable=False),
        sa.Column("tier", sa.String, nullable=False),
        sa.Column("gpus", sa.Integer, nullable=False),
        sa.Column("gpu_name", sa.String),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("why", sa.Text, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("submitted_us", sa.BigInteger, nullable=False),
        sa.Column("ended_us", sa.BigInteger),
        sa.Column("spec", sa.Text, nullable=False),
    )
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.String, primary_key=True),
        sa.Column("epoch", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("leases", sa.Text, nullable=False),
        sa.Column("placed_us", sa.BigInteger, nullable=False),
        sa.Column("started_us", sa.BigInteger),
        sa.Column("notice_us", sa.BigInteger),
        sa.Column("notice_reason", sa.String),
        sa.Column("step", sa.BigInteger),
        sa.Column("checkpoint_step", sa.BigInteger),
        sa.Column("ended_us", sa.BigInteger),
        sa.Column("outcome", sa.String),
        sa.Column("why", sa.Text, nullable=False),
        sa.Column("failure", sa.Text),
    )
    op.create_table(
        "commands",
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("job_id", sa.String, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
    )
    op.create_table(
        "marks",
        sa.Column("source", sa.String, primary_key=True),
        sa.Column("seq", sa.BigInteger, nullable=False),
    )
