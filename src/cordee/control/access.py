"""Rights of the one who asks: `roles.may`, asked with what the server knows of jobs and queues.

Whoever may not see a job sees that GPUs are held, not by which job: its id becomes `another-job` in every text.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel

from cordee.answers.queues import QueuesView
from cordee.answers.submissions import DryRunView
from cordee.control.acts import note
from cordee.control.operations import Operations
from cordee.control.roles import Action, Bearer, may
from cordee.control.specs import read_spec
from cordee.errors import ForbiddenError, SpecError
from cordee.events import (
    ArtifactPushed,
    ArtifactRemoved,
    ArtifactStaged,
    ArtifactTagged,
    ArtifactUsed,
    Event,
    JobSubmitted,
    Queue,
)
from cordee.ids import ALPHABET, JobId
from cordee.schedule.quota.queues import DEFAULT
from cordee.workload.spec import JobSpec

HIDDEN = "another-job"
HIDDEN_USER = "another user"
HIDDEN_ARTIFACT = "another-artifact"
_ID = re.compile(rf"([A-Za-z0-9][A-Za-z0-9._-]*-[{ALPHABET}]{{6}})(\.\d+)?(?![A-Za-z0-9_-])")
_FOR_ALL = re.compile(r"Node[A-Z]|Server[A-Z]|Queues[A-Z]|Maintenance[A-Z]")
"""Kinds of events about the cluster itself: everybody may see them."""

V = TypeVar("V", bound=BaseModel)


class Owned(Protocol):
    """A thing of a user and a queue: a job, an attempt's account."""

    @property
    def owner(self) -> str: ...

    @property
    def queue(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Access:
    """One who asks.

    Attributes:
        bearer: who it is.
        operations: what is asked about.
    """

    bearer: Bearer
    operations: Operations

    @property
    def name(self) -> str:
        """Return the name of who asks."""
        return self.bearer.name

    @property
    def sees_all(self) -> bool:
        """Return whether nothing is hidden."""
        return may(self.bearer, Action.SEE)

    @property
    def operates(self) -> bool:
        """Return whether nodes and all jobs may be changed."""
        return may(self.bearer, Action.CHANGE)

    @property
    def scope(self) -> tuple[object, ...]:
        """Values on which pages depend: those of equal scopes may be used for both."""
        return (self.name, self.bearer.reads_only, self.bearer.grants)

    def may(self, action: Action, owner: str | None = None, queue: str | None = None) -> bool:
        """Return whether this may be done with a thing of a user and a queue, by default with the whole cluster."""
        if queue is None:
            return may(self.bearer, action, owner=owner)
        return may(self.bearer, action, owner=owner, queues=path_to(queue, self.operations.control.state.quotas.queues))

    def sees(self, thing: Owned) -> bool:
        """Return whether a job may be seen."""
        return self.sees_all or self.may(Action.SEE, thing.owner, thing.queue)

    def owner_of(self, thing: Owned) -> str:
        """Return the owner of a job, or that it is somebody else's if the job may not be seen."""
        return thing.owner if self.sees(thing) else HIDDEN_USER

    def changes(self, thing: Owned) -> bool:
        """Return whether a job may be changed."""
        return self.may(Action.CHANGE, thing.owner, thing.queue)

    def check(self, action: Action, what: str) -> None:
        """Check that something may be done with the whole cluster.

        Args:
            action: what is asked for.
            what: the same in words, as "cordon nodes".

        Raises:
            ForbiddenError: it may not.
        """
        if not self.may(action):
            raise ForbiddenError(f"{self.name} may not {what}", hint=f"ask {self.operations.members.operator}")

    def job(self, ref: str, action: Action = Action.SEE, what: str = "change it") -> JobId:
        """Return the id of a job that may be seen, or changed.

        Raises:
            NotFoundError: there is none that may be seen, or there are several.
            ForbiddenError: it may be seen, and not changed.
        """
        row = self.operations.row(ref, self._sees_row)
        note(object=row["job_id"], queue=row["queue"])
        if not self.may(action, row["owner"], row["queue"]):
            owner = row["owner"]
            raise ForbiddenError(
                f"{row['job_id']} is {owner}'s: only {owner} and operators of {row['queue']} may {what}",
                hint=f"ask {owner}, or {self.operations.members.operator}",
            )
        return JobId(row["job_id"])

    def changes_id(self, job_id: JobId) -> bool:
        """Return whether a job may be changed, by its id."""
        row = self.operations.row(job_id)
        return self.may(Action.CHANGE, row["owner"], row["queue"])

    def operates_queue_of(self, job_id: JobId) -> bool:
        """Return whether everybody's jobs of a job's queue may be changed."""
        return self.may(Action.CHANGE, queue=self.operations.row(job_id)["queue"])

    def check_submits(self, spec: Mapping[str, Any], job_id: str = "") -> None:
        """Check that a job may be submitted to the queue that its spec names, under an id that is free or its own.

        Raises:
            ForbiddenError: it may not.
            SpecError: it names an artifact that does not exist or may not be seen.
        """
        queue = queue_of(spec)
        note(object=job_id or str(spec.get("name") or ""), queue=queue)
        if job_id and not self.sees_id(job_id):
            raise ForbiddenError(f"the id {job_id} is another user's", hint="submit it under another id")
        if not self.may(Action.SUBMIT, queue=queue):
            raise ForbiddenError(
                f"{self.name} may not submit to the queue {queue}", hint=f"ask {self.operations.members.operator}"
            )
        if not self.sees_all:
            self._check_artifacts(read_spec(spec))

    def _check_artifacts(self, spec: JobSpec) -> None:
        """Check that the versions of artifacts that a spec names may be seen: its ranks and replicas read them."""
        refs = [] if spec.service is None else list(spec.service.artifacts.values())
        pinned = () if spec.service is None else spec.service.versions.values()
        with self.operations.control.changed:
            artifacts = self.operations.control.fold.artifacts
            named = {ref: [] if (found := artifacts.find(ref)) is None else [found] for ref in refs}
            named |= {each: artifacts.all_of(each) for each in (*spec.artifacts, *(each.digest for each in pinned))}
        for ref, versions in named.items():
            if not any(self.sees(each) for each, _ in versions):
                raise SpecError(f"there is no artifact {ref}", hint="`cordee artifact ls` shows them")

    def check_changes(self, what: str, owner: str, spec: str) -> None:
        """Check that a service or a sweep may be changed.

        Args:
            what: its name.
            owner: of it.
            spec: of it, as JSON.

        Raises:
            ForbiddenError: it may not.
        """
        queue = queue_of(json.loads(spec))
        note(object=what, queue=queue)
        if not self.may(Action.CHANGE, owner, queue):
            raise ForbiddenError(f"{what} is {owner}'s, and not {self.name}'s to change", hint=f"ask {owner}")

    def sees_spec(self, owner: str, spec: str) -> bool:
        """Return whether a service or a sweep may be seen, by its owner and its spec as JSON."""
        return self.sees_all or self.may(Action.SEE, owner, queue_of(json.loads(spec)))

    def sees_id(self, job_id: str) -> bool:
        """Return whether a job of this id may be seen; one that is unknown may."""
        return self.sees_all or all(self._sees_row(row) for row in self.operations.store.jobs(job_id))

    def _sees_row(self, row: Mapping[str, Any]) -> bool:
        return self.sees_all or self.may(Action.SEE, row["owner"], row["queue"])

    # -- answers, without what may not be seen ---------------------------------------------------------------------

    def text(self, text: str) -> str:
        """Return a text in which jobs that may not be seen have no name."""
        if self.sees_all:
            return text
        return _ID.sub(lambda found: found[0] if self.sees_id(found[1]) else HIDDEN, text)

    def view(self, view: V) -> V:
        """Return an answer in which jobs that may not be seen have no name."""
        self.operations.control.precedence.give_way()  # lists have many
        return view if self.sees_all else type(view).model_validate(self._hidden(view.model_dump()))

    def views(self, views: Iterable[V]) -> list[V]:
        """Return answers in which jobs that may not be seen have no name."""
        return [self.view(each) for each in views]

    def _hidden(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self._hidden(key): self._hidden(each) for key, each in value.items()}
        return [self._hidden(each) for each in value] if isinstance(value, list | tuple) else value

    def dry_run(self, found: DryRunView) -> DryRunView:
        """Return a dry run whose victims have no name and no owner if they may not be seen."""
        victims = [
            each if self.sees_id(each.job_id) else each.model_copy(update={"owner": ""}) for each in found.victims
        ]
        return self.view(found.model_copy(update={"victims": victims}))

    def queues(self, found: QueuesView) -> QueuesView:
        """Return the tree of queues, without the users of those whose jobs may not be seen."""
        queues = [
            each
            if self.may(Action.SEE, queue=each.name)
            else each.model_copy(update={"users_gpu_milli": self._own(each.users_gpu_milli)})
            for each in found.queues
        ]
        return found.model_copy(update={"queues": queues})

    def _own(self, by_user: Mapping[str, int]) -> dict[str, int]:
        return {user: amount for user, amount in by_user.items() if user == self.name}

    def event(self, event: Event, body: dict[str, Any]) -> dict[str, Any] | None:
        """Return what may be seen of an event of the log, given as JSON; None: nothing."""
        if self.sees_all:
            return body
        job_id = getattr(event, "job_id", None)
        if isinstance(event, JobSubmitted):
            shown = self.sees(event.job)
        elif isinstance(event, ArtifactPushed | ArtifactTagged | ArtifactStaged | ArtifactUsed | ArtifactRemoved):
            shown = self.sees(self.operations.control.fold.artifacts.named[event.name])
        elif job_id is not None:
            shown = self.sees_id(job_id)
        else:
            shown = _FOR_ALL.match(type(event).__name__) is not None
        return self._hidden(body) if shown else None


def path_to(queue: str, queues: Sequence[Queue]) -> list[str]:
    """Return a queue and those above it; a queue that is gone is below `default`, where its jobs wait.

    >>> path_to("llm", [Queue(name="llm", parent="research"), Queue(name="research")])
    ['llm', 'research']
    >>> path_to("gone", [])
    ['gone', 'default']
    """
    parents = {each.name: each.parent for each in queues}
    found, above = [queue], parents.get(queue, None if queue == DEFAULT else DEFAULT)
    while above is not None:
        found.append(above)
        above = parents.get(above)
    return found


def queue_of(spec: Mapping[str, Any]) -> str:
    """Return the queue that a spec names."""
    return str(spec.get("queue") or DEFAULT)
