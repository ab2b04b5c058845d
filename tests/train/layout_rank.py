"""One small model in every layout of 4 ranks: `layout_rank.py <folder> <matrix>`, as JSON {saved in: [loaded in]}.

Each layout takes three steps and saves after the second; whoever loads that takes the third. Prints for each the digest
of every whole tensor, and the sum of the weights after the third step.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch._dynamo  # an optimizer's first step imports it: once here, and not in each rank
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from cordee.errors import CheckpointError
from cordee.train.checkpoint import rank_state
from cordee.train.checkpoint.checkpointer import Checkpointer
from cordee.train.data.sampler import ElasticBatchSampler
from forked import gang

WORLD, LAYERS, WIDTH, BATCH, LENGTH = 4, 4, 12, 8, 8
Step = Callable[[torch.Tensor, torch.Tensor], None]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 16), torch.nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(torch.nn.Module):
    """All layers, or those of some stages: names are those of the whole either way."""

    def __init__(self, layers: range = range(LAYERS), seed: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        blocks = [Block() for _ in range(LAYERS)]
        head = torch.nn.Linear(WIDTH, 1)
        self.layers = torch.nn.ModuleDict({str(i): blocks[i] for i in layers})
        if LAYERS - 1 in layers:
            self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if hasattr(self, "head") else x


def loss_of(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (found - wanted).square().mean()


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    vectors = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    groups = [{"params": matrices, "lr": 0.01}, {"params": vectors, "lr": 0.02, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, foreach=False)


def part(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return tensor.chunk(size)[rank]


def data_parallel(model: torch.nn.Module, rank: int, size: int) -> tuple[dict, Step]:
    """Whatever happens inside the model: this rank's part of the batch, and gradients that are means."""
    optimizer = optimizer_of(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model(part(x, rank, size)), part(y, rank, size)).backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


def single(seed: int) -> tuple[dict, Step]:
    return data_parallel(Model(seed=seed), 0, 1)


def ddp4(seed: int) -> tuple[dict, Step]:
    # Without the flag it puts its buckets into another order after its first step, and adds up in another one.
    model = torch.nn.parallel.DistributedDataParallel(Model(seed=seed), find_unused_parameters=True)
    return data_parallel(model, dist.get_rank(), WORLD)


def fsdp4(seed: int) -> tuple[dict, Step]:
    model = Model(seed=seed)
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    return data_parallel(model, dist.get_rank(), WORLD)


def hsdp2x2(seed: int) -> tuple[dict, Step]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Model(seed=seed)
    fully_shard(model, mesh=mesh)
    return data_parallel(model, dist.get_rank(), WORLD)


def _tensor_parallel(model: Model, mesh: Any) -> Model:
    plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    return model


def tp4(seed: int) -> tuple[dict, Step]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    return data_parallel(_tensor_parallel(Model(seed=seed), mesh), 0, 1)


def dp2tp2(seed: int) -> tuple[dict, Step]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _tensor_parallel(Model(seed=seed), mesh["tp"])
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return data_parallel(model, mesh["dp"].get_local_rank(), 2)


def dp2cp2(seed: int) -> tuple[dict, Step]:
    """Sequences in halves over cp. Ring attention has no CPU kernel, so that this model has no attention."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = Model(seed=seed)
    fully_shard(model, mesh=mesh["dp", "cp"]._flatten("dp_cp"))
    optimizer = optimizer_of(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        mine = [part(each, mesh["dp"].get_local_rank(), 2).clone() for each in (x, y)]
        with context_parallel(mesh["cp"], buffers=mine, buffer_seq_dims=[1, 1]):
            assert mine[0].shape[1] == LENGTH // 2
            loss_of(model(mine[0]), mine[1]).backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


def pp2fsdp2(seed: int) -> tuple[dict, Step]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    at, dp_rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    model = Model(range(2 * at, 2 * at + 2), seed)
    fully_shard(model, mesh=mesh["dp"])
    stage = PipelineStage(model, at, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, 2, loss_of)
    optimizer = optimizer_of(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        given = [part(x, dp_rank, 2)] if at == 0 else []
        schedule.step(*given, **({"target": part(y, dp_rank, 2)} if at == 1 else {}))
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


def pp4(seed: int) -> tuple[dict, Step]:
    at = dist.get_rank()
    model = Model(range(at, at + 1), seed)
    schedule = ScheduleGPipe(PipelineStage(model, at, 4, torch.device("cpu")), 4, loss_of)
    optimizer = optimizer_of(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        schedule.step(*([x] if at == 0 else []), **({"target": y} if at == 3 else {}))
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


def interleaved2(seed: int) -> tuple[dict, Step]:
    """Two stages on each of two ranks, twice over: a list of modules, and one optimizer for each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    at, dp_rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    models = [Model(range(i, i + 1), seed) for i in (at, at + 2)]
    for model in models:
        fully_shard(model, mesh=mesh["dp"])
    group = mesh["pp"].get_group()
    stages = [
        PipelineStage(model, number, 4, torch.device("cpu"), group=group)
        for model, number in zip(models, (at, at + 2), strict=True)
    ]
    schedule = ScheduleInterleaved1F1B(stages, 2, loss_of)
    optimizers = [optimizer_of(model) for model in models]

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for each in optimizers:
            each.zero_grad()
        given = [part(x, dp_rank, 2)] if at == 0 else []
        schedule.step(*given, **({"target": part(y, dp_rank, 2)} if at == 1 else {}))
        for each in optimizers:
            each.step()

    return {"model": models, "optimizer": optimizers}, step


LAYOUTS = {made.__name__: made for made in (ddp4, fsdp4, hsdp2x2, tp4, dp2tp2, dp2cp2, pp2fsdp2, pp4, interleaved2)}


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
    return x, x.sum(-1, keepdim=True).sin()


