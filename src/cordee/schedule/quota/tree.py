"""Arithmetic on the tree of queues: the effects of a change in an inner queue on those above it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from cordee.events import Queue
from cordee.schedule.quota.held import Holder


def leaf_of(holder: Holder) -> Holder:
    """Return the holder of a queue's own jobs: itself, or a leaf with the quota that inner queues leave."""
    if not holder.inside:
        return holder
    left = holder.queue.quota_gpus - sum(each.queue.quota_gpus for each in holder.inside)
    return Holder(Queue(name=holder.queue.name, parent=holder.queue.name, quota_gpus=left), holder)


def has_rules(queue: Queue) -> bool:
    """Return whether a queue has more than a name, a parent and a weight."""
    return queue != Queue(name=queue.name, parent=queue.parent, weight=queue.weight)


def set_occupied(holder: Holder) -> int:
    """Set the occupied GPUs of a queue and of all under it while none holds anything; return its own."""
    holder.inner = holder.net = sum(set_occupied(each) for each in holder.inside)
    holder.occupied = holder.net_occupied = holder.occupied_with(holder.inner)
    return holder.occupied


def net(path: Sequence[Holder], more: int) -> None:
    """Add to the holdings without notice, from the innermost queue up."""
    for holder in path:
        holder.net += more
        before, holder.net_occupied = holder.net_occupied, holder.occupied_with(holder.net)
        more = holder.net_occupied - before


def upward(
    path: Sequence[Holder], more: int, gone: Mapping[Holder, int] = {}, *, now: bool = False
) -> Iterator[tuple[Holder, int]]:
    """Yield for each queue the holdings and kept quota that `more` in the innermost queue adds, with `gone` taken off.

    Kept quota absorbs a part of it. The count is after jobs with notice have left, or as of `now`.
    """
    for holder in path:
        has, here = (holder.inner if now else holder.net) - gone.get(holder, 0), more
        more = holder.occupied_with(has + here) - holder.occupied_with(has)
        yield holder, here


def occupied(path: Sequence[Holder], more: int, gone: Mapping[Holder, int] = {}, *, now: bool = False) -> int:
    """Return the cluster's holdings and kept quota with `more` in the innermost queue, without `gone`."""
    *_, (cluster, added) = upward(path, more, gone, now=now)
    return (cluster.inner if now else cluster.net) - gone.get(cluster, 0) + added


def over_quota(holders: Iterable[Holder]) -> Iterator[Holder]:
    """Yield the innermost queues over their quota below queues that are all over theirs."""
    for holder in holders:
        if holder.net > holder.quota:
            if holder.inside:
                yield from over_quota(holder.inside)
            else:
                yield holder
