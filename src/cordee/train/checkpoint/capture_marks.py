"""One word per staging buffer, in memory that trainer and drain share: the save whose capture is whole in it, or 0.

The trainer breaks the seal before it touches a buffer and sets it when the copy is done. So whenever it dies, the
drain knows which buffers it may use. No torch here: the drain imports it.
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
        """The save whose capture is whole in this buffer; 0: none."""
        return int(_WORD.unpack_from(self._page, slot * _WORD.size)[0])

    def set(self, slot: int, save: int) -> None:
        """The capture of this save is whole."""
        _WORD.pack_into(self._page, slot * _WORD.size, save)

    def clear(self, slot: int) -> None:
        """From here on the buffer is being written."""
        self.set(slot, 0)
