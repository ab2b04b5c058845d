"""Load a generation into the state, on any number of ranks and in any layout.

The ranks agree before each step that could leave them half loaded. `dcp.py` reads the bytes. `attempt_log.py` chooses
the generation, and an earlier one if it is damaged.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from cordee.errors import CheckpointError
from cordee.imports import uncollected
from cordee.storage.files import Blobs
from cordee.storage.generations import Commit, check_chunks
from cordee.storage.manifest import Manifest, read_extras, read_manifest
from cordee.train.checkpoint import rank_state
from cordee.train.checkpoint.consensus import Consensus
from cordee.train.checkpoint.dcp import GenerationReader, load_tensors
from cordee.train.checkpoint.reshard import fit, model_names
from cordee.train.checkpoint.state import decode, dtype_of, gather, names_in, scatter
from cordee.units import plural

T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """The result of a load, besides the state.

    Attributes:
        step: the first one to run.
        extras: this rank's; None if the world size or the layout has changed.
        world_size: number of ranks that saved it.
        rng: for `rank_state.restore_rng`; None if there is none.
        differed: if `extras` is None, the objects that differed between ranks; all ranks now have rank 0's.
    """

    step: int
    extras: dict[str, object] | None
    world_size: int
    rng: Any = None
    differed: tuple[str, ...] = ()


@uncollected()  # a pass of the garbage collector over torch's objects takes 0.2 s on every rank
def restore(
    state: dict[str, object], commit: Commit, *, blobs: Blobs, consensus: Consensus, is_verified: bool = False
) -> Loaded:
    """Put a generation into the state: tensors in place, resharded as needed; plain values by replacing them.

    The rank that reads a chunk verifies it, and one rank verifies a chunk that none reads, unless it `is_verified`.

    Raises:
        CheckpointError: the state does not fit.
        Damaged: a chunk does not verify; raised on all ranks. Tensors may be half loaded; another load overwrites them.
    """

    def on_all(work: Callable[[], T]) -> T:
        return consensus.on_all(work, f"load step {commit.step}")

    manifest, template, fitted = on_all(lambda: _fitted(state, commit, blobs))
    _require_all_taken(state, manifest, fitted, consensus)
    reader = GenerationReader(blobs, manifest)
    wanted, extras = on_all(lambda: _read(reader, template, fitted, consensus))
    place = rank_state.dp_of(state)
    moved = extras is None or extras.get("dp") != place
    chunks = () if is_verified else manifest.chunks
    # One choice for all ranks, even if this rank reads the same data as before.
    moved, *read = consensus.any_rank([moved, *(chunk.key in reader.verified for chunk in chunks)])
    rest = [chunk for chunk, done in zip(chunks, read, strict=True) if not done]
    if rest:
        on_all(lambda: check_chunks(blobs, rest[consensus.rank :: consensus.world_size]))
    on_all(lambda: _scatter(state, manifest, fitted, wanted))
    if extras is None or moved:
        return on_all(lambda: _elsewhere(manifest, blobs, place[0] if place else consensus.rank))
    return Loaded(manifest.step, extras, manifest.world_size, extras.get("rng"))


def _fitted(
    state: dict[str, object], commit: Commit, blobs: Blobs
) -> tuple[Manifest, dict[str, torch.Tensor], dict[str, object]]:
    manifest = read_manifest(blobs, commit.manifest)
    template, mine = gather(state, template=True)
    return manifest, template, fit(state, manifest.all_values(), mine)


def _require_all_taken(
    state: dict[str, object], manifest: Manifest, fitted: dict[str, object], consensus: Consensus
) -> None:
    """Refuse a checkpoint with tensors that no rank has a place for: it belongs to another model."""
    saved = sorted(model_names(state, manifest.all_values()))
    mine = model_names(state, [fitted])
    taken = consensus.any_rank([name in mine for name in saved])
    if left := [name for name, used in zip(saved, taken, strict=True) if not used]:
        raise CheckpointError(
            f"no rank has a place for {plural(len(left), 'tensor')} of the checkpoint, such as {left[0]}",
            hint="is it the same model? With a pipeline: is every layer on some rank?",
        )


def _read(
    reader: GenerationReader, template: dict[str, torch.Tensor], fitted: dict[str, object], consensus: Consensus
) -> tuple[dict[str, torch.Tensor], dict[str, object] | None]:
    """Read the tensors by name, those of the template in place, and this rank's extras if the world is the same."""
    wanted = {}
    for name in sorted(names_in(list(fitted.values()))):
        saved = reader.manifest.tensors[name]
        empty = template.get(name)
        wanted[name] = torch.empty(saved.shape, dtype=dtype_of(saved.dtype)) if empty is None else empty
    load_tensors(reader, wanted, consensus.rank)
    if reader.manifest.world_size != consensus.world_size:
        return wanted, None
    extras = _extras(reader.blobs, reader.manifest, consensus.rank)
    pieces = reader.manifest.ranks[consensus.rank].extras
    reader.verified |= {reader.manifest.chunks[piece.chunk].key for piece in pieces}
    return wanted, extras


def _scatter(
    state: dict[str, object], manifest: Manifest, fitted: dict[str, object], wanted: dict[str, torch.Tensor]
) -> None:
    try:
        scatter(state, {name: decode(value, wanted.__getitem__) for name, value in fitted.items()})
    except (RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"the state does not take what step {manifest.step} saved: {error}",
            hint="is it the same model and optimizer?",
        ) from error


def _elsewhere(manifest: Manifest, blobs: Blobs, stream: int) -> Loaded:
    """Return, in another world or layout, substitutes for the state that each rank kept for itself."""
    if not manifest.ranks:  # An imported checkpoint has no ranks.
        return Loaded(manifest.step, None, manifest.world_size)
    first = last = _extras(blobs, manifest, 0)
    if manifest.world_size > 1:
        last = _extras(blobs, manifest, manifest.world_size - 1)
    rng = rank_state.rng_elsewhere(first, last, manifest.step, stream)
    return Loaded(manifest.step, None, manifest.world_size, rng, rank_state.differing(first, last))


def _extras(blobs: Blobs, manifest: Manifest, rank: int) -> dict[str, object]:
    found: dict[str, object] = decode(read_extras(blobs, manifest, rank))
    return found
