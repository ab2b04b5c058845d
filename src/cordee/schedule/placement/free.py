"""The index of free GPUs: entries by node, tallies by kind, and views that count units of a shape.

Only `State` changes it, through `put`, and undoes that with the entry that `put` returns. Views catch up with a log of
changed names when they are read, so the cost of a change does not depend on the number of views and nodes.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from cordee.schedule.placement.entry import Entry, Kind, Used, entry_of
from cordee.schedule.placement.mig import Boards
from cordee.schedule.placement.mix import Mix
from cordee.schedule.placement.need import Need
from cordee.schedule.placement.pack import Packer
from cordee.schedule.placement.view import Feed, Pool, View
from cordee.schedule.policy import Packing

_NODES_MAX = 1_000_000  # in all views together: about 300 MB


@dataclass(slots=True)
class Tally:
    """The sums over all nodes of one kind."""

    free: int = 0
    usable: int = 0
    nodes: int = 0
    shared: list[tuple[int, str, int]] = field(default_factory=list)  # (free milli, node, GPU), ascending
    boards: Boards = field(default_factory=Boards)  # GPUs on which MIG instances may be placed


class FreeIndex:
    """The nodes on which jobs can be placed now."""

    def __init__(self, mix: Mix | None = None) -> None:
        """Start empty; `mix` holds the submitted shapes if another index counts them already."""
        self.entries: dict[str, Entry] = {}
        self.kinds: dict[Kind, Tally] = {}
        self._now = Feed()
        self._empty = Feed()  # every node as if it had no leases
        self.mix = mix or Mix()
        self.needs: dict[object, Need | None] = {}  # of gangs, as `place` finds them; forgotten when nodes change
        self.holds: dict[object, bool] = {}  # whether nodes could ever hold an instance; forgotten with `needs`
        self._packers: dict[Packing, Packer] = {}
        self._views: dict[tuple[Pool, int, int, bool, bool], View] = {}

    def put(self, name: str, entry: Entry | None) -> Entry | None:
        """Set a node's entry, or remove it; return the previous entry."""
        old = self.entries.get(name)
        if old is entry or old == entry:
            return old
        self._now.put(name, entry)
        if old is not None and entry is not None:
            node, free, usable, kind, shared, _, _, mig = old
            now_node, now_free, now_usable, now_kind, now_shared, _, _, now_mig = entry
            is_as_large = usable == now_usable and node is now_node and kind == now_kind
            if is_as_large and shared == now_shared and mig == now_mig:
                self.kinds[kind].free += now_free.bit_count() - free.bit_count()
                self.entries[name] = entry
                return old
        else:
            is_as_large = False
        if old is not None:
            del self.entries[name]
            self._count(name, old, -1)
        if entry is not None:
            self.entries[name] = entry
            self._count(name, entry, +1)
        if not is_as_large:
            self._empty.put(name, None if entry is None else entry_of(entry.node, Used(), entry.reserved))
            self.needs.clear()
            self.holds.clear()
        return old

    def free(self, kind: Kind) -> int:
        """Return the number of GPUs of a kind without any lease."""
        tally = self.kinds.get(kind)
        return tally.free if tally else 0

    def usable(self, kind: Kind) -> int:
        """Return the GPUs of a kind on nodes that are up, free or leased."""
        tally = self.kinds.get(kind)
        return tally.usable if tally else 0

    def view(
        self, pool: Pool, cpu_milli: int = 0, memory_bytes: int = 0, *, empty: bool = False, hosts: bool = False
    ) -> View:
        """Return the view of a pool's nodes for jobs that take this much CPU and memory for each GPU.

        With `empty` nodes count as if they had no leases, with `hosts` also those without a free GPU.
        """
        key = (pool, cpu_milli, memory_bytes, empty, hosts)
        view = self._views.pop(key, None)
        if view is None:
            view = View(pool, cpu_milli, memory_bytes, self._empty if empty else self._now, hosts)
            while self._views and sum(len(each.where) for each in self._views.values()) > _NODES_MAX:
                del self._views[next(iter(self._views))]
        self._views[key] = view  # the least recently used is the first
        view.follow()
        return view

    def packer(self, packing: Packing) -> Packer:
        """Return the packer that chooses among nodes that hold a job."""
        if packing not in self._packers:
            self._packers[packing] = Packer(self._now, self.mix, packing)
        return self._packers[packing]

    def shared(self, kind: Kind, milli: int) -> Iterator[tuple[int, str, int]]:
        """Yield shared GPUs of a kind with at least `milli` thousandths free, tightest first: (milli, node, GPU)."""
        tally = self.kinds.get(kind)
        if tally is not None:
            for at in range(bisect_left(tally.shared, (milli, "", -1)), len(tally.shared)):
                yield tally.shared[at]

    @contextmanager
    def as_if(self, entries: Mapping[str, Entry | None]) -> Iterator[None]:
        """Open a context in which these nodes have the given entries; None removes one."""
        before = [(name, self.put(name, entry)) for name, entry in entries.items()]
        try:
            yield
        finally:
            for name, entry in reversed(before):
                self.put(name, entry)

    def value(self) -> object:
        """Return a deep copy, to compare."""
        kinds = {
            kind: (each.free, each.usable, each.nodes, tuple(each.shared), each.boards.value())
            for kind, each in self.kinds.items()
        }
        return dict(self.entries), kinds, self.mix.value()

    def _count(self, name: str, entry: Entry, sign: int) -> None:
        tally = self.kinds.get(entry.kind)
        if tally is None:
            tally = self.kinds[entry.kind] = Tally()
        tally.free += sign * entry.free.bit_count()
        tally.usable += sign * entry.usable
        tally.nodes += sign
        for gpu, milli in entry.shared:
            if sign > 0:
                insort(tally.shared, (milli, name, gpu))
            else:
                del tally.shared[bisect_left(tally.shared, (milli, name, gpu))]
        if entry.mig:
            tally.boards.count(entry, sign)
        if not tally.nodes:
            del self.kinds[entry.kind]
