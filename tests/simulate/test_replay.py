"""A log decided again comes out as it is, record for record, unless it was not decided by these rules."""

from dataclasses import replace

import pytest
from crowded_world import crowded

from cordee.events import AttemptEnded, JobEnded, JobSubmitted, NodeDown, ServerUp
from cordee.schedule.policy import NAMED, Policy
from cordee.simulate.observed import newest, observe
from cordee.simulate.replay import audit, measure_log, replay


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", ["cordee", "fifo", "las"])
def test_every_moment_of_a_log_is_decided_again_as_it_was(seed: int, policy: str) -> None:
    log = crowded(seed, policy=NAMED[policy], defer_reports=bool(seed % 2)).log
    found = audit(log, NAMED[policy])
    assert found.differences == (), f"replay: crowded({seed}, policy=NAMED[{policy!r}], defer_reports={bool(seed % 2)})"
    assert found.moments > 40 and found.decisions > 100


def test_a_log_is_decided_again_with_the_patience_that_it_says() -> None:
    rules = replace(Policy(), time_slice_us=0)  # two time slices are the least patience
    log = list(crowded(1, policy=replace(rules, patience=0.001)).log)
    assert isinstance(log[0], ServerUp) and log[0].patience is None
    assert audit(log, rules).differences, "without it the decisions are others"
    log[0] = replace(log[0], patience=0.001)
    assert audit(log, rules).differences == ()


def test_a_decision_that_these_rules_would_not_make_is_found() -> None:
    log = list(crowded(1).log)
    number = next(at for at, event in enumerate(log) if isinstance(event, AttemptEnded))
    log[number] = replace(log[number], why="a whim")
    (first, *_) = audit(log, Policy()).differences
    assert first.number <= number + 1 <= first.number + len(first.logged)
    assert len(audit(crowded(1, policy=NAMED["fifo"]).log, NAMED["las"]).differences) > 0


def test_the_same_jobs_arrive_and_the_same_nodes_go() -> None:
    log = crowded(2).log
    seen = observe(log)
    arrived = [(event.at_us, event.job.job_id) for event in log if isinstance(event, JobSubmitted)]
    assert [(each.at_us, each.job.job_id) for each in seen.submissions()] == arrived
    gone = sorted((event.at_us, event.node) for event in log if isinstance(event, NodeDown))
    assert sorted((each.at_us, each.nodes[0]) for each in seen.outages) == gone
    was, same = measure_log(seen), replay(seen, Policy())
    assert (was.summary.jobs, was.summary.ended, same.summary.jobs, same.errors) == (40, 40, 40, 0)
    assert same.summary.useful_gpu_us == pytest.approx(was.summary.useful_gpu_us, rel=0.02)


def test_jobs_that_had_ended_before_the_newest_part_are_not_in_it_at_all() -> None:
    """Their submissions alone would be jobs without an end, which hold GPUs for ever."""
    log = crowded(2).log
    lasts_us = (log[-1].at_us - log[0].at_us) // 3
    ended = {event.job_id for event in log if isinstance(event, JobEnded) and event.at_us < log[-1].at_us - lasts_us}
    jobs = {each.job.job_id for each in observe(newest(log, lasts_us)).jobs}
    assert ended and jobs == {each.job.job_id for each in observe(log).jobs} - ended


def test_an_undisturbed_log_is_replayed_to_the_microsecond() -> None:
    from cordee.simulate.cluster import cluster
    from cordee.simulate.run import run
    from cordee.simulate.synthetic import Synthetic
    from cordee.simulate.traces import Tally
    from cordee.simulate.workload import Costs, submissions

    nodes = cluster("4x8")
    drawn = Synthetic(jobs=80, sizes=((1, 5), (4, 3), (8, 2))).at_load(32, 1.5, 1)
    given = submissions(drawn.draw(1), nodes, Tally("x"), costs=Costs())
    log = run(nodes, given, policy=NAMED["fit"], defer_reports=True).log
    seen = observe(log)
    again = replay(seen, NAMED["fit"])
    assert again.waits_us == measure_log(seen).waits_us
    assert max(again.waits_us.values()) > 0
    assert again.waits_us != replay(seen, NAMED["fifo"]).waits_us
