"""The person who looks at a page, and what that person may see and do."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Viewer:
    """A person who looks at pages.

    Attributes:
        name: the person.
        operates: whether nodes and all jobs are the person's to change.
        reads_only: whether nothing is.
    """

    name: str
    operates: bool
    reads_only: bool = False

    def changes(self, owner: str) -> bool:
        """Return whether the person may stop, requeue or pause jobs of this owner."""
        return not self.reads_only and (self.operates or owner == self.name)

    @property
    def scope(self) -> tuple[object, ...]:
        """Values on which the parts of a page depend: those of equal scopes may be used for both."""
        return (self.operates, self.reads_only, self.name)
