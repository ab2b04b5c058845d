"""A resumed run is the run that was not interrupted: schedules, scaler, averages, data, random numbers; and names."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as lr
from torch.utils.data import DataLoader, Dataset

from cordee import ElasticBatchSampler
from cordee.errors import CheckpointError
from cordee.storage.manifest import Manifest, RankPart
from cordee.train.checkpoint import rank_state
from cordee.train.checkpoint.checkpointer import Checkpointer
from cordee.train.checkpoint.reshard import fit
from cordee.train.checkpoint.state import FRESH, decode, gather, scatter

SCHEDULES = {
    "lambda": lambda o: lr.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: lr.OneCycleLR(o, 0.1, total_steps=12),
    "plateau": lambda o: lr.ReduceLROnPlateau(o, patience=1),
    "warm-up": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, 1.0, 3), lr.StepLR(o, 2, 0.5)], [3]),
    "chained": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, 0.5, 4), lr.ExponentialLR(o, 0.9)]),
}


class Noisy(Dataset):
    """Samples that draw while they are read, in a worker."""

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index)).sin() + torch.randn(4) * np.random.rand() + random.random()


class Training:
    """Several optimizers with a schedule each, a scaler, an average, dropout, and data from two workers."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)]
        self.models = {name: torch.nn.Sequential(*map(copied, layers)) for name in SCHEDULES}
        self.optimizers = {name: torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for name, m in self.models.items()}
        self.schedules = {name: SCHEDULES[name](optimizer) for name, optimizer in self.optimizers.items()}
        self.average = torch.optim.swa_utils.AveragedModel(self.models["cosine"])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.sampler = ElasticBatchSampler(Noisy(), 6, micro_batch_max=3, seed=4)
        self.loader = DataLoader(self.sampler.seeded(Noisy()), batch_sampler=self.sampler, num_workers=2)
        self.state: dict[str, Any] = {"average": self.average, "scaler": self.scaler, "data": self.sampler}
        self.state |= {f"{name} model": each for name, each in self.models.items()}
        self.state |= {f"{name} optimizer": each for name, each in self.optimizers.items()}
        self.state |= {f"{name} schedule": each for name, each in self.schedules.items()}

    def run(self, steps: int) -> list[Any]:
        told = []
        batches = self.sampler.batches(self.loader)
        for _ in range(steps):
            taken = [next(batches) for _ in range(self.sampler.micro_batches)]
            for name, model in self.models.items():
                loss = sum(model(x).square().mean() for x in taken)
                self.optimizers[name].zero_grad()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizers[name])
                self.schedules[name].step(*([loss.item()] if name == "plateau" else []))
                told.append((name, loss.item(), self.optimizers[name].param_groups[0]["lr"]))
            self.scaler.update()
            self.average.update_parameters(self.models["cosine"])
            told.append((random.random(), np.random.rand(), torch.rand(1).item(), self.scaler.get_scale()))
        return told


def copied(layer: torch.nn.Module) -> torch.nn.Module:
    other = (
        type(layer)(layer.in_features, layer.out_features) if isinstance(layer, torch.nn.Linear) else type(layer)(0.3)
    )
    other.load_state_dict(layer.state_dict())
    return other


def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path: Path) -> None:
    def seeded() -> Training:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(8)
        return Training()

    uninterrupted = seeded()
    whole = uninterrupted.run(9)  # more than two epochs of four steps
    first = seeded()
    begun = first.run(3)  # within an epoch; workers have fetched ahead
    checkpointer = Checkpointer(str(tmp_path), rank=0, world_size=1)
    checkpointer.open()
    checkpointer.save(first.state, step=3, extras=rank_state.capture(first.state))
    commit = checkpointer.wait(60)
    second = seeded()
    loaded = checkpointer.load(second.state, commit)
    checkpointer.close()
    rank_state.restore(second.state, loaded.extras)
    rank_state.restore_rng(loaded.rng)
    assert begun + second.run(6) == whole
    for name in SCHEDULES:
        for mine, theirs in zip(second.models[name].parameters(), uninterrupted.models[name].parameters(), strict=True):
            assert torch.equal(mine, theirs), name
    assert all(map(torch.equal, second.average.parameters(), uninterrupted.average.parameters()))


