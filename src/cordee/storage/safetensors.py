"""Files in the safetensors format, read and written without torch: a JSON header, then the tensors' bytes.

Format: https://huggingface.co/docs/safetensors: 8 bytes of header length (little-endian), the header, the data; offsets
in the header count from the end of the header.
"""

import json
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cordee.errors import CheckpointError, InputError

_ALIGN_BYTES = 8
_HEADER_BYTES_MAX = 100_000_000  # The format's own limit.
# torch's name: (the format's name, bytes of an element).
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "complex64": ("C64", 8),
}
_TORCH_NAMES = {theirs: ours for ours, (theirs, _) in DTYPES.items()}


@dataclass(frozen=True)
class FileTensor:
    """A tensor in an open file."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def write_file(path: Path, tensors: Iterable[tuple[str, str, tuple[int, ...], int]], data: Iterator[Any]) -> None:
    """Write (name, dtype, shape, bytes) of each tensor, then `data` in the same order, whole or not at all.

    Raises:
        CheckpointError: the format does not have a tensor's type.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, size_bytes in tensors:
        if dtype not in DTYPES:
            raise CheckpointError(f"{name} is {dtype}, a type that safetensors lacks")
        header[name] = {"dtype": DTYPES[dtype][0], "shape": shape, "data_offsets": [end, end + size_bytes]}
        end += size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    half = path.with_name(f".{path.name}.half")
    try:
        with half.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for part in data:
                file.write(part)
            assert file.tell() == 8 + len(text) + end, "the data are what the header says"
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


@contextmanager
def open_file(path: Path) -> Iterator[dict[str, FileTensor]]:
    """Open a file, and yield its tensors, mapped and not read.

    Raises:
        InputError: it is not a safetensors file, is cut off, or has an unknown type.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    with file:
        header, start = _header(path, file.read(8), file)
        size_bytes = path.stat().st_size
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        view = memoryview(mapped)
        held = {}
        try:
            for name, entry in header.items():
                if name != "__metadata__":
                    held[name] = _held(path, name, entry, view[start:size_bytes])
            yield held
        finally:
            for tensor in held.values():
                tensor.data.release()
            view.release()


def header_of(path: Path) -> tuple[dict[str, object], int]:
    """Return the header of a file, and the offset of its data in bytes.

    Raises:
        InputError: it is not a safetensors file.
    """
    with path.open("rb") as file:
        return _header(path, file.read(8), file)


def _header(path: Path, length: bytes, file: Any) -> tuple[dict[str, object], int]:
    bytes_said = int.from_bytes(length, "little")
    try:
        if len(length) < 8 or bytes_said > _HEADER_BYTES_MAX:
            raise ValueError
        header = json.loads(file.read(bytes_said))
        if not isinstance(header, dict):
            raise ValueError
    except ValueError:
        raise InputError(
            f"{path} is not a safetensors file", hint="torch's .pt and .bin files hold pickle, which is not read"
        ) from None
    return header, 8 + bytes_said


def _held(path: Path, name: str, entry: Any, data: memoryview) -> FileTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{path}: the header of {name} cannot be read") from None
    if dtype not in _TORCH_NAMES:
        raise InputError(f"{path}: {name} has the unknown type {dtype}", hint=f"known: {', '.join(_TORCH_NAMES)}")
    ours = _TORCH_NAMES[dtype]
    wanted = DTYPES[ours][1]
    for length in shape:
        wanted *= length
    if not 0 <= begin <= end <= len(data) or end - begin != wanted:
        raise InputError(
            f"{path}: {name} needs {wanted} bytes, and its header says {begin} to {end} of {len(data)}",
            hint="the file is cut off, or was not downloaded whole",
        )
    return FileTensor(ours, shape, data[begin:end])
