"""Tenants of the gateways, and their keys."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "tenants",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("weight", sa.Float, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("rate_per_s", sa.Float),
        sa.Column("budget_micro_usd", sa.BigInteger),
        sa.Column("per", sa.String, nullable=False),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("hash", sa.String, nullable=False, unique=True),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("models", sa.Text, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("by", sa.String, nullable=False),
        sa.Column("revoked_us", sa.BigInteger),
    )
    op.create_index("ix_keys_tenant", "keys", ["tenant"])
