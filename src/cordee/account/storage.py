"""Storage of checkpoints and artifacts by owner, the egress that caches have saved, and what may be deleted.

Of checkpoints the log knows the sizes as ranks committed them and what the job says is kept. What was removed since
then only their own log tells: it is read where it would be proposed to remove some. Chunks that generations share
count in each, so that their bytes are at most what is stored.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from shlex import quote
from typing import Literal

from cordee.events import (
    ArtifactPushed,
    ArtifactRemoved,
    ArtifactStaged,
    ArtifactTagged,
    CheckpointCommitted,
    Event,
    HeldSet,
    JobEnded,
    JobSubmitted,
    NodeUp,
)
from cordee.ids import JobId
from cordee.units import GB, US_PER_S
from cordee.workload.keep import KEEP_MIN, Keep, parse_keep

MICRO_USD_PER_GB_MONTH = 23_000
"""List price of Amazon S3 Standard in us-east-1, first 50 TB (aws.amazon.com/s3/pricing, November 2026)."""
MICRO_USD_PER_GB_EGRESS = 90_000
"""List price of data that leave AWS for the internet, first 10 TB; between two regions it is 20,000."""
IDLE_US = 30 * 86_400 * US_PER_S
"""What nobody has used for this long is proposed for deletion."""


Generations = Mapping[int, bool]
"""The generations of a job's checkpoints that are there, each with whether `gc` would retire it."""


@dataclass(frozen=True, slots=True)
class StoredRow:
    """The checkpoints and artifacts of one owner."""

    owner: str
    checkpoint_bytes: int
    artifact_bytes: int
    micro_usd_per_month: int


@dataclass(frozen=True, slots=True)
class CachedRow:
    """A dataset in the caches of nodes, and the egress that prefetches were spared.

    Attributes:
        url: of the dataset.
        nodes: that have some of it.
        held_bytes: that they have.
        found_bytes: that prefetches found on their own node.
        given_bytes: that other nodes gave them.
        fetched_bytes: that they took from the store.
        saved_micro_usd: what the found and given bytes would have cost there.
    """

    url: str
    nodes: int
    held_bytes: int
    found_bytes: int
    given_bytes: int
    fetched_bytes: int
    saved_micro_usd: int


@dataclass(frozen=True, slots=True)
class Deletion:
    """Something that may be deleted: at most so many bytes, by this command; `checked`: it was seen to be there."""

    what: str
    owner: str
    kind: Literal["checkpoint", "artifact"]
    size_bytes: int
    micro_usd_per_month: int
    command: str
    checked: bool = True


@dataclass(frozen=True, slots=True)
class StorageCost:
    """Storage and egress; `micro_usd_per_gb_month` and `micro_usd_per_gb_egress` are the prices that were taken."""

    at_us: int
    micro_usd_per_gb_month: int
    micro_usd_per_gb_egress: int
    rows: list[StoredRow]
    cached: list[CachedRow]
    deletions: list[Deletion]


@dataclass(slots=True)
class _Job:
    owner: str
    to: str | None
    keep: Keep
    commits: dict[int, CheckpointCommitted] = field(default_factory=dict)  # by generation
    ended_us: int | None = None

    def sum_of(self, generations: Iterable[int]) -> int:
        """Return the bytes of some generations."""
        return sum(self.commits[each].size_bytes for each in generations if each in self.commits)

    def kept(self, keep: Keep) -> int:
        """Return the bytes of the generations that a rule keeps."""
        found = sorted(self.commits.items())
        newest_us = max((each.at_us for _, each in found), default=0)
        return sum(
            each.size_bytes
            for at, (_, each) in enumerate(found, 1)
            if at > len(found) - keep.last
            or (keep.every and at % keep.every == 0)
            or (keep.within_s and each.at_us >= newest_us - keep.within_s * US_PER_S)
        )


