"""Seconds of the products of routed experts on one GPU: each touched expert's weights are read once a step."""

from dataclasses import dataclass
from math import log, sqrt

from cordee.hardware.catalog import Gpu
from cordee.plan.serving.formats import Format
from cordee.plan.serving.speed.products import MEASURED_AS, computed_in, peak_flop_per_s

EXPERT_SPREAD = 0.7
"""Standard deviation of an expert's tokens over the mean: routing dumps of four tasks (deepseek-ai/ESFT, 64 experts, 26
layers) have a fullest GPU of 1.45, 1.83 and 2.6 times the mean with 8, 16 and 32 GPUs, which this gives to 15 %."""


def expected_imbalance(routed: int, ranks: int) -> float:
    """Return the fullest GPU's tokens over the mean: the maximum of `ranks` normal sums of routed / ranks experts.

    >>> [round(expected_imbalance(64, ranks), 2) for ranks in (1, 8, 16, 32)]
    [1.0, 1.5, 1.82, 2.3]
    """
    if ranks <= 1:
        return 1.0
    return 1 + EXPERT_SPREAD * sqrt(2 * log(ranks) * ranks / routed)


@dataclass(frozen=True, slots=True)
class Grouped:
    """The experts of one GPU.

    Attributes:
        experts: experts whose weights, or a part of them, this GPU holds.
        routed: experts of the whole layer.
        per_token: experts that a token chooses.
        hidden: elements of a token.
        ffn: width of an expert on this GPU.
        gated: an expert has three matrices, otherwise two.
    """

    experts: float
    routed: int
    per_token: int
    hidden: int
    ffn: float
    gated: bool = True

    @property
    def weights(self) -> float:
        """Weights of one expert on this GPU."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    def touched(self, tokens: float) -> float:
        """Return how many experts of this GPU tokens choose, if each is chosen equally often.

        >>> round(Grouped(8, 8, 2, 1, 1).touched(1), 9), Grouped(8, 8, 2, 1, 1).touched(1000)
        (2.0, 8.0)
        """
        return self.experts * (1 - float((1 - self.per_token / self.routed) ** tokens))


def grouped_roofline_s(gpu: Gpu, weights: Format, group: Grouped, tokens: float) -> float:
    """Return the seconds at the nameplate's rates for the tokens of the whole expert-parallel group."""
    pairs = tokens * group.per_token * group.experts / group.routed
    moved = weights.bits / 8 * group.weights * group.touched(tokens) + 2 * 2 * pairs * (group.hidden + group.ffn)
    flop = 2 * pairs * group.weights
    return max(flop / peak_flop_per_s(gpu, computed_in(gpu, weights)), moved / gpu.memory_bytes_per_s)


def grouped_s(gpu: Gpu, weights: Format, group: Grouped, tokens: float, *, imbalance: float = 1.0) -> float:
    """Return the seconds of one layer's experts for the tokens of the whole expert-parallel group.

    `imbalance` is the fullest GPU's tokens over the mean: the others wait for it.
    """
    if tokens <= 0:
        return 0.0
    ideal = grouped_roofline_s(gpu, weights, group, tokens * imbalance)
    # Where no kernel of a format was measured, it reaches the fraction of those in 16 bits, as other products do.
    grid = gpu.kernels.find("experts", weights.name, MEASURED_AS.get(weights.name, weights.products), "bf16")
    if grid is not None:
        pairs = tokens * group.per_token / group.routed
        return ideal / grid.fraction(pairs, group.experts, group.weights, group.routed / group.experts)
    fraction = min(gpu.efficiency.memory_fraction, gpu.efficiency.product_fraction) * gpu.efficiency.grouped_fraction
    return ideal / fraction + 2 * gpu.efficiency.launch_s
