"""Shared by the tests of replicas' accounts: one service `chat` on two nodes, and the events of its replicas."""

from dataclasses import replace
from typing import Any

from cordee.account import Ledger
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    Event,
    JobSubmitted,
    Lease,
    NoticeGiven,
    NoticeReason,
    Outcome,
    RanksEnded,
    ReplicaReady,
    ReplicaUnready,
    TokensServed,
)
from cordee.ids import JobId
from world import PRICE, S, job, node


def us(seconds: float) -> int:
    return round(seconds * S)


def replica_job(name: str = "r", service: str = "chat", gpus: int = 2, **more: Any) -> JobSubmitted:
    submitted = job(name, gpus, "production", **more)
    return replace(submitted, job=replace(submitted.job, service=service))


def placed(at_s: float, name: str = "r", epoch: int = 1, nodes: tuple[str, ...] = ("n0", "n1")) -> AttemptPlaced:
    leases = tuple(Lease(node=each, gpus=(0,)) for each in nodes)
    return AttemptPlaced(at_us=us(at_s), job_id=JobId(name), epoch=epoch, leases=leases)


def ready(at_s: float, name: str = "r", epoch: int = 1) -> ReplicaReady:
    who = {"job_id": JobId(name), "epoch": epoch, "rank": 0}
    return ReplicaReady(at_us=us(at_s), address="http://h:1", engine="llama.cpp", model="tiny", **who)


def unready(at_s: float, *, draining: bool = False, name: str = "r", epoch: int = 1) -> ReplicaUnready:
    return ReplicaUnready(at_us=us(at_s), job_id=JobId(name), epoch=epoch, rank=0, why="", draining=draining)


def notice(at_s: float, name: str = "r", epoch: int = 1) -> NoticeGiven:
    return NoticeGiven(at_us=us(at_s), job_id=JobId(name), epoch=epoch, reason=NoticeReason.STOP, deadline_us=0)


def served(
    from_s: float,
    busy_s: float = 0,
    tokens: tuple[int, int, int] = (0, 0, 0),
    *,
    at_s: float | None = None,
    tenant: str = "",
    key: str = "",
    model: str = "tiny",
    gateway: str = "g",
    service: str = "chat",
    name: str = "r",
    epoch: int = 1,
) -> TokensServed:
    """A gateway's report; with tokens (input, cached, output) it has one request."""
    amounts = dict(zip(("input_tokens", "cached_tokens", "output_tokens"), tokens, strict=True))
    return TokensServed(
        at_us=us(from_s + busy_s if at_s is None else at_s), job_id=JobId(name), epoch=epoch, gateway=gateway,
        service=service, tenant=tenant, key=key, model=model, from_us=us(from_s), busy_us=us(busy_s),
        requests=int(any(tokens)), failed=0, **amounts,
    )  # fmt: skip


def ended(at_s: float, outcome: str = "finished", name: str = "r", epoch: int = 1) -> tuple[Event, ...]:
    who = {"at_us": us(at_s), "job_id": JobId(name), "epoch": epoch, "outcome": Outcome(outcome)}
    return (*(RanksEnded(node=each, **who) for each in ("n0", "n1")), AttemptEnded(why="", **who))


def ledger_of(*events: Event, price: int = PRICE, detailed: bool = False) -> Ledger:
    """The ledger of a replica `r` on a GPU of each of two nodes from 100 s on; then these events."""
    ledger = Ledger(detailed=detailed)
    cluster = [node(name, micro_usd_per_gpu_hour=price, price_source="list") for name in ("n0", "n1")]
    for event in (*cluster, replica_job(), placed(100), *events):
        ledger.apply(event)
    return ledger
