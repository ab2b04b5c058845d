"""The keys by which agents and clients know the server that leads."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the column."""
    op.add_column("leader", sa.Column("known_by", sa.Text, nullable=False, server_default="{}"))
