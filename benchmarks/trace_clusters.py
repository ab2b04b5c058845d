"""Clusters out of a folder of traces: each virtual cluster by itself, on nodes of 8 GPUs that make it as full as asked.

Every file or folder that `cordee simulate` can read is a trace, in folders of the folder as well: HeliosData has one
for each cluster. What is passed over is named on standard error, with the reason.
"""

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cordee.errors import CordeeError
from cordee.simulate.traces import Tally, TraceJob, open_trace

FEWEST = 300
"""Jobs of the smallest virtual cluster that counts."""


@dataclass(frozen=True)
class VirtualCluster:
    """The first jobs of one virtual cluster.

    Attributes:
        asked_gpus: GPUs that they would hold on average between the first and the last submission; a part of one
            counts as a whole.
    """

    name: str
    jobs: list[TraceJob]
    asked_gpus: float

    def gpus(self, load: float) -> int:
        """Return the number of GPUs that makes the load this or, where one job needs more GPUs, less."""
        return max(math.ceil(self.asked_gpus / load), *(math.ceil(job.gpus) for job in self.jobs))

    def nodes(self, load: float) -> int:
        """Return the number of nodes of 8 for that load."""
        return -(-self.gpus(load) // 8)


def virtual_clusters(folder: Path, most: int) -> Iterator[VirtualCluster]:
    """Yield the virtual clusters of all traces of a folder, each with at most so many jobs."""
    for path, read in _traces(folder):
        name = str(path.relative_to(folder)).split(".")[0]
        of: dict[str, list[TraceJob]] = defaultdict(list)
        for job in read:
            if job.gpus and job.duration_us > 0:
                of[job.vc].append(job)
        for vc, found in sorted(of.items()):
            jobs = sorted(found, key=lambda job: job.submit_us)[:most]
            span_us = jobs[-1].submit_us - jobs[0].submit_us
            if len(found) >= FEWEST and span_us > 0:
                asked = sum(job.gpus * job.duration_us for job in jobs) / span_us
                yield VirtualCluster("/".join(filter(None, (name, vc))), jobs, asked)
            else:
                _pass_over(f"{name}/{vc}", f"{len(found):,} jobs, fewer than {FEWEST}")


def _traces(folder: Path) -> Iterator[tuple[Path, list[TraceJob]]]:
    for path in sorted(folder.iterdir()):
        try:
            yield path, list(open_trace(path).jobs(Tally(path.name)))
        except CordeeError as error:
            if path.is_dir():
                yield from _traces(path)
            else:
                _pass_over(path.name, error.message)


def _pass_over(name: str, why: str) -> None:
    print(f"passed over: {name}: {why}", file=sys.stderr)


def folder_of_traces(text: str) -> Path:
    """Return the folder that an argument names.

    Raises:
        argparse.ArgumentTypeError: there is none.
    """
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no folder")
    return Path(text)
