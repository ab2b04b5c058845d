"""`cordee top` and `cordee compare`: what they say of the API's answers, at the widths of terminals."""

import io
from typing import Any

import pytest
from rich.console import Console

from cordee.answers.cost import CostRowView, ElectricityView, SplitView
from cordee.answers.files import FilesView
from cordee.answers.jobs import AttemptView, JobDetailView
from cordee.answers.metrics import CurveView, JobCostView, LiveJobView, LiveNodeView, LiveView, MetricsView
from cordee.cli import compare_text, terminal
from cordee.cli.compare import compare
from cordee.cli.compare_text import comparison_page, outcome_rows, print_comparison
from cordee.cli.metrics_text import metrics_table, small_curve
from cordee.cli.top_text import screen
from cordee.compared import ComparedRun, common_curves, differences, labels
from cordee.errors import InputError

S = 1_000_000
NO_TIME = SplitView(**dict.fromkeys(SplitView.model_fields, 0))


def curve(name: str, *values: float | None) -> CurveView:
    return CurveView(name=name, steps=list(range(len(values))), at_us=[0] * len(values), values=list(values))


GRID = ElectricityView(building_factor=1.5, g_co2e_per_kwh=400, sources=[])


def run_of(name: str, *words: str, curves: tuple[CurveView, ...] = (), **spec: Any) -> ComparedRun:
    attempt = {"epoch": 1, "state": "ended", "leases": {"n": [0]}, "placed_us": 5 * S, "ended_us": 65 * S}
    job = JobDetailView(
        job_id=f"{name}-abcdef", name=name, owner="ada", queue="default", tier="standard", gpus=2, gpu_name="H100",
        state="done", why="finished", epoch=1, step=9, checkpoint_step=9, submitted_us=0, ended_us=65 * S,
        attempts=[AttemptView(**attempt, notice_reason=None, outcome="finished", why="", failure=None)],
        spec={"run": ["python", "train.py", *words], "gpus": 2, **spec}, estimate=None, measured=[], estimate_missed=[],
        files=FilesView(files=3, size_bytes=10, commit="c0ffee" * 6, changed=name == "b"),
    )  # fmt: skip
    held = NO_TIME.model_copy(update={"held": 3_500_000})
    row = CostRowView(
        key=job.job_id, attempts=1, gpu_us=NO_TIME, micro_usd=held, lost_by_cause=[], charged_gpu_us=0,
        charged_micro_usd=0, steps=9, steps_repeated=0, tokens=10**6, micro_usd_per_million_tokens=3_500_000,
        price_sources=[], measured=[], energy_mj=NO_TIME,
    )  # fmt: skip
    metrics = MetricsView(job_id=job.job_id, step=9, curves=list(curves), energy_j=None)
    return ComparedRun(
        job, metrics, JobCostView(job_id=job.job_id, at_us=99 * S, row=row, epochs=[], energy_j=None, electricity=GRID)
    )


A = run_of(
    "a", "--lr", "0.1", "--amp", curves=(curve("loss", 4.0, 2.0, None, 1.0), curve("lr", 1.0)), env={"SEED": "1"}
)
B = run_of("b", "--lr=0.2", curves=(curve("loss", 4.0, 3.0), curve("measured/mfu", 0.4)), env={"SEED": "2"}, priority=5)


def test_what_differs_is_said_with_flags_first_and_the_environment_last() -> None:
    found = [(each.name, each.values) for each in differences([A, B])]
    assert found == [
        ("--lr", ("0.1", "0.2")),
        ("--amp", ("yes", None)),
        ("commit", ("c0ffeec0ffee", "c0ffeec0ffee with changes")),
        ("priority", (None, "5")),
        ("env.SEED", ("1", "2")),
    ]
    assert differences([A, A]) == []
    assert common_curves([A, B]) == ["loss"] and common_curves([A]) == ["loss", "lr"]
    assert labels([A, B]) == ["a", "b"] and labels([A, A]) == ["a-abcdef", "a-abcdef"]
    outcome = dict(outcome_rows([A, B]))
    assert (
        outcome["time"] == ["1m", "1m"] and outcome["cost"] == ["$3.50", "$3.50"] and outcome["MFU"] == ["–", "40.0 %"]
    )


