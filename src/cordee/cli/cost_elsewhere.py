"""`cordee cost --from`: what a cluster that Cordee does not run has lost, by its scheduler's accounting."""

import csv
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from zoneinfo import ZoneInfo

import typer

from cordee.account.elsewhere import ENDS, OtherAttempt, OtherRow, other_cost
from cordee.cli import terminal
from cordee.errors import CatalogueError, InputError
from cordee.events import Node
from cordee.units import MICRO_USD, US_PER_HOUR, US_PER_S, parse_duration_s, parse_micro_usd, plural

if TYPE_CHECKING:
    from cordee.cli.cost_elsewhere_text import OtherCostAnswer
    from cordee.simulate.what_if import WhatIf

BY = ("user", "account", "partition", "job")

From = Annotated[
    Path | None,
    typer.Option("--from", help="Accounting of a cluster that Cordee does not run: what `sacct -P` printed."),
]
ClusterOfExport = Annotated[
    str | None,
    typer.Option(
        help="With --from: the cluster, nodes x GPUs, 4x8xH100; or a table of nodes.",
        show_default="the most GPUs that were held at once",
    ),
]
SavedEvery = Annotated[
    str | None, typer.Option(help="With --from: interval at which jobs save their state, 1h.", show_default="never")
]
PriceAs = Annotated[
    str | None,
    typer.Option(
        help="With --from: dollars of a GPU-hour, $2.10, or the GPU of the catalogue whose price stands for all.",
        show_default="the GPU that the export or --cluster names",
    ),
]
Zone = Annotated[str, typer.Option(help="With --from: time zone of its times, Europe/Berlin.")]
WhatIfOption = Annotated[
    bool, typer.Option("--what-if", help="With --from: replay the log under Cordee's scheduler, and compare.")
]
PolicyOption = Annotated[str, typer.Option(help="With --what-if: policies of the replay, as `cordee simulate` has.")]


@dataclass(frozen=True, slots=True)
class Asked:
    """The flags that go with an export, as they were given."""

    by: str
    window_us: tuple[int | None, int | None]
    cluster: str | None
    checkpoint_every: str | None
    price_as: str | None
    timezone: str


def show_other_cost(path: Path, asked: Asked, *, policy: str | None, as_csv: bool, as_json: bool) -> None:
    """Read an export, and print what its cluster has lost; with a policy, its replay too."""
    from cordee.cli.cost_elsewhere_text import print_other_cost

    answer = _answer(path, asked, policy)
    if as_json:
        terminal.print_json(answer)
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow((asked.by, *COLUMNS))
        writer.writerows(csv_row(row) for row in answer.cost.rows)
    else:
        print_other_cost(answer)


def _answer(path: Path, asked: Asked, policy: str | None) -> "OtherCostAnswer":
    from cordee.cli.cost_elsewhere_text import OtherCostAnswer
    from cordee.simulate.answer import LeftOut
    from cordee.simulate.cluster import cluster
    from cordee.simulate.traces.job import Tally
    from cordee.simulate.traces.sacct import read_export

    if asked.by not in BY:
        raise InputError(f"unknown --by {asked.by!r}", hint=f"with --from use one of: {', '.join(BY)}")
    every_us = None if asked.checkpoint_every is None else round(parse_duration_s(asked.checkpoint_every) * US_PER_S)
    tally = Tally(str(path))
    export = read_export(path.expanduser(), tally, _zone(asked.timezone))
    given = () if asked.cluster is None else cluster(asked.cluster)
    prices = _Prices(asked.price_as, given[0].gpu_name if given else "")
    found = other_cost(
        export.attempts,
        by=asked.by,
        price_of=prices.of,
        gpus=sum(node.gpus for node in given) or None,
        window_us=asked.window_us,
        every_us=every_us,
    )
    replayed = None
    if policy is not None:
        kind = Counter(each.gpu_name for each in export.attempts).most_common(1)[0][0]
        nodes = tuple(
            _node(node, prices.of(kind)) for node in given or cluster(_cluster_of(export.attempts, found.gpus))
        )
        replayed = _replay(export.attempts, nodes, policy, name=path.name, every_us=every_us)
    return OtherCostAnswer(
        export=path.name,
        cost=found,
        what_if=replayed,
        left_out=tuple(
            LeftOut(kind=kind, rows=rows, line=tally.first.get(kind)) for kind, rows in sorted(tally.kinds.items())
        ),
        remarks=tuple(_remarks(export.steps, export.again, export.without_first)),
        price_sources=tuple(sorted(set(prices.sources.values()))),
    )


