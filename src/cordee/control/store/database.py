"""The database behind the store: SQLite in the home, or PostgreSQL by its URL."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic.command import upgrade
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from cordee.errors import InputError, MissingExtraError, StoreError

_BUSY_MS = 10_000
_WRITE = "write --database postgresql://USER@HOST/DATABASE"
# A server that reaches its database no longer notices within the lease; libpq's own limits are minutes and hours.
_POSTGRES = {"connect_timeout": 5, "tcp_user_timeout": 5_000, "keepalives_idle": 2, "keepalives_interval": 1}
# So that two servers that start at once do not both migrate; any number that no other lock of the database has.
_MIGRATION_LOCK = 4_711_012_013


def check_database(url: str) -> None:
    """Raise InputError or MissingExtraError if this is not the URL of a PostgreSQL that can be used here."""
    try:
        kind = sa.make_url(url).get_backend_name()
    except ArgumentError:
        raise InputError(f"{url!r} is not the URL of a database", hint=_WRITE) from None
    if kind not in ("postgresql", "postgres"):
        raise InputError(f"{kind} cannot keep the log of several servers", hint=f"{_WRITE}, or --database sqlite")
    if find_spec("psycopg") is None:
        raise MissingExtraError("PostgreSQL needs psycopg: not installed", hint="pip install 'cordee[postgres]'")


def count_jobs(url: str) -> int:
    """Return the number of jobs that a database knows; 0 if it has no schema yet."""
    engine = make_engine(url)
    try:
        with engine.connect() as connection:
            found = sa.inspect(connection).has_table("jobs")
            return connection.scalar(sa.select(sa.func.count()).select_from(sa.table("jobs"))) or 0 if found else 0
    except SQLAlchemyError as error:
        raise StoreError(f"{url} cannot be read: {reason(error)}", hint="cordee admin check says more") from error
    finally:
        engine.dispose()


def make_engine(url: str, *, name: str = "") -> sa.Engine:
    """Return an engine for `sqlite:///PATH` or `postgresql://...`.

    Args:
        url: the database.
        name: of this process's sessions in PostgreSQL; a server that takes over ends its predecessor's by it.
    """
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "sqlite":
        engine = sa.create_engine(parsed)
        sa.event.listen(engine, "connect", _prepare_sqlite)
        sa.event.listen(engine, "begin", _begin_sqlite)
        return engine
    given = {key: value for key, value in _POSTGRES.items() if key not in parsed.query}
    arguments = given | ({"application_name": name} if name else {})
    # Connections that a restart of PostgreSQL has cut are replaced when they are next used.
    return sa.create_engine(parsed.set(drivername="postgresql+psycopg"), connect_args=arguments, pool_pre_ping=True)


def reason(error: SQLAlchemyError) -> str:
    """Return the first line of the database's own message."""
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0]


def is_old(engine: sa.Engine) -> bool:
    """Return whether the database has a schema with servers, and an older one than this version's."""
    with engine.connect() as connection:
        found = MigrationContext.configure(connection).get_current_revision()
    return found is not None and "0005" <= found < max(_known())


def migrate(engine: sa.Engine) -> None:
    """Bring the schema to this version.

    Raises:
        StoreError: a newer version of Cordee wrote the database, or a step failed; nothing has changed.
    """
    known = _known()
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
        found = MigrationContext.configure(connection).get_current_revision()
        if found is not None and found not in known:
            raise StoreError(
                f"the database has schema {found}, which this version of Cordee does not know",
                hint=f"a newer Cordee wrote it; install that one again. This one knows up to schema {max(known)}",
            )
        if found == max(known):
            return
        config = _config()
        config.attributes["connection"] = connection
        try:
            upgrade(config, "head")
        except CommandError as error:
            raise StoreError(f"the database could not be migrated: {error}") from error


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    return config


@cache
def _known() -> frozenset[str]:
    return frozenset(script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions())


def _prepare_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # BEGIN is explicit below: Python's sqlite3 would begin late, and not immediate
    for pragma in ("journal_mode=WAL", "synchronous=FULL", f"busy_timeout={_BUSY_MS}"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: sa.Connection) -> None:
    reads_only = connection.get_execution_options().get("cordee_read")
    connection.exec_driver_sql("BEGIN" if reads_only else "BEGIN IMMEDIATE")
