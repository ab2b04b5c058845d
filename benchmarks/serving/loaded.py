"""Prices of tokens by a replica that was measured under load, as vendors publish it."""

from dataclasses import dataclass

from cordee.plan.serving.price.price import HOUR_S, MTOK, TokenMix, TokenPrices


@dataclass(frozen=True, slots=True)
class LoadedPrice:
    """Dollars of a million tokens by a replica that was measured under load at one shape of requests.

    Such a figure (a vendor's table, an engine's own benchmark) holds prefill and decode together: the whole cost is
    laid on the output, or on input and output alike.
    """

    usd_per_request: float
    mix: TokenMix

    @property
    def output_usd(self) -> float:
        """All on the output tokens."""
        return self.usd_per_request / self.mix.output_tokens * MTOK

    @property
    def blended_usd(self) -> float:
        """Spread evenly over input and output tokens."""
        return self.usd_per_request / self.mix.tokens * MTOK

    def busy_fraction_needed(self, prices: TokenPrices) -> float:
        """Return the fraction of full load from which these prices pay; above 1 they never do."""
        return self.usd_per_request / prices.usd(self.mix)


def loaded_price(output_tokens_per_s: float, mix: TokenMix, usd_per_replica_hour: float) -> LoadedPrice:
    """Return the price at full load of a replica that was measured at this shape.

    Llama-3.1-405B in FP8 on 8 H100 at $2 each, 1000 in and 1000 out: 2,919 tokens/s (TensorRT-LLM 1.0, perf-overview).

    >>> price = loaded_price(2919, TokenMix(1000, 1000), 16.0)
    >>> round(price.output_usd, 2), round(price.blended_usd, 2)
    (1.52, 0.76)
    """
    return LoadedPrice(usd_per_replica_hour / HOUR_S * mix.output_tokens / output_tokens_per_s, mix)


def margin(revenue_usd: float, cost_usd: float) -> float:
    """Return profit over cost, which is how DeepSeek states its 545 %.

    >>> round(margin(562_027, 87_072), 3)
    5.455
    """
    return (revenue_usd - cost_usd) / cost_usd
