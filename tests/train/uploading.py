"""Uploaders in this process and beside it, with captures made by hand."""

import json
import mmap
import os
import subprocess
import sys

import pytest

from cordee.storage.chunks import lay_out
from cordee.storage.destination import open_blobs
from cordee.storage.files import FileBlobs
from cordee.storage.generations import check_generation, commit_of
from cordee.storage.log import Log, live_commits, read_entries
from cordee.train.checkpoint.upload import Uploader, UploaderSetup

FROZEN = b"F" * 2**20


def payload(step: int, rank: int = 0) -> list[bytes]:
    """Three shards: one that changes with each step, one that never does, and the extras."""
    return [bytes([step % 256]) * 2**20 + f"{rank}".encode(), FROZEN, json.dumps({"step": step, "rank": rank}).encode()]


def capture(save: int, step: int, rank: int = 0, world: int = 1) -> tuple[bytes, dict]:
    """Staging memory and command as the trainer would give them."""
    shards = payload(step, rank)
    layout = lay_out([len(shard) for shard in shards])
    memory = bytearray(layout.total_bytes)
    for shard, offset in zip(shards, layout.offsets, strict=True):
        memory[offset : offset + len(shard)] = shard
    pieces = [[[p.chunk, p.offset, p.length_bytes] for p in shard] for shard in layout.pieces]
    length = len(shards[0])
    rows = [["w", "uint8", [world * length], [rank * length], [length], pieces[0]]]
    if rank == 0:
        rows.append(["frozen", "uint8", [len(FROZEN)], [0], [len(FROZEN)], pieces[1]])
    command = {
        "do": "save",
        "slot": 0,
        "save": save,
        "step": step,
        "plan": "p",
        "shards": rows,
        "values": {"step": step} if rank == 0 else None,
        "extras": pieces[2],
        "cuts": [list(cut) for cut in layout.cuts],
        "stall_us": 5,
        "captured_us": 7,
        "total_bytes": layout.total_bytes,
    }
    return bytes(memory), command


def setup(log: Log, folder, rank: int = 0, world: int = 1, **changes) -> UploaderSetup:
    return UploaderSetup(
        **{
            "to": str(folder),
            "rank": rank,
            "world_size": world,
            "epoch": log.epoch,
            "nonce": log.nonce,
            "keep": 2,
            "grace_s": 10.0,
            "fds": [-1, -1],
            "marks_fd": -1,
            "verified": None,
            "saves_before": 0,
            "damaged": [],
        }
        | changes
    )


class Bench:
    """An uploader in this process, with its events."""

    def __init__(self, log: Log, folder, blobs: FileBlobs | None = None, **changes) -> None:
        self.events: list[dict] = []
        self.memory = b""
        self.setup = setup(log, folder, **changes)
        self.blobs = blobs or FileBlobs(folder)
        self.uploader = Uploader(self.setup, self.blobs, self.events.append, lambda slot, size: memoryview(self.memory))

    def save(self, save: int, step: int, **more) -> list[str]:
        before = len(self.events)
        self.memory, command = capture(save, step, self.setup.rank, self.setup.world_size)
        self.uploader.save(command | more)
        return [event["event"] for event in self.events[before:]]


def generations(folder) -> list[tuple[int, str | None]]:
    """(step, what is wrong with it) of each live generation."""
    blobs = open_blobs(str(folder))
    commits = [commit_of(entry) for entry in live_commits(read_entries(blobs))]
    return [(commit.step, check_generation(blobs, commit.manifest)) for commit in commits]


def open_log(folder, nonce: str = "n1") -> Log:
    return Log.open(open_blobs(str(folder)), nonce=nonce)


class Process:
    """An uploader as the trainer starts it."""

    def __init__(self, log: Log, folder, env: dict[str, str] | None = None, **changes) -> None:
        self.fd, self.second, self.marks_fd = (os.memfd_create("test") for _ in range(3))
        os.ftruncate(self.marks_fd, mmap.PAGESIZE)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cordee.train.checkpoint.uploader"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self.fd, self.second, self.marks_fd),
            env=os.environ | (env or {}),
        )
        self.tell(vars(setup(log, folder, fds=[self.fd, self.second], marks_fd=self.marks_fd, **changes)))

    def tell(self, message: dict) -> None:
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    def save(self, save: int, step: int, rank: int = 0, world: int = 1) -> None:
        memory, command = capture(save, step, rank, world)
        os.ftruncate(self.fd, max(len(memory), os.fstat(self.fd).st_size))
        os.pwrite(self.fd, memory, 0)
        self.tell(command)

    def event(self) -> dict | None:
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def events_until(self, kind: str) -> bool:
        while (event := self.event()) is not None:
            if event["event"] == kind:
                return True
        return False

    def end(self) -> int:
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        code = self.process.wait(30)
        self.process.stdout.close()
        self.close()
        return code

    def close(self) -> None:
        for fd in (self.fd, self.second, self.marks_fd):
            os.close(fd)


def fill(disk) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * mmap.PAGESIZE)
