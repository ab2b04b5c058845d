"""Tokens of nodes that join, and secrets of jobs that come from other machines."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Create the tables of tokens and secrets."""
    op.create_table(
        "agents",
        sa.Column("node", sa.String, primary_key=True),
        sa.Column("token_hash", sa.String, nullable=False, unique=True),
        sa.Column("machine", sa.String, nullable=False),
        sa.Column("joined_us", sa.BigInteger, nullable=False),
        sa.Column("by", sa.String, nullable=False),
        sa.Column("left_us", sa.BigInteger),
    )
    op.create_table(
        "join_tokens",
        sa.Column("hash", sa.String, primary_key=True),
        sa.Column("expires_us", sa.BigInteger, nullable=False),
        sa.Column("uses", sa.Integer, nullable=False),
        sa.Column("used", sa.Integer, nullable=False),
        sa.Column("by", sa.String, nullable=False),
    )
    op.create_table(
        "secrets",
        sa.Column("job_id", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("sealed", sa.Text, nullable=False),
    )
