"""Dollars of a million tokens: input, cached input and output, each by the GPU time that it takes.

A replica spends 1 / rate seconds on a token of each kind, and it is paid for whether it works or not: a price is
dollars a second over the rate and over the fraction of the time in which the replica works.
"""

import math
from dataclasses import dataclass

MTOK = 1_000_000
HOUR_S = 3600.0
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class PhaseRates:
    """Tokens per second of one replica that does nothing but this.

    Attributes:
        prefill_tokens_per_s: input tokens that are computed.
        decode_tokens_per_s: output tokens, at the batch that the replica runs.
        restore_tokens_per_s: input tokens whose KV is found in a cache; infinite where it lies on the GPU already.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    restore_tokens_per_s: float = math.inf


@dataclass(frozen=True, slots=True)
class TokenMix:
    """The tokens of a mean request, or of a day. `cached_tokens` are input whose KV is found in a cache."""

    input_tokens: float
    output_tokens: float
    cached_tokens: float = 0.0

    @property
    def computed_tokens(self) -> float:
        """Input tokens that the GPU has to compute."""
        return self.input_tokens - self.cached_tokens

    @property
    def tokens(self) -> float:
        """Input and output."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Dollars of a million tokens of each kind: a cost of one's own, or the price list of an API."""

    input_usd: float
    cached_usd: float
    output_usd: float

    def usd(self, mix: TokenMix) -> float:
        """Return the dollars of these tokens.

        DeepSeek's day at the prices of R1 (open-infra-index, day 6): $562,027 reported.

        >>> round(TokenPrices(0.55, 0.14, 2.19).usd(TokenMix(608e9, 168e9, 342e9)))
        562100
        """
        parts = (
            mix.computed_tokens * self.input_usd,
            mix.cached_tokens * self.cached_usd,
            mix.output_tokens * self.output_usd,
        )
        return sum(parts) / MTOK

    def blended_usd(self, mix: TokenMix) -> float:
        """Return the dollars of a million tokens of this mix, input and output counted together."""
        return self.usd(mix) / mix.tokens * MTOK


def replica_s(rates: PhaseRates, mix: TokenMix) -> float:
    """Return the seconds of a replica that these tokens take.

    The nodes of DeepSeek's day (open-infra-index, day 6: 73.7 k input and 14.8 k output tokens/s a node of 8 H800, the
    former with cache hits; 226.75 nodes reported):

    >>> round(replica_s(PhaseRates(73_700, 14_800), TokenMix(608e9, 168e9)) / DAY_S, 1)
    226.9
    """
    return (
        mix.computed_tokens / rates.prefill_tokens_per_s
        + mix.cached_tokens / rates.restore_tokens_per_s
        + mix.output_tokens / rates.decode_tokens_per_s
    )


def token_prices(rates: PhaseRates, usd_per_replica_hour: float, busy_fraction: float = 1.0) -> TokenPrices:
    """Return the cost of a million tokens of each kind on replicas that work this fraction of the time.

    >>> own = token_prices(PhaseRates(20_000, 2_000), 16.0, busy_fraction=0.5)
    >>> round(own.input_usd, 3), own.cached_usd, round(own.output_usd, 3)
    (0.444, 0.0, 4.444)
    """
    usd_per_s = usd_per_replica_hour / HOUR_S / busy_fraction
    return TokenPrices(
        input_usd=usd_per_s / rates.prefill_tokens_per_s * MTOK,
        cached_usd=usd_per_s / rates.restore_tokens_per_s * MTOK,
        output_usd=usd_per_s / rates.decode_tokens_per_s * MTOK,
    )
