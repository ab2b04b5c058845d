"""The tables of `cordee cost` where jobs and replicas stand together, on terminals of 80 and 120 columns."""

import io
import re

import pytest
from rich.console import Console

from cordee.account import Split
from cordee.answers.cost import CostRowView, CostView, ElectricityView, LostView, SplitView
from cordee.answers.services import CostLineView, TokenCostView, TokenCountsView, TokenPrices, UsageRowView, UsageView
from cordee.cli.cost_text import class_table, cost_table, energy_lines, line_table, retrieval_lines, token_table

HOUR = 3_600_000_000
REPLICAS = Split(loading=HOUR // 10, serving=61 * HOUR, idle_held=30 * HOUR, draining=HOUR // 2, lost=HOUR // 3)
TRAINING = Split(useful=123 * HOUR, checkpoint=HOUR, restart=3 * HOUR, stall=HOUR, lost=4 * HOUR, unreported=HOUR)
ALL = REPLICAS + TRAINING
COUNTS = TokenCountsView(requests=1_234_567, failed=3, input=12_345_678_901, cached=3_456_789, output=1_234_567_890)
COST = TokenCostView(total=230_000_000, computed=100_000_000, cached=10_000_000, output=110_000_000, unused=10_000_000)
PRICES = TokenPrices(computed=8_123, cached=2_890_000, output=89_123, blended=16_000)


GRID = ElectricityView(building_factor=1.5, g_co2e_per_kwh=400, sources=["a grid (2026)"])


def split(of: Split) -> SplitView:
    return SplitView.of(of)


def row(key: str, tenant: str | None = None) -> UsageRowView:
    more = {"gpu_us": split(REPLICAS), "micro_usd_by_class": split(REPLICAS)}
    return UsageRowView(key=key, tenant=tenant, tokens=COUNTS, micro_usd=COST, micro_usd_per_million=PRICES, **more)


def usage(by: str, *rows: UsageRowView) -> UsageView:
    training = {"training_gpu_us": split(TRAINING), "training_micro_usd": split(TRAINING)}
    return UsageView(by=by, at_us=0, rows=list(rows), micro_usd=10**9, **training)


def trained() -> CostView:
    """Return the cost of jobs alone, with all classes."""
    found = cost()
    rows = [found.rows[0].model_copy(update={"key": key}) for key in ("three-u3rxf4", "job-rehearsal-hf7kze")]
    return found.model_copy(update={"rows": rows, "gpu_us": split(TRAINING + TRAINING)})


def cost() -> CostView:
    def of(key: str, held: Split) -> CostRowView:
        rest = {"lost_by_cause": [], "charged_gpu_us": 0, "charged_micro_usd": 0, "steps": 0, "steps_repeated": 0}
        rest |= {"price_sources": [], "measured": [], "attempts": 1, "tokens": 10**9, "energy_mj": split(Split())}
        rest |= {"micro_usd_per_million_tokens": 12_345}
        return CostRowView(key=key, gpu_us=split(held), micro_usd=split(held), **rest)

    rows = [of("a-training-job-with-a-name-abcdef", TRAINING), of("chat-1-abcdef", REPLICAS)]
    whole = {"gpu_us": split(ALL), "micro_usd": split(ALL), "idle_gpu_us": 0, "idle_micro_usd": 0}
    whole |= {"energy_mj": split(Split()), "idle_energy_mj": 0, "integrated_mj": 0, "electricity": GRID}
    return CostView(by="job", at_us=0, rows=rows, **whole)


def line() -> CostLineView:
    who = {"service": "chat", "tenant": "research-and-development", "key": "key-0123456789ab", "model": "llama-3-8b"}
    return CostLineView(from_us=0, to_us=24 * HOUR, tokens=COUNTS, micro_usd=COST, **who)


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("frames", [False, True])
def test_tables_stay_inside_the_terminal_and_cut_no_number(
    columns: int, frames: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: frames)
    services = usage("service", row("chat"), row("embeddings-of-documents"))
    tables = {
        "class": class_table(services, columns),
        "token": token_table(services, columns),
        "key": token_table(usage("key", row("key-0123456789ab", "research-and-development")), columns),
        "line": line_table([line()], columns),
        "cost": cost_table(cost(), columns),
        "trained": cost_table(trained(), columns),
    }
    for name, table in tables.items():
        console = Console(file=io.StringIO(), width=columns if frames else 10_000)
        console.print(table)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert "…" not in text, (name, text)
        assert not frames or max(map(len, text.splitlines())) <= columns
        assert "12.3B" in text or name in ("class", "cost", "trained"), text


def text_of(table: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_jobs_and_replicas_share_columns() -> None:
    text = text_of(class_table(usage("service", row("chat")), 200))
    assert re.search(r"USEFUL/SERVING +RESTART/LOADING +STALL/IDLE HELD +CHECKPOINT +DRAINING +LOST +UNREPORTED", text)
    assert re.search(r"chat +66 % +0.1 % +33 % +– +0.5 % +0.4 % +– +91.93 GPU-h", text)


def test_energy_is_told_by_class_and_cause_with_the_building_and_what_its_grid_emits() -> None:
    kwh = 3_600_000_000  # millijoules
    lost = [LostView(cause="failure", gpu_us=HOUR, micro_usd=1, energy_mj=2 * kwh)]
    row = cost().rows[0].model_copy(update={"lost_by_cause": lost})
    whole = {"energy_mj": split(Split(useful=7 * kwh, lost=2 * kwh)), "idle_energy_mj": kwh, "integrated_mj": kwh}
    found = cost().model_copy(update={"rows": [row], **whole})
    lines = energy_lines(found)
    assert lines[0] == "energy of GPUs: 10.000 kWh (70 % useful, 20 % lost, 10 % idle)"
    assert lines[1] == f"{row.key} lost 2.000 kWh by failure"
    assert lines[2] == "with the building 15.000 kWh, 6 kg CO2e; hosts are not counted"
    assert lines[3] == "10 % of it is power over time, where no counter was" and lines[4] == "a grid (2026)"
    unknown = found.model_copy(update={"electricity": GRID.model_copy(update={"g_co2e_per_kwh": None})})
    assert energy_lines(unknown)[2] == "with the building 15.000 kWh; hosts are not counted"
    assert energy_lines(cost()) == []  # no driver counted anything


def test_time_of_a_knowledge_base_is_said_by_its_parts() -> None:
    assert retrieval_lines(usage("service", row("chat"))) == []
    counts = COUNTS.model_copy(update={"retrieval_us": 90_000_000, "generation_us": 12_000_000})
    found = retrieval_lines(usage("tenant", row("acme").model_copy(update={"tokens": counts})))
    assert found == ["acme: requests spent 1m30s in retrieval and 12 s in generation"]
