"""Sums of attempts' accounts: by job, user, queue, service or attempt, and of the whole cluster."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from types import MappingProxyType
from typing import Literal, NamedTuple

from cordee.account.attempt import AttemptRow, Charged
from cordee.account.split import Split
from cordee.ids import attempt_name

By = Literal["job", "user", "queue", "service", "epoch"]


class Loss(NamedTuple):
    """The loss by one cause."""

    cause: str
    gpu_us: int
    micro_usd: int
    energy_mj: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """The sum of the accounts of a job, user, queue, service or attempt; of jobs that are no replicas, service ""."""

    key: str
    attempts: int
    gpu_us: Split
    micro_usd: Split
    lost_by_cause: tuple[Loss, ...]
    charged_gpu_us: int  # what others lost for it
    charged_micro_usd: int
    steps: int
    steps_repeated: int
    tokens: int
    price_sources: tuple[str, ...]
    energy_mj: Split
    integrated_mj: int  # the part of it that is power over time, where there was no counter

    @property
    def micro_usd_per_million_tokens(self) -> int | None:
        """Return micro-dollars paid per million tokens kept; None if no tokens were reported."""
        return self.micro_usd.held * 1_000_000 // self.tokens if self.tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Held and idle time and energy of the whole cluster."""

    gpu_us: Split
    micro_usd: Split
    idle_gpu_us: int
    idle_micro_usd: int
    energy_mj: Split
    idle_energy_mj: int
    integrated_mj: int  # of held and idle energy


_KEYS: Mapping[By, Callable[[AttemptRow], str]] = {
    "job": lambda row: row.job_id,
    "user": lambda row: row.owner,
    "queue": lambda row: row.queue,
    "service": lambda row: row.service,
    "epoch": lambda row: attempt_name(row.job_id, row.epoch),
}


RETIRED_BY: tuple[By, ...] = ("user", "queue", "service")


def _payer(by: By, charged: Charged) -> str:
    return {"user": charged.owner, "queue": charged.queue, "service": charged.service}.get(by, charged.job_id)


def summed(
    by: By,
    rows: Iterable[AttemptRow],
    sums: Mapping[str, Sequence[CostRow]] = MappingProxyType({}),
    *,
    sees: Callable[[AttemptRow], bool] | None = None,
) -> tuple[CostRow, ...]:
    """Return these rows, and earlier sums by key, summed in the order of their keys.

    With `sees`, only rows for which it is true are summed, and keys without one are left out; what is charged to a key
    is all that others lost for it.
    """
    key = _KEYS[by]
    groups: dict[str, list[AttemptRow]] = {}
    charged: dict[str, list[AttemptRow]] = {}
    for row in rows:
        if sees is None or sees(row):
            groups.setdefault(key(row), []).append(row)
        if row.charged is not None and by != "epoch":
            charged.setdefault(_payer(by, row.charged), []).append(row)
    keys = sorted(groups if sees is not None else groups.keys() | charged.keys() | sums.keys())
    return tuple(sum_rows(key, groups.get(key, ()), charged.get(key, ()), sums.get(key, ())) for key in keys)


def sum_rows(
    key: str, rows: Sequence[AttemptRow], charged: Sequence[AttemptRow], sums: Sequence[CostRow] = ()
) -> CostRow:
    """Sum rows, rows that are charged to this key, and earlier sums."""
    by_cause: dict[str, Loss] = {}
    lost = [_loss(row.cause, row) for row in rows if row.cause is not None]
    for cause, *amounts in (*lost, *(each for row in sums for each in row.lost_by_cause)):
        _, *before = by_cause.get(cause, Loss(cause, 0, 0, 0))
        by_cause[cause] = Loss(cause, *map(add, before, amounts))
    every: Sequence[AttemptRow | CostRow] = (*rows, *sums)
    return CostRow(
        key=key,
        attempts=len(rows) + sum(row.attempts for row in sums),
        gpu_us=Split.sum(row.gpu_us for row in every),
        micro_usd=Split.sum(row.micro_usd for row in every),
        lost_by_cause=tuple(by_cause[cause] for cause in sorted(by_cause)),
        charged_gpu_us=sum(row.gpu_us.lost for row in charged) + sum(row.charged_gpu_us for row in sums),
        charged_micro_usd=sum(row.micro_usd.lost for row in charged) + sum(row.charged_micro_usd for row in sums),
        steps=sum(row.steps for row in every),
        steps_repeated=sum(row.steps_repeated for row in every),
        tokens=sum(row.tokens for row in every),
        price_sources=tuple(sorted({source for row in every for source in row.price_sources})),
        energy_mj=Split.sum(row.energy_mj for row in every),
        integrated_mj=sum(row.integrated_mj for row in every),
    )


def _loss(cause: str, row: AttemptRow) -> Loss:
    return Loss(cause, row.gpu_us.lost, row.micro_usd.lost, row.energy_mj.lost)