def storage_cost(
    events: Iterable[Event],
    at_us: int,
    *,
    generations: Callable[[str], Generations | None] = lambda to: None,
    micro_usd_per_gb_month: int = MICRO_USD_PER_GB_MONTH,
    micro_usd_per_gb_egress: int = MICRO_USD_PER_GB_EGRESS,
) -> StorageCost:
    """Return what is stored after these events, at a time and at these prices.

    Args:
        events: the log.
        at_us: now.
        generations: returns what is there of the checkpoints at an address; None: they cannot be read.
        micro_usd_per_gb_month: the price of storage.
        micro_usd_per_gb_egress: the price of data that leave the store.
    """
    jobs: dict[JobId, _Job] = {}
    nodes: dict[str, tuple[HeldSet, ...]] = {}
    artifacts = _Artifacts()
    for event in events:
        if isinstance(event, JobSubmitted):
            jobs[event.job.job_id] = _job(event)
        elif isinstance(event, CheckpointCommitted) and event.job_id in jobs:
            jobs[event.job_id].commits[event.generation] = event
        elif isinstance(event, JobEnded) and event.job_id in jobs:
            jobs[event.job_id].ended_us = event.at_us
        elif isinstance(event, NodeUp):
            nodes[event.node.name] = event.node.data
        else:
            artifacts.apply(event)

    def month(n_bytes: int) -> int:
        return round(n_bytes * micro_usd_per_gb_month / GB)

    stored: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    deletions = []
    for job_id, job in jobs.items():
        kept_bytes = job.kept(job.keep) if job.to else 0
        freed_bytes = kept_bytes - job.kept(Keep()) if job.to else 0
        if freed_bytes > 0 and job.ended_us is not None and job.ended_us < at_us - IDLE_US:
            to = f"{job.to}/{job_id}"
            if (there := generations(to)) is not None:
                kept_bytes = job.sum_of(there)
                freed_bytes = job.sum_of(each for each, goes in there.items() if goes)
            command = f"cordee checkpoint gc {quote(to)} --keep {KEEP_MIN}"
            what, checked = f"checkpoints of {job_id} but the newest {KEEP_MIN}", there is not None
            cost = month(freed_bytes)
            if freed_bytes:
                deletions.append(Deletion(what, job.owner, "checkpoint", freed_bytes, cost, command, checked))
        stored[job.owner][0] += kept_bytes
    for version in artifacts.live.values():
        stored[version.by][1] += version.stored_bytes
    for version in artifacts.unneeded(at_us - IDLE_US):
        name, size_bytes = f"{version.name}:{version.version}", version.stored_bytes
        command = f"cordee artifact rm {quote(name)} && cordee artifact gc --yes"
        deletions.append(Deletion(name, version.by, "artifact", size_bytes, month(size_bytes), command))
    rows = [StoredRow(owner, of[0], of[1], month(sum(of))) for owner, of in stored.items() if any(of)]
    return StorageCost(
        at_us,
        micro_usd_per_gb_month,
        micro_usd_per_gb_egress,
        sorted(rows, key=lambda row: (-row.micro_usd_per_month, row.owner)),
        _cached(nodes.values(), micro_usd_per_gb_egress),
        sorted(deletions, key=lambda each: (-each.size_bytes, each.what)),
    )


def _job(event: JobSubmitted) -> _Job:
    written = json.loads(event.spec).get("checkpoint") or {}
    return _Job(event.job.owner, written.get("to"), parse_keep(written.get("keep") or KEEP_MIN))


def _cached(nodes: Iterable[tuple[HeldSet, ...]], micro_usd_per_gb: int) -> list[CachedRow]:
    by_url: dict[str, list[HeldSet]] = defaultdict(list)
    for held in nodes:
        for each in held:
            by_url[each.url].append(each)
    rows = []
    for url, found in by_url.items():
        found_bytes, given_bytes = sum(each.found_bytes for each in found), sum(each.given_bytes for each in found)
        is_remote = "://" in url and not url.startswith("file:")
        rows.append(
            CachedRow(
                url,
                sum(bool(each.held_bytes) for each in found),
                sum(each.held_bytes for each in found),
                found_bytes,
                given_bytes,
                sum(each.fetched_bytes for each in found),
                round((found_bytes + given_bytes) * micro_usd_per_gb / GB) if is_remote else 0,
            )
        )
    return sorted(rows, key=lambda row: (-row.saved_micro_usd, row.url))


class _Artifacts:
    """Versions that are there, and what needs them."""

    def __init__(self) -> None:
        self.live: dict[tuple[str, int], ArtifactPushed] = {}
        self._tags: dict[tuple[str, str], int] = {}
        self._stages: dict[tuple[str, int], str] = {}

    def apply(self, event: Event) -> None:
        if isinstance(event, ArtifactPushed):
            self.live[event.name, event.version] = event
        elif isinstance(event, ArtifactRemoved):
            self.live.pop((event.name, event.version), None)
        elif isinstance(event, ArtifactTagged):
            self._tags[event.name, event.tag] = event.version
        elif isinstance(event, ArtifactStaged):
            self._stages[event.name, event.version] = event.stage

    def unneeded(self, before_us: int) -> list[ArtifactPushed]:
        """Return versions older than this that no tag, stage or other version needs, and that are not the newest."""
        tagged = {(name, version) for (name, _), version in self._tags.items()}
        newest = {name: max(v for n, v in self.live if n == name) for name, _ in self.live}
        needed = {digest for each in self.live.values() for digest in (each.base, *each.parents)}
        return [
            each
            for key, each in self.live.items()
            if each.at_us < before_us
            and key not in tagged
            and not self._stages.get(key)
            and key[1] != newest[key[0]]
            and each.digest not in needed
        ]
