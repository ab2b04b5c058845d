"""The examples in the docstrings of hardware/, workload/, plan/ and view/memory are checked by hand: run them."""

import doctest
from importlib import import_module

import pytest

MODULES = [
    "hardware.catalog", "hardware.topology", "hardware.collectives", "workload.gpus", "workload.model", "workload.spec",
    "plan.layout", "plan.memory", "plan.step", "plan.cost", "plan.survive", "plan.search", "view.memory",
    "plan.space", "plan.own", "plan.curve", "plan.pipeline.price", "plan.pipeline.table",
    "plan.pipeline.bound", "plan.pipeline.compare", "view.chrome", "cli.pipeline_text",
    "plan.kernels", "plan.activations", "plan.states",
]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name: str) -> None:
    assert doctest.testmod(import_module(f"cordee.{name}")).failed == 0
