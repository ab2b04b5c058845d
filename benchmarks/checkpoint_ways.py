"""The ways to save and load one state that `checkpoint.py` compares, as one rank sees them; and the state itself.

Each way is what its own manual says: files are synced, DCP's defaults stay, and what it reads goes into the tensors of
the state. Peers get their state dict made outside the measured time; ours makes it inside.
"""

import mmap
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from cordee.storage.destination import open_blobs
from cordee.storage.generations import is_verified
from cordee.storage.log import live_commits, read_entries
from cordee.train.checkpoint.checkpointer import Checkpointer

BLOCK_BYTES = 1 << 20
WIDTH = 768


class Block(nn.Module):
    """The weights of one transformer block; nothing here runs forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)


class State:
    """GPT-like weights in fp32 with AdamW's two moments, about `gb` in all; sharded by FSDP2 if there are ranks."""

    def __init__(self, gb: float, world: int) -> None:
        torch.manual_seed(0)
        n_weights = gb * 1e9 / 12
        blocks = max(1, round(0.6 * n_weights / (12 * WIDTH**2)))
        rows = max(256, round((n_weights - blocks * 12 * WIDTH**2) / WIDTH))
        self.model = nn.Sequential(nn.Embedding(rows, WIDTH), *(Block() for _ in range(blocks)))
        if world > 1:
            for part in self.model:
                fully_shard(part)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for weight in self.model.parameters():
            weight.grad = torch.randn_like(weight)
        self.step()

    def step(self) -> None:
        """Every byte changes, or most: what did not change would cost ours nothing."""
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """As torch's distributed checkpoint wants it; the tensors are those of the state."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def local(self) -> dict[str, torch.Tensor]:
        """This rank's own tensors by name."""
        weights = dict(self.model.named_parameters())
        moments = {
            f"{name}.{kind}": self.optimizer.state[weight][kind]
            for name, weight in weights.items()
            for kind in ("exp_avg", "exp_avg_sq")
        }
        return {
            name: (each.to_local() if hasattr(each, "to_local") else each).detach()
            for name, each in {**weights, **moments}.items()
        }

    def spoil(self) -> None:
        """So that a load which does nothing is seen."""
        for tensor in self.local().values():
            tensor.fill_(float("nan"))

    def sums(self) -> float:
        """Of all local tensors, the same for the same bits."""
        return sum(float(each.view(torch.int32).sum(dtype=torch.int64)) for each in self.local().values())


class Way:
    """One way: `save` returns when it was durable, and says how long the caller was held."""

    def __init__(self, state: State, folder: Path, rank: int, world: int) -> None:
        self.state, self.folder, self.rank, self.world = state, folder, rank, world
        folder.mkdir(parents=True, exist_ok=True)
        self.turn = 0

    def prepare(self) -> None:
        """What is not measured, before each save."""

    def save(self) -> float:
        raise NotImplementedError

    def before_load(self) -> None:
        """What is not measured, before each load."""

    def load(self) -> None:
        raise NotImplementedError

    def other_cpu_s(self) -> float:
        """CPU time of other processes that work for this way."""
        return 0.0

    def settle(self) -> None:
        """What a save leaves to be done after it is durable, waited for but not timed."""

    def close(self) -> None:
        """The end."""

    def path(self, turn: int) -> Path:
        """Of the turn-th save of this rank; the one before the last goes."""
        return self.folder / f"{turn:04d}.{self.rank}"

    def drop_cache(self) -> None:
        """Let the next load come from the disk."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


class Memcpy(Way):
    """The limit of a stall: one copy into memory that is there."""

    def prepare(self) -> None:
        if not self.turn:
            self.warm = {name: torch.zeros_like(each) for name, each in self.state.local().items()}
            self.turn = 1

    def save(self) -> float:
        started_s = time.perf_counter()
        for name, each in self.state.local().items():
            self.warm[name].copy_(each)
        return time.perf_counter() - started_s

    def load(self) -> None:
        for name, each in self.state.local().items():
            each.copy_(self.warm[name])


class Raw(Way):
    """The limit of the disk: the same bytes past the page cache in one stream, and fsync; read into warm memory."""

    cold = False

    def prepare(self) -> None:
        if self.turn:
            return
        self.turn = 1
        size = -(-sum(each.nbytes for each in self.state.local().values()) // BLOCK_BYTES) * BLOCK_BYTES
        self.memory = mmap.mmap(-1, size)
        for at in range(0, size, BLOCK_BYTES):
            self.memory[at : at + BLOCK_BYTES] = os.urandom(BLOCK_BYTES)

    def save(self) -> float:
        started_s = time.perf_counter()
        self.path(1).unlink(missing_ok=True)
        fd = os.open(self.path(1), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
        view, done = memoryview(self.memory), 0
        while done < len(view):
            done += os.write(fd, view[done : done + 64 * BLOCK_BYTES])
        os.fsync(fd)
        os.close(fd)
        return time.perf_counter() - started_s

    def drop_cache(self) -> None:
        self.cold = True

    def load(self) -> None:
        fd = os.open(self.path(1), os.O_RDONLY | (os.O_DIRECT if self.cold else 0))
        self.cold = False
        view, done = memoryview(self.memory), 0
        while done < len(view):
            done += os.readv(fd, [view[done : done + 64 * BLOCK_BYTES]])
        os.close(fd)


class TorchSave(Way):
    """`torch.save` of this rank's own tensors, and fsync."""

    def save(self) -> float:
        started_s = time.perf_counter()
        self.turn += 1
        with self.path(self.turn).open("wb") as file:
            self._write(file)
            file.flush()
            os.fsync(file.fileno())
        held_s = time.perf_counter() - started_s
        self.path(self.turn - 1).unlink(missing_ok=True)
        return held_s

    def _write(self, file: Any) -> None:
        torch.save(self.state.local(), file)

    def load(self) -> None:
        self._into(torch.load(self.path(self.turn), weights_only=True))

    def _into(self, found: dict[str, torch.Tensor]) -> None:
        for name, each in self.state.local().items():
            each.copy_(found[name])


