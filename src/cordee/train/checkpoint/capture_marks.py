"""One word per staging buffer, in memory shared by trainer and uploader: the save whose capture it holds whole, or 0.

The trainer clears the mark before it touches a buffer and sets it when the copy is done. If the trainer dies, the
uploader thus knows which buffers it may use. The uploader imports this file, so it imports no torch.
"""

import mmap
import struct

BUFFERS = 2
_WORD = struct.Struct("<Q")


class CaptureMarks:
    """The shared page behind a descriptor."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, mmap.PAGESIZE)

    def read(self, slot: int) -> int:
        """Return the save whose capture is whole in this buffer; 0: none."""
        return int(_WORD.unpack_from(self._page, slot * _WORD.size)[0])

    def set(self, slot: int, save: int) -> None:
        """Mark the capture of this save as whole; 0: the buffer is being written."""
        _WORD.pack_into(self._page, slot * _WORD.size, save)
