"""Any layout's checkpoint in any other: weights, optimizer and rates to the last bit, and the next step alike."""

import json
from pathlib import Path
from typing import Any

import layout_rank
import pytest

from cordee.storage.files import FileBlobs
from cordee.storage.generations import commit_of
from cordee.storage.log import live_commits, read_entries
from cordee.train.checkpoint.checkpointer import Checkpointer
from forked import run_script

SCRIPT = Path(__file__).with_name("layout_rank.py")
# The layouts as they are saved, and those that load them.
SOME = {
    "pp2fsdp2": ["pp2fsdp2", "fsdp4", "interleaved2"],
    "dp2tp2": ["dp2tp2", "ddp4"],
    "fsdp4": ["tp4", "pp2fsdp2"],
    "interleaved2": ["interleaved2", "dp2cp2"],
    "dp2cp2": ["dp2tp2"],
}
ALL = {name: list(layout_rank.LAYOUTS) for name in layout_rank.LAYOUTS}


def check(folder: Path, matrix: dict[str, list[str]]) -> dict[str, Any]:
    ranks = run_script(SCRIPT, str(folder), json.dumps(matrix))
    assert [code for code, _ in ranks] == [0] * 4
    found = ranks[0][1]
    truth = found["saved"][next(iter(matrix))][1]
    assert len(truth) == 18
    for name, (saved, after, _, _) in found["saved"].items():
        assert len(saved) == 18 * 5, f"{name} has weights, three of the optimizer, and a group for each"
        assert after == pytest.approx(truth, rel=1e-4, abs=1e-5), f"{name} trains something else"
    assert len(found["loaded"]) == sum(map(len, matrix.values()))
    for name, target, loaded, after, bits in found["loaded"]:
        assert loaded == found["saved"][name][0], f"{name} is not the same in {target}"
        assert after == pytest.approx(found["saved"][name][1], rel=1e-4, abs=1e-5), (
            f"{target} goes on otherwise than {name}"
        )
        if name == target:
            assert bits == found["saved"][name][2], f"{name} does not go on bitwise"
    check_alone(folder, found)
    return {"ranks": [told for _, told in ranks]}


def check_alone(folder: Path, found: dict[str, Any]) -> None:
    """One process loads what 4 ranks saved."""
    checkpointer = Checkpointer(str(folder), rank=0, world_size=1, keep=30)
    assert checkpointer.open() is not None
    commits = {entry.index: commit_of(entry) for entry in live_commits(read_entries(FileBlobs(folder)))}
    try:
        for name, (saved, after, _, generation) in found["saved"].items():
            state, step = layout_rank.single(6)
            loaded = checkpointer.load(state, commits[generation])
            assert loaded.extras is None and loaded.world_size == 4
            assert layout_rank.digests(state) == saved, name
            step(*layout_rank.batch(2))
            assert layout_rank.numbers(state) == pytest.approx(after, rel=1e-4, abs=1e-5), name
    finally:
        checkpointer.close()


@pytest.mark.gang
@pytest.mark.soak
def test_a_checkpoint_of_one_layout_goes_on_in_another(tmp_path: Path) -> None:
    ranks = check(tmp_path, SOME)["ranks"]
    for told in ranks:
        names, few, many = told["refused"]
        assert "ranks 0 and 2 hold different weights under one name, model/0.weight" in names
        assert few == "no rank has a place for 6 tensors of the checkpoint, such as model/head.bias"
        assert "lacks 4 of model's names, such as model/layers.4.up.weight" in many
    wanted = [each.double().sum().item() for each in layout_rank.Model(range(3, 4), seed=9).parameters()]
    assert [told["last"] for told in ranks] == [wanted] * 4
    same, by_dp, again, by_tp, own = zip(*(told["moved"] for told in ranks), strict=True)
    assert same == own, "in the same layout each rank has its own generator back"
    assert by_dp == again, "two resumes differ"
    assert by_dp[0] == by_dp[1] and by_dp[2] == by_dp[3] and by_dp[0] != by_dp[2]
    assert by_tp[0] == by_tp[2] and by_tp[1] == by_tp[3] and by_tp[0] != by_tp[1]
    assert not set(by_dp) & set(own)


@pytest.mark.gang
@pytest.mark.soak
def test_all_layouts_load_all(tmp_path: Path) -> None:
    check(tmp_path, ALL)
