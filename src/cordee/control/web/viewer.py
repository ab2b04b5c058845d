"""The person who looks at a page, and what that person may see and do."""

from dataclasses import dataclass

HIDDEN = "another queue's job"
"""What is shown in place of a job that the viewer may not see."""


@dataclass(frozen=True, slots=True)
class Viewer:
    """A person who looks at pages.

    Attributes:
        name: the person.
        operates: whether nodes and all jobs are the person's to change.
    """

    name: str
    operates: bool

    def sees(self, owner: str, queue: str) -> bool:
        """Return whether the person may know of a job of this owner in this queue."""
        return bool(self.name or owner or queue)

    def changes(self, owner: str, queue: str) -> bool:
        """Return whether the person may stop, requeue or pause such a job."""
        return self.operates or owner == self.name or not queue

    @property
    def scope(self) -> tuple[object, ...]:
        """What the parts of a page depend on: those of equal scopes may be shared."""
        return ("all", self.operates)
