"""The bridge between torch's distributed checkpoint (DCP) and storage: DCP plans and reshards, Cordee moves bytes.

`CaptureWriter` and `GenerationReader` carry out its plans; the plan of a save is kept as long as the state has
the same shape on every rank.
"""

import hashlib
import itertools
import math
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    Metadata,
    SavePlan,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlanner, WriteItem
from torch.distributed.tensor import DTensor

from cordee.errors import CheckpointError
from cordee.storage.chunks import OWN_CHUNK_BYTES, Chunk, ChunkLayout, check_chunk, join_pieces, lay_out, read_chunk
from cordee.storage.files import Blobs
from cordee.storage.manifest import Manifest, Shard
from cordee.train.checkpoint.consensus import Consensus
from cordee.train.checkpoint.staging import StagingBuffer
from cordee.train.checkpoint.state import dtype_of, samples_of

_CHUNKS_KEPT = 4
_THREADS = 4


def fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    """Return a digest of names, types, shapes and placements: if it changes, a save must be planned again."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        place = (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else ()
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape), place)).encode())
    return digest.hexdigest()


class CaptureWriter:
    """A writer of plans into the staging memory."""

    def __init__(self, staging: StagingBuffer) -> None:
        self.staging = staging
        self.layout: ChunkLayout = lay_out([])
        self._targets: list[torch.Tensor] = []

    def prepare(self, plan: SavePlan) -> None:
        """Lay out a new plan."""
        self.layout = lay_out(_shard_bytes(item) for item in plan.items)
        self.staging.clear()  # Gaps are hashed too, so old bytes would make equal chunks differ.
        self._targets = []

    def make_room(self, plan: SavePlan, room_bytes: int) -> None:
        """Grow the staging memory if it cannot hold the plan and `room_bytes` after it."""
        if self.staging.grow(self.layout.total_bytes + room_bytes) or not self._targets:
            self._targets = [
                self.staging.bytes[offset : offset + _shard_bytes(item)]
                .view(item.tensor_data.properties.dtype)
                .view(item.tensor_data.chunk.sizes)
                for item, offset in zip(plan.items, self.layout.offsets, strict=True)
            ]

    def write(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Copy the state; when this returns, the trainer may change it."""
        self.staging.fill(self._targets, [planner.resolve_data(item).detach() for item in plan.items])


def _shard_bytes(item: WriteItem) -> int:
    sizes: torch.Size = item.tensor_data.chunk.sizes
    dtype: torch.dtype = item.tensor_data.properties.dtype
    return int(sizes.numel() * dtype.itemsize)


@dataclass(frozen=True)
class RankPlan:
    """This rank's part of a save, as all ranks agreed on it."""

    name: str
    items: SavePlan
    fingerprint: str
    writes_values: bool  # this rank writes its values too

    def shards(self, layout: ChunkLayout) -> list[list[object]]:
        """Return the rows of the part record: name, dtype, shape, offsets, sizes and pieces of each shard."""
        rows = []
        for item, pieces in zip(self.items.items, layout.pieces, strict=True):
            data = item.tensor_data
            dtype = str(data.properties.dtype).removeprefix("torch.")
            plain = [[p.chunk, p.offset, p.length_bytes] for p in pieces]
            box = (list(data.size), list(data.chunk.offsets), list(data.chunk.sizes))
            rows.append([item.index.fqn, dtype, *box, plain])
        return rows


@dataclass(frozen=True)
class _Offer:
    """One rank's input to a plan: its own plan, its objects, and a few numbers of each of its weights."""

    plan: SavePlan
    objects: list[str]
    samples: dict[str, list[float]]


