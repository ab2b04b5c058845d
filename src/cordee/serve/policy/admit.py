"""Admission by KV tokens: a request starts where its prompt and its expected answer have room, so no engine preempts.

Prompts are limited too: a replica gets new ones only while little is waiting there to be computed, so that what waits
waits in the gateway, in its fair order, and not in the engine in the order of arrival.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, log2

from cordee.serve.policy.route import ReplicaLoad

UNLIMITED = 1 << 62
BLOCK_TOKENS = 16
"""Tokens of an engine's KV block: a request leaves a part of its last one empty."""
PREFILL_TOKENS = 4096
"""Prompt tokens that may wait in a replica, and one prompt more: a quarter of a second of an 8B model's work."""
SPARE = 16
"""One part in so many of a replica's slots and KV tokens is kept for tenants that have less than their part."""
QUANTILE = 0.95
ANSWER_TOKENS = 1024
"""Tokens expected at most of an answer before enough were seen."""
OBSERVED_MIN = 32
"""Answers that are enough."""
OBSERVED_FEW = 256
"""Answers up to which each one may change the quantile; then it is looked up once in `OBSERVED_MIN`."""
OBSERVED_MAX = 4096
"""Answers after which earlier ones count half."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Limits of one replica; None is unknown and does not limit.

    Attributes:
        kv_tokens: of its KV cache.
        slots: requests at a time.
        prefill_tokens: prompt tokens that may wait there; the last prompt may be longer.
    """

    kv_tokens: int | None = None
    slots: int | None = None
    prefill_tokens: int = PREFILL_TOKENS


@dataclass(slots=True, eq=False)
class Reservation:
    """Room that one request holds on a replica; `Admission` alone changes it.

    It keeps the replica's load, not its name: a replica that was away and came back begins anew.
    """

    load: ReplicaLoad
    kv_tokens: int
    miss_tokens: int
    open: bool = True


class Admission:
    """KV tokens, slots and waiting prompts of the replicas of a service. `loads` is what `Router.choose` reads."""

    def __init__(self, replicas: Mapping[str, Capacity]) -> None:
        """Begin with empty replicas."""
        self.loads: dict[str, ReplicaLoad] = {}
        self._capacities: dict[str, Capacity] = {}
        self.set_replicas(replicas)

    def set_replicas(self, replicas: Mapping[str, Capacity]) -> None:
        """Forget the replicas that are gone; add the new ones; apply changed limits."""
        for name in self.loads.keys() - replicas.keys():
            del self.loads[name], self._capacities[name]
        for name, capacity in replicas.items():
            old = self._capacities.get(name, Capacity(0, 0, 0))
            load = self.loads.setdefault(name, ReplicaLoad(0, 0, 0, prefill_free=0))
            load.kv_tokens = _limit(capacity.kv_tokens)
            load.kv_free += _limit(capacity.kv_tokens) - _limit(old.kv_tokens)
            load.slots_free += _limit(capacity.slots) - _limit(old.slots)
            load.spare_kv = 0 if capacity.kv_tokens is None else capacity.kv_tokens // SPARE
            load.spare_slots = 0 if capacity.slots is None else capacity.slots // SPARE
            load.prefill_free += capacity.prefill_tokens - old.prefill_tokens
            self._capacities[name] = capacity

    def largest(self) -> int:
        """Return the tokens of the largest KV cache; 0 without replicas."""
        return max((_limit(each.kv_tokens) for each in self._capacities.values()), default=0)

    def reserve(self, replica: str, kv_tokens: int, miss_tokens: int) -> Reservation:
        """Take room on a replica that has it."""
        load = self.loads[replica]
        assert load.slots_free > 0 and load.kv_free >= kv_tokens, f"{replica} has no room for {kv_tokens} tokens"
        load.kv_free -= kv_tokens
        load.slots_free -= 1
        load.running += 1
        load.miss_tokens += miss_tokens
        load.prefill_free -= miss_tokens
        return Reservation(load, kv_tokens, miss_tokens)

    def first_token(self, reservation: Reservation) -> None:
        """Note that the prompt is computed."""
        reservation.load.miss_tokens -= reservation.miss_tokens
        reservation.load.prefill_free += reservation.miss_tokens
        reservation.miss_tokens = 0

    def release(self, reservation: Reservation) -> None:
        """Give the room back; a second call does nothing."""
        if not reservation.open:
            return
        reservation.open = False
        self.first_token(reservation)
        reservation.load.kv_free += reservation.kv_tokens
        reservation.load.slots_free += 1
        reservation.load.running -= 1


def _limit(value: int | None) -> int:
    return UNLIMITED if value is None else value


@dataclass(slots=True)
class AnswerLengths:
    """A running quantile of the lengths of answers, in buckets of a quarter of an octave."""

    quantile: float = QUANTILE
    _counts: list[float] = field(default_factory=lambda: [0.0] * 128)
    _total: float = 0.0
    _expected: int | None = None

    def add(self, tokens: int) -> None:
        """Note the length of an answer that ended by itself or by its limit."""
        self._counts[ceil(4 * log2(max(1, tokens)))] += 1
        self._total += 1
        if self._total < OBSERVED_FEW or not self._total % OBSERVED_MIN:
            self._expected = None
        if self._total >= OBSERVED_MAX:
            self._counts = [each / 2 for each in self._counts]
            self._total /= 2

    def expected(self, limit: int) -> int:
        """Return the tokens to reserve for an answer of at most `limit`."""
        if self._total < OBSERVED_MIN:
            return min(limit, ANSWER_TOKENS)
        if self._expected is None:
            below = 0.0
            for bucket, count in enumerate(self._counts):
                below += count
                if below >= self.quantile * self._total:
                    self._expected = ceil(2 ** (bucket / 4))
                    break
        return min(limit, self._expected or limit)
