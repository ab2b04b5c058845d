"""Limits of a tenant: a rate of requests, and a budget in dollars. Both are exact, in integers."""

from dataclasses import dataclass

from cordee.serve.policy.refusal import Refusal

PICO_PER_MICRO = 1_000_000
"""Cost is counted in 10^-12 dollars: tokens times their price in micro-dollars per million."""
_MICRO = 1_000_000


@dataclass(frozen=True, slots=True)
class Prices:
    """Micro-dollars per million tokens; the defaults are the weights of the virtual token counter's paper (1 and 2).

    Attributes:
        input_tokens: that the replica has to compute.
        cached_tokens: found in its prefix cache.
        output_tokens: of the answer.
    """

    input_tokens: int = 1_000_000
    cached_tokens: int = 100_000
    output_tokens: int = 2_000_000

    def cost_pico_usd(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """Return the cost of a request; `cached_tokens` are a part of `input_tokens`.

        >>> Prices(300_000, 30_000, 1_200_000).cost_pico_usd(1000, 400, 10)
        204000000
        """
        return (
            (input_tokens - cached_tokens) * self.input_tokens
            + cached_tokens * self.cached_tokens
            + output_tokens * self.output_tokens
        )


class RateLimit:
    """A token bucket of requests: full at first, refilled with the time that passes."""

    def __init__(self, per_s: float, *, burst: int | None = None, now_us: int = 0) -> None:
        """Allow `per_s` requests a second, and `burst` at once (by default those of one second, at least one)."""
        self.per_s = per_s
        self.burst = max(1, int(per_s) if burst is None else burst)
        # A request is 10^12 units, and a microsecond brings `per_s` * 10^6 of them: nothing is rounded on the way.
        self._refill = round(per_s * _MICRO)
        self._request = _MICRO * _MICRO
        self._level = self.burst * self._request
        self._at_us = now_us

    def take(self, tenant: str, now_us: int) -> Refusal | None:
        """Take one request out of the bucket, or refuse it with the time after which there will be one."""
        passed_us = max(0, now_us - self._at_us)
        self._level = min(self.burst * self._request, self._level + passed_us * self._refill)
        self._at_us = max(self._at_us, now_us)
        if self._level >= self._request:
            self._level -= self._request
            return None
        wait_s = -(-(self._request - self._level) // self._refill) / _MICRO if self._refill else None
        again = f"the next one may come in {wait_s:.3f} s" if wait_s is not None else "none may come"
        return Refusal(
            429,
            "rate_limit_exceeded",
            f"tenant {tenant} may send {self.per_s:g} requests per second, {self.burst} at once; {again}",
            "send fewer requests, or ask the operator for a higher rate",
            wait_s,
        )


class Budget:
    """Dollars that a tenant may spend; open requests hold what they may cost, so the budget is never exceeded."""

    def __init__(self, budget_micro_usd: int, spent_micro_usd: int = 0) -> None:
        """Begin with what was spent before."""
        self.budget_micro_usd = budget_micro_usd
        self._spent_pico_usd = spent_micro_usd * PICO_PER_MICRO
        self._held_pico_usd = 0

    @property
    def left_pico_usd(self) -> int:
        """The budget less what is spent and held."""
        return self.budget_micro_usd * PICO_PER_MICRO - self._spent_pico_usd - self._held_pico_usd

    def set_spent(self, pico_usd: int) -> None:
        """Take over what the server knows, with what this gateway has not reported yet."""
        self._spent_pico_usd = pico_usd

    def hold(self, tenant: str, pico_usd: int) -> Refusal | None:
        """Hold the most that a request can cost, or refuse it."""
        if pico_usd <= self.left_pico_usd:
            self._held_pico_usd += pico_usd
            return None
        spent, held, asked = (each / 1e12 for each in (self._spent_pico_usd, self._held_pico_usd, pico_usd))
        return Refusal(
            429,
            "insufficient_quota",
            f"tenant {tenant} has spent ${spent:.6f} of ${self.budget_micro_usd / 1e6:.6f}, its open requests hold "
            f"${held:.6f}, and this one may cost ${asked:.6f}",
            "lower max_tokens, wait for open requests, or ask the operator for a larger budget",
        )

    def settle(self, held_pico_usd: int, spent_pico_usd: int) -> None:
        """Turn what a request held into what it cost."""
        self._held_pico_usd -= held_pico_usd
        self._spent_pico_usd += spent_pico_usd
