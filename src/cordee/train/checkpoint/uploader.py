"""The uploader: a process beside each rank that uploads captures from shared memory and commits them.

It starts as `python -m cordee.train.checkpoint.uploader` with the staging memory's descriptor. It imports no torch,
runs no collective and ignores the signals that end the trainer. It ends when its standard input is closed and its work
is done. If its trainer dies, it also uploads the captures that are only in memory. `upload.py` uploads one capture.
"""

import contextlib
import json
import mmap
import os
import queue
import signal
import sys
import threading
from typing import Any

from cordee.errors import CordeeError
from cordee.storage import rescue
from cordee.storage.destination import open_blobs
from cordee.storage.sealed import Damaged
from cordee.train.checkpoint.capture_marks import CaptureMarks
from cordee.train.checkpoint.upload import REPORT_AGAIN_S, Uploader, UploaderSetup, error_event


def main() -> None:
    """Serve one trainer: commands as JSON lines on standard input, events as JSON lines on standard output."""
    for number in rescue.UPLOADER_IGNORES:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, rescue.UPLOADER_IGNORES)  # the trainer has blocked them until now
    commands: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    trainer_left = threading.Event()
    captured = [0]  # the newest

    def read() -> None:
        try:
            for line in sys.stdin:
                if line.endswith("\n"):  # A trainer that died while writing leaves half a line, not a capture.
                    command = json.loads(line)
                    captured[0] = command.get("save", captured[0])
                    commands.put(command)
        finally:  # In any case, upload what was handed over and the captures in memory.
            trainer_left.set()
            commands.put(None)

    threading.Thread(target=read, daemon=True).start()
    first = commands.get()
    if first is None:
        return
    setup = UploaderSetup(**first)

    def is_busy() -> bool:
        return trainer_left.is_set() or not commands.empty()

    try:
        blobs = open_blobs(setup.to)
        signs = rescue.SignsOfLife(
            blobs, setup.epoch, setup.nonce, setup.rank, left=trainer_left, captured=lambda: captured[0]
        )
        uploader = Uploader(setup, blobs, _emit, _StagingMemory(setup.fds), is_busy=is_busy, on_settled=signs.settled)
    except (CordeeError, Damaged) as error:
        _emit({**error_event(error), "save": None})
        return
    _serve(uploader, commands, setup.saves_before, CaptureMarks(setup.marks_fd))
    signs.end()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(0)  # The reader thread may hold standard input, and nothing is left to do.


def _serve(
    uploader: Uploader, commands: "queue.SimpleQueue[dict[str, Any] | None]", newest: int, marks: CaptureMarks
) -> None:
    """Handle commands until they end, then the captures in memory; `newest`: the save before."""
    layout: dict[str, object] = {}
    in_memory: dict[int, dict[str, Any]] = {}  # by buffer
    closed = False
    while True:
        try:
            command = commands.get(timeout=REPORT_AGAIN_S if uploader.has_unreported else None)
        except queue.Empty:
            uploader.report_failures()
            continue
        if command is None:
            break
        if command["do"] == "layout":
            layout = command
        elif command["do"] == "close":
            closed = True
        else:
            newest = command["save"]
            in_memory[command["slot"]] = {**layout, **command}
            if command["do"] == "save":
                uploader.save(in_memory.pop(command["slot"]))
    if not closed:
        uploader.abandon(newest + 1)
    whole = [each for slot, each in in_memory.items() if marks.read(slot) == each["save"]]
    uploader.rescue({each["save"]: each for each in whole}, died=not closed)


class _StagingMemory:
    """The trainer's staging buffers, mapped at the first read and kept, since a new mapping faults on each page."""

    def __init__(self, fds: list[int]) -> None:
        self._fds = fds
        self._mapped: dict[int, mmap.mmap] = {}

    def __call__(self, slot: int, size_bytes: int) -> memoryview:
        """Return a buffer's content, at least `size_bytes` of it."""
        if slot not in self._mapped or len(self._mapped[slot]) < size_bytes:
            self._mapped[slot] = mmap.mmap(self._fds[slot], 0, prot=mmap.PROT_READ)
        return memoryview(self._mapped[slot])


def _emit(event: dict[str, object]) -> None:
    with contextlib.suppress(BrokenPipeError):  # The trainer has ended; the log has the outcome.
        print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main()
