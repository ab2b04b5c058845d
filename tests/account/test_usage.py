"""The dollars of replicas, divided over the tokens that they served: to the micro-dollar, on every day."""

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replica_events import ended, ledger_of, placed, ready, replica_job, served, us

from cordee.account import Ledger
from cordee.account.ledger import SavedLedger
from cordee.account.split import apportioned
from cordee.account.usage import DAY_US, Tokens, UsageBy, usage_rows
from cordee.control.codec import codec
from cordee.events import Estimate, TokenWeights
from cordee.units import format_month, month_start_us
from world import HOUR, PRICE, S, job

DAY_S = DAY_US // S


def test_the_dollars_of_a_day_go_to_its_tokens_by_their_weights():
    """Two GPUs for an hour. Weights of an unplanned service: 10 for input, 1 for cached input, 40 for output."""
    ledger = ledger_of(
        ready(110),
        served(120, 20),
        served(120, tokens=(1000, 400, 100), tenant="acme", key="k1"),
        served(130, tokens=(0, 0, 100), tenant="acme", key="k2"),
        served(140, tokens=(1200, 0, 0), tenant="beta", key="k3", gateway="h"),
        *ended(3700),
    )
    whole = 2 * PRICE
    units = 600 * 10 + 400 * 1 + 200 * 40 + 1200 * 10
    rows = usage_rows(ledger.usage(0), "tenant")
    assert [(row.key, row.tokens) for row in rows] == [
        ("acme", Tokens(2, 0, 1000, 400, 200)), ("beta", Tokens(1, 0, 1200, 0, 0))
    ]  # fmt: skip
    acme, beta = (row.micro_usd for row in rows)
    assert sum(row.micro_usd.total for row in rows) == whole
    for found, weight in ((acme.computed, 6000), (acme.cached, 400), (acme.output, 8000), (beta.computed, 12000)):
        assert abs(found - whole * weight / units) < 1
    assert [row.key for row in usage_rows(ledger.usage(0), "key")] == ["k1", "k2", "k3"]
    (row,) = usage_rows(ledger.usage(0), "model")
    assert (row.key, row.tokens.requests, row.micro_usd.unused) == ("tiny", 3, 0)


def test_the_plan_weighs_the_tokens():
    planned = TokenWeights(input=50, cached=0, output=1000)
    estimate = Estimate(layout="tp2", peak_bytes=1, gpu_memory_bytes=1, gpus=2, token_weights=planned)
    submitted = replica_job("q")
    submitted = replace(submitted, job=replace(submitted.job, estimates=(estimate,)))
    ledger = ledger_of(submitted, served(120, tokens=(300, 100, 10), tenant="acme"), *ended(3700))
    (row,) = usage_rows(ledger.usage(0), "service")
    assert (row.micro_usd.computed, row.micro_usd.cached, row.micro_usd.output) == (PRICE, 0, PRICE)


def test_days_without_tokens_are_unused_and_days_that_are_over_do_not_change():
    """A replica for three days; it serves on the second."""
    ledger = ledger_of(ready(110))
    (line,) = ledger.usage(us(100 + 3600))
    assert (line.tokens, line.micro_usd.unused, line.key.tenant) == (Tokens(), 2 * PRICE, "")
    ledger.apply(served(DAY_S + 10, 5, (100, 0, 100), tenant="acme"))
    ledger.apply(job("other", 1, at_us=2 * DAY_US + 5))
    first, second = ledger.usage(2 * DAY_US + 5)[:2]
    assert (first.from_us, second.from_us, second.to_us) == (0, DAY_US, 2 * DAY_US)
    assert first.micro_usd.unused == first.micro_usd.total == 2 * (DAY_US - 100 * S) * PRICE // HOUR
    assert second.micro_usd.unused == 0 and second.micro_usd.total == 48 * PRICE
    ledger.apply(served(DAY_S + 20, 5, (100, 0, 100), tenant="late", at_s=2 * DAY_S + 100))
    assert ledger.usage(3 * DAY_US)[:2] == [first, second]
    assert ledger.usage(3 * DAY_US)[2].key.tenant == "late"


