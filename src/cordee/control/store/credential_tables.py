"""Tables of what other machines and clients bring: tokens and keys, as hashes, and the encrypted secrets of jobs.

They are not derived from the log, and the log does not contain them.
"""

import sqlalchemy as sa

metadata = sa.MetaData()  # of all tables

agents = sa.Table(
    "agents",
    metadata,
    sa.Column("node", sa.String, primary_key=True),
    sa.Column("token_hash", sa.String, nullable=False, unique=True),
    sa.Column("machine", sa.String, nullable=False),
    sa.Column("joined_us", sa.BigInteger, nullable=False),
    sa.Column("by", sa.String, nullable=False),
    sa.Column("left_us", sa.BigInteger),
)
join_tokens = sa.Table(
    "join_tokens",
    metadata,
    sa.Column("hash", sa.String, primary_key=True),
    sa.Column("expires_us", sa.BigInteger, nullable=False),
    sa.Column("uses", sa.Integer, nullable=False),
    sa.Column("used", sa.Integer, nullable=False),
    sa.Column("by", sa.String, nullable=False),
)
secrets = sa.Table(
    "secrets",
    metadata,
    sa.Column("job_id", sa.String, primary_key=True),
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("sealed", sa.Text, nullable=False),
)
tenants = sa.Table(
    "tenants",
    metadata,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("weight", sa.Float, nullable=False),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("rate_per_s", sa.Float),
    sa.Column("budget_micro_usd", sa.BigInteger),
    sa.Column("per", sa.String, nullable=False),
)
keys = sa.Table(
    "keys",
    metadata,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("hash", sa.String, nullable=False, unique=True),
    sa.Column("tenant", sa.String, nullable=False, index=True),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("models", sa.Text, nullable=False),
    sa.Column("created_us", sa.BigInteger, nullable=False),
    sa.Column("by", sa.String, nullable=False),
    sa.Column("revoked_us", sa.BigInteger),
)
answers = sa.Table(
    "answers",
    metadata,
    sa.Column("key", sa.String, primary_key=True),
    sa.Column("request", sa.String, nullable=False),
    sa.Column("at_us", sa.BigInteger, nullable=False, index=True),
    sa.Column("status", sa.Integer),
    sa.Column("body", sa.Text),
)
