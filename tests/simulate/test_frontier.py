"""The frontier of patience: names with a patience, blocks drawn again, the policy at the knee, and how sure it is."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from cordee.cli.main import main
from cordee.errors import InputError
from cordee.schedule.policy import NAMED
from cordee.simulate.answer import PolicyComparison, comparison
from cordee.simulate.cluster import cluster
from cordee.simulate.compare import Result, Scenario, simulate
from cordee.simulate.frontier import (
    DAY_US,
    FRONTIER,
    Recommendation,
    block_us,
    recommendation,
    resampled,
    samples_for,
    sentences,
)
from cordee.simulate.knee import RULE, SAME, knee
from cordee.simulate.metrics import Lost
from cordee.simulate.policies import named_policies
from cordee.simulate.synthetic import Synthetic
from cordee.simulate.traces import Tally
from cordee.units import US_PER_HOUR


def scenario(days: int) -> Scenario:
    """Ten jobs a day."""

    def read(tally: Tally) -> Any:
        for index, job in enumerate(Synthetic(jobs=10 * days).draw(1)):
            tally.jobs += 1
            yield replace(job, submit_us=index * DAY_US // 10)

    return Scenario(jobs=read, name="days", nodes=cluster("2x8"))


def test_a_policy_of_cordees_own_takes_a_patience() -> None:
    one, other = named_policies(["cordee", "cordee:2"])
    assert (one.name, one.policy) == ("cordee", NAMED["cordee"])
    assert (other.name, other.policy) == ("cordee:2", replace(NAMED["cordee"], patience=2.0))
    for text in ("fifo:2", "cordee:", "cordee:0", "cordee:long", "cordee:nan"):
        with pytest.raises(InputError, match="no policy with a patience"):
            named_policies([text])


@pytest.mark.parametrize(("days", "block_days"), [(35, 7), (10, 1)])
def test_weeks_or_the_days_of_a_short_trace_are_drawn_again_with_their_times_of_day(days: int, block_days: int) -> None:
    given = scenario(days)
    jobs = {job.job_id: job for job in given.jobs(given.tally())}
    drawn = list(resampled(given, 3).jobs(given.tally()))
    assert drawn == list(resampled(given, 3).jobs(given.tally())) != list(resampled(given, 4).jobs(given.tally()))
    assert [job.submit_us for job in drawn] == sorted(job.submit_us for job in drawn)
    assert len({job.job_id for job in drawn}) == len(drawn)
    for job in drawn:
        index, _, name = job.job_id.partition("-")
        moved_us = job.submit_us - jobs[name].submit_us
        assert moved_us % DAY_US == 0 and job.submit_us // (block_days * DAY_US) == int(index)
        assert (job.gpus, job.duration_us) == (jobs[name].gpus, jobs[name].duration_us)
    windowed = replace(given, window_us=(2 * DAY_US, 5 * DAY_US))
    names = {job.job_id.partition("-")[2] for job in resampled(windowed, 0).jobs(given.tally())}
    assert names <= {name for name, job in jobs.items() if 2 * DAY_US <= job.submit_us < 5 * DAY_US}


def test_a_trace_of_hours_is_drawn_in_eighths_that_begin_at_any_time() -> None:
    """Once it was one block of a day: every resampled trace was the trace itself."""
    given = replace(scenario(10), window_us=(0, DAY_US))
    jobs = {job.job_id: job for job in given.jobs(given.tally())}
    span_us = 9 * DAY_US // 10
    assert block_us(given) == span_us // 8
    for seed in range(5):
        drawn = list(resampled(given, seed).jobs(given.tally()))
        names = [job.job_id.partition("-")[2] for job in drawn]
        assert (
            names != list(jobs)[: len(names)]
            and set(names) <= set(jobs)
            and len({job.job_id for job in drawn}) == len(drawn)
        )
        for job, name in zip(drawn, names, strict=True):
            index = int(job.job_id.partition("-")[0])
            assert index * block_us(given) <= job.submit_us < (index + 1) * block_us(given)
            assert job.gpus == jobs[name].gpus


def test_every_day_of_a_trace_is_drawn_and_no_block_is_empty_behind_its_end() -> None:
    """Once a block began only at a whole week: of 38 days the last three were never drawn."""
    given = replace(scenario(38), nodes=cluster("8x8"))
    drawn = [list(resampled(given, seed).jobs(given.tally())) for seed in range(40)]
    names = {job.job_id.partition("-")[2] for jobs in drawn for job in jobs}
    assert "job-380" in names and "job-1" in names
    assert {len(jobs) for jobs in drawn} == {10 * 35}


def test_one_job_can_be_drawn() -> None:
    (job,) = resampled(replace(scenario(1), limit=1), 0).jobs(scenario(1).tally())
    assert job.job_id == "0-job-1"


@pytest.fixture(scope="module")
def some() -> Result:
    """A result whose figures are replaced."""
    return simulate(replace(scenario(1), limit=2), named_policies(["fifo"])[0])


NAMES = {"half": "cordee:0.5", "one": "cordee:1", "two": "cordee:2", "las": "2d-las", "no_notice": "no-notice"}


def results(some: Result, **figures: tuple[float, float, float, float]) -> list[Result]:
    """Results with these mean times to the end, p99 slowdowns, longest times away and GPU-hours lost."""
    found = []
    for name, (jct_s, slowdown, away_s, lost) in figures.items():
        (named,) = named_policies([NAMES.get(name, name)])
        summary = replace(
            some.summary,
            jct_s=replace(some.summary.jct_s, mean=jct_s),
            slowdown_p99=slowdown,
            away_s=replace(some.summary.away_s, max=away_s),
            lost=(Lost(cause="move", redone_gpu_us=round(lost * US_PER_HOUR), save_gpu_us=0, micro_usd=0),),
        )
        found.append(replace(some, policy=named, summary=summary))
    return found


def chosen(found: list[Result]) -> str | None:
    return knee([(each.policy, each.summary) for each in found])


def told(trace: list[Result], samples: list[list[Result]]) -> Recommendation:
    given = scenario(1)
    return recommendation(comparison(given, given.tally(), 2, trace), trace, samples, DAY_US)


def test_the_knee_weighs_slowdown_time_away_and_losses_among_nearly_the_shortest_means(some: Result) -> None:
    base = (100.0, 10.0, 5000.0, 20.0)
    for better in ((104.0, 5.0, 5000.0, 20.0), (104.0, 10.0, 2500.0, 20.0), (104.0, 10.0, 5000.0, 10.0)):
        assert chosen(results(some, one=base, two=better)) == "cordee:2"
        assert chosen(results(some, one=base, two=(106.0, *better[1:]))) == "cordee:1", "its mean is longer"
    assert chosen(results(some, one=base, two=(99.0, *base[1:]))) == "cordee:2", "the shorter mean of two"
    assert chosen(results(some, one=base, two=base)) == "cordee:1", "the first of two"
    assert chosen(results(some, one=base, half=base)) == "cordee:0.5", "of equals the default"
    free = (100.0, 10.0, 0.0, 0.0)
    assert chosen(results(some, one=free, two=(100.0, 9.0, 50.0, 0.9))) == "cordee:2", "as good as none"
    peers = dict.fromkeys(("easy", "las", "fgd", "no_notice"), (50.0, 1.0, 1.0, 0.0))
    assert chosen(results(some, **peers, one=base)) == "cordee:1", "no server runs the others"
    assert chosen(results(some, **peers)) is None
    none = [replace(each, summary=replace(each.summary, jct_s=None)) for each in results(some, one=free)]
    assert chosen([*none, *results(some, two=base)]) == "cordee:2" and chosen(none) is None, "no job ended"


def test_costs_have_a_spread_and_differences_on_the_same_samples(some: Result) -> None:
    trace = results(some, easy=(50, 1, 1, 0), half=(100, 10, 5000, 20), two=(104, 5, 5000, 20))
    samples = [
        results(some, half=(10.0 * index, 10, 5000, 0), two=(10.2 * index, 5, 5000, 20)) for index in range(1, 12)
    ]
    answer = told(trace, samples)
    assert (answer.policy, answer.clear, answer.other, answer.baseline) == (
        "cordee:2",
        False,
        "cordee:0.5",
        "cordee:0.5",
    )
    easy, half, two = answer.costs
    assert easy.chosen is None and easy.jct_s.low is None and easy.jct_s.over == 0.5
    assert (half.chosen, two.chosen) == (11, 0)
    assert (half.jct_s.value, half.jct_s.low, half.jct_s.high) == (100, 20, 100)
    assert two.jct_s.over == 1.04 and two.jct_s.over_low == pytest.approx(1.02) == two.jct_s.over_high
    assert (two.lost_gpu_hours.over, two.lost_gpu_hours.over_low) == (1.0, None), "nothing is no multiple of nothing"
    lines = sentences(answer)
    assert lines[:2] == ["no clear winner: cordee:2 or cordee:0.5", "11 resampled traces: 11 for cordee:0.5"]
    assert f"rule: {RULE}" in lines


def test_a_winner_of_half_the_samples_is_recommended(some: Result) -> None:
    wins = results(some, half=(100, 10, 5000, 20), two=(104, 5, 5000, 20))
    loses = results(some, half=(100, 10, 5000, 20), two=(106, 5, 5000, 20))
    answer = told(wins, [wins, loses])
    assert (answer.policy, answer.clear, answer.other) == ("cordee:2", True, None)
    assert sentences(answer)[0] == "recommended: cordee:2, in 1 of 2 resampled traces as well"
    assert "a server takes it by: cordee up --patience 2" in sentences(answer)
    assert not told(wins, [wins, loses, loses]).clear
    same = results(some, half=(100, 10, 5000, 20), two=(100, 10, 5000, 20))
    assert sentences(told(same, [same]))[0].startswith("all patiences give the same figures")
    assert not any("recommended" in line or "cordee up" in line for line in sentences(told(same, [same])))
    assert (samples_for(50), samples_for(1_000), samples_for(100_000)) == (20, 10, 4)


def test_the_default_and_other_policies_are_told_in_words_beside_the_recommended_one(some: Result) -> None:
    trace = results(
        some, half=(103, 10, 5000, 30), two=(100, 5, 5000, 20), las=(101, 50, 7500, 10), easy=(100.2, 5, 0, 0)
    )
    default, las, easy = (line for line in sentences(told(trace, [trace])) if "beside" in line)
    assert default == (
        "cordee:0.5, beside cordee:2: mean JCT 3 % longer, p99 slowdown 100 % higher, longest time away the same,"
        " 10.0 more GPU-hours lost ($0)"
    )
    assert las == (
        "2d-las, beside cordee:2: mean JCT 1 % longer, p99 slowdown 10 times as high, longest time away 50 % longer,"
        " 10.0 fewer GPU-hours lost ($0)"
    )
    assert easy.startswith("easy, which knows the run times, beside cordee:2: mean JCT the same, p99 slowdown the same")
    assert "longest time away shorter, 20.0 fewer" in easy


def test_patiences_that_give_the_same_are_told_so_and_the_axes_of_near_points_have_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One line in place of the same one for each policy; once an axis from 7 to 16 hours had no number."""
    page = tmp_path / "page.html"
    policies = ("--policy", "cordee,cordee:4,cordee:8,easy")
    printed = said(capsys, "--load", "0.6", "--frontier", *policies, "--html", str(page))
    best = re.findall(r"shortest mean JCT: ([^<]+)<", page.read_text())
    said(capsys, "--policy", "srsf,fifo", "--html", str(tmp_path / "other.html"))
    best += re.findall(r"shortest mean JCT: ([^<]+)<", (tmp_path / "other.html").read_text())
    assert best == ["cordee", "srsf, which knows the run times"]
    assert SAME in printed and printed.count("lost by time-slice") == 1
    assert "cordee, cordee:4, cordee:8 lost by time-slice" in printed
    drawn = page.read_text().partition("The frontier</h2>")[2].partition("</svg>")[0]
    ticks = re.findall(r'class="tick"[^>]*>([^<]+)<', drawn)
    across = re.findall(r'class="tick"[^>]*text-anchor="middle">([^<]+)<', drawn)
    assert len(across) >= 2 and len(ticks) - len(across) >= 2 and "default (knee), 4, 8" in drawn


