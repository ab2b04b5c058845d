"""Snapshots: the fold of the log at one number, so that a start reads the log after that number only.

A snapshot is the saved form of the fold (`fold.py`) as compressed JSON, with a hash of the text and the version of the
code that folds. A snapshot of another version is not used: the log is the truth, and a full replay gives the same.
"""

import json
import zlib
from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import cordee
from cordee.account.curves import JobCurves, SavedJobCurves
from cordee.control.codec import codec
from cordee.control.fold import EndedJob, Fold, SavedFold
from cordee.ids import JobId
from cordee.schedule.policy import Policy

_LEVEL = 1  # of compression: a snapshot is written more often than read, and level 6 saves a tenth more
_FOLDING = (
    "account",
    "schedule",
    "control/versions.py",
    "control/codec.py",
    "control/fold.py",
    "control/directory.py",
    "control/rehearsed/fold.py",
    "control/trials.py",
    "workload/sweep.py",
    "event_json.py",
    "events",
    "reports.py",
)


class Snapshot(NamedTuple):
    """A fold of the log up to `number` in its stored form; `hash` is of the body."""

    number: int
    at_us: int
    version: str
    hash: str
    body: bytes


class SnapshotError(ValueError):
    """A snapshot that cannot be used; the message has the reason."""


@cache
def version(policy: Policy) -> str:
    """Return the version of the code that folds: the release, the hash of its source, and the policy's."""
    digest = blake2b(repr(policy).encode(), digest_size=8)
    root = Path(cordee.__file__).parent
    for name in _FOLDING:
        path = root / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return f"{cordee.__version__}-{digest.hexdigest()}"


def taken(fold: Fold) -> Snapshot:
    """Return a snapshot of the fold; nothing may change it meanwhile."""
    text = json.dumps(codec(SavedFold).encode(fold.saved()), separators=(",", ":")).encode()
    body = zlib.compress(text, _LEVEL)
    return Snapshot(fold.number, fold.last_us, version(fold.policy), _hash(body), body)


def loaded(snapshot: Snapshot, policy: Policy, log_number: int) -> Fold:
    """Return the fold of a snapshot.

    Args:
        snapshot: the snapshot.
        policy: the policy of this server.
        log_number: the log's last number.

    Raises:
        SnapshotError: it is of another version, damaged or ahead of the log.
    """
    if snapshot.version != version(policy):
        raise SnapshotError(f"it is of version {snapshot.version}, and this is {version(policy)}")
    if snapshot.number > log_number:
        raise SnapshotError(f"it is of number {snapshot.number}, and the log ends at {log_number}")
    if _hash(snapshot.body) != snapshot.hash:
        raise SnapshotError(f"its {len(snapshot.body)} bytes do not have its hash {snapshot.hash}")
    try:
        fold = Fold(policy, codec(SavedFold).decode(json.loads(zlib.decompress(snapshot.body))))
    except Exception as error:  # whatever it holds, the log is there
        raise SnapshotError(f"it cannot be read: {error!r}") from error
    if fold.number != snapshot.number:
        raise SnapshotError(f"it holds number {fold.number}, and says {snapshot.number}")
    return fold


def encoded_jobs(jobs: Mapping[JobId, EndedJob]) -> dict[JobId, str]:
    """Return retired jobs as JSON."""
    encode = codec(EndedJob).encode
    return {job_id: json.dumps(encode(job), separators=(",", ":")) for job_id, job in jobs.items()}


def decoded_jobs(bodies: Iterable[str]) -> list[EndedJob]:
    """Return the retired jobs of this JSON."""
    decode = codec(EndedJob).decode
    return [decode(json.loads(body)) for body in bodies]


def encoded_curves(curves: Mapping[JobId, SavedJobCurves]) -> dict[JobId, bytes]:
    """Return the curves of retired jobs in their stored form."""
    encode = codec(SavedJobCurves).encode
    return {
        job_id: zlib.compress(json.dumps(encode(each), separators=(",", ":")).encode(), _LEVEL)
        for job_id, each in curves.items()
    }


def decoded_curves(body: bytes) -> JobCurves:
    """Return the curves of this stored form."""
    return JobCurves.restored(codec(SavedJobCurves).decode(json.loads(zlib.decompress(body))))


def _hash(body: bytes) -> str:
    return blake2b(body, digest_size=16).hexdigest()
