"""An index of jobs in the order of their lists."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Create the index."""
    op.create_index("ix_jobs_newest", "jobs", [sa.text("submitted_us DESC"), "job_id"])
