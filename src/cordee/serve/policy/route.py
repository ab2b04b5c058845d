"""The replica of a request: prefix match against the work that waits there.

The router keeps a model of each replica's prefix cache: the blocks of the prompts that it sent there, the least
recently used forgotten first. Blocks are named by the hash of the prompt up to their end, so a block that is held means
that all before it are, and the length of a match is found by bisection.

The cost of a replica is in prompt tokens: those of this request that it has to compute, those that it has yet to
compute for others, and a charge for what it computed lately. Without the last two all prompts that share one block
would follow the first one to its replica.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

BLOCK_BYTES = 2048
"""Text of one block: about 512 tokens."""
BALANCE = 0.5
"""The charge, in lengths of the request's prompt, of a replica with the mean number of recent misses. A replica that
computes all is charged as many times that as there are replicas: of two or more, none keeps all for a match."""
WAITING = 0.03
"""The charge of a prompt token that waits to be computed. A match is worth more than a short wait: a request that
leaves its prefix makes a second copy, and both caches have less room. Admission keeps the wait short."""
RUNNING, RUNNING_SPARE, RUNNING_BEYOND = 8, 32, 256
"""The charge of a running request, in prompt tokens; and that of each beyond so many more than the least: a prompt that
all want gets a second replica in time."""
OVERLOAD_TOKENS = 16_384
"""Prompt tokens by which the waiting work of a session's replica may exceed the least before the session leaves it."""
HORIZON_TOKENS = 2_000_000
"""Computed prompt tokens after which an earlier miss counts 1/e."""
SESSIONS_MAX = 100_000


