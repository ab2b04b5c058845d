"""Times of short work on a device: a case of a table, run once more on what no cache holds."""

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import starmap

import torch

from cordee.errors import first_line
from cordee.hardware.measured import Point, Refused, Sample

SWEEPS_MIN = 7
DOUBT = 0.015  # of the median, at which a case is steady
SAMPLE_S = 2e-3  # a run is repeated within a sample until it lasts as long
FLUSH_BYTES = 256 << 20  # more than any GPU's L2
COOL_BYTES = 64 << 20  # more than a core has of its CPU's last cache

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h

Run = Callable[[], object]


class Device:
    """A CPU as torch's device, with so many threads.

    With one thread the time is that of the CPU, which leaves out when others had the core; with more it is the wall's.
    """

    kind = "cpu"

    def __init__(self, threads: int) -> None:
        self.threads = threads
        torch.set_num_threads(threads)
        self.torch = torch.device("cpu")
        self._clock = time.process_time if threads == 1 else time.perf_counter
        self._cooling = torch.empty(COOL_BYTES, dtype=torch.uint8)

    @property
    def clock(self) -> str:
        """Which clock it is measured with: `cpu`, `wall` or `events`."""
        return "cpu" if self.threads == 1 else "wall"

    def seconds(self, run: Run, times: int = 1) -> float:
        """Return the seconds of one of so many runs in a row.

        A tensor that a run returns is kept until the last has ended, as a step keeps it for the backward pass: the next
        run writes elsewhere.
        """
        kept = []
        start = self._clock()
        for _ in range(times):
            found = run()
            if isinstance(found, torch.Tensor):
                kept.append(found)
        return (self._clock() - start) / times

    def cool(self) -> None:
        """Write over the caches: what a step reads and writes was last touched many megabytes ago."""
        self._cooling.zero_()

    def wait(self) -> None:
        """Wait until everything issued is done."""


def keep_memory() -> None:
    """Tell glibc to give no memory back to the kernel: a run would pay for pages that the case before it returned.

    In a training step most tensors lie where others were freed. Whether a probe's do would be chance: that moved a norm
    of 4 MiB by a factor of five from run to run. What new pages cost has probes of its own.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, -1)


class CudaDevice(Device):
    """A GPU: times by events on the current stream, the L2 cache written over before each sample."""

    kind = "cuda"

    def __init__(self, index: int) -> None:
        super().__init__(torch.get_num_threads())
        torch.cuda.set_device(index)
        self.torch = torch.device("cuda", index)
        self._cooling = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.torch)

    @property
    def clock(self) -> str:
        return "events"

    def seconds(self, run: Run, times: int = 1) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / times

    def wait(self) -> None:
        torch.cuda.synchronize(self.torch)


@dataclass(slots=True)
class Case:
    """One point of one table: the work of a run, and how to run it.

    `before` is run ahead of each sample, outside of its time, and told how many runs follow. A device need not be able
    to do what is `optional`.
    """

    table: str
    at: Point
    work: float
    run: Run
    before: Callable[[int], object] | None = None
    times: int = 1
    optional: bool = False
    found: list[float] = field(default_factory=list)

    @property
    def steady(self) -> bool:
        """Return whether its median is known well enough."""
        return len(self.found) >= SWEEPS_MIN and self.result().doubt <= DOUBT

    def sample(self, device: Device) -> None:
        """Time it once more."""
        if not self.found:
            self._ready(device, 1)
            self.run()
            self._ready(device, 1)
            once = device.seconds(self.run)
            self.times = max(1, min(1000, int(SAMPLE_S / max(once, 1e-7))))
        self._ready(device, self.times)
        self.found.append(device.seconds(self.run, self.times))

    def _ready(self, device: Device, times: int) -> None:
        if self.before is not None:
            self.before(times)
        device.wait()
        device.cool()

    def result(self) -> Sample:
        """Return the quartiles of all samples."""
        low, middle, high = statistics.quantiles(self.found, n=4, method="inclusive")
        return Sample(self.table, self.at, self.work, middle, low, high, len(self.found))


def able(cases: Sequence[Case]) -> tuple[list[Case], list[Refused]]:
    """Return the cases that this device can run, and why it cannot run others, once for each table."""
    kept: list[Case] = []
    refused: dict[str, str] = {}
    for case in cases:
        try:
            if case.optional:
                case.run()
        except Exception as error:
            refused.setdefault(case.table, first_line(error))
        else:
            kept.append(case)
    return [case for case in kept if case.table not in refused], list(starmap(Refused, refused.items()))
