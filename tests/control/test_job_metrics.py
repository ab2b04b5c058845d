"""The metrics of jobs over the API: their curves, their cost by epoch, what is live, and jobs that were retired."""

import pytest
from api_scene import SPEC, Api
from stage import GPT

from cordee.control.snapshot import encoded_curves, encoded_jobs, taken
from cordee.errors import NotFoundError
from cordee.events import GpusSampled, Measured, MetricsLogged, Outcome, Reported, Restored, SpanClass

S = 1_000_000


@pytest.fixture
def job(api: Api) -> Api:
    api.client.submit(SPEC, job_id=GPT)
    api.scene.control.tick()
    return api


def train(api: Api) -> None:
    """Report two epochs of ten seconds each."""
    agents, start_us = api.scene.agents, api.scene.time.us
    scope = {"job_id": GPT, "epoch": 1}

    def report(kind: type, **fields: object) -> None:
        agents.report(kind(at_us=api.scene.time.us, **scope, **fields), f"{GPT}.1/rank0")

    report(Restored, step=0, generation=None)
    for epoch in (0, 1):
        names, steps = ("loss", "loss", "epoch"), (10 * epoch + 1, 10 * epoch + 9, 10 * epoch + 1)
        report(
            MetricsLogged,
            rank=0,
            step=10 * epoch + 9,
            names=names,
            values=(2.0, None if epoch else 1.5, epoch),
            steps=steps,
        )
        report(
            Measured, rank=0, step=10 * epoch + 9, steps_total=40, peak_bytes=7, step_us=S, tokens_per_s=64.0, mfu=0.25
        )
        api.scene.time.us += 10 * S
        from_us = start_us + 10 * S * epoch
        report(Reported, span=SpanClass.USEFUL, from_us=from_us, first_step=10 * epoch, steps=10, tokens=640)
        api.scene.control.tick()
    sample = {"gpus": 4, "from_us": start_us, "busy": 0.5, "memory_bytes": 9, "power_mw": 8_000, "energy_mj": 5_000}
    agents.report(GpusSampled(at_us=api.scene.time.us, **scope, node="local", **sample))
    api.scene.control.tick()


def test_curves_are_read_by_the_job_and_a_value_that_is_not_finite_is_null(job: Api) -> None:
    assert job.client.metrics("gpt").curves == []
    train(job)
    found = job.client.metrics("gpt")
    curves = {each.name: each for each in found.curves}
    assert (found.job_id, found.step, found.energy_j) == (GPT, 19, 5.0)
    assert (curves["loss"].steps, curves["loss"].values) == ([1, 9, 11, 19], [2.0, 1.5, 2.0, None])
    assert {"epoch", "gpu/busy", "gpu/power_w", "measured/mfu", "measured/tokens_per_s"} < set(curves)
    with pytest.raises(NotFoundError):
        job.client.metrics("nobody")


def test_what_is_live_is_one_answer(job: Api) -> None:
    train(job)
    live = job.client.live()
    [line], [node] = live.jobs, live.nodes
    assert (line.state, line.step, line.steps_total, line.left_us) == ("running", 20, 40, 20 * S)
    assert (line.loss, line.lost_loss, line.tokens_per_s, line.mfu, line.busy) == (None, True, 64.0, 0.25, 0.5)
    assert (line.memory_bytes, line.power_w, line.micro_usd_per_hour) == (9, 8.0, 8_000_000)
    assert live.micro_usd_per_hour == 8_000_000 and line.micro_usd > 0
    assert (node.name, node.gpus, node.held, node.busy) == ("local", 4, 4, 0.5)


def test_the_cost_of_a_job_by_epoch_and_its_metrics_after_it_was_retired(job: Api) -> None:
    train(job)
    live = job.client.job_cost("gpt")
    assert [each.epoch for each in live.epochs] == [0, 1]
    assert sum(each.micro_usd for each in live.epochs) == live.row.micro_usd.held
    assert live.row.tokens == 1280 and live.row.micro_usd_per_million_tokens is not None
    job.scene.ended(GPT, 1, Outcome.FINISHED)
    job.scene.control.tick()
    before, cost = job.client.metrics(GPT), job.client.job_cost(GPT)
    fold = job.scene.control.fold
    ended = fold.ended_jobs()
    curves, retired = fold.saved_curves(ended), fold.retire(ended)
    job.scene.store.archive.keep(taken(fold), encoded_jobs(retired), encoded_curves(curves))
    assert ended == [GPT] and fold.curves.of(GPT) is None
    assert job.client.metrics("gpt") == before
    after = job.client.job_cost("gpt")
    assert (after.row, after.epochs, after.energy_j) == (cost.row, cost.epochs, 5.0)
    assert job.client.live().jobs == []
