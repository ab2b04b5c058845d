"""The section `sweep` as people write it, in YAML and as flags, and what is wrong with it."""

from typing import Any

import pytest

from cordee.errors import SpecError, UnitError
from cordee.workload.spec import JobSpec, parse_spec
from cordee.workload.sweep import SweepSpec, named_values, parse_parameter

YAML = """\
run: python train.py --lr {lr}
gpus: 1
name: lr
checkpoint: {to: /ckpt}
sweep:
  values:
    lr: 1e-4..1e-2:log
    seed: 1..5
    opt: [adam, sgd]
  rungs: 100..2700:3
"""


def flags(sweep: dict[str, Any], **others: Any) -> SweepSpec:
    section = JobSpec.from_flags(run="true", gpus="1", name="lr", sweep=sweep, **others).sweep
    assert section is not None
    return section


def test_a_file_and_flags_say_the_same() -> None:
    written = parse_spec(YAML)
    texts = named_values(["lr=1e-4..1e-2:log,seed=1..5", "opt=adam,sgd"])
    made = flags({"values": texts, "rungs": "100..2700:3"}, checkpoint_to="/ckpt")
    assert written.sweep == made
    assert (made.way, made.total, made.max_running, made.rung_steps) == ("random", 20, 4, (100, 300, 900, 2700))
    assert written.tier == "preemptible", "a trial goes on from its checkpoint"
    again = JobSpec.model_validate_json(written.model_dump_json())
    assert again == written and again.sweep is not None
    assert [again.sweep.point(each) for each in (1, 2)] == [made.point(each) for each in (1, 2)]


def test_what_can_be_listed_is_a_grid() -> None:
    grid = flags({"values": {"lr": "1e-4..1e-2:log:3", "opt": "adam,sgd", "path": "../a,../b"}})
    assert (grid.way, grid.total) == ("grid", 12)
    points = [tuple(grid.point(number).values()) for number in range(1, 13)]
    assert len(set(points)) == 12 and points[0] == (0.0001, "adam", "../a")
    assert flags({"values": {"n": "1..64:log"}, "trials": 5}).way == "random"


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ({"values": {}}, "the sweep has no values"),
        ({"values": {"lr": ""}}, "sweep.values.lr: '' has no values"),
        ({"values": {"lr": "1..5:normal"}}, "'normal' is not a known distribution"),
        ({"values": {"lr": "5..1"}}, "is not a range of numbers, the smaller one first"),
        ({"values": {"lr": "0..1:log"}}, "0 has no logarithm"),
        ({"values": {"lr": "0..inf"}}, "has an end that is not finite"),
        ({"values": {"lr": "a,a"}}, "has a value twice"),
        ({"values": {"l r": "1..5"}}, "'l r' cannot name a parameter"),
        ({"values": {"lr": "0.1..0.5"}, "search": "grid"}, "lr has no end of values for a grid"),
        ({"values": {"n": "1..5"}, "search": "grid", "trials": 3}, "the grid has 5 trials, not 3"),
        ({"values": {"n": "1..999", "m": "1..999"}, "search": "grid"}, "the grid has 998,001 trials"),
        ({"values": {"n": "1..5"}, "max_running": 0}, "sweep.max_running = 0"),
        ({"values": {"n": "1..5"}, "search": "best"}, "unknown sweep.search 'best'"),
        ({"values": {"n": "1..5"}, "rungs": "1"}, "the first rung must be 1 step or more and before the last"),
        ({"values": {"n": "1..5"}, "rungs": "9..3"}, "the first rung must be 1 step or more and before the last"),
        ({"values": {"n": "1..5"}, "rungs": "3..9"}, "rungs need checkpoint.to"),
        ({"values": {"n": "1..5"}, "colour": 1}, "unknown key 'colour' in sweep"),
    ],
)
def test_bad_input_is_named(sweep: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        flags(sweep)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("texts", "said"), [(["lr=1,lr=2"], "lr has values twice"), (["lr"], "'lr' is not NAME=VALUES")]
)
def test_flags_that_are_no_values_are_named(texts: list[str], said: str) -> None:
    with pytest.raises(UnitError, match=said):
        named_values(texts)


def test_drawn_values_stay_within_their_range() -> None:
    whole, log = parse_parameter("1..64:log"), parse_parameter("1e-4..1e-2:log")
    for at in range(1000):
        assert 1 <= whole.at(at / 1000) <= 64 and 1e-4 <= log.at(at / 1000) <= 1e-2  # type: ignore[operator]
    assert {parse_parameter("1..3").at(at / 9) for at in range(9)} == {1, 2, 3}
