"""The fold of artifacts: their versions, tags and stages, what used them, and the history of all that. Pure."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cordee.events import (
    ArtifactPushed,
    ArtifactRemoved,
    ArtifactStaged,
    ArtifactTagged,
    ArtifactUsed,
    Event,
)
from cordee.ids import JobId
from cordee.schedule.quota.queues import DEFAULT

NAME = r"[a-z0-9][a-z0-9._-]{0,62}(?:/[a-z0-9][a-z0-9._-]{0,62}){0,3}"
TAG = r"[A-Za-z][A-Za-z0-9._-]{0,62}"
LATEST = "latest"
HISTORY_MAX = 10_000  # changes of one name that are kept; the log has all


@dataclass(slots=True)
class Version:
    """A version of an artifact.

    Attributes:
        pushed: the event that made it.
        stage: that it has come to; "": none.
        removed: why it was removed; None: it is there.
        used_by: jobs that have pulled it.
    """

    pushed: ArtifactPushed
    stage: str = ""
    removed: str | None = None
    used_by: list[JobId] = field(default_factory=list)


@dataclass(slots=True)
class Change:
    """A change of a name's versions, tags or stages, in words."""

    at_us: int
    by: str
    what: str


@dataclass(slots=True)
class Named:
    """An artifact: all versions of a name.

    Attributes:
        owner: who pushed the first version.
        versions: by number, the oldest first.
        tags: the version that each names.
        history: of its changes, the oldest first.
    """

    name: str
    owner: str
    versions: dict[int, Version] = field(default_factory=dict)
    tags: dict[str, int] = field(default_factory=dict)
    history: list[Change] = field(default_factory=list)

    @property
    def queue(self) -> str:
        """Return the queue that its newest push named, by whose roles it is seen and changed."""
        newest = next(reversed(self.versions.values()), None)
        return (newest.pushed.queue if newest is not None else "") or DEFAULT

    @property
    def live(self) -> list[Version]:
        """Return the versions that are there, the oldest first."""
        return [each for each in self.versions.values() if each.removed is None]

    def tags_of(self, version: int) -> list[str]:
        """Return the tags that name a version."""
        return sorted(tag for tag, number in self.tags.items() if number == version)


class SavedArtifacts(NamedTuple):
    """The saved form of all artifacts."""

    named: dict[str, Named]


class Artifacts:
    """All artifacts of the log; hold the control's `changed` while reading them.

    Attributes:
        named: by name.
        kinds: of events that may change something.
    """

    def __init__(self) -> None:
        self.named: dict[str, Named] = {}
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            ArtifactPushed: self._pushed,
            ArtifactTagged: self._tagged,
            ArtifactStaged: self._staged,
            ArtifactUsed: self._used,
            ArtifactRemoved: self._removed,
        }
        self.kinds = frozenset(self._handlers)

    def saved(self) -> SavedArtifacts:
        """Return the saved form; it shares this object's values."""
        return SavedArtifacts(self.named)

    @classmethod
    def restored(cls, saved: SavedArtifacts) -> "Artifacts":
        """Return the artifacts that were saved."""
        new = cls()
        new.named = saved.named
        return new

    def apply(self, event: Event) -> None:
        """Fold an event of the log; most are of no artifact."""
        if (handler := self._handlers.get(type(event))) is not None:
            handler(event)

    def find(self, ref: str) -> tuple[Named, Version] | None:
        """Return the version of `name`, `name:3`, `name:tag` or `name@digest`; None: there is none.

        A name alone is its newest version.
        """
        name, mark, which = split_ref(ref)
        named = self.named.get(name)
        if named is None:
            return None
        live = {each.pushed.version: each for each in named.live}
        found: Version | None
        if mark == "@":
            near = [each for each in live.values() if len(which) >= 8 and each.pushed.digest.startswith(which)]
            found = near[-1] if near else None
        elif which.isdecimal():
            found = live.get(int(which))
        elif which and which != LATEST:
            found = live.get(named.tags.get(which, 0))
        else:
            found = live[max(live)] if live else None
        return None if found is None else (named, found)

    def versions(self) -> Iterator[tuple[Named, Version]]:
        """Yield every version that is there."""
        for named in self.named.values():
            for version in named.live:
                yield named, version

    def by_digest(self, digest: str) -> tuple[Named, Version] | None:
        """Return the newest version with this digest; None: there is none."""
        found = self.all_of(digest)
        return found[-1] if found else None

    def all_of(self, digest: str) -> list[tuple[Named, Version]]:
        """Return the versions with this digest."""
        return [(named, each) for named, each in self.versions() if each.pushed.digest == digest]

    def used_by(self, job_id: JobId) -> list[str]:
        """Return the digests of the versions that a job has pulled."""
        return [version.pushed.digest for _, version in self.versions() if job_id in version.used_by]

    def _pushed(self, event: ArtifactPushed) -> None:
        named = self.named.setdefault(event.name, Named(event.name, event.by))
        named.versions[event.version] = Version(event)
        _note(named, event.at_us, event.by, f"pushed version {event.version}")

    def _tagged(self, event: ArtifactTagged) -> None:
        named = self.named[event.name]
        before = named.tags.pop(event.tag, 0)
        if event.version:
            named.tags[event.tag] = event.version
        was = f", before {before}" if before else ""
        what = f"tag {event.tag} is version {event.version}{was}" if event.version else f"tag {event.tag} removed{was}"
        _note(named, event.at_us, event.by, what)

    def _staged(self, event: ArtifactStaged) -> None:
        version = self.named[event.name].versions[event.version]
        was = f", before {version.stage}" if version.stage else ""
        version.stage = event.stage
        what = f"version {event.version} is in {event.stage or 'no stage'}{was}"
        _note(self.named[event.name], event.at_us, event.by, what)

    def _used(self, event: ArtifactUsed) -> None:
        used = self.named[event.name].versions[event.version].used_by
        if event.job_id not in used:
            used.append(event.job_id)

    def _removed(self, event: ArtifactRemoved) -> None:
        named = self.named[event.name]
        named.versions[event.version].removed = event.why
        named.tags = {tag: number for tag, number in named.tags.items() if number != event.version}
        _note(named, event.at_us, event.by, f"removed version {event.version}: {event.why}")


def split_ref(ref: str) -> tuple[str, str, str]:
    """Return the name of a reference, the mark behind it, and what follows.

    >>> split_ref("team/gpt:production"), split_ref("gpt@0123abcd"), split_ref("gpt")
    (('team/gpt', ':', 'production'), ('gpt', '@', '0123abcd'), ('gpt', '', ''))
    """
    name, mark, which = re.split(r"([:@]|$)", ref, maxsplit=1)
    return name, mark, which


def _note(named: Named, at_us: int, by: str, what: str) -> None:
    named.history.append(Change(at_us, by, what))
    del named.history[:-HISTORY_MAX]
