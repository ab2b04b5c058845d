"""Which idle sessions are worth keeping: those that come back from a file faster than their prompt is computed again.

The crossover is the plan's (`plan.serving.levers.offload`), with what the engine itself measured in place of what the
plan assumes. Host memory needs no rule here: an engine that pages a session there does so when another request needs
its slot, and not after a pause.
"""

from collections.abc import Iterable
from dataclasses import dataclass

OPEN_S = 0.002
"""Seconds before the first byte of a file: a request to the engine, and the file's name."""
HOST_PARTS = 16
"""One part in so many of a node's memory is for the idle sessions of a replica: a node has up to 8 replicas."""
HOST_BYTES_MAX = 8 << 30


@dataclass(frozen=True, slots=True)
class IdleSession:
    """A slot whose session pauses, and the tokens that it holds."""

    slot: int
    tokens: int


@dataclass(frozen=True, slots=True)
class FileSpeed:
    """A session that was written to a file: its size and the seconds that it took."""

    tokens: int
    bytes_: int
    seconds: float


def shortest_session(speed: FileSpeed, prefill_tokens_per_s: float, longest: int) -> int | None:
    """Return the tokens from which on a file is faster than computing again; None: it never is.

    Reading is counted as fast as writing, which is the slower of the two. With 6 KiB a token, files of 100 MB/s and a
    prefill of 1,000 tokens a second, the 2 ms before the first byte are earned by the third token:

    >>> shortest_session(FileSpeed(1_000, 6_144_000, 0.06144), 1_000.0, 4_096)
    3
    >>> shortest_session(FileSpeed(1_000, 6_144_000, 6.144), 1_000.0, 4_096) is None
    True
    """
    from cordee.plan.serving.levers.offload import KvLevel, shortest_restore_tokens  # Slow to import.

    if prefill_tokens_per_s <= 0:
        return 1  # Nothing was measured, and computing again has to wait for its turn in a batch at least.
    token_bytes = speed.bytes_ / max(1, speed.tokens)
    level = KvLevel("files", speed.bytes_ / max(1e-6, speed.seconds), OPEN_S, 0.0)
    return shortest_restore_tokens(
        lambda tokens: token_bytes * tokens, lambda tokens: tokens / prefill_tokens_per_s, level, longest
    )


def saving_order(sessions: Iterable[IdleSession]) -> list[IdleSession]:
    """Return the sessions in the order in which they are saved: the longest first, it saves most for its file."""
    return sorted(sessions, key=lambda each: -each.tokens)


def host_cache_bytes(memory_bytes: int | None) -> int:
    """Return the bytes of a node's memory that one engine may use for idle sessions; None is unknown.

    >>> host_cache_bytes(32 << 30) >> 20
    2048
    """
    return HOST_BYTES_MAX if memory_bytes is None else min(HOST_BYTES_MAX, memory_bytes // HOST_PARTS)