def make_plan(state: dict[str, object], tensors: dict[str, torch.Tensor], mark: str, consensus: Consensus) -> RankPlan:
    """Plan a save with DCP's default planner; a collective of all ranks.

    Raises:
        CheckpointError: the ranks' plans contradict each other.
    """
    rank, group = consensus.rank, consensus.group
    planner = planner_for(tensors, rank)
    offer = _Offer(planner.create_local_plan(), list(state), samples_of(state, tensors))
    if group is None:
        plans, name, problem = _join_plans(planner, [offer.plan])
        if plans is None:
            raise CheckpointError(f"the state cannot be planned: {problem}")
        return RankPlan(name, plans[0], mark, True)
    gathered: list[Any] | None = [None] * consensus.world_size if rank == 0 else None
    dist.gather_object(offer, gathered, group_dst=0, group=group)
    answers: list[object] = [None] * consensus.world_size
    if gathered is not None:
        plans, name, problem = _join_plans(planner, [each.plan for each in gathered])
        problem = _conflict(gathered) or problem
        answers = [(*each, name, problem) for each in zip(plans or answers, _value_writers(gathered), strict=True)]
    answer: list[Any] = [None]
    dist.scatter_object_list(answer, answers if rank == 0 else None, group_src=0, group=group)
    plan, writes_values, name, problem = answer[0]
    if problem:
        raise CheckpointError(f"the ranks' states cannot be planned together: {problem}")
    return RankPlan(name, plan, mark, writes_values)


def _value_writers(offers: list[_Offer]) -> list[bool]:
    """Return whether each rank writes values: rank 0 does, and any with a name that no rank before it has."""
    seen: set[str] = set()
    writers: list[bool] = []
    for offer in offers:
        names = {item.index.fqn for item in offer.plan.items}.union(offer.objects)
        writers.append(not writers or not names <= seen)
        seen |= names
    return writers


def _conflict(offers: list[_Offer]) -> str:
    """Describe two ranks that use one name for different weights; return "" if there are none.

    Stages of a pipeline that each count from 0 would do that. Small differences of replicas are allowed, since not all
    are equal to the last bit.
    """
    seen: dict[object, tuple[int, list[float]]] = {}
    for rank, offer in enumerate(offers):
        for item in offer.plan.items:
            mine = offer.samples.get(item.index.fqn)
            if mine is None:
                continue
            other, theirs = seen.setdefault((item.index.fqn, item.index.offset), (rank, mine))
            apart = max((abs(a - b) for a, b in zip(mine, theirs, strict=False)), default=0.0)
            if apart > 0.1 * max(map(abs, [*mine, *theirs]), default=0.0):
                return (
                    f"ranks {other} and {rank} hold different weights under one name, {item.index.fqn}; "
                    "the stages of a pipeline need the names of the whole model"
                )
    return ""


