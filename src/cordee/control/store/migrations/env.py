"""Alembic's entry: it runs the steps on the connection, and in the transaction, that the store already holds."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
