"""Export checkpoints to safetensors files, and import such files as a generation. No torch: bytes are copied."""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from cordee.errors import CheckpointError, InputError
from cordee.storage.chunks import Chunk, ChunkLayout, join_pieces, lay_out, read_chunk, write_chunk
from cordee.storage.files import Blobs
from cordee.storage.generations import Commit, check_generation, commit_fields, commit_of
from cordee.storage.log import Log, read_entries
from cordee.storage.manifest import Manifest, Shard, Tensor, write_manifest
from cordee.storage.safetensors import DTYPES, FileTensor, open_file, write_file

# The default of transformers: no file is too large to download again.
FILE_BYTES_MAX = 5_000_000_000
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def read_tensor(blobs: Blobs, whole: Manifest, tensor: Tensor) -> bytearray:
    """Return all bytes of a tensor, row by row, from all its shards; every chunk is verified.

    Raises:
        Damaged: a chunk does not verify.
        CheckpointError: safetensors lacks its type.
    """
    if tensor.dtype not in DTYPES:
        raise CheckpointError(f"a tensor is {tensor.dtype}, a type that safetensors lacks")
    element_bytes = DTYPES[tensor.dtype][1]

    def content(shard: Shard) -> bytearray:
        return join_pieces([read_chunk(blobs, whole.chunks[p.chunk]) for p in shard.pieces], shard.pieces)

    if len(tensor.shards) == 1:
        return content(tensor.shards[0])
    joined = bytearray(math.prod(tensor.shape) * element_bytes)
    box = np.frombuffer(joined, dtype=np.dtype(f"V{element_bytes}")).reshape(tensor.shape)
    for shard in tensor.shards:
        place = tuple(slice(at, at + size) for at, size in zip(shard.offsets, shard.sizes, strict=True))
        box[place] = np.frombuffer(content(shard), dtype=box.dtype).reshape(shard.sizes)
    del box
    return joined


def export_safetensors(
    blobs: Blobs, whole: Manifest, out: Path, *, of: str | None, on_bytes: Callable[[int], None] = lambda n: None
) -> list[Path]:
    """Write one file with all tensors, or those of one object of the state, under their full names.

    Raises:
        InputError: there is no such object, or nothing in it, or the file exists.
    """
    names = _names(whole, of)
    if out.exists():
        raise InputError(f"{out} exists", hint="name a new file")
    out.parent.mkdir(parents=True, exist_ok=True)
    _write(blobs, whole, out, [(name, name) for name in names], on_bytes)
    return [out]


