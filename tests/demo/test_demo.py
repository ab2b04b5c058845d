"""Every claim of the demo fails loudly on false input, and reports what it measured on true input."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cordee.cli import demo
from cordee.cli.demo_text import Terminal
from cordee.control.spawn import is_owned
from cordee.demo import claims
from cordee.demo.costs import leased_gpu_us
from cordee.demo.narrator import Narrator
from cordee.demo.stage import stage
from cordee.errors import ClaimError, InputError, MissingExtraError
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    Event,
    JobEnded,
    Lease,
    NoticeGiven,
    NoticeReason,
    Outcome,
    RankLeft,
    RanksEnded,
    Restored,
)
from cordee.ids import JobId
from cordee.view.report import Claim
from cordee.workload.spec import JobSpec

GPT, EVAL = JobId("gpt-aaaaaa"), JobId("eval-bbbbbb")
S = 1_000_000


def placed(job_id: JobId, epoch: int, at_s: int, gpus: int = 4) -> AttemptPlaced:
    return AttemptPlaced(
        at_us=at_s * S, job_id=job_id, epoch=epoch, leases=(Lease(node="local", gpus=tuple(range(gpus))),)
    )


def ended(job_id: JobId, epoch: int, at_s: int, outcome: Outcome) -> AttemptEnded:
    return AttemptEnded(at_us=at_s * S, job_id=job_id, epoch=epoch, outcome=outcome, why="")


def left(rank: int, step: int = 40, how: str = "checkpointed") -> RankLeft:
    return RankLeft(at_us=14 * S, job_id=GPT, epoch=1, rank=rank, how=how, step=step)


NOTICE = NoticeGiven(at_us=10 * S, job_id=GPT, epoch=1, reason=NoticeReason.PREEMPT, deadline_us=40 * S, for_job=EVAL)


def story() -> list[Event]:
    return [
        placed(GPT, 1, 0),
        NOTICE,
        *(left(rank) for rank in range(4)),
        ended(GPT, 1, 15, Outcome.CHECKPOINTED),
        placed(EVAL, 1, 15),
        ended(EVAL, 1, 25, Outcome.FINISHED),
        placed(GPT, 2, 25),
        Restored(at_us=27 * S, job_id=GPT, epoch=2, step=40, generation=3),
        ended(GPT, 2, 35, Outcome.FINISHED),
        JobEnded(at_us=35 * S, job_id=GPT, state="done", why="finished"),
    ]


def but(change: Callable[[Event], Event | None]) -> list[Event]:
    """The story with some events changed, or taken out."""
    return [changed for event in story() if (changed := change(event)) is not None]


TRUE: list[Callable[[], Claim]] = [
    lambda: claims.parameters("70B", 70_553_706_496, 70_553_706_496),
    lambda: claims.weight("1.129 TB", 1_128_859_303_936, "1.129 TB"),
    lambda: claims.holds_the_state({"fsdp64": 1_000_000, "dp64": 64_000_000}, 1_000_000),
    lambda: claims.whole_gang(story(), GPT, 4, {1: 4, 2: 4}),
    lambda: claims.preempted_for(story(), GPT, EVAL),
    lambda: claims.left_together(story(), GPT, 4),
    lambda: claims.none_overlapped(story(), GPT, EVAL),
    lambda: claims.resumed_by_itself(story(), GPT),
    lambda: claims.no_step_repeated({0: [0, 1, 2], 1: [0, 1, 2]}, 2, 3),
    lambda: claims.same_bits({"w": "aa"}, {"w": "aa"}),
    lambda: claims.adds_up({"useful": 5, "lost": 2}, 7, 7),
]


def without(kind: type) -> list[Event]:
    return but(lambda event: None if isinstance(event, kind) else event)


def rank_three(how: str = "checkpointed", step: int = 40) -> list[Event]:
    return but(lambda event: left(3, step, how) if event == left(3) else event)


def late(event: Event) -> Event:
    return replace(event, at_us=41 * S) if event == ended(GPT, 1, 15, Outcome.CHECKPOINTED) else event


FALSE: dict[str, Callable[[], Claim]] = {
    "a parameter less": lambda: claims.parameters("70B", 70_553_706_495, 70_553_706_496),
    "a heavier bill": lambda: claims.weight("1.129 TB", 1_130_000_000_000, "1.129 TB"),
    "a layout left a part out": lambda: claims.holds_the_state({"a": 900_000, "b": 2_000_000}, 1_000_000),
    "three ranks came up": lambda: claims.whole_gang(story(), GPT, 4, {1: 4, 2: 3}),
    "placed on three GPUs": lambda: claims.whole_gang([placed(GPT, 1, 0, gpus=3)], GPT, 4, {1: 4}),
    "never placed": lambda: claims.whole_gang([], GPT, 4, {}),
    "no notice": lambda: claims.preempted_for(without(NoticeGiven), GPT, EVAL),
    "notice for somebody else": lambda: claims.preempted_for(story(), GPT, JobId("other-cccccc")),
    "two notices": lambda: claims.preempted_for([*story(), replace(NOTICE, epoch=2)], GPT, EVAL),
    "a rank left elsewhere": lambda: claims.left_together(rank_three(step=41), GPT, 4),
    "a rank aborted": lambda: claims.left_together(rank_three(how="aborted"), GPT, 4),
    "a rank said nothing": lambda: claims.left_together(but(lambda event: None if event == left(3) else event), GPT, 4),
    "too late": lambda: claims.left_together(but(late), GPT, 4),
    "killed": lambda: claims.left_together(
        but(lambda event: replace(event, outcome=Outcome.KILLED) if event == story()[6] else event), GPT, 4
    ),
    "two gangs at once": lambda: claims.none_overlapped(without(AttemptEnded), GPT, EVAL),
    "restored elsewhere": lambda: claims.resumed_by_itself(
        but(lambda event: replace(event, step=30) if isinstance(event, Restored) else event), GPT
    ),
    "not done": lambda: claims.resumed_by_itself(without(JobEnded), GPT),
    "a step twice": lambda: claims.no_step_repeated({0: [0, 1, 1, 2]}, 1, 3),
    "a step missing": lambda: claims.no_step_repeated({0: [0, 2]}, 1, 3),
    "a rank without a trace": lambda: claims.no_step_repeated({0: [0, 1, 2]}, 2, 3),
    "steps out of order": lambda: claims.no_step_repeated({0: [0, 2, 1]}, 1, 3),
    "another bit": lambda: claims.same_bits({"w": "aa", "b": "cc"}, {"w": "aa", "b": "cd"}),
    "a tensor missing": lambda: claims.same_bits({"w": "aa"}, {"w": "aa", "b": "cd"}),
    "nothing to compare": lambda: claims.same_bits({}, {}),
    "a microsecond over": lambda: claims.adds_up({"useful": 5, "lost": 3}, 7, 7),
    "held but not leased": lambda: claims.adds_up({"useful": 7}, 7, 6),
    "nothing held": lambda: claims.adds_up({}, 0, 0),
}


@pytest.mark.parametrize("claim", TRUE)
def test_what_is_true_holds_and_says_what_was_measured(claim: Callable[[], Claim]) -> None:
    found = claim()
    assert found.holds
    assert any(char.isdigit() for char in found.measured) or "preempt" in found.measured


@pytest.mark.parametrize("name", FALSE)
def test_what_is_false_fails_loudly(name: str) -> None:
    with pytest.raises(ClaimError, match="does not hold") as raised:
        FALSE[name]()
    assert raised.value.exit_code == 80
    assert raised.value.hint


def test_a_job_that_fails_ends_the_demo_with_its_last_lines_and_leaves_nothing_behind() -> None:
    printed = io.StringIO()
    screen = Terminal(Console(file=printed, width=80))
    homes = []
    with (
        pytest.raises(ClaimError, match="ended as failed") as raised,
        stage(screen, keep=False, price_as="H100", ranks=4) as stood,
    ):
        homes.append(stood.home)
        run = [sys.executable, "-c", "print('the disk of rank 7 is on fire'); raise SystemExit(3)"]
        spec = JobSpec.from_flags(run=run, gpus="4", name="broken", launch="rank", cwd=str(stood.home))
        job_id = stood.submit(spec)
        stood.follow(lambda event: isinstance(event, JobEnded) and event.job_id == job_id, "it runs")
    assert "the disk of rank 7 is on fire" in str(raised.value.hint)
    assert "broken is queued" in printed.getvalue()
    assert not homes[0].exists()
    assert not is_owned(homes[0])


def test_the_screen_degrades_where_the_terminal_shows_only_ascii() -> None:
    raw = io.BytesIO()
    screen = Terminal(Console(file=io.TextIOWrapper(raw, encoding="ascii", errors="strict"), width=80))
    narrator = Narrator(screen)
    with narrator.part("The memory", "A lead."):
        narrator.claim(Claim("it holds", "1 = 1"))
        screen.line(1.25, "something happened")
        screen.amounts([("a", 1.0, "$1")])
        narrator.note("A note.")
    screen.console.file.flush()
    lines = raw.getvalue().decode("ascii").splitlines()
    assert max(map(len, lines)) <= 80
    assert any("ok it holds" in line for line in lines)
    assert [section.title for section in narrator.sections] == ["The memory"]
    assert narrator.sections[0].notes == ("A note.",)


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "NEEDS", ("no_such_library",))
    with pytest.raises(MissingExtraError, match="needs no_such_library") as raised:
        demo.demo(out=tmp_path / "report.html", keep=False)
    assert raised.value.exit_code == 70
    assert not list(tmp_path.iterdir())


def test_a_report_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InputError, match="cannot be written") as raised:
        demo.demo(out=tmp_path / "file" / "report.html", keep=False)
    assert raised.value.hint
    with pytest.raises(InputError, match="Is a directory"):
        demo.demo(out=tmp_path, keep=False)


def test_what_was_leased_is_counted_from_the_log_alone() -> None:
    def freed(at_s: int, node: str) -> RanksEnded:
        return RanksEnded(at_us=at_s * S, job_id=GPT, epoch=1, node=node, outcome=Outcome.FINISHED)

    leases = (Lease(node="a", gpus=(0, 1)), Lease(node="b", gpus=(5,)))
    log = [
        AttemptPlaced(at_us=10 * S, job_id=GPT, epoch=1, leases=leases),
        freed(12, "a"),
        freed(17, "b"),
        freed(19, "b"),
    ]
    assert leased_gpu_us(log) == (2 * 2 + 1 * 7) * S


@pytest.mark.gang
@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("ranks", "steps"), [(2, 60), (4, 100)], ids=["small", "whole"])
def test_the_story_holds_and_is_written_down(tmp_path: Path, ranks: int, steps: int) -> None:
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "cordee", "demo", "--out", str(tmp_path / "report.html")),
            *("--ranks", str(ranks), "--steps", str(steps)),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONUTF8": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert f"0 repeated, 0 missing of {steps} steps on each of {ranks} ranks" in done.stdout
    assert f"0 of {ranks} SHA-256 digests differ" in done.stdout
    assert "$8,993.92" in done.stdout
    assert f"{ranks}, then {ranks // 2}, then {ranks} ranks" in done.stdout
    assert "0 failed, 0 differ" in done.stdout
    html = (tmp_path / "report.html").read_text()
    assert html.count('<li class="holds">') == done.stdout.count("✓") == 30
    assert html.count('class="slots"') == 1
    assert '<li class="fails">' not in html
    assert not list((tmp_path / "tmp").glob("cordee-demo-*")), "the temporary home is gone"
