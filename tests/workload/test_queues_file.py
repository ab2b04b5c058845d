"""`queues.yaml`: how it is read, and that every mistake is pointed at."""

import re
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.errors import SpecError
from cordee.events import Budget, Queue
from cordee.units import US_PER_HOUR
from cordee.workload.queues import KEYS, parse_budgets, parse_queues

FILE = """\
version: 1
queues:
  research:
    weight: 2
    day_cost: $5,000
  llm: {parent: research, quota: 32, limit: 48, day_gpu_time: 500h}
  vision: {parent: research, quota: 8, user_limit: 4}
  product: {quota: 16, lend: false}
  default:
"""


def test_a_tree_is_read_into_base_units() -> None:
    assert parse_queues(FILE) == (
        Queue(name="research", quota_gpus=40, weight=2, micro_usd_per_day=5_000_000_000),  # 32 + 8 inside it
        Queue(name="llm", parent="research", quota_gpus=32, limit_gpus=48, gpu_us_per_day=500 * US_PER_HOUR),
        Queue(name="vision", parent="research", quota_gpus=8, user_gpus=4),
        Queue(name="product", quota_gpus=16, lend=False),
        Queue(name="default"),
    )
    assert parse_queues("queues: {}") == ()


def test_the_tree_of_the_guide_is_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "queues.md").read_text(encoding="utf-8")
    tree = page[page.index("    queues:\n") : page.index("\nSet it")]
    research = parse_queues(dedent(tree))[0]
    assert (research.name, research.quota_gpus, research.micro_usd_per_day) == ("research", 40, 5_000_000_000)


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("", "q.yaml: queues are a mapping", "shortest"),
        ("version: 1", "q.yaml: there are no queues", "shortest"),
        ("version: 2\nqueues: {}", "q.yaml:1:1: unknown version 2", "use 1"),
        ("queus: {}", "q.yaml:1:1: unknown key 'queus'", "did you mean queues?"),
        ("queues: [a]", "q.yaml:1:1: queues must be a mapping", "queues: {research: {quota: 2}}"),
        ("queues:\n  a: 8", "q.yaml:2:3: a must be a mapping, not 8", "a: {quota: 8}"),
        ("queues:\n  a: {qouta: 8}", "q.yaml:2:7: unknown key 'qouta' in queues.a", "did you mean quota?"),
        ("queues:\n  a: {quota: -8}", "q.yaml:2:7: queues.a.quota = -8", "use 0 or more"),
        ("queues:\n  a: {quota: 8.5}", "q.yaml:2:7: queues.a.quota = 8.5", "write a whole number"),
        ("queues:\n  a: {weight: 0}", "q.yaml:2:7: queues.a.weight = 0", "use 1 or more"),
        ("queues:\n  a: {lend: maybe}", "q.yaml:2:7: queues.a.lend = 'maybe'", "true or false"),
        ("queues:\n  a: {day_cost: 500}", "q.yaml:2:7: queues.a.day_cost: '500' is not an amount", "$500"),
        ("queues:\n  a: {day_gpu_time: 500}", "q.yaml:2:7: queues.a.day_gpu_time: '500' is not a duration", "47h"),
        ("queues:\n  a: {}\n  a: {}", "q.yaml:3:3: not valid YAML", "each key once"),
    ],
)
def test_a_mistake_is_pointed_at(text: str, says: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_queues(text, source="q.yaml")
    assert caught.value.message.startswith(says) and hint in (caught.value.hint or "")


def test_a_circle_is_read_and_left_to_who_checks_the_tree() -> None:
    queues = parse_queues("queues: {a: {parent: b}, b: {parent: a, quota: 2}}")
    assert [queue.parent for queue in queues] == ["b", "a"]


@given(st.text(max_size=60))
def test_no_text_does_anything_but_parse_or_be_refused(text: str) -> None:
    try:
        parse_queues(f"queues:\n  a: {{}}\n{text}")
    except SpecError as error:
        assert error.message.startswith("<queues>")


def test_the_how_to_names_every_key_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "queues.md").read_text()
    keys, _, _ = page.partition("| here | Kueue |")
    assert re.findall(r"^[|] `([a-z_]+)`", keys, re.MULTILINE) == list(KEYS)


def test_budgets_of_the_same_file() -> None:
    written = '[{queue: llm, cost: "$40", hard: true}, {user: ann, per: total, gpu_time: 2h}]'
    text = f"queues: {{llm: {{}}}}\nbudgets: {written}\n"
    assert parse_budgets(text) == (
        Budget(queue="llm", micro_usd=40_000_000, hard=True),
        Budget(user="ann", per="total", gpu_us=7_200_000_000),
    )
    assert parse_budgets("queues: {llm: {}}") is None and parse_budgets("queues: {llm: {}}\nbudgets: []\n") == ()
    for written, said in (
        ("budgets: {queue: llm}", "budgets are a list"),
        ("budgets: [{queue: llm, prise: $4}]", "unknown key 'prise' in budgets.0"),
        ("budgets: [{queue: llm, per: week, cost: $4}]", "unknown budgets.0.per 'week'"),
        ("budgets: [{queue: llm, cost: 4}]", "is not an amount of money"),
        ("budgets: [{queue: llm, cost: $4}, {queue: llm, cost: $5}]", "queue llm has two budgets per month"),
    ):
        with pytest.raises(SpecError, match=re.escape(said)):
            parse_budgets(f"queues: {{llm: {{}}}}\n{written}\n", source="queues.yaml")