def test_days_pass_without_an_event() -> None:
    ledger = ledger_of(ready(110), served(120, tokens=(100, 0, 100), tenant="acme"))
    for _ in range(2):
        lines = ledger.usage(2 * DAY_US + 3600 * S)
        assert [(line.from_us // DAY_US, line.key.tenant) for line in lines] == [(0, "acme"), (1, ""), (2, "")]
        assert [line.micro_usd.total for line in lines[1:]] == [48 * PRICE, 2 * PRICE]
    assert ledger.spent(DAY_US, 2 * DAY_US + 3600 * S) == {"": 50 * PRICE}
    [line] = ledger.usage(us(3700))
    assert line.micro_usd.total == 2 * PRICE


def test_old_days_are_merged_into_their_months():
    """A service without replicas that serves once a day, from 20 May to 16 September 1974."""
    ledger, first_us = Ledger(), 1_600 * DAY_US
    for day in range(120):
        ledger.apply(served((first_us + day * DAY_US) / S, tokens=(10, 0, 1), tenant="acme"))
    lines = ledger.usage(0)
    spans = [
        (datetime.fromtimestamp(line.from_us / S, UTC).date().isoformat(), (line.to_us - line.from_us) // DAY_US)
        for line in lines
    ]
    assert spans[:4] == [("1974-05-01", 31), ("1974-06-01", 30), ("1974-07-01", 1), ("1974-07-02", 1)]
    assert len(lines) == 2 + 31 + 31 + 16 and sum(line.tokens.output for line in lines) == 120


@given(at_us=st.integers(0, 4_102_444_799_999_999))
def test_months_are_those_of_the_calendar(at_us):
    first = datetime.fromtimestamp(at_us // S, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    assert month_start_us(at_us) == round(first.timestamp()) * S
    assert format_month(at_us) == f"{first:%Y-%m}"


@given(amount=st.integers(0, 10**15), weights=st.lists(st.integers(0, 10**12), min_size=1, max_size=20).filter(any))
def test_apportioned_parts_sum_to_the_amount(amount, weights):
    parts = apportioned(amount, weights)
    assert sum(parts) == amount
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part * sum(weights) - amount * weight) < sum(weights)


seconds = st.integers(0, 4 * DAY_S)
tokens = st.tuples(st.integers(0, 10**7), st.integers(0, 10**5), st.integers(0, 10**6))
reports = st.builds(
    served, seconds, st.integers(0, 30), tokens,
    tenant=st.sampled_from(["", "acme", "beta"]), key=st.sampled_from(["k1", "k2"]), model=st.sampled_from("mn"),
    gateway=st.sampled_from("gh"), service=st.sampled_from(["chat", "chat", "other"]), name=st.sampled_from(["r", "q"]),
)  # fmt: skip
happenings = st.lists(
    st.one_of(
        reports,
        st.builds(lambda at_s: replica_job("q", "other", at_us=us(at_s)), seconds),
        st.builds(placed, seconds, st.sampled_from(["r", "q"]), st.integers(1, 3)),
        st.builds(ready, seconds, st.sampled_from(["r", "q"])),
        st.builds(lambda at_s, name, epoch: ended(at_s, "finished", name, epoch), seconds, st.sampled_from(["r", "q"]),
                  st.integers(1, 3)),
        st.just(None),
    ),
    max_size=30,
)  # fmt: skip


@settings(max_examples=50)
@given(events=happenings, price=st.integers(0, 10**7), is_sorted=st.booleans())
def test_lines_sum_to_the_dollars_held_and_lose_no_token(events, price, is_sorted):
    ledger, sent = ledger_of(price=price), Tokens()
    flat = [each for event in events for each in (event if isinstance(event, tuple) else (event,))]
    for event in sorted(flat, key=lambda each: each.at_us if each else 0) if is_sorted else flat:
        if event is None:
            saved = codec(SavedLedger)
            ledger = Ledger.restored(saved.decode(json.loads(json.dumps(saved.encode(ledger.saved())))))
            continue
        ledger.apply(event)
        if hasattr(event, "tenant"):
            counts = (event.input_tokens, event.cached_tokens, event.output_tokens)
            sent += Tokens(event.requests, 0, *counts)
    for now_us in (ledger.at_us, ledger.at_us + 5 * S):
        lines = ledger.usage(now_us)
        assert sum((line.tokens for line in lines), Tokens()) == sent
        for row in ledger.cost("service", now_us):
            assert row.micro_usd.held == sum(line.micro_usd.total for line in lines if line.key.service == row.key)
        assert min((part for line in lines for part in (line.micro_usd.total, line.micro_usd.unused)), default=0) >= 0


@pytest.mark.parametrize("by", ["service", "tenant", "key", "model"])
def test_rows_are_the_same_money_however_they_are_grouped(by: UsageBy):
    ledger = ledger_of(served(120, tokens=(10, 5, 3), tenant="acme", key="k"), *ended(500))
    assert sum(row.micro_usd.total for row in usage_rows(ledger.usage(0), by)) == 800 * PRICE * S // HOUR
