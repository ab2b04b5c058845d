"""A draft model beside the large one: its weights and KV on each GPU, and its seconds for a token of each answer."""

from dataclasses import dataclass, replace

from cordee.plan.serving.case import ServingCase, ServingLayout
from cordee.plan.serving.formats import WEIGHTS
from cordee.plan.serving.layouts import undivided
from cordee.plan.serving.memory.kv import kv_bytes
from cordee.plan.serving.memory.memory import ServingMemory
from cordee.plan.serving.memory.weights import weights_bytes
from cordee.plan.serving.performance import speed_of
from cordee.plan.serving.request import Draft
from cordee.plan.serving.speed.speed import host_s


@dataclass(frozen=True, slots=True)
class DraftCost:
    """The parts of one replica that a draft model takes.

    Attributes:
        case: the draft in the replica's layout; None: `fraction` of the large model.
        large: the large model's case.
        fraction: of weights, KV and time of the large model, where `case` is None.
    """

    large: ServingCase
    case: ServingCase | None
    fraction: float

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights on each GPU."""
        return weights_bytes(self.case, 0) if self.case else round(self.fraction * weights_bytes(self.large, 0))

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes of KV of one sequence of so many tokens on each GPU."""
        return kv_bytes(self.case, tokens, 0) if self.case else round(self.fraction * kv_bytes(self.large, tokens, 0))

    def token_s(self, batch: int, context_tokens: float) -> float:
        """Return the seconds to draft one token for each sequence; the host schedules once for the whole step."""
        case, fraction = (self.case, 1.0) if self.case else (self.large, self.fraction)
        return fraction * (speed_of(case).decode_s(batch, batch * context_tokens) - host_s(case, batch))

    def sequences(self, held: ServingMemory, tokens: int) -> int:
        """Return the sequences of this length that run in a replica beside the draft; 0 where it does not fit."""
        each = kv_bytes(self.large, tokens, held.stage) + self.kv_bytes(tokens)
        room = max(0, held.kv_bytes - self.weights_bytes) // each * self.large.layout.dp
        return min(self.large.slots, room)


def draft_cost(case: ServingCase, draft: Draft) -> DraftCost:
    """Return the cost of a draft, cut over as many tensor-parallel GPUs of the replica as divide it, in 16 bits."""
    if draft.shape is None:
        return DraftCost(case, None, draft.fraction)
    degrees = (tp for tp in range(case.layout.tp, 0, -1) if case.layout.tp % tp == 0)
    tp = next(tp for tp in degrees if undivided(ServingLayout(tp), draft.shape) is None)
    small = replace(case, shape=draft.shape, layout=ServingLayout(tp), weights=WEIGHTS["bf16"])
    return DraftCost(case, small, 0.0)
