"""A state at a moment, for a second owner: what would be, and how it goes on, are asked of it and not of the live one.

Taking it copies dictionaries of frozen records and little else, so it is done under the lock that guards the state;
`state()` builds the indexes anew and is called without it.
"""

from copy import deepcopy
from dataclasses import replace

from cordee.schedule.free import FreeIndex
from cordee.schedule.state import State

_MAPPINGS = ("jobs", "attempts", "nodes", "leased", "vacating", "attention", "owed", "returning", "elastic")
_LISTS = ("limits", "quarantines")


class Present:
    """A copy of a state between two cycles."""

    def __init__(self, state: State) -> None:
        """Take it; nobody may change the state meanwhile."""
        assert not state.journal.keeps, "inside `what_if` a state is not what it is"
        self._policy, self._draining = state.policy, state.draining
        self._mappings = {name: dict(getattr(state, name)) for name in _MAPPINGS}
        self._lists = {name: list(getattr(state, name)) for name in _LISTS}
        self._mix, self._quotas = deepcopy(state.index.mix), state.quotas.copied()

    def state(self) -> State:
        """A state that equals the one it was taken of. Call it once: both would share what they change."""
        # `use` builds all indexes when the policy is another one.
        made = State(replace(self._policy, notice=not self._policy.notice))
        made.draining, made.quotas = self._draining, self._quotas
        for name, value in (self._mappings | self._lists).items():
            setattr(made, name, value)
        made.index = FreeIndex(self._mix)
        made.soon = FreeIndex(self._mix)
        made.use(self._policy)
        return made
