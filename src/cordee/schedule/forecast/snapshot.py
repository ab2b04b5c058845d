"""A state at a moment, as a value: what would be, and how it goes on, are asked of copies and not of the live state.

Taking it copies dictionaries of frozen records and little else, so it is done under the lock that guards the state;
`state()` builds the indexes anew, and is called without it.
"""

from copy import deepcopy
from dataclasses import replace

from cordee.schedule.placement.free import FreeIndex
from cordee.schedule.state import State

_COLLECTIONS = (
    "jobs", "attempts", "nodes", "leased", "vacating", "attention", "entitled", "returning", "elastic", "limits",
    "went_down", "quarantines",
)  # fmt: skip
_REMEMBERED = ("changes", "newest", "gains", "idle", "failed_searches")  # by `decide`, of decisions before


class Present:
    """What a state is between two cycles."""

    def __init__(self, state: State) -> None:
        """Take it; nobody may change the state meanwhile."""
        assert not state.journal.keeps, "inside `what_if` a state is not what it is"
        self.policy, self.shutting_down = state.policy, state.shutting_down
        self._collections = {name: getattr(state, name).copy() for name in _COLLECTIONS}
        self.jobs, self.attempts = self._collections["jobs"], self._collections["attempts"]
        self._remembered = {name: getattr(state, name) for name in _REMEMBERED}
        self._mix, self._quotas, self.history = deepcopy(state.index.mix), state.quotas.copied(), state.history.copied()

    def state(self) -> State:
        """A state of its own that equals the one it was taken of."""
        # `use` builds all indexes when the policy is another one.
        made = State(replace(self.policy, notice=not self.policy.notice))
        made.shutting_down, made.quotas, made.history = self.shutting_down, self._quotas.copied(), self.history.copied()
        for name, value in self._collections.items():
            setattr(made, name, value.copy())
        made.index = FreeIndex(deepcopy(self._mix))
        made.soon, made.vacated = FreeIndex(made.index.mix), FreeIndex(made.index.mix)
        made.use(self.policy)
        for name, value in self._remembered.items():
            setattr(made, name, value)
        return made