def prefix_blocks(text: bytes, *, block_bytes: int = BLOCK_BYTES) -> tuple[int, ...]:
    """Return the chained hashes of the whole blocks of a prompt: equal up to where two prompts differ.

    >>> a, b = prefix_blocks(b"same" * 1024 + b"x" * 2048), prefix_blocks(b"same" * 1024 + b"y" * 2048)
    >>> len(a), a[:2] == b[:2], a[2] == b[2]
    (3, True, False)
    """
    blocks = []
    chained = 0
    view = memoryview(text)
    for start in range(0, len(text) - block_bytes + 1, block_bytes):
        chained = xxhash.xxh3_64_intdigest(view[start : start + block_bytes], chained)
        blocks.append(chained)
    return tuple(blocks)


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request as the router sees it.

    Attributes:
        blocks: of the prompt, see `prefix_blocks`; may be empty.
        tokens: of the prompt.
        kv_tokens: room that it needs: prompt and expected answer.
        session: of the client; requests of one session go to one replica.
        avoid: replicas that failed this request.
        takes_spare: its tenant has less than its part, or it moves: waiting prompts of others do not hold it back.
        leaves_spare: its tenant has more than its part: it leaves the slots and tokens that are kept for others.
    """

    blocks: Sequence[int]
    tokens: int
    kv_tokens: int = 0
    session: str = ""
    avoid: frozenset[str] = frozenset()
    takes_spare: bool = False
    leaves_spare: bool = False


@dataclass(slots=True)
class ReplicaLoad:
    """The open work of one replica.

    Attributes:
        kv_tokens: tokens of its KV cache.
        kv_free: those that are not reserved.
        slots_free: requests that it can start.
        miss_tokens: prompt tokens that it has yet to compute.
        prefill_free: prompt tokens that may be sent to it before it has computed others; the last prompt may be longer.
        spare_kv, spare_slots: of the free tokens and slots, those kept for tenants that have less than their part.
        running: open requests.
        failing: it answered with errors, or not at all.
        draining: it takes no new request.
    """

    kv_tokens: int
    kv_free: int
    slots_free: int
    miss_tokens: int = 0
    prefill_free: int = 1 << 62
    spare_kv: int = 0
    spare_slots: int = 0
    running: int = 0
    failing: bool = False
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """The replica of a request, the tokens of the prompt expected in its cache, and the reason in one word."""

    replica: str
    cached_tokens: int
    miss_tokens: int
    why: str


class Router:
    """Chooses replicas, and remembers which prefixes each of them has."""

    def __init__(self, replicas: Mapping[str, int], *, balance: float = BALANCE) -> None:
        """Begin with these replicas and the blocks that each one's prefix cache holds."""
        self.balance = balance
        self._caches: dict[str, _Cache] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._unit = 1.0
        self._recent = 0.0
        self.set_replicas(replicas)

    def set_replicas(self, replicas: Mapping[str, int]) -> None:
        """Forget the replicas that are gone, and add the new ones with the mean of recent misses."""
        mean = self._recent / len(self._caches) if self._caches else 0.0
        self._caches = {name: self._caches.get(name) or _Cache(size, mean) for name, size in replicas.items()}
        for name, size in replicas.items():
            self._caches[name].size = size
        self._recent = sum(each.recent for each in self._caches.values())

    def choose(self, request: RouteRequest, load: Mapping[str, ReplicaLoad], *, wait: bool = True) -> Choice | None:
        """Return the replica with the least cost, and remember the prompt there; None to wait.

        Failing replicas, and those that the request avoids, are taken if no other is left.

        Args:
            request: to place.
            load: of each replica.
            wait: for a full replica, if it is cheaper than those with room; otherwise None means that none has room.
        """
        candidates = [each for each in load if each in self._caches and not load[each].draining]
        sound = [each for each in candidates if not load[each].failing]
        untried = [each for each in sound if each not in request.avoid]
        usable = [each for each in (untried or sound or candidates) if _has_room(request, load[each], wait=wait)]
        if not usable:
            return None
        choice = self._sticky(request, usable, load) or self._cheapest(request, usable, load)
        if not _has_room(request, load[choice.replica], wait=False):
            return None
        self._remember(request, choice)
        return choice

    def _sticky(self, request: RouteRequest, usable: list[str], load: Mapping[str, ReplicaLoad]) -> Choice | None:
        replica = self._sessions.get(request.session) if request.session else None
        if replica is None or replica not in usable or load[replica].kv_free < request.kv_tokens:
            return None
        least = min(load[each].miss_tokens for each in usable)
        if load[replica].miss_tokens - least > max(OVERLOAD_TOKENS, request.tokens):
            return None
        cached = self._matched(request, replica)
        return Choice(replica, cached, request.tokens - cached, "session")

    def _cheapest(self, request: RouteRequest, usable: list[str], load: Mapping[str, ReplicaLoad]) -> Choice:
        tokens = request.tokens
        charge = self.balance * tokens * len(self._caches) / self._recent if self._recent > 0 else 0.0
        spare_running = RUNNING_SPARE + min(load[each].running for each in usable)
        best, best_cost, best_cached, longest = "", float("inf"), 0, 0
        for name in usable:
            cached = self._matched(request, name)
            replica = load[name]
            cost = tokens - cached + charge * self._caches[name].recent
            cost += WAITING * replica.miss_tokens + RUNNING * replica.running
            if replica.running > spare_running:
                cost += RUNNING_BEYOND * (replica.running - spare_running)
            if replica.kv_free < request.kv_tokens:  # they have to be given back first
                cost += request.kv_tokens - replica.kv_free
            if cost < best_cost:
                best, best_cost, best_cached = name, cost, cached
            longest = max(longest, cached)
        why = "prefix" if best_cached and best_cached == longest else "load"
        return Choice(best, best_cached, tokens - best_cached, why)

    def _matched(self, request: RouteRequest, replica: str) -> int:
        blocks = request.blocks
        return request.tokens * self._caches[replica].matched(blocks) // len(blocks) if blocks else 0

    def _remember(self, request: RouteRequest, choice: Choice) -> None:
        cache = self._caches[choice.replica]
        cache.touch(request.blocks)
        self._unit *= 1 + choice.miss_tokens / (HORIZON_TOKENS * len(self._caches))
        cache.recent += choice.miss_tokens * self._unit
        self._recent += choice.miss_tokens * self._unit
        if self._unit > 1e100:
            self._renormalise()
        if request.session:
            self._sessions[request.session] = choice.replica
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > SESSIONS_MAX:
                self._sessions.popitem(last=False)

    def _renormalise(self) -> None:
        for each in self._caches.values():
            each.recent /= self._unit
        self._recent /= self._unit
        self._unit = 1.0


def _has_room(request: RouteRequest, load: ReplicaLoad, *, wait: bool) -> bool:
    """Return whether the request can start, or, if it may wait, whether it can once tokens are given back."""
    if load.slots_free <= (load.spare_slots if request.leaves_spare else 0):
        return False
    if wait:
        return load.kv_tokens >= request.kv_tokens
    tokens = min(request.kv_tokens + load.spare_kv, load.kv_tokens) if request.leaves_spare else request.kv_tokens
    return load.kv_free >= tokens and (load.prefill_free > 0 or request.takes_spare)


class _Cache:
    """Blocks that a replica is thought to hold, least recently used first; of one prompt the last ones leave first."""

    def __init__(self, size: int, recent: float) -> None:
        self.size = size
        self.recent = recent
        self._held: OrderedDict[int, None] = OrderedDict()

    def matched(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks, from the first on, are held."""
        held = self._held
        if not blocks or blocks[0] not in held:
            return 0
        return bisect_left(blocks, True, key=lambda block: block not in held)

    def touch(self, blocks: Sequence[int]) -> None:
        """Hold these blocks, the first one as the most recently used."""
        held = self._held
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self.size:
            held.popitem(last=False)
