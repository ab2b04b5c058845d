"""Interruptions and their cost on each kind of capacity, and what is assumed where the user says nothing."""

from dataclasses import dataclass

from cordee.errors import LayoutError
from cordee.hardware.catalog import CAPACITIES, Capacity, Gpu, Price, price_of
from cordee.hardware.power import Electricity
from cordee.plan.optimum import Case
from cordee.plan.survive import ASSUMED_START_S, Saving, Survival, survival
from cordee.units import format_duration

LLAMA3_SOURCE = "Llama 3's rate: 419 interruptions in 54 days on 16,384 GPUs (arXiv:2407.21783)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Storage and interruptions. Every field that keeps its default is an assumption, and the answer names it.

    `storage_bytes_per_s` is what one node writes to and reads from the checkpoint's storage. `mtbi_s` is the mean time
    between failures (None: Llama 3's rate for so many GPUs), `reclaim_mtbi_s` that between reclaims of spot capacity,
    each with `notice_s` of notice. `stall_s` is how long an asynchronous save holds the ranks (None: it is
    synchronous). `start_s` passes between placement and the first step, besides reading the checkpoint. `gpus_per_node`
    None is the catalogue's. `electricity` None: no energy is told.
    """

    storage_bytes_per_s: float = 2e9
    mtbi_s: float | None = None
    reclaim_mtbi_s: float = 24 * 3600.0
    notice_s: float = 30.0
    stall_s: float | None = None
    start_s: float = ASSUMED_START_S
    gpus_per_node: int | None = None
    electricity: Electricity | None = None

    def __post_init__(self) -> None:
        if self.storage_bytes_per_s <= 0:
            rate = f"{self.storage_bytes_per_s:g} bytes a second"
            raise LayoutError(f"storage of {rate} writes nothing", hint="give what a node reaches: 2GB/s")
        for name, seconds in (("failure", self.mtbi_s), ("reclaim", self.reclaim_mtbi_s)):
            if seconds is not None and seconds <= 0:
                raise LayoutError(f"a {name} every {seconds:g} s leaves no time to work", hint="give a duration: 6h")

    def nodes(self, gpu: Gpu, gpus: int) -> int:
        """Return the nodes that so many GPUs fill."""
        return -(-gpus // (self.gpus_per_node or gpu.gpus_per_node))

    @property
    def assumes_reclaims(self) -> bool:
        """Return whether both the rate of reclaims and their notice are assumed."""
        return (self.reclaim_mtbi_s, self.notice_s) == (DEFAULTS.reclaim_mtbi_s, DEFAULTS.notice_s)


DEFAULTS = Assumptions()


def node_storage_bytes_per_s(gpu: Gpu) -> float:
    """Return what a node's checkpoint storage reaches: the slower way if it was calibrated, else what is assumed.

    A save is over with its slowest rank: where all ranks were measured at once, the 95th percentile of them counts.
    """
    numbers = {} if gpu.measured is None else gpu.measured.numbers
    for name in ("node_{}_p95_bytes_per_s", "{}_bytes_per_s"):
        if ways := [numbers[each] for way in ("write", "read") if (each := name.format(way)) in numbers]:
            return min(ways)
    return DEFAULTS.storage_bytes_per_s


@dataclass(frozen=True, slots=True)
class Expectation:
    """One kind of capacity: its price, its interruptions with their source, and what they cost the job."""

    capacity: Capacity
    price: Price | None
    mtbi_source: str
    survival: Survival


def expectations(
    case: Case, *, assumed: Assumptions, prices: tuple[Price, ...], step_s: float
) -> tuple[Expectation, ...]:
    """Return what each kind of capacity has to expect, at those of the prices that are for this GPU."""
    return tuple(
        _expectation(case, capacity, price_of(prices, case.gpu, capacity), assumed, step_s=step_s)
        for capacity in CAPACITIES
    )


def _expectation(
    case: Case, capacity: Capacity, price: Price | None, assumed: Assumptions, *, step_s: float
) -> Expectation:
    spot = capacity == "spot"
    source = LLAMA3_SOURCE if assumed.mtbi_s is None else "as given"
    if spot:
        every, notice = format_duration(assumed.reclaim_mtbi_s), format_duration(assumed.notice_s)
        origin = "assumed" if assumed.assumes_reclaims else "as given"
        source += f"; reclaims every {every} with {notice} of notice ({origin}: --reclaims, --notice)"
    expected = survival(
        case.shape,
        case.training,
        case.gpus,
        Saving(assumed.nodes(case.gpu, case.gpus) * assumed.storage_bytes_per_s, assumed.start_s, assumed.stall_s),
        mtbi_s=assumed.mtbi_s,
        usd_per_gpu_hour=None if price is None else price.usd_per_gpu_hour,
        reclaim_mtbi_s=assumed.reclaim_mtbi_s if spot else None,
        grace_s=assumed.notice_s if spot else 0.0,
        step_s=step_s,
    )
    return Expectation(capacity, price, source, expected)
