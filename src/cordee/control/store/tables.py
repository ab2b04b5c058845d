"""The tables of the database, and the changes that each event makes to them.

`log` is the truth, and its old events lie in `segments`; `jobs` and `attempts` are derived from it, for queries by
people and by the API, and so are `snapshots`, `retired` and `curves` (archive.py).
`commands` is the outbox: a row stays until its delivery is confirmed or its attempt has ended.
"""

import dataclasses
import json
from collections.abc import Sequence

import sqlalchemy as sa

from cordee.control.ports import Command
from cordee.control.store.credential_tables import metadata, secrets
from cordee.event_json import encode
from cordee.events import (
    AttemptEnded,
    AttemptEvent,
    AttemptPlaced,
    Behind,
    CheckpointCommitted,
    EstimateMissed,
    Event,
    JobDeferred,
    JobEnded,
    JobPaused,
    JobReleased,
    JobResumed,
    JobSubmitted,
    KillOrdered,
    NoticeGiven,
    RankBehind,
    RankLeft,
    RanksStarted,
    Reported,
    ReportsRefused,
    RequeueRequested,
    Restored,
)
from cordee.schedule.explain import held_up

log = sa.Table(
    "log",
    metadata,
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("at_us", sa.BigInteger, nullable=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("job_id", sa.String, index=True),
    sa.Column("body", sa.Text, nullable=False),
)
jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("job_id", sa.String, primary_key=True),
    sa.Column("name", sa.String, nullable=False, index=True),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("queue", sa.String, nullable=False),
    sa.Column("tier", sa.String, nullable=False),
    sa.Column("gpus", sa.Integer, nullable=False),
    sa.Column("gpu_name", sa.String),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("why", sa.Text, nullable=False),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("submitted_us", sa.BigInteger, nullable=False),
    sa.Column("ended_us", sa.BigInteger),
    sa.Column("spec", sa.Text, nullable=False),
)
# In the order of the lists, so that a page of them reads its own rows only.
sa.Index("ix_jobs_newest", jobs.c.submitted_us.desc(), jobs.c.job_id)
attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("job_id", sa.String, primary_key=True),
    sa.Column("epoch", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("leases", sa.Text, nullable=False),
    sa.Column("placed_us", sa.BigInteger, nullable=False),
    sa.Column("started_us", sa.BigInteger),
    sa.Column("notice_us", sa.BigInteger),
    sa.Column("notice_reason", sa.String),
    sa.Column("step", sa.BigInteger),
    sa.Column("checkpoint_step", sa.BigInteger),
    sa.Column("ended_us", sa.BigInteger),
    sa.Column("outcome", sa.String),
    sa.Column("why", sa.Text, nullable=False),
    sa.Column("failure", sa.Text),
    sa.Column("refused", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("refused_why", sa.Text, nullable=False, server_default=""),
)
commands = sa.Table(
    "commands",
    metadata,
    # The command's number is that of its event in the log.
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("job_id", sa.String, nullable=False),
    sa.Column("epoch", sa.Integer, nullable=False),
)
marks = sa.Table(
    "marks",
    metadata,
    sa.Column("source", sa.String, primary_key=True),
    sa.Column("seq", sa.BigInteger, nullable=False),
)
segments = sa.Table(
    "segments",
    metadata,
    sa.Column("first", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("last", sa.BigInteger, nullable=False, unique=True),
    sa.Column("hash", sa.String, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
)
snapshots = sa.Table(
    "snapshots",
    metadata,
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("at_us", sa.BigInteger, nullable=False),
    sa.Column("version", sa.String, nullable=False),
    sa.Column("hash", sa.String, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
)
retired = sa.Table(
    "retired",
    metadata,
    sa.Column("job_id", sa.String, primary_key=True),
    sa.Column("body", sa.Text, nullable=False),
)
curves = sa.Table(
    "curves",
    metadata,
    sa.Column("job_id", sa.String, primary_key=True),
    sa.Column("body", sa.LargeBinary, nullable=False),
)

# One row: the server that may write. Where one server owns the database by its home's lock, there is none.
leader = sa.Table(
    "leader",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("holder", sa.String, nullable=False),
    sa.Column("url", sa.String, nullable=False),
    sa.Column("expires_us", sa.BigInteger, nullable=False),
    sa.Column("known_by", sa.Text, nullable=False, server_default="{}"),
)
servers = sa.Table(
    "servers",
    metadata,
    sa.Column("url", sa.String, primary_key=True),
    sa.Column("seen_us", sa.BigInteger, nullable=False),
)


def record(connection: sa.Connection, number: int, events: Sequence[Event]) -> None:
    """Append events to the log, the first of them under `number`, and update the other tables."""
    rows, orders = [], []
    for at, event in enumerate(events, start=number):
        job_id = event.job.job_id if isinstance(event, JobSubmitted) else getattr(event, "job_id", None)
        body = encode(event)
        rows.append(
            {"number": at, "at_us": event.at_us, "kind": body["kind"], "job_id": job_id, "body": json.dumps(body)}
        )
        if isinstance(event, Command):
            orders.append({"number": at, "job_id": event.job_id, "epoch": event.epoch})
    # All rows of a table at once: a statement is a round trip to a database on another machine.
    if rows:
        connection.execute(log.insert(), rows)
    if orders:
        connection.execute(commands.insert(), orders)
    for event in events:
        _follow_job(connection, event)
        _follow_attempt(connection, event)


def _follow_job(connection: sa.Connection, event: Event) -> None:
    match event:
        case JobSubmitted(job=job):
            row = {name: getattr(job, name) for name in ("job_id", "name", "owner", "queue", "gpus", "gpu_name")}
            row |= {"tier": job.tier.value, "state": "queued", "why": "", "epoch": 0}
            connection.execute(jobs.insert().values(**row, submitted_us=event.at_us, spec=event.spec))
        case AttemptPlaced():
            _set_job(connection, event.job_id, state="running", why="", epoch=event.epoch)
        case NoticeGiven() | KillOrdered():
            _set_job(connection, event.job_id, state="stopping")
        case RankBehind():
            why = "" if event.how is Behind.OVER else held_up(event)
            connection.execute(jobs.update().where(_runs(event)).values(why=why))
        case EstimateMissed():
            connection.execute(jobs.update().where(_runs(event) & (jobs.c.why == "")).values(why=event.why))
        case AttemptEnded():
            _set_job(connection, event.job_id, state="queued", why=event.why)
        case JobPaused():
            _set_job(connection, event.job_id, state="paused", why=event.why)
        case JobResumed():
            _set_job(connection, event.job_id, state="queued", why=event.why)
        case JobDeferred():
            _set_job(connection, event.job_id, state=event.state, why=event.why)
        case JobReleased():
            _set_job(connection, event.job_id, state="queued", why="")
        case RequeueRequested():
            ended = (jobs.c.job_id == event.job_id) & jobs.c.ended_us.is_not(None)
            again = {"state": "queued", "why": f"requeued by {event.by}", "ended_us": None}
            connection.execute(jobs.update().where(ended).values(again))
        case JobEnded():
            connection.execute(secrets.delete().where(secrets.c.job_id == event.job_id))
            _set_job(connection, event.job_id, state=event.state, why=event.why, ended_us=event.at_us)


def _follow_attempt(connection: sa.Connection, event: Event) -> None:
    match event:
        case AttemptPlaced():
            leases = json.dumps({lease.node: lease.gpus for lease in event.leases})
            row = {"job_id": event.job_id, "epoch": event.epoch, "state": "placed", "leases": leases}
            connection.execute(attempts.insert().values(**row, placed_us=event.at_us, why=""))
        case RanksStarted():
            _set_attempt(connection, event, state="running", started_us=event.at_us)
        case NoticeGiven():
            notice = {"notice_us": event.at_us, "notice_reason": event.reason.value}
            _set_attempt(connection, event, state="stopping", **notice)
        case KillOrdered():
            _set_attempt(connection, event, state="stopping", why=event.why)
        case Restored() | RankLeft():
            _set_attempt(connection, event, step=event.step)
        case Reported(steps=steps) if steps:
            _set_attempt(connection, event, step=event.first_step + steps)
        case CheckpointCommitted():
            _set_attempt(connection, event, checkpoint_step=event.step)
        case ReportsRefused():
            _set_attempt(connection, event, refused=attempts.c.refused + event.count, refused_why=event.why)
        case AttemptEnded():
            failure = None if event.failure is None else json.dumps(dataclasses.asdict(event.failure))
            ended = {"state": "ended", "ended_us": event.at_us, "outcome": event.outcome.value}
            _set_attempt(connection, event, **ended, why=event.why, failure=failure)
            # No rank group is left: an undelivered order has no receiver, and must not start ranks late.
            of_attempt = (commands.c.job_id == event.job_id) & (commands.c.epoch == event.epoch)
            connection.execute(commands.delete().where(of_attempt))


def _runs(event: AttemptEvent) -> sa.ColumnElement[bool]:
    """Return the condition that the event's attempt is the running one of its job."""
    return (jobs.c.job_id == event.job_id) & (jobs.c.epoch == event.epoch) & (jobs.c.state == "running")


def _set_job(connection: sa.Connection, job_id: str, **values: object) -> None:
    connection.execute(jobs.update().where(jobs.c.job_id == job_id).values(values))


def _set_attempt(connection: sa.Connection, event: AttemptEvent, **values: object) -> None:
    which = (attempts.c.job_id == event.job_id) & (attempts.c.epoch == event.epoch)
    connection.execute(attempts.update().where(which).values(values))
