"""Histories of the commit log drawn from a seed: zombies, late and doubled puts, deaths at every store operation."""

import random
import threading
from collections.abc import Callable

from cordee.errors import DestinationError, FencedError
from cordee.storage.log import Log, read_entries


class Killed(BaseException):
    """The writer died here."""


class World:
    """A store whose every operation waits for its turn; the seed decides whose turn it is and what goes wrong."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.data: dict[str, bytes] = {}
        self.late: list[tuple[str, bytes]] = []
        self.turns: dict[int, threading.Semaphore] = {}
        self.back = threading.Semaphore(0)
        self.done: set[int] = set()

    def run(self, writers: list[Callable[[], None]]) -> None:
        def body(me: int, work: Callable[[], None]) -> None:
            self.turns[me].acquire()
            try:
                work()
            except (Killed, FencedError, DestinationError):
                pass
            finally:
                self.done.add(me)
                self.back.release()

        threads = []
        for me, work in enumerate(writers):
            self.turns[me] = threading.Semaphore(0)
            threads.append(threading.Thread(target=body, args=(me, work), name=str(me)))
            threads[-1].start()
        started = 1
        while len(self.done) < len(writers):
            if started < len(writers) and self.rng.random() < 0.08:
                started += 1  # A new attempt begins; nobody tells the old one.
            if self.late and self.rng.random() < 0.2:
                self.data.setdefault(*self.late.pop(self.rng.randrange(len(self.late))))
            able = [me for me in range(started) if me not in self.done]
            if not able:
                started += 1
                continue
            self.turns[self.rng.choice(able)].release()
            self.back.acquire()
        for thread in threads:
            thread.join()
        for key, data in self.late:
            self.data.setdefault(key, data)

    def wait(self) -> None:
        self.back.release()
        self.turns[int(threading.current_thread().name)].acquire()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self.wait()
        luck = self.rng.random()
        if luck < 0.02:
            raise Killed
        if luck < 0.10:
            self.late.append((key, data))  # Timed out, and arrives whenever it likes.
            raise DestinationError("timed out")
        if luck < 0.15:
            raise DestinationError("timed out, never arrives")
        created = key not in self.data
        self.data.setdefault(key, data)
        if luck < 0.20:
            self.late.append((key, data))  # Sent twice by the network.
        self.wait()
        if luck > 0.98:
            raise Killed
        if luck > 0.90:
            raise DestinationError("timed out, but has arrived")
        return created

    def get(self, key: str) -> bytes | None:
        self.wait()
        return self.data.get(key)

    def list(self, prefix: str):
        self.wait()
        return iter(sorted(key for key in self.data if key.startswith(prefix + "/")))


class Plain:
    """The same data without turns, to read the result."""

    def __init__(self, data: dict[str, bytes]) -> None:
        self.get = data.get
        self.list = lambda prefix: iter(sorted(data))


def one_history(seed: int) -> None:
    world = World(seed)
    seen_at_open: dict[str, tuple[int, list]] = {}
    succeeded: list[tuple[str, int, int]] = []

    def writer(number: int) -> Callable[[], None]:
        def work() -> None:
            nonce = f"n{number}"
            log = Log.open(world, nonce=nonce, epoch=None if seed % 2 else number + 1)
            opened = len(log.entries) - 1
            seen_at_open[nonce] = (opened, [entry.index for entry in log.commits()])
            for save in range(1, 6):
                try:
                    index = log.append("commit", save=save, step=save * 10)
                except DestinationError:
                    continue  # This save has failed as far as the writer knows; it goes on with the next.
                except FencedError:
                    continue  # A stubborn zombie tries again.
                succeeded.append((nonce, save, index))

        return work

    world.run([writer(number) for number in range(4)])
    entries = read_entries(Plain(world.data))
    assert [entry.index for entry in entries] == list(range(len(world.data))), "the log is dense"
    assert all(entry.record for entry in entries)
    epochs = [entry.record.epoch for entry in entries]
    assert epochs == sorted(epochs), "an older attempt wrote after a newer one had opened"
    owners: dict[int, str] = {}
    last_save: dict[str, int] = {}
    for entry in entries:
        record = entry.record
        assert owners.setdefault(record.epoch, record.nonce) == record.nonce, "two attempts share an epoch"
        if record.kind == "commit":
            assert record.fields["save"] > last_save.get(record.nonce, 0), "a save is committed twice or out of order"
            last_save[record.nonce] = record.fields["save"]
    for opened, commits in seen_at_open.values():
        assert commits == [e.index for e in entries[:opened] if e.record.kind == "commit"], "an attempt missed a commit"
    for nonce, save, index in succeeded:
        record = entries[index].record
        assert (record.nonce, record.fields.get("save")) == (nonce, save), "a reported commit is not in the log"