def planner_for(tensors: dict[str, torch.Tensor], rank: int) -> DefaultSavePlanner:
    """Return DCP's default planner over flat names."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, is_coordinator=rank == 0)
    return planner


def _join_plans(planner: DefaultSavePlanner, plans: list[SavePlan]) -> tuple[list[SavePlan] | None, str, str]:
    try:
        joined, _ = planner.create_global_plan(_small_tensors_once(plans))
    except (ValueError, RuntimeError) as error:
        return None, "", str(error)
    boxes = [[(i.index.fqn, i.tensor_data.chunk.offsets) for i in plan.items] for plan in joined]
    return joined, hashlib.blake2b(repr(boxes).encode(), digest_size=16).hexdigest(), ""


def _small_tensors_once(plans: list[SavePlan]) -> list[SavePlan]:
    """Keep only the lowest rank's copy of a small tensor that several ranks hold; DCP would take any copy.

    Buffers, such as BatchNorm's, may differ from rank to rank, and DistributedDataParallel uses rank 0's.
    """
    seen: set[object] = set()
    thinned = []
    for plan in plans:
        items = [item for item in plan.items if item.index not in seen or _shard_bytes(item) > OWN_CHUNK_BYTES]
        seen |= {item.index for item in items}
        thinned.append(replace(plan, items=items))
    return thinned


class GenerationReader:
    """A reader of one generation; every chunk is verified as it is read."""

    def __init__(self, blobs: Blobs, manifest: Manifest) -> None:
        self.blobs = blobs
        self.manifest = manifest
        self.verified: set[str] = set()  # keys of the chunks that were read
        self._kept: OrderedDict[str, bytes] = OrderedDict()

    def metadata(self) -> Metadata:
        """Return DCP's metadata, rebuilt from the manifest."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=dtype_of(tensor.dtype)),
                    torch.Size(tensor.shape),
                    [ChunkStorageMetadata(torch.Size(s.offsets), torch.Size(s.sizes)) for s in tensor.shards],
                )
                for name, tensor in self.manifest.tensors.items()
            }
        )

    def read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read the items of the plan, in the order of the chunks."""
        shards = {
            (name, shard.offsets): (shard, tensor.dtype)
            for name, tensor in self.manifest.tensors.items()
            for shard in tensor.shards
        }
        straight: list[tuple[Chunk, memoryview]] = []
        wanted = [(shards[item.storage_index.fqn, tuple(item.storage_index.offset)], item) for item in plan.items]
        for (shard, dtype), item in sorted(wanted, key=lambda pair: [p.chunk for p in pair[0][0].pieces]):
            target = planner.resolve_tensor(item).detach()
            if found := self._straight(shard, dtype, item, target):
                straight += found
            else:
                box = self._read(shard, dtype)
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    box = box.narrow(dim, start, length)
                target.copy_(box)
            planner.commit_tensor(item, target)
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda pair: check_chunk(self.blobs, *pair), straight))
        self.verified |= {chunk.key for chunk, _ in straight}
        self._kept.clear()

    def _straight(
        self, shard: Shard, dtype: str, item: ReadItem, target: torch.Tensor
    ) -> list[tuple[Chunk, memoryview]]:
        """Return each chunk with its memory in the target if whole chunks can be read into it, else nothing."""
        chunks = [self.manifest.chunks[piece.chunk] for piece in shard.pieces]
        fits = tuple(item.lengths) == shard.sizes and target.dtype == dtype_of(dtype)
        whole = all(piece.length_bytes == chunk.length_bytes for piece, chunk in zip(shard.pieces, chunks, strict=True))
        if not (fits and whole and target.device.type == "cpu" and target.is_contiguous()):
            return []
        memory = memoryview(target.view(-1).view(torch.uint8).numpy())
        ends = list(itertools.accumulate(chunk.length_bytes for chunk in chunks))
        return [(chunk, memory[end - chunk.length_bytes : end]) for chunk, end in zip(chunks, ends, strict=True)]

    def _read(self, shard: Shard, dtype: str) -> torch.Tensor:
        if math.prod(shard.sizes) == 0:
            return torch.empty(shard.sizes, dtype=dtype_of(dtype))
        contents = [self._chunk(self.manifest.chunks[piece.chunk]) for piece in shard.pieces]
        data = torch.frombuffer(join_pieces(contents, shard.pieces), dtype=torch.uint8)
        return data.view(dtype_of(dtype)).view(shard.sizes)

    def _chunk(self, chunk: Chunk) -> bytes:
        if chunk.key not in self._kept:
            self._kept[chunk.key] = read_chunk(self.blobs, chunk)
            self.verified.add(chunk.key)
            while len(self._kept) > _CHUNKS_KEPT:
                self._kept.popitem(last=False)
        return self._kept[chunk.key]


def load_tensors(reader: GenerationReader, tensors: dict[str, torch.Tensor], rank: int) -> None:
    """Fill the tensors in place, from any sharding.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
        Damaged: a chunk does not verify.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        planner.set_up_planner(tensors, reader.metadata(), is_coordinator=rank == 0)
        plan = planner.create_local_plan()
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"the state does not fit the checkpoint: {error}", hint="is it the same model and optimizer?"
        ) from error
    reader.read(planner.finish_plan(plan), planner)
