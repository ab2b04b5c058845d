"""Without the library an integration says what to install; with one of its own needs unmet, what to change."""

import importlib
import sys

import pytest

from cordee.errors import MissingExtraError
from cordee.train import torch_version


@pytest.mark.parametrize(("module", "library"), [("huggingface", "transformers"), ("lightning", "lightning")])
def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, module: str, library: str) -> None:
    for name in [each for each in sys.modules if each.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"cordee.train.integrations.{module}", raising=False)
    with pytest.raises(MissingExtraError) as caught:
        importlib.import_module(f"cordee.train.integrations.{module}")
    assert caught.value.hint == f'pip install "cordee[train,{module}]"'


def test_an_older_torch_is_refused_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "__version__", "2.5.1+cu124")
    with pytest.raises(MissingExtraError, match=r"needs torch 2\.6 or newer, and this is 2\.5\.1"):
        importlib.reload(torch_version)
