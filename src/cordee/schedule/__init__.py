"""The scheduler core: events in, decisions out; the service and the simulator share it.

No clock, no randomness, no I/O.

apply(state, event)                         for every event of the log, in order
decision = decide(state, now_us, policy)    the decision for now; the state is left as it was
enact(state, now_us, policy, write)         the same, written down by `write` and applied; wake at `wake_at_us`
explain(state, job_id, now_us)              the reason that holds a job where it is
"""

from cordee.schedule.decision import Decision, decide, enact
from cordee.schedule.explain import Explanation, Reason, explain
from cordee.schedule.policy import NAMED, Policy
from cordee.schedule.state.records import Attempt, JobRecord, NodeRecord, Phase
from cordee.schedule.state.state import State
from cordee.schedule.state.transitions import apply

__all__ = [
    "NAMED",
    "Attempt",
    "Decision",
    "Explanation",
    "JobRecord",
    "NodeRecord",
    "Phase",
    "Policy",
    "Reason",
    "State",
    "apply",
    "decide",
    "enact",
    "explain",
]
