"""Which replica of a service with several models holds which: `serve.policy.residency` over replicas and reports. Pure.

A replica without a model gets one as soon as it has GPUs. Models whose loads failed wait as replicas do that fail, so a
broken one costs the others little.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cordee.answers.services import GatewayStatus
from cordee.control.directory import Replica, Service
from cordee.control.services.rollout import backoff_us
from cordee.ids import JobId, attempt_name
from cordee.serve.policy.residency import Demand, ModelSlot, Swap, copies, first_model, swaps
from cordee.units import US_PER_S

LOAD_US = 10 * US_PER_S
"""The time that a load is taken to need before one was measured."""


class Order(NamedTuple):
    """The model that the newest attempt of a replica shall hold from now on."""

    job_id: JobId
    epoch: int
    model: str
    why: str


def orders(service: Service, models: Sequence[str], statuses: Iterable[GatewayStatus], now_us: int) -> list[Order]:
    """Return the models that replicas of the newest revision shall load now."""
    found = list(statuses)
    held = {each.job_id: each for each in service.replicas.values() if each.node is not None and not each.draining}
    newest = {job_id for job_id, each in held.items() if each.revision == service.revision}
    slots = [_slot(each, found, now_us, fixed=job_id not in newest) for job_id, each in held.items()]
    loadable = [model for model in models if not _must_wait(service, model, now_us)]
    demand = {model: each for model, each in _demand(found, now_us).items() if model in loadable}
    longest_us = max(service.load_us.values(), default=LOAD_US)
    load_us = {model: service.load_us.get(model, longest_us) for model in models}
    decided = swaps(now_us, slots, demand, load_us)
    decided += copies(now_us, _after(slots, decided), demand, load_us)
    requests = Counter({model: each.waiting for model, each in demand.items()})
    requests.update({each.model: each.running for each in slots})
    for empty in [each.name for each in _after(slots, decided) if not each.model and each.name in newest]:
        own = [each for each in _after(slots, decided) if each.name in newest]
        if model := first_model(loadable, own, requests):
            decided.append(Swap(empty, model, "", "the replica holds none"))
    return [Order(JobId(each.slot), held[JobId(each.slot)].epoch, each.model, each.why) for each in decided]


def _must_wait(service: Service, model: str, now_us: int) -> bool:
    failures = service.load_failures.get(model)
    return failures is not None and now_us < failures.at_us + backoff_us(failures.number)


def _slot(replica: Replica, statuses: Iterable[GatewayStatus], now_us: int, *, fixed: bool) -> ModelSlot:
    """Return a replica as a slot; one whose model is `fixed`, as of an old revision, counts as one that loads."""
    endpoint = attempt_name(replica.job_id, replica.epoch)
    model = "" if replica.order is None else replica.order.model
    own = [each for each in statuses if each.model == model]
    return ModelSlot(
        replica.job_id,
        model,
        since_us=0 if replica.ready is None else replica.ready.at_us,
        loading=fixed or (bool(model) and (not replica.is_ready or replica.swaps)),
        running=sum(each.open.get(endpoint, 0) for each in own),
        used_us=now_us - min((each.idle_us[endpoint] for each in own if endpoint in each.idle_us), default=now_us),
    )


def _demand(statuses: Iterable[GatewayStatus], now_us: int) -> dict[str, Demand]:
    demand = dict[str, Demand]()
    for each in statuses:
        if each.queued:
            oldest_us = now_us - each.oldest_wait_us
            before = demand.get(each.model, Demand(0, oldest_us))
            demand[each.model] = Demand(before.waiting + each.queued, min(before.oldest_us, oldest_us))
    return demand


def _after(slots: Iterable[ModelSlot], decided: Iterable[Swap]) -> list[ModelSlot]:
    """Return the slots as they are once these swaps have begun."""
    loads = {each.slot: each.model for each in decided}
    return [ModelSlot(each.name, loads[each.name], loading=True) if each.name in loads else each for each in slots]
