"""The server that leads, and the addresses of all servers of the database."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Create the tables of the servers."""
    op.create_table(
        "leader",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("holder", sa.String, nullable=False),
        sa.Column("url", sa.String, nullable=False),
        sa.Column("expires_us", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "servers",
        sa.Column("url", sa.String, primary_key=True),
        sa.Column("seen_us", sa.BigInteger, nullable=False),
    )
