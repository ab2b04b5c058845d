"""A snapshot: the state at a moment as a value, so that forecasts and what-ifs run on copies and not on the live state.

Taking one copies dictionaries of frozen records and little else, so it is done under the lock that guards the state;
`restore` builds the indexes anew and is called without the lock.
"""

from copy import deepcopy
from dataclasses import replace

from cordee.schedule.state.state import State


class Snapshot:
    """The state as it is between two cycles."""

    def __init__(self, state: State) -> None:
        """Take the snapshot; nothing may change the state meanwhile."""
        assert not state.journal.keeps, "inside a what-if a state is not what it is"
        self.policy, self.shutting_down = state.policy, state.shutting_down
        self.jobs, self.attempts, self.history = state.jobs.copy(), state.attempts.copy(), state.history.copied()
        nodes = state.nodes
        self._leases = nodes.records.copy(), nodes.leased.copy(), nodes.vacating.copy()
        self._failures = nodes.went_down.copy(), nodes.quarantines.copy()
        self._mix, self._quotas = deepcopy(state.nodes.free.mix), state.quotas.copied()
        self._agenda = state.agenda.copied()
        self._changes = (state.changes.total, state.changes.gains, state.changes.newest)
        self._idle, self._failed_searches = state.idle, state.failed_searches

    def restore(self) -> State:
        """Return a new state that equals the captured one."""
        # `use` builds all indexes when the policy is another one.
        made = State(replace(self.policy, notice=not self.policy.notice), mix=deepcopy(self._mix))
        made.shutting_down, made.quotas, made.history = self.shutting_down, self._quotas.copied(), self.history.copied()
        made.jobs, made.attempts, made.agenda = self.jobs.copy(), self.attempts.copy(), self._agenda.copied()
        nodes = made.nodes
        records, leased, vacating = self._leases
        nodes.records, nodes.leased, nodes.vacating = records.copy(), leased.copy(), vacating.copy()
        went_down, quarantines = self._failures
        nodes.went_down, nodes.quarantines = went_down.copy(), quarantines.copy()
        made.use(self.policy)
        made.changes.set(*self._changes)
        made.idle, made.failed_searches = self._idle, self._failed_searches
        return made
