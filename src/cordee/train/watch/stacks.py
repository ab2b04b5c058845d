"""Stacks of a process, seen from another of its threads, and the state of another process.

The main thread may be inside a collective, where no Python signal handler runs; nothing here needs its help.
"""

import faulthandler
import logging
import os
import sys
import tempfile
import threading
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

log = logging.getLogger("cordee")

STACK_LINES_MAX = 30
_STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for a disk or a device", "Z": "dead"}
_NOT_THE_SCRIPTS = (f"{os.sep}torch{os.sep}", f"{os.sep}cordee{os.sep}train{os.sep}", f"{os.sep}threading.py")


def main_stack() -> tuple[str, tuple[str, ...]]:
    """Return the main thread's innermost line in the script, and all its calls, outermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "", ()
    calls = traceback.extract_stack(frame)
    own = [call for call in calls if not any(part in call.filename for part in _NOT_THE_SCRIPTS)] or list(calls)
    lines = tuple(f"{call.filename}:{call.lineno} in {call.name}: {call.line}" for call in calls)
    last = own[-1]
    return f"{Path(last.filename).name}:{last.lineno} in {last.name}: {last.line}", lines[-STACK_LINES_MAX:]


def other_threads() -> list[str]:
    """Return one line for each other thread that is not Cordee's: the innermost call."""
    frames = sys._current_frames()
    lines = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is not None and thread is not threading.main_thread() and not thread.name.startswith("cordee-"):
            lines.append(f"{thread.name}: {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
    return lines


def state_of(pid: int) -> str:
    """Describe the state of a process of this host; empty if it is not known."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "its process is gone" if Path("/proc/self/stat").exists() else ""
    return f"its process {pid} is {_STATES[state]}" if state in _STATES else f"its process {pid} runs"


def dump_unless_renewed(after_s: float) -> bool:
    """Print all threads' stacks after this time unless called again before, and return whether that is possible.

    It works even if a thread never releases the interpreter, so that no other thread gets to call it again.
    """
    try:
        faulthandler.dump_traceback_later(after_s, file=sys.__stderr__ or sys.stderr)
    except (AttributeError, OSError, ValueError, RuntimeError):
        return False  # stderr is not a file
    return True


def keep_flight_record(folder: Path | None, rank: int) -> Path | None:
    """Write the record of torch's flight recorder, for `torchfrtrace`; None where there is none."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None) if dist.is_available() else None
    if dump is None:
        return None
    folder = folder or Path(tempfile.gettempdir()) / f"cordee-flight-{os.getuid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"flight_{rank}"
        path.write_bytes(dump())
    except (OSError, RuntimeError) as error:
        log.debug("no flight record: %s", error)
        return None
    return path