def _replay(
    attempts: Sequence[OtherAttempt], nodes: tuple[Node, ...], policy: str, *, name: str, every_us: int | None
) -> "WhatIf":
    from cordee.simulate.policies import named_policies
    from cordee.simulate.what_if import what_if

    policies = named_policies([word.strip() for word in policy.split(",") if word.strip()])
    return what_if(attempts, nodes, policies, name=name, every_us=every_us)


def _node(node: Node, price: int) -> Node:
    return replace(node, micro_usd_per_gpu_hour=price)


def _cluster_of(attempts: Sequence[OtherAttempt], gpus: int) -> str:
    """Return the cluster that a log shows: nodes of 8 GPUs, or of as many as its largest job where that has fewer."""
    per_node = min(8, max(each.gpus for each in attempts))
    return f"{-(-gpus // per_node)}x{per_node}"


def _remarks(steps: int, again: int, without_first: int) -> list[str]:
    lines = []
    if again:
        lines.append(f"{plural(again, 'row')} of an attempt that stands there again: counted once")
    if without_first:
        lines.append(
            f"earlier attempts of {without_first:,} requeued jobs are not in it: export with sacct --duplicates"
        )
    if steps:
        lines.append(f"{plural(steps, 'row')} of job steps: counted with their jobs")
    return lines


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise InputError(f"there is no time zone {name!r}", hint="write --timezone Europe/Berlin, or UTC") from None


class _Prices:
    """Prices by the cluster's names of its GPUs, with their sources."""

    def __init__(self, price_as: str | None, of_cluster: str) -> None:
        self._price_as, self._of_cluster = price_as, of_cluster
        self.sources: dict[str, str] = {}
        self._known: dict[str, int] = {}

    def of(self, kind: str) -> int:
        """Return the micro-dollars of an hour of a kind of GPU; 0 where no price is known."""
        if kind not in self._known:
            self._known[kind], self.sources[kind] = self._find(kind)
        return self._known[kind]

    def _find(self, kind: str) -> tuple[int, str]:
        from cordee.hardware.load import load_catalogue
        from cordee.planning import home_gpus

        if self._price_as is not None and self._price_as.startswith("$"):
            return parse_micro_usd(self._price_as), f"{self._price_as}/GPU-h, as given"
        if self._price_as == "none":
            return 0, "none, as asked for"
        name = self._price_as or kind or self._of_cluster
        try:
            catalogue = load_catalogue(gpu_files=home_gpus())
            gpu = catalogue.find_gpu(name)
        except CatalogueError:
            if self._price_as is not None:
                raise
            says = f"the catalogue does not know {name!r}" if name else "the export does not name its GPUs"
            return 0, f"none: {says}; give --price-as H100 or --price-as '$2.10'"
        price = catalogue.price(gpu, "on-demand")
        if price is None:
            return 0, f"none is known for {gpu.name}; give --price-as '$2.10'"
        return round(price.usd_per_gpu_hour * MICRO_USD), f"{gpu.name} on-demand: {price.source}"


COLUMNS = (
    *("jobs", "attempts", *(f"{end}_gpu_h" for end in ENDS), "held_gpu_h", "lost_gpu_h", "waiting_gpu_h"),
    *("held_usd", "lost_usd", "wait_mean_s", "wait_p99_s"),
)


def csv_row(row: OtherRow) -> tuple[str | int, ...]:
    """Return a row in the order of `COLUMNS`, after its key."""
    gpu_us = [*(row.gpu_us[end] for end in ENDS), row.held_gpu_us, row.lost_gpu_us, row.waiting_gpu_us]
    hours = [f"{each / US_PER_HOUR:.4f}" for each in gpu_us]
    dollars = [f"{micro_usd / MICRO_USD:.6f}" for micro_usd in (row.held_micro_usd, row.lost_micro_usd)]
    return (row.key, row.jobs, row.attempts, *hours, *dollars, f"{row.wait_mean_s:.0f}", f"{row.wait_p99_s:.0f}")
