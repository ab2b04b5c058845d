"""A word to whoever plans with a calibration that no longer holds, or over several kinds of GPU."""

import socket
import sys

from cordee.hardware.catalog import Gpu
from cordee.hardware.measured import stale
from cordee.units import format_bytes


def warned(gpu: Gpu) -> Gpu:
    """Return the GPU, after saying what has changed since it was calibrated, if that was on this host."""
    marks = {} if gpu.measured is None else gpu.measured.fingerprint
    if marks.get("host") == socket.gethostname():
        from cordee.agent.calibration.fingerprint import same_device  # plans are made where no agent runs, too

        if changed := stale(marks, same_device(marks)):
            note = f"note: the calibration of {gpu.name} is stale: {', '.join(changed)}; run cordee calibrate"
            print(note, file=sys.stderr)
    return gpu


def note_several_kinds(gpu: Gpu) -> None:
    """Say what a gang over several kinds of GPU runs at, if this is such a GPU."""
    if " and " in gpu.name:
        print(f"note: {gpu.source.title}; {format_bytes(gpu.memory_bytes)} each", file=sys.stderr)
