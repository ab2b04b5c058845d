"""Sessions of browsers."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "sessions",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("by", sa.String, nullable=False),
        sa.Column("groups", sa.Text, nullable=False),
        sa.Column("begun_us", sa.BigInteger, nullable=False),
        sa.Column("seen_us", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_sessions_name", "sessions", ["name"])