def drawn(width: int, monkeypatch: pytest.MonkeyPatch) -> Console:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    for module in (terminal, compare_text.terminal):
        monkeypatch.setattr(module, "stdout", lambda: console)
    return console


@pytest.mark.parametrize("width", [80, 120])
def test_a_comparison_fits_the_terminal_and_its_curves_share_their_axes(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = drawn(width, monkeypatch)
    print_comparison([A, B])
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    assert "--lr" in text and "$3.50" in text
    assert small_curve(A.metrics.curves[0], 4, (0, 3, 1.0, 4.0)) == "█▃×▁"
    assert small_curve(B.metrics.curves[0], 4, (0, 3, 1.0, 4.0)) == "█▆", "a shorter run ends earlier"


def test_the_page_has_the_charts_and_escapes_what_users_wrote() -> None:
    evil = run_of("b", "--note", "<script>", curves=(curve("loss", 4.0, 3.0), curve("gone", None)))
    page = comparison_page([A, evil])
    assert page.count("<svg") >= 2 and "&lt;script&gt;" in page and "<script>" not in page
    assert page == comparison_page([A, evil])


@pytest.mark.parametrize("names", [["a"], list("abcdefghi")])
def test_too_few_and_too_many_jobs_are_refused(names: list[str]) -> None:
    with pytest.raises(InputError, match=f"{len(names)} jobs cannot be compared"):
        compare(names)


JOB = LiveJobView(
    job_id="llama-3-8b-pretrain-abcdef", name="llama", owner="ada", state="running", why="", gpus=16, gpu_name="H100",
    step=123_456, steps_total=500_000, left_us=86_400 * 7 * S, loss=2.3456, lost_loss=False, tokens_per_s=123_456.0,
    mfu=0.41, busy=0.998, memory_bytes=72 * 10**9, power_w=9_800.0, micro_usd_per_hour=48_000_000,
    micro_usd=1_234_567_890,
)  # fmt: skip
NAN = JOB.model_copy(update={"job_id": "nan-abcdef", "loss": None, "lost_loss": True})
WAITS = LiveJobView(
    **dict.fromkeys(LiveJobView.model_fields)
    | {"job_id": "next-abcdef", "name": "next", "owner": "bob", "state": "queued", "why": "", "gpus": 8}
    | {"lost_loss": False, "micro_usd_per_hour": 0, "micro_usd": 0}
)
NODE = LiveNodeView(
    name="gpu-1", up=True, gpu_name="NVIDIA H100 80GB HBM3", gpus=8, held=8, unavailable=0, busy=0.99,
    memory_bytes=72 * 10**9, power_w=4_900.0,
)  # fmt: skip


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_of_top_fits_the_terminal(width: int) -> None:
    live = LiveView(at_us=1, nodes=[NODE, NODE], jobs=[JOB, NAN, WAITS], micro_usd_per_hour=96_000_000)
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(screen(live, console))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    for word in (
        "16 of 16 GPUs held, 2 jobs running, 1 waiting, $96.00 an hour",
        "2.3456",
        "123k",
        "41 %",
        "100 %",
        "–",
    ):
        assert word in text, word
    assert "not finite" in text and "utilisation" in text and "MFU" in text
    console.print(screen(live, console, 1))
    assert "and 2 jobs more" in console.file.getvalue()  # type: ignore[attr-defined]


def test_metrics_of_a_job_are_a_table() -> None:
    console = Console(width=100, file=io.StringIO(), color_system=None)
    console.print(metrics_table(A.metrics, 100))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "loss" in text and "▃×▁" in text
