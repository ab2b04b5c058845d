"""Figures that are quoted in the field, worked out again: which hold, and which contradict themselves."""

from dataclasses import dataclass

from cordee.plan.cost import hold_usd, storage_usd_per_month
from cordee.plan.rent_or_buy import break_even_month
from cordee.plan.training import OPTIMIZERS, Optimizer
from cordee.units import GB, TB, MiB, format_bytes
from cordee.workload.model import ModelShape

# 8-bit Adam as that estimate has it: without the constants of its blocks.
EIGHT_BIT = Optimizer("8-bit adamw", 2, 2, 0, 2)


@dataclass(frozen=True, slots=True)
class Figure:
    """A published statement, the result of the calculation, whether they agree, and the reason."""

    statement: str
    computed: str
    holds: bool
    because: str


def figures(l70: ModelShape, l405: ModelShape) -> tuple[Figure, ...]:
    """Return all of them; the shapes are Llama 3's of 70B and 405B."""
    return (*_bytes_of_405b(l405), _moments_of_70b(l70), _storage(), _lost_run(), _ring(), _sequence(l405), *_own())


def _bytes_of_405b(shape: ModelShape) -> tuple[Figure, ...]:
    nominal, exact, adam8 = 405e9, shape.parameters, EIGHT_BIT
    third = 2 * nominal
    eight_bit = adam8.bytes_per_parameter * exact
    moments = 8 * nominal
    whole = OPTIMIZERS["adamw"].bytes_per_parameter * nominal
    return (
        Figure(
            "405B: 810 GB of weights, as much of gradients and of 8-bit Adam states",
            f"3 x {format_bytes(third)} at a nominal 405e9; 3 x {format_bytes(2 * exact)} = {format_bytes(eight_bit)} "
            f"at the shape's {exact:,}",
            third == 810 * GB and round(2 * exact / GB, 1) == 811.7,
            "2 bytes each, and no fp32 master copy: with one it is 4 bytes a parameter more",
        ),
        Figure(
            "405B: 3.24 TB of standard Adam states",
            f"{format_bytes(moments)} for two fp32 moments alone",
            moments == 3.24 * TB,
            f"weights, gradients and master copy come on top: {format_bytes(whole)} in all",
        ),
    )


def _moments_of_70b(shape: ModelShape) -> Figure:
    return Figure(
        "70B: optimizer states of 280 GB",
        f"{format_bytes(8 * 70e9)} for two fp32 moments",
        False,
        f"280 GB are 4 bytes a parameter: one fp32 copy, or both moments in bf16; with the master copy it is "
        f"{format_bytes(12 * shape.parameters)}",
    )


def _storage() -> Figure:
    total = 30 * 420 * GB
    usd = storage_usd_per_month(total, 0.02)
    return Figure(
        "30 checkpoints of 420 GB: 12.6 TB, $252 a month at $0.02 a GB",
        f"{format_bytes(total)}, ${usd:,.0f} a month",
        (total, round(usd)) == (12.6 * TB, 252),
        "420 GB is 6 bytes a parameter of 70B: an exact resume of AdamW needs 12, which is $508 a month",
    )


def _lost_run() -> Figure:
    usd = hold_usd(64, 47 * 3600, 2.99)
    return Figure(
        "64 H100s for 47 hours: $9,000 lost",
        f"64 x 47 = {64 * 47:,} GPU-hours x $2.99 = ${usd:,.0f}",
        (64 * 47, round(usd)) == (3008, 8994),
        "rounded up by $6",
    )


def _ring() -> Figure:
    # Reduce-scatter and all-gather: N - 1 messages of 1/N each, twice.
    sent = {ranks: 2 * (ranks - 1) * (1 / ranks) for ranks in (2, 8, 64)}
    computed = ", ".join(f"{fraction:.3f} of the bytes at N = {ranks}" for ranks, fraction in sent.items())
    holds = all(abs(fraction - 2 * (n - 1) / n) < 1e-12 for n, fraction in sent.items())
    return Figure(
        "a ring all-reduce moves 2(N-1)/N of the bytes", computed, holds, "per rank, and never twice all of it"
    )


def _sequence(shape: ModelShape) -> Figure:
    tokens, tp = 8192, 8
    one = 2 * tokens * shape.hidden
    moved = one * (tp - 1) / tp
    states = EIGHT_BIT.bytes_per_parameter * shape.parameters
    return Figure(
        "sequence parallelism: 224 MB instead of 2.4 TB",
        f"{moved / MiB:.0f} MiB is what one all-gather of one layer's {one / MiB:.0f} MiB moves at tp={tp}; "
        f"{format_bytes(states)} is the resident state of the whole model",
        False,
        "traffic of one layer is compared with resident state of all: neither replaces the other",
    )


def _own() -> tuple[Figure, ...]:
    """Return a rented run against owned hardware, as one source has it."""
    yearly = 100 * 48 * 98
    hardware, power, staff = 312_500, 200_000, 50_000
    # $312,500 a year is the part of a purchase that wears out in 8 years: 8 nodes of 8 H100s at that price each.
    purchase, life_months = 8 * hardware, 96
    never = break_even_month(purchase, (power + staff) / 12, yearly / 12, life_months)
    monthly = break_even_month(purchase, (power + staff) / 12, yearly, life_months)
    owned = hardware + power + staff
    return (
        Figure(
            "100 runs a year x 48 h x $98 = $470,400: 64 owned H100s pay off",
            f"rent ${yearly:,} a year; owning ${hardware:,} + ${power:,} + ${staff:,} = ${owned:,} a year: "
            f"{'never' if never is None else f'month {never}'}",
            never is not None,
            "$98 an hour rents 8 H100s, not 64; and owning costs more each year than the rent that it saves",
        ),
        Figure(
            "100 runs a month instead: about six months",
            f"rent ${yearly:,} a month against ${purchase:,} at once and ${power + staff:,} a year: month {monthly}",
            monthly == 6,
            "the same runs, twelve times as often: how busy they are decides, not the price",
        ),
    )