def whole_tensors(state: dict) -> dict[str, torch.Tensor]:
    """Every whole tensor of weights and optimizer that this rank has a part of, and each weight's rate and decay."""
    models, optimizers = (each if isinstance(each, list) else [each] for each in state.values())
    found: dict[str, torch.Tensor] = {}
    for model, optimizer in zip(models, optimizers, strict=True):
        held = get_optimizer_state_dict(model, optimizer)
        found |= {f"model/{name}": tensor for name, tensor in get_model_state_dict(model).items()}
        for fqn, each in held["state"].items():
            found |= {f"optimizer/{fqn}/{name}": tensor for name, tensor in each.items()}
        for group in held["param_groups"]:
            told = torch.tensor([group["lr"], group["weight_decay"], *group["betas"]], dtype=torch.float64)
            found |= {f"group/{fqn}": told for fqn in group["params"]}
    return {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in found.items()}


def digests(state: dict) -> dict[str, str]:
    """Of what all ranks have together; where two have the same it has to be the same."""
    mine = {
        name: hashlib.sha256(each.detach().contiguous().numpy().tobytes()).hexdigest()[:16]
        for name, each in whole_tensors(state).items()
    }
    joined: dict[str, str] = {}
    for each in together(mine):
        assert all(joined.get(name, digest) == digest for name, digest in each.items()), "replicas differ"
        joined |= each
    return joined


def together(mine: Any) -> list[Any]:
    if not dist.is_initialized():
        return [mine]
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, mine)
    return found


def numbers(state: dict) -> dict[str, float]:
    """For each weight a number that depends on all of its elements, to compare within rounding."""
    mine = {
        name: (each.double() * torch.arange(1, each.numel() + 1).view(each.shape)).sum().item() / each.numel()
        for name, each in whole_tensors(state).items()
        if name.startswith("model/")
    }
    return {name: number for each in together(mine) for name, number in each.items()}


def rank_main(folder: Path, matrix: dict[str, list[str]], rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    checkpointer = Checkpointer(str(folder), rank=rank, world_size=WORLD, keep=30)
    checkpointer.open()
    result: dict[str, Any] = {"saved": {}, "loaded": []}
    commits = {}
    for number, name in enumerate(matrix, start=1):
        state, step = LAYOUTS[name](5)
        for at in range(2):
            step(*batch(at))
        checkpointer.save(state, step=number, extras={"rank": rank})
        saved = digests(state)
        step(*batch(2))
        commits[name] = checkpointer.wait(60)
        result["saved"][name] = [saved, numbers(state), digests(state), commits[name].generation]
    for name, targets in matrix.items():
        for target in targets:
            state, step = LAYOUTS[target](6)
            loaded = checkpointer.load(state, commits[name])
            assert loaded.extras == {"rank": rank} and loaded.step == commits[name].step
            found = digests(state)
            step(*batch(2))
            result["loaded"].append([name, target, found, numbers(state), digests(state)])
    result["refused"] = refusals(checkpointer, commits)
    result["moved"] = moved(checkpointer, rank)
    result["last"] = of_the_last_rank(checkpointer, rank)
    checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()
    return result


def refusals(checkpointer: Checkpointer, commits: dict[str, Any]) -> list[str]:
    """What cannot be right is said, on every rank, before anything is written or read."""
    rank, told = dist.get_rank(), []

    def counted_from_0() -> None:
        torch.manual_seed(rank // 2)
        stage = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
        checkpointer.save({"model": stage}, step=99, extras={})

    def a_layer_too_few() -> None:
        checkpointer.load({"model": Model(range(2 * (rank // 2), 3))}, next(iter(commits.values())))

    def a_layer_too_many() -> None:
        model = Model()
        model.layers["4"] = Block()
        checkpointer.load({"model": model}, next(iter(commits.values())))

    for work in (counted_from_0, a_layer_too_few, a_layer_too_many):
        try:
            work()
        except CheckpointError as error:
            told.append(error.message)
    return told


def moved(checkpointer: Checkpointer, rank: int) -> list[Any]:
    """The same number of ranks in another layout: those that share their data share their random numbers."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(rank)
    before = {"data": ElasticBatchSampler(range(50), 12)}
    checkpointer.save(before, step=50, extras=rank_state.capture(before))
    commit, found = checkpointer.wait(60), []
    for dp in (None, mesh["dp"], mesh["dp"], mesh["tp"]):
        loaded = checkpointer.load({"data": ElasticBatchSampler(range(50), 12, dp=dp)}, commit)
        rank_state.restore_rng(loaded.rng)
        found.append(torch.rand(1).item())
    torch.manual_seed(rank)
    return [*found, torch.rand(1).item()]


def of_the_last_rank(checkpointer: Checkpointer, rank: int) -> list[float]:
    """What rank 3 alone has, such as the last stage of a pipeline, all ranks can load."""
    torch.manual_seed(rank)
    average, plain = torch.optim.swa_utils.AveragedModel(Model(range(3, 4), seed=9)), {"best": [0.5, "step"]}
    checkpointer.save({"n": 1, **({"average": average, "plain": plain} if rank == 3 else {})}, step=51, extras={})
    state = {"n": 0, "average": torch.optim.swa_utils.AveragedModel(Model(range(3, 4), seed=2)), "plain": None}
    checkpointer.load(state, checkpointer.wait(60))
    assert (state["n"], state["plain"]) == (1, plain)
    return [each.double().sum().item() for each in state["average"].parameters()]


if __name__ == "__main__":
    print(json.dumps(gang(WORLD, partial(rank_main, Path(sys.argv[1]), json.loads(sys.argv[2])))), flush=True)
