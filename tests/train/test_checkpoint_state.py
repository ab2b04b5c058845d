"""Every kind of value in a state comes back as it was, and what cannot be stored is refused by name."""

import json
import random
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from states import WAIT_S, build

from cordee.errors import CheckpointError
from cordee.train.checkpoint.checkpointer import Checkpointer
from cordee.train.checkpoint.dcp import _join_plans, planner_for
from cordee.train.checkpoint.state import decode, encode

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8, torch.complex64]


def test_every_kind_of_tensor_comes_back(make) -> None:
    tensors = {str(dtype): torch.randn(5, 3).to(dtype) for dtype in DTYPES}
    tensors["float8"] = torch.randn(4).to(torch.float8_e4m3fn)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 3)
    tensors["transposed"] = torch.arange(12).reshape(3, 4).t()
    tensors["own chunk"] = torch.randn(300_000)
    checkpointer = make()
    checkpointer.open()
    checkpointer.save({"all": dict(tensors)}, step=1, extras={})
    state = {"all": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}}
    checkpointer.load(state, checkpointer.wait(WAIT_S))
    for name, tensor in tensors.items():
        got = state["all"][name]
        assert got.dtype == tensor.dtype and got.shape == tensor.shape, name
        assert encode(got, "") == encode(tensor, ""), name


def test_plain_values_and_random_states_come_back_as_they_were() -> None:
    value = {
        "python": random.Random(4).getstate(),
        "numpy": np.random.RandomState(4).get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "mixed": [None, True, 3, -0.0, float("inf"), "é", b"\x00\xff", (1, (2,)), {1: "a", "b": 2}, {3, 1}],
        "ordered": OrderedDict(z=1, a=2),
        "counter": Counter({30: 2, 4: 1}),
        "$": "a key that is our tag",
        "big": 2**80,
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "size": torch.Size([2, 3]),
        "number": np.float32(0.1),
    }
    back = decode(json.loads(json.dumps(encode(value, "extras"), sort_keys=True)))
    assert list(back) == list(value) and list(back["ordered"]) == ["z", "a"], "order is kept"
    assert back["python"] == value["python"]
    assert np.array_equal(back["numpy"]["state"]["key"], value["numpy"]["state"]["key"])
    assert torch.equal(back["torch"], value["torch"])
    for name in ("mixed", "$", "big", "dtype", "device", "size", "number", "counter"):
        assert back[name] == value[name] and type(back[name]) is type(value[name])


def test_nan_comes_back() -> None:
    assert np.isnan(decode(encode(float("nan"), "x")))


@pytest.mark.parametrize("value", [object(), lambda: 0, Path("x"), np.array([object()])])
def test_save_refuses_unsupported_values_by_name(make, value) -> None:
    checkpointer = make()
    checkpointer.open()
    with pytest.raises(CheckpointError, match=r"loader/inner/0 is a .*which a checkpoint cannot hold"):
        checkpointer.save({"loader": {"inner": [value]}}, step=1, extras={})
    with pytest.raises(CheckpointError, match="extras/x is a"):
        checkpointer.save({}, step=1, extras={"x": value})
    checkpointer.save({"n": 1}, step=2, extras={})
    assert checkpointer.wait(WAIT_S).step == 2


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_save_before_the_first_step_changes_nothing(make, kind) -> None:
    def run(checkpointer: Checkpointer | None, resume: bool = False) -> torch.Tensor:
        torch.manual_seed(5)
        model = torch.nn.Linear(4, 1)
        state = {"model": model, "opt": kind(model.parameters(), lr=0.1)}
        if resume:
            state["opt"].param_groups[0]["lr"] = 9.0
            checkpointer.load(state, checkpointer.open())
        elif checkpointer:
            checkpointer.open()
            checkpointer.save(state, step=0, extras={})
            checkpointer.wait(WAIT_S)
        for _ in range(3):
            state["opt"].zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            state["opt"].step()
        return model.weight.detach().clone()

    plain = run(None)
    assert torch.equal(run(make()), plain), "the save changed the run"
    assert torch.equal(run(make(), resume=True), plain), "the resume changed the run"


def test_parameters_that_never_had_a_gradient(make) -> None:
    def model_and_opt() -> dict:
        torch.manual_seed(5)
        model = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 1), "unused": torch.nn.Linear(4, 1)})
        return {"model": model, "opt": torch.optim.AdamW(model.parameters())}

    def train(state: dict) -> None:
        state["opt"].zero_grad()
        state["model"]["used"](torch.ones(2, 4)).square().sum().backward()
        state["opt"].step()

    state = model_and_opt()
    train(state)
    checkpointer = make()
    checkpointer.open()
    checkpointer.save(state, step=1, extras={})
    commit = checkpointer.wait(WAIT_S)
    other = model_and_opt()
    checkpointer.load(other, commit)
    train(state)
    train(other)
    assert torch.equal(state["model"]["used"].weight, other["model"]["used"].weight)
    assert len(other["opt"].state) == len(state["opt"].state) == 2


def test_an_optimizer_without_its_model_is_refused(make) -> None:
    checkpointer = make()
    checkpointer.open()
    state = build()
    with pytest.raises(CheckpointError, match="no module in the state owns all parameters of the optimizer 'opt'"):
        checkpointer.save({"opt": state["opt"]}, step=1, extras={})


def test_of_a_small_tensor_that_ranks_share_rank_0s_is_kept() -> None:
    tensors = {"weight": torch.zeros(2**19), "mean": torch.zeros(4), "var": torch.zeros(4)}
    planner = planner_for(tensors, 0)
    joined, _, problem = _join_plans(
        planner, [planner.create_local_plan(), planner_for(tensors, 1).create_local_plan()]
    )
    assert problem == ""
    names = [{item.index.fqn for item in plan.items} for plan in joined]
    assert {"mean", "var"} <= names[0] and not {"mean", "var"} & names[1] and "weight" in names[0] | names[1]
