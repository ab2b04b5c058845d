"""The GPU of each phase: prompts want compute, answers bandwidth, and their cheapest GPUs may differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cordee.errors import SpecError
from cordee.plan.serving.price.price import HOUR_S, MTOK, PhaseRates, TokenMix


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """Dollars of a million tokens of each phase on one kind of GPU."""

    gpu: str
    prefill_usd: float
    decode_usd: float

    def usd(self, mix: TokenMix) -> float:
        """Return the dollars of these tokens, both phases on this GPU."""
        return (mix.computed_tokens * self.prefill_usd + mix.output_tokens * self.decode_usd) / MTOK


@dataclass(frozen=True, slots=True)
class PhaseSplit:
    """The cheapest GPU of each phase against the cheapest for both.

    Attributes:
        prefill: where prompts cost least.
        decode: where answers cost least.
        together: where both phases on one kind cost least.
        split_usd: of the mix, each phase on its cheapest kind, with the transfer of the KV cache.
        together_usd: of the mix on one kind.
    """

    costs: tuple[PhaseCost, ...]
    prefill: PhaseCost
    decode: PhaseCost
    together: PhaseCost
    split_usd: float
    together_usd: float

    @property
    def usd(self) -> float:
        """Dollars of the mix in the cheaper way."""
        return self.split_usd if self.pays else self.together_usd

    @property
    def pays(self) -> bool:
        """Return whether two kinds of GPU cost less than one."""
        return self.prefill.gpu != self.decode.gpu and self.split_usd < self.together_usd

    def __str__(self) -> str:
        if self.pays:
            less = 1 - self.split_usd / self.together_usd
            return (
                f"prefill on {self.prefill.gpu}, decode on {self.decode.gpu}: {less:.0%} less than {self.together.gpu}"
            )
        return f"both phases on {self.together.gpu}"


def phase_costs(
    rates: Mapping[str, PhaseRates], gpus: Mapping[str, int], usd_per_gpu_hour: Mapping[str, float]
) -> tuple[PhaseCost, ...]:
    """Return the dollars of each phase by GPU, from a replica's rates, its GPUs and their price."""
    found = []
    for name, rate in rates.items():
        usd_per_s = gpus[name] * usd_per_gpu_hour[name] / HOUR_S
        found.append(
            PhaseCost(name, usd_per_s / rate.prefill_tokens_per_s * MTOK, usd_per_s / rate.decode_tokens_per_s * MTOK)
        )
    return tuple(found)


def split_phases(
    costs: Sequence[PhaseCost],
    mix: TokenMix,
    *,
    mixed_usd: Mapping[str, float] | None = None,
    kv_bytes: float = 0.0,
    usd_per_gb_sent: float = 0.0,
) -> PhaseSplit:
    """Return which GPU should prefill and which should decode this mix.

    Args:
        costs: of the GPUs to choose from.
        mix: tokens of a request.
        mixed_usd: dollars of the mix by GPU where steps compute prompts and answers together, which costs less than
            one phase after the other; None: no step does.
        kv_bytes: KV cache that travels from one to the other for a request.
        usd_per_gb_sent: dollars of sending 10^9 bytes: 0 within a data centre.

    Raises:
        SpecError: no GPU.
    """
    if not costs:
        raise SpecError("no GPU to choose from", hint="name GPUs that have a price")
    prefill = min(costs, key=lambda each: each.prefill_usd)
    decode = min(costs, key=lambda each: each.decode_usd)
    both = {each.gpu: each.usd(mix) for each in costs} if mixed_usd is None else mixed_usd
    together = min(costs, key=lambda each: both[each.gpu])
    computed = PhaseCost("", prefill.prefill_usd, decode.decode_usd).usd(mix)
    split_usd = computed + kv_bytes / 1e9 * usd_per_gb_sent
    return PhaseSplit(tuple(costs), prefill, decode, together, split_usd, both[together.gpu])