def export_hf(
    blobs: Blobs,
    whole: Manifest,
    out: Path,
    *,
    of: str | None,
    like: Path | None,
    file_bytes_max: int = FILE_BYTES_MAX,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> list[Path]:
    """Write a folder for `from_pretrained`: the weights of one object (`model`), and the other files of `like`.

    Raises:
        InputError: there is no such object, the folder has something in it, or `like` has no config.json.
    """
    of = of or "model"
    names = _names(whole, of)
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty", hint="name a new folder")
    if like is not None and not (like / "config.json").is_file():
        raise InputError(f"{like} has no config.json", hint="--like is a folder of a Hugging Face model")
    out.mkdir(parents=True, exist_ok=True)
    groups: list[list[str]] = [[]]
    room = file_bytes_max
    for name in names:
        size_bytes = _size_bytes(whole.tensors[name])
        if groups[-1] and size_bytes > room:
            groups.append([])
            room = file_bytes_max
        groups[-1].append(name)
        room -= size_bytes
    written: list[Path] = []
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        many = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        path = out / (many if len(groups) > 1 else "model.safetensors")
        short = [(name, name.removeprefix(f"{of}/")) for name in group]
        _write(blobs, whole, path, short, on_bytes)
        written.append(path)
        weight_map |= {theirs: path.name for _, theirs in short}
    if len(groups) > 1:
        index = {
            "metadata": {"total_size": sum(_size_bytes(whole.tensors[n]) for n in names)},
            "weight_map": weight_map,
        }
        written.append(out / "model.safetensors.index.json")
        written[-1].write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    for path in sorted(like.iterdir()) if like else []:
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            written.append(Path(shutil.copy(path, out / path.name)))
    return written


def exported_bytes(whole: Manifest, of: str | None) -> int:
    """Return the number of bytes of tensors that an export writes."""
    return sum(_size_bytes(whole.tensors[name]) for name in _names(whole, of))


def import_safetensors(
    blobs: Blobs,
    source: Path,
    *,
    nonce: str,
    of: str = "model",
    step: int = 0,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> Commit:
    """Make the first generation of an empty destination from a file or a folder of them; verified by reading it back.

    It belongs to no rank, so any world size may load it.

    Raises:
        InputError: there are no such files, or they cannot be read.
        CheckpointError: the destination has checkpoints already, or does not give back what was written.
    """
    paths = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if not paths:
        raise InputError(f"{source} has no *.safetensors", hint="torch's own .pt and .bin files hold pickle")
    if read_entries(blobs):
        raise CheckpointError("the destination has a log already", hint="import into a place of its own, and pin it")
    with ExitStack() as files:
        held: dict[str, FileTensor] = {}
        for path in paths:
            found = files.enter_context(open_file(path))
            twice = held.keys() & found.keys()
            if twice:
                raise InputError(f"{path} has {min(twice)}, which another file has too")
            held |= found
        names = sorted(held)
        layout = lay_out(len(held[name].data) for name in names)
        log = Log.open(blobs, nonce=nonce)
        chunks = list(_write_chunks(blobs, layout, [held[name] for name in names], log.epoch, on_bytes))
        tensors = {
            f"{of}/{name}": Tensor(
                held[name].dtype,
                held[name].shape,
                (Shard((0,) * len(held[name].shape), held[name].shape, layout.pieces[at]),),
            )
            for at, name in enumerate(names)
        }
    values = {of: {name: {"$": "tensor", "name": f"{of}/{name}"} for name in names}}
    whole = Manifest(step, log.epoch, 1, 0, tuple(chunks), tensors, values, ())
    manifest = write_manifest(blobs, whole)
    for level in blobs.levels:
        problem = check_generation(level, manifest)
        if problem is not None:
            raise CheckpointError(f"the destination does not give back what was written: {problem}")
    fields = commit_fields(manifest, whole, at_us=time.time_ns() // 1000)
    index = log.append("commit", **{**fields, "bytes": sum(map(_size_bytes, tensors.values()))})
    return commit_of(log.entries[index])


def _names(whole: Manifest, of: str | None) -> list[str]:
    if of is not None and of not in whole.values:
        raise InputError(f"the checkpoint has no {of!r}", hint=f"it has {', '.join(sorted(whole.values))}")
    names = sorted(name for name in whole.tensors if of is None or name.startswith(f"{of}/"))
    if not names:
        raise InputError(f"there is no tensor in {of or 'the checkpoint'}")
    return names


def _size_bytes(tensor: Tensor) -> int:
    return sum(piece.length_bytes for shard in tensor.shards for piece in shard.pieces)


def _write(
    blobs: Blobs, whole: Manifest, path: Path, names: Sequence[tuple[str, str]], on_bytes: Callable[[int], None]
) -> None:
    def contents() -> Iterator[bytearray]:
        for name, _ in names:
            data = read_tensor(blobs, whole, whole.tensors[name])
            on_bytes(len(data))
            yield data

    header = [
        (theirs, tensor.dtype, tensor.shape, _size_bytes(tensor))
        for name, theirs in names
        for tensor in (whole.tensors[name],)
    ]
    write_file(path, header, contents())


def _write_chunks(
    blobs: Blobs, layout: ChunkLayout, tensors: Sequence[FileTensor], epoch: int, on_bytes: Callable[[int], None]
) -> Iterator[Chunk]:
    inside: list[list[tuple[int, memoryview]]] = [[] for _ in layout.cuts]
    for tensor, pieces in zip(tensors, layout.pieces, strict=True):
        at = 0
        for piece in pieces:
            inside[piece.chunk].append((piece.offset, tensor.data[at : at + piece.length_bytes]))
            at += piece.length_bytes
    for (_, length), parts in zip(layout.cuts, inside, strict=True):
        data = bytearray(length)
        for offset, part in parts:
            data[offset : offset + len(part)] = part
            part.release()
        chunk, _ = write_chunk(blobs, data, save=1, epoch=epoch, known={})
        on_bytes(length)
        yield chunk
