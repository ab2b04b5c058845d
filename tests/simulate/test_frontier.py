"""The frontier of patience: names with a patience, weeks drawn again, and the policy at the knee."""

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from cordee.cli.main import main
from cordee.errors import InputError
from cordee.schedule.policy import NAMED
from cordee.simulate.cluster import cluster
from cordee.simulate.compare import Result, Scenario, simulate
from cordee.simulate.frontier import DAY_US, FRONTIER, Recommendation, knee, recommendation, resampled
from cordee.simulate.policies import named_policies
from cordee.simulate.synthetic import Synthetic
from cordee.simulate.traces import Tally


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
        assert moved_us % (block_days * DAY_US) == 0 and job.submit_us // (block_days * DAY_US) == int(index)
        assert (job.gpus, job.duration_us) == (jobs[name].gpus, jobs[name].duration_us)
    windowed = replace(given, window_us=(2 * DAY_US, 5 * DAY_US))
    names = {job.job_id.partition("-")[2] for job in resampled(windowed, 0).jobs(given.tally())}
    assert names <= {name for name, job in jobs.items() if 2 * DAY_US <= job.submit_us < 5 * DAY_US}


def results(**figures: tuple[float, float]) -> list[Result]:
    """Results with these mean times to the end and longest times away."""
    done = simulate(replace(scenario(1), limit=2), named_policies(["fifo"])[0])
    found = []
    for name, (jct_s, away_s) in figures.items():
        (named,) = named_policies([name.replace("_", ":")])
        spreads = {"jct_s": replace(done.summary.jct_s, mean=jct_s), "away_s": replace(done.summary.away_s, max=away_s)}
        found.append(replace(done, policy=named, summary=replace(done.summary, **spreads)))
    return found


def test_the_knee_is_the_shortest_time_away_among_nearly_the_shortest_means() -> None:
    assert knee(results(cordee_1=(100, 50), cordee_2=(104, 20), cordee_4=(106, 10))) == "cordee:2"
    assert knee(results(easy=(50, 1), cordee_1=(100, 50), fifo=(104, 20))) == "fifo", "easy knows the run times"
    trace = results(cordee_1=(100, 50), cordee_2=(104, 20))
    samples = [results(cordee_1=(90, 40), cordee_2=(120, 10)), results(cordee_1=(110, 60), cordee_2=(111, 30))]
    told = recommendation(trace, samples, 7)
    assert (told.policy, told.chosen, told.samples) == ("cordee:2", 1, 2)
    (_, cost) = told.costs
    assert (cost.jct_s.value, cost.jct_s.low, cost.jct_s.high) == (104, 104, 120)
    assert (cost.away_s.low, cost.away_s.high) == (10, 30)


def test_recommend_says_which_policy_and_what_each_would_have_cost(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "synthetic", "--jobs", "60", "--load", "1.2", "--cluster", "2x8", "--recommend", "--samples=2"]
    with pytest.raises(SystemExit) as left:
        main([*words, "--json"])
    assert not left.value.code
    told = TypeAdapter(Recommendation).validate_python(json.loads(capsys.readouterr().out))
    assert [each.policy for each in told.costs] == list(FRONTIER) and told.policy in FRONTIER
    assert all(each.jct_s.low <= each.jct_s.value <= each.jct_s.high for each in told.costs)
    with pytest.raises(SystemExit) as left:
        main(words)
    printed = capsys.readouterr().out
    assert f"recommended: {told.policy}" in printed and not left.value.code
    assert max(map(len, printed.splitlines())) <= 80