SHORT = ["simulate", "synthetic", "--jobs", "60", "--load", "1.2", "--cluster", "2x8"]
TWO = ["--policy", "cordee:0.5,cordee:8,2d-las"]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        main([*SHORT, *words])
    assert not left.value.code
    return capsys.readouterr().out


def test_recommend_says_which_policy_and_what_each_would_have_cost(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page, drawn = tmp_path / "page.html", tmp_path / "attempts.json"
    files = ["--html", str(page), "--chrome-trace", str(drawn)]
    answer = TypeAdapter(Recommendation).validate_python(
        json.loads(said(capsys, "--recommend", "--samples=3", *TWO, "--json", *files))
    )
    assert [each.policy for each in answer.costs] == ["cordee:0.5", "cordee:8", "2d-las"]
    assert (answer.samples, answer.compared.jobs, answer.compared.gpus) == (3, 60, 16)
    assert all(
        low is not None and low < high for low, high in [(each.jct_s.low, each.jct_s.high) for each in answer.costs[:2]]
    )
    assert "Recommendation</h2>" in page.read_text() and json.loads(drawn.read_text())
    printed = said(capsys, "--recommend", "--samples=3", *TWO)
    assert sentences(answer)[0] in printed and "60 synthetic jobs: 60 jobs on 2 nodes, 16 GPUs" in printed
    assert "left out" not in printed, "no job that is too large is drawn"
    lines = [line for line in printed.splitlines() if ", beside " not in line]  # sentences wrap
    rows = [line for line in lines if line.startswith(("POLICY", "cordee")) or "–" in line]
    assert len(rows) > 4 and max(map(len, rows)) <= 74, "a terminal adds six characters of its frame"


def test_the_frontier_has_its_four_figures_a_knee_and_a_drawing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    printed = said(capsys, "--frontier", "--html", str(page))
    head, *rows = printed.splitlines()[1 : len(FRONTIER) + 2]
    assert head.split("  ")[0] == "POLICY" and all(
        name in head for name in ("MEAN JCT", "P99 SLOWDOWN", "AWAY MAX", "LOST GPU-H")
    )
    assert [row.split()[0].rstrip("*<") for row in rows] == list(FRONTIER) and sum("<" in row for row in rows) == 1
    assert f"< the knee: {RULE}" in printed
    text = page.read_text()
    assert "The frontier</h2>" in text and " (knee)" in text and all(f">{name}<" in text for name in ("2d-las", "srsf"))
    answer = TypeAdapter(PolicyComparison).validate_python(json.loads(said(capsys, "--frontier", *TWO, "--json")))
    assert (
        answer.knee in ("cordee:0.5", "cordee:8")
        and answer.rule == RULE
        and [each.policy for each in answer.policies][2] == "2d-las"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--frontier --recommend", "--recommend compares the policies of --frontier as well"),
        ("--samples 3", "--samples needs --recommend"),
        ("--recommend --until 1s", "no job ended"),
        ("--load nan", "--load nan is no load"),
        ("--diurnal 5", "--diurnal 5 is no variation"),
        ("--frontier --samples 3", "--samples needs --recommend"),
        ("--recommend --policy cordee:-1", "no policy with a patience"),
        ("--frontier --policy fifo,2d-las", "none of the policies is cordee with a patience"),
        ("--recommend --requests synthetic --service chat.yaml", "--recommend does not work with --requests"),
        ("--chrome-trace x --requests synthetic --service chat.yaml", "--chrome-trace does not work with --requests"),
    ],
)
def test_options_that_would_be_ignored_are_refused(capsys: pytest.CaptureFixture[str], words: str, says: str) -> None:
    with pytest.raises(SystemExit) as left:
        main([*SHORT, *words.split()])
    printed = capsys.readouterr().err
    assert left.value.code == 10 and says in printed and "hint: " in printed