class Safetensors(TorchSave):
    """`safetensors.torch.save_file`, and fsync."""

    def save(self) -> float:
        from safetensors.torch import save_file

        started_s = time.perf_counter()
        self.turn += 1
        save_file(self.state.local(), self.path(self.turn))
        fd = os.open(self.path(self.turn), os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        held_s = time.perf_counter() - started_s
        self.path(self.turn - 1).unlink(missing_ok=True)
        return held_s

    def load(self) -> None:
        from safetensors.torch import load_file

        self._into(load_file(self.path(self.turn)))


class Dcp(Way):
    """`dcp.save` with its defaults, which sync its files."""

    def prepare(self) -> None:
        self.given = self.state.state_dict()
        self.turn += 1
        if self.rank == 0:
            shutil.rmtree(self._at(self.turn - 2), ignore_errors=True)

    def _at(self, turn: int) -> Path:
        return self.folder / f"{turn:04d}"

    def save(self) -> float:
        started_s = time.perf_counter()
        dcp.save(self.given, checkpoint_id=self._at(self.turn))
        return time.perf_counter() - started_s

    def before_load(self) -> None:
        self.given = self.state.state_dict()

    def load(self) -> None:
        dcp.load(self.given, checkpoint_id=self._at(self.turn))  # In place: the tensors are those of the state.


class DcpAsync(Dcp):
    """`dcp.async_save` with its defaults, which make their staging memory anew each time."""

    stager: DefaultStager | None = None

    def save(self) -> float:
        started_s = time.perf_counter()
        answer = dcp.async_save(self.given, checkpoint_id=self._at(self.turn), async_stager=self.stager)
        held_s = time.perf_counter() - started_s
        getattr(answer, "upload_completion", answer).result()
        return held_s


class DcpKept(DcpAsync):
    """`dcp.async_save` with one stager for all saves: its staging memory is kept."""

    def prepare(self) -> None:
        super().prepare()
        if self.stager is None:
            cuda = torch.cuda.is_available()
            self.stager = DefaultStager(StagingOptions(cuda, True, False, cuda))

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()


class Cordee(Way):
    """`Checkpointer.save`; durable once the commit record is in the log."""

    checkpointer: Checkpointer | None = None

    def _open(self) -> Checkpointer:
        return Checkpointer(str(self.folder), rank=self.rank, world_size=self.world, keep=2, grace_s=600)

    def _state(self) -> dict[str, Any]:
        return {"model": self.state.model, "optimizer": self.state.optimizer}

    def prepare(self) -> None:
        if self.checkpointer is None:
            self.checkpointer = self._open()
            self.checkpointer.open()
            self.checkpointer.prepare(self._state())  # As a job does after its first step, beside the next ones.
            self.checkpointer._captures.buffers.settle()

    def save(self) -> float:
        assert self.checkpointer is not None, "prepare() opens it"
        self.turn += 1
        started_s = time.perf_counter()
        self.checkpointer.save(self._state(), step=self.turn, extras={})
        held_s = time.perf_counter() - started_s
        self.checkpointer.wait(600)
        return held_s

    def settle(self) -> None:
        """Until all ranks have read back what they wrote and this rank's uploader is idle."""
        blobs = open_blobs(str(self.folder))
        newest = live_commits(read_entries(blobs))[-1]
        while not is_verified(blobs, newest):
            time.sleep(0.02)
        before_s = -1.0
        while (now_s := self.other_cpu_s()) != before_s:  # Retention comes after that; it ends when no CPU is used.
            before_s = now_s
            time.sleep(0.3)

    def other_cpu_s(self) -> float:
        import psutil

        uploaders = [
            each
            for each in psutil.Process().children()
            if "cordee.train.checkpoint.uploader" in " ".join(each.cmdline())
        ]
        return sum(sum(each.cpu_times()[:2]) for each in uploaders)

    def before_load(self) -> None:
        self.close()
        self.checkpointer = self._open()

    def load(self) -> None:
        """Find the newest generation, verify all of it, put it into the state."""
        assert self.checkpointer is not None, "before_load() makes one"
        assert self.checkpointer.resume(self._state()) is not None, "something was saved before"

    def close(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.close()
            self.checkpointer = None


WAYS: dict[str, type[Way]] = {
    "memcpy": Memcpy,
    "O_DIRECT and fsync": Raw,
    "torch.save": TorchSave,
    "safetensors": Safetensors,
    "dcp.save": Dcp,
    "dcp.async_save": DcpAsync,
    "dcp.async_save, kept stager": DcpKept,
    "cordee": Cordee,
}


class Timer:
    """Wall and CPU seconds of a call: the slowest rank's, and the sum over all."""

    def __init__(self, world: int) -> None:
        self.world = world

    def together(self) -> None:
        """Ranks begin at once."""
        if self.world > 1:
            dist.barrier()

    def all_of(self, *values: float) -> list[list[float]]:
        """Each value of all ranks."""
        mine = torch.tensor(values, dtype=torch.float64)
        if self.world == 1:
            return [[value] for value in mine.tolist()]
        everyone = [torch.zeros_like(mine) for _ in range(self.world)]
        dist.all_gather(everyone, mine)
        return [list(each) for each in zip(*(row.tolist() for row in everyone), strict=True)]

    def save(self, way: Way) -> dict[str, float]:
        """One save of this way."""
        way.prepare()
        other_s = way.other_cpu_s()
        self.together()
        cpu_s, started_s = time.process_time(), time.perf_counter()
        held_s = way.save()
        durable_s = time.perf_counter() - started_s
        cpu_s = time.process_time() - cpu_s
        way.settle()
        held, durable, cpu = self.all_of(held_s, durable_s, cpu_s + way.other_cpu_s() - other_s)
        return {"stall_s": max(held), "durable_s": max(durable), "cpu_s": sum(cpu)}

    def load(self, way: Way, *, cold: bool) -> dict[str, float]:
        """One load; the state must be what was saved."""
        saved = way.state.sums()
        if not isinstance(way, Raw):
            way.state.spoil()
        way.before_load()
        if cold:
            way.drop_cache()
        self.together()
        cpu_s, started_s = time.process_time(), time.perf_counter()
        way.load()
        load_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
        assert way.state.sums() == saved, f"{type(way).__name__} did not give the state back"
        load, cpu = self.all_of(load_s, cpu_s)
        kind = "cold" if cold else "warm"
        return {f"{kind}_load_s": max(load), f"{kind}_load_cpu_s": sum(cpu)}


def lora(gb: float, folder: Path) -> dict[str, float]:
    """Bytes that the first and the second checkpoint of an adapter store: frozen weights, and an adapter of 1 %."""
    torch.manual_seed(0)
    rows = round(gb * 1e9 / 4 / WIDTH)
    frozen = nn.Embedding(rows, WIDTH).requires_grad_(False)
    adapter = nn.Linear(WIDTH, max(1, rows // 100))
    optimizer = torch.optim.AdamW(adapter.parameters())
    state = {"base": frozen, "adapter": adapter, "optimizer": optimizer}
    stored = []
    checkpointer = Checkpointer(str(folder), rank=0, world_size=1, keep=2, grace_s=600)
    checkpointer.open()
    for step in (1, 2):
        for weight in adapter.parameters():
            weight.grad = torch.randn_like(weight)
        optimizer.step()
        checkpointer.save(state, step=step, extras={})
        checkpointer.wait(600)
        while not is_verified(blobs := open_blobs(str(folder)), live_commits(read_entries(blobs))[-1]):
            time.sleep(0.02)  # What was not read back is not used again.
        stored.append(sum(path.stat().st_size for path in (folder / "chunks").rglob("*") if path.is_file()))
    checkpointer.close()
    return {"first_bytes": stored[0], "second_bytes": stored[1] - stored[0]}
