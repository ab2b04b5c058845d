"""The audit log, and the row that says where it ends."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_TEXTS = ("who", "token", "session", "address", "agent", "operation", "object", "queue", "outcome")


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "audit",
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("at_us", sa.BigInteger, nullable=False),
        *(sa.Column(name, sa.String, nullable=False) for name in _TEXTS),
        sa.Column("count", sa.BigInteger, nullable=False),
        sa.Column("event", sa.BigInteger),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("before", sa.String, nullable=False),
        sa.Column("hash", sa.String, nullable=False),
    )
    head = op.create_table(
        "audit_head",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("hash", sa.String, nullable=False),
    )
    op.bulk_insert(head, [{"id": 1, "number": 0, "hash": ""}])