def seen_rng(dp: list[int] | None, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return {"rng": rank_state.capture_rng(), "own": {}, "dp": dp}


def drawn(rng: Any) -> tuple[float, float, float]:
    rank_state.restore_rng(rng)
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def test_generators_of_another_world_follow_from_the_checkpoint() -> None:
    first, last = seen_rng(None, 1), seen_rng(None, 2)
    streams = [drawn(rank_state.rng_elsewhere(first, last, 40, stream)) for stream in range(3)]
    assert len({number for stream in streams for number in stream}) == 9, "three ranks, three generators, all different"
    assert streams == [drawn(rank_state.rng_elsewhere(seen_rng(None, 1), last, 40, stream)) for stream in range(3)]
    assert drawn(rank_state.rng_elsewhere(first, last, 41, 0)) not in streams
    assert rank_state.rng_elsewhere(first, seen_rng(None, 1), 40, 2) == first["rng"], (
        "ranks that shared a seed go on sharing it"
    )
    assert "seed" in rank_state.rng_elsewhere(first, first, 40, 0), "one rank shared with nobody"
    one, other = seen_rng([0, 2], 1), seen_rng([0, 2], 1)
    assert "seed" in rank_state.rng_elsewhere(one, other, 40, 0), (
        "the same data, as under tp: nothing is known of other ranks"
    )
    assert rank_state.rng_elsewhere(one, seen_rng([1, 2], 1), 40, 0) is one["rng"]


def test_resume_names_objects_that_differed_between_ranks() -> None:
    first, last = {"own": {"data": {"at": 1}, "n": 3}}, {"own": {"data": {"at": 2}, "n": 3}}
    assert rank_state.differing(first, last) == ("data",)
    assert rank_state.differing({}, {}) == ()


def optimizer_over(model: torch.nn.Module, *rates: tuple[float, list[str]]) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    return torch.optim.SGD(
        [{"params": [named[name] for name in names], "lr": rate} for rate, names in rates], momentum=0.9
    )


def stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    sum(p.square().sum() for p in model.parameters()).backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


class Part(torch.nn.Module):
    def __init__(self, **layers: torch.nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


def linears(*names: str) -> Part:
    return Part(**{name: torch.nn.Linear(2, 2) for name in names})


def test_groups_of_an_optimizer_are_found_by_names_in_any_other_grouping() -> None:
    front, back = linears("a"), linears("b")
    saved = []
    for part, name, rate in ((front, "a", 0.1), (back, "b", 0.3)):
        groups = ((rate, [f"{name}.weight"]), (rate * 2, [f"{name}.bias"]))
        saved.append(gather(stepped(part, optimizer_over(part, *groups))))
    tensors = saved[0][0] | saved[1][0]
    whole = linears("b", "a")
    grouped = optimizer_over(whole, (9.0, ["a.bias"]), (9.0, ["b.weight"]), (9.0, ["a.weight"]))
    grouped.add_param_group({"params": [whole.b.bias], "lr": 9.0})
    state = {"model": whole, "optimizer": grouped}
    fitted = fit(state, [values for _, values in saved], gather(state, template=True)[1])
    scatter(state, {name: decode(value, tensors.__getitem__) for name, value in fitted.items()})
    assert [group["lr"] for group in grouped.param_groups] == pytest.approx([0.2, 0.3, 0.1, 0.6])
    assert torch.equal(whole.b.weight, back.b.weight) and torch.equal(whole.a.bias, front.a.bias)
    momentum = grouped.state[whole.b.bias]["momentum_buffer"]
    assert torch.equal(momentum, tensors["optimizer/state/b.bias/momentum_buffer"]) and momentum.any()


def fresh(rate: float, *layers: str) -> dict[str, Any]:
    """A model with one group for each layer, before the first step."""
    model = linears(*layers)
    groups = [(rate, [f"{layer}.weight", f"{layer}.bias"]) for layer in layers]
    return {"model": model, "optimizer": optimizer_over(model, *groups)}


def test_an_optimizer_before_its_first_step_fits_any_layout_if_its_groups_are_alike() -> None:
    whole = fresh(1.0, "a", "b")
    mine = gather(whole, template=True)[1]
    parts = [gather(fresh(0.1, layer))[1] for layer in "ab"]
    fitted = fit(whole, parts, mine)
    assert [decode(group)["lr"] for group in fitted["optimizer"][FRESH]] == [0.1, 0.1]
    with pytest.raises(CheckpointError, match="optimizer has 2 groups of parameters, the checkpoint 1 that differ"):
        fit(whole, [parts[0], gather(fresh(0.2, "b"))[1]], mine)


def test_parts_of_one_model_must_not_share_names() -> None:
    parts = [linears("a"), linears("a")]
    with pytest.raises(CheckpointError, match=r"two parts of 'model' have a\.(bias|weight)"):
        gather({"model": parts})
    with pytest.raises(CheckpointError, match="no module in the state owns all parameters of the optimizer 'o'"):
        both = torch.optim.SGD([*parts[0].parameters(), *parts[1].parameters()])
        gather({"model": [parts[0], linears("b")], "o": [both]})


def test_a_manifest_says_what_later_ranks_hold_and_reads_those_that_do_not() -> None:
    ranks = RankPart((), 1, 1, 1, 1), RankPart((), 1, 1, 1, 1, {"model": {"b": 1}})
    whole = Manifest(3, 1, 1, 2, (), {}, {"model": {"a": 1}}, ranks)
    stored = whole.to_bytes()
    assert stored.endswith(
        b'"ranks":[{"captured_bytes":1,"extras":[],"stall_us":1,"uploaded_us":1,"written_bytes":1},'
        b'{"captured_bytes":1,"extras":[],"stall_us":1,"uploaded_us":1,"values":{"model":{"b":1}},"written_bytes":1}],'
        b'"save":1,"step":3,"tensors":{},"values":{"model":{"a":1}},"world_size":2}'
    )
    again = Manifest.from_bytes(stored)
    assert again == whole and again.all_values() == [{"model": {"a": 1}}, {"model": {"b": 1}}]
