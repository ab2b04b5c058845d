"""KV offload: when it is cheaper to bring the KV cache of a prompt back than to compute it again.

Restoring n tokens takes their KV bytes over a bandwidth, computing them the time of their prefill. Both are functions
of the length, so offload has a break-even bandwidth for each length and nothing else: KV bytes / recompute seconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cordee.plan.serving.levers.reuse import BlockReuse
from cordee.units import GB, format_bytes

BytesAt = Callable[[int], float]
"""KV bytes of a replica for a context of so many tokens."""
SecondsAt = Callable[[int], float]
"""Seconds in which a replica computes a prompt of so many tokens."""


@dataclass(frozen=True, slots=True)
class KvLevel:
    """A place for KV blocks beyond the GPU.

    Attributes:
        bytes_per_s: what one replica reads from it.
        latency_s: seconds before the first byte.
        usd_per_gb_hour: rent of 10^9 bytes for an hour.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    usd_per_gb_hour: float

    def restore_s(self, kv_bytes: float) -> float:
        """Return the seconds until so many bytes are on the GPU."""
        return self.latency_s + kv_bytes / self.bytes_per_s


# Bandwidths and latencies are assumed: a copy over PCIe 4 x16 to one GPU, a good NVMe drive. Prices are assumed after
# EC2 types in us-east-1 that differ in memory or disk alone: r7i against c7i.xlarge (24 GB for $0.086 an hour), i4i
# against r6i.xlarge (937 GB for $0.091).
KV_LEVELS = (
    KvLevel("host memory", 25e9, 20e-6, 0.0036),
    KvLevel("local NVMe", 6e9, 200e-6, 0.0001),
)


def break_even_bytes_per_s(kv_bytes: float, recompute_s: float) -> float:
    """Return the bandwidth at which restoring takes as long as computing.

    70B with 8 KV heads holds 320 KiB a token in bf16; at 10,000 tokens/s of prefill that is 3.3 GB/s at any length:

    >>> round(break_even_bytes_per_s(320 * 1024 * 8000, 8000 / 10_000) / 1e9, 2)
    3.28
    """
    return kv_bytes / recompute_s


def shortest_restore_tokens(kv_bytes: BytesAt, recompute_s: SecondsAt, level: KvLevel, longest: int) -> int | None:
    """Return the shortest prefix that this level restores faster than the replica computes it; None: none does.

    The latency of the level counts against short prefixes; above the answer restoring is faster at each doubling.
    """
    tokens, found = longest, None
    while tokens >= 1 and level.restore_s(kv_bytes(tokens)) < recompute_s(tokens):
        tokens, found = tokens // 2, tokens
    if found is None or tokens < 1:
        return found
    low, high = tokens, found
    while high - low > 1:
        middle = (low + high) // 2
        faster = level.restore_s(kv_bytes(middle)) < recompute_s(middle)
        low, high = (low, middle) if faster else (middle, high)
    return high


@dataclass(frozen=True, slots=True)
class Offloading:
    """A replica whose KV blocks may leave the GPU.

    Attributes:
        gpu_tokens: tokens of KV cache on the GPUs of the replica.
        token_bytes: KV bytes of a token of the replica.
        prefix_tokens: length of a typical reused prefix.
        recompute_s: seconds in which the replica computes such a prefix.
        usd_per_replica_hour: price of the replica's GPUs.
    """

    gpu_tokens: float
    token_bytes: float
    prefix_tokens: int
    recompute_s: float
    usd_per_replica_hour: float

    def saved_s_per_token(self, level: KvLevel) -> float:
        """Return the seconds saved for a token that is restored; 0 where computing it is faster."""
        restored_s = level.restore_s(self.token_bytes * self.prefix_tokens)
        return max(0.0, self.recompute_s - restored_s) / self.prefix_tokens


@dataclass(frozen=True, slots=True)
class LevelPlan:
    """A level of a certain size: what it gives, and what it costs, beside the levels before it.

    `saved_gpu_fraction` is of the replica's time, `hit_fraction` of all tokens asked for.
    """

    level: KvLevel
    capacity_bytes: float
    hit_fraction: float
    saved_gpu_fraction: float
    saved_usd_per_hour: float
    usd_per_hour: float

    @property
    def pays(self) -> bool:
        """Return whether it saves more than it costs."""
        return self.saved_usd_per_hour > self.usd_per_hour

    def __str__(self) -> str:
        verdict = "pays" if self.pays else "does not pay"
        return (
            f"{format_bytes(self.capacity_bytes)} of {self.level.name} {verdict}: it has {self.hit_fraction:.1%} of "
            f"the tokens, ${self.saved_usd_per_hour:.3g} an hour of GPU time saved for ${self.usd_per_hour:.3g}"
        )


def level_plan(
    reuse: BlockReuse, replica: Offloading, level: KvLevel, capacity_bytes: float, before_tokens: float
) -> LevelPlan:
    """Return what a level of this size gives behind caches of `before_tokens` tokens (the GPU's and nearer levels').

    Levels are exclusive: a block is in one of them, and the next holds what the nearer ones evict.
    """
    held = before_tokens + capacity_bytes / replica.token_bytes
    per_s = reuse.hit_tokens_per_s(before_tokens, held)
    fraction = per_s * replica.saved_s_per_token(level)
    return LevelPlan(
        level=level,
        capacity_bytes=capacity_bytes,
        hit_fraction=reuse.hit_fraction(held) - reuse.hit_fraction(before_tokens),
        saved_gpu_fraction=fraction,
        saved_usd_per_hour=fraction * replica.usd_per_replica_hour,
        usd_per_hour=capacity_bytes / GB * level.usd_per_gb_hour,
    )


def best_levels(
    reuse: BlockReuse, replica: Offloading, levels: Sequence[KvLevel] = KV_LEVELS, sizes: int = 64
) -> tuple[LevelPlan, ...]:
    """Return the size of each level, nearest first, that saves most beyond its cost; 0 bytes where none pays.

    Sizes are tried at evenly spaced reuses: between two of them a larger level costs more and finds nothing new.
    """
    plans = []
    before = replica.gpu_tokens
    reused = len(reuse.distances)
    for level in levels:
        spots = {reused * step // sizes for step in range(1, sizes + 1)} - {0}
        tokens = [0.0, *((reuse.distances[spot - 1] + 1) * reuse.block_tokens - before for spot in spots)]
        sizes_bytes = [each * replica.token_bytes for each in tokens if each >= 0]
        tried = [level_plan(reuse, replica, level, size, before) for size in sizes_bytes]
        best = max(tried, key=lambda plan: (plan.saved_usd_per_hour - plan.usd_per_hour, -plan.capacity_bytes))
        plans.append(best)
        before += best.capacity_bytes / replica.token_bytes
    return tuple(plans)
