"""The team of `web_world.py` with all that pages have to show: a sweep, a service, artifacts, failures, long names."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from web_world import H100, HOUR, MINUTE, S, Team, a_week, with_artifacts

from cordee.answers.services import GatewayReport, GatewayStatus, ServiceSubmission, UsageLine
from cordee.answers.submissions import Submission
from cordee.events import Budget, BudgetSet, Failure, MetricsLogged, NodeUp, Outcome, RankLeft, RanksEnded, ReplicaReady
from cordee.ids import JobId
from cordee.ids import job_id as new_id
from cordee.workload.spec import JobSpec

LONG = "multilingual-instruction-tuning-round-12"
TRACEBACK = """  File "/home/tomas/src/multilingual/train.py", line 214, in step
    loss = model(batch.tokens.to(device), labels=batch.labels).loss
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 1 has 44.42 GiB in total, of which \
2.87 GiB is free. Including non-PyTorch memory, this process has 41.54 GiB memory in use."""
L40S = replace(
    H100, name="c1", gpu_name="L40S", gpus=8, micro_usd_per_gpu_hour=790_000, domain=("block-1", "rack-c"),
    price_source="L40S on-demand: RunPod L40S, as quoted by deploybase.ai, Spot GPU Pricing (2026-03)",
    unavailable=(7,), unavailable_why=("in use by a process that is not Cordee's",),
)  # fmt: skip


def everything(folder: Path) -> Team:
    """Return the team on a Friday evening."""
    team = with_artifacts(a_week(folder))
    budget = Budget(queue="product", per="total", micro_usd=1_600_000_000, hard=True, stops=True)
    team.api.scene.control.note(BudgetSet(at_us=team.now, budget=budget, by="ada"))
    team.say(NodeUp(at_us=team.now, node=L40S), "node/c1/1")
    _service(team)
    _failed(team)
    _sweep(team)
    _take_turns(team, 2 * HOUR)
    _take_turns(team, 3 * HOUR)
    _requests(team)
    return team


def _take_turns(team: Team, lasts_us: int) -> None:
    """Jobs that have got notice leave with a checkpoint; those that start in their place train, and so do others."""
    attempts = team.api.scene.control.state.attempts
    mine = set(team.ids.values()) - {team.ids["eval-nightly"]}
    for job_id in [each for each in attempts if each in mine and attempts[each].leaving]:
        team.leave(job_id, "checkpointed", Outcome.CHECKPOINTED)
    turn(team, MINUTE)
    for job_id in [each for each in attempts if each in mine and attempts[each].started_us is None]:
        team.start(job_id)
    team.train(*((each, 300, 6_000) for each in attempts if each in mine), lasts_us=lasts_us)


def turn(team: Team, after_us: int = 0) -> None:
    """Let time pass; then let trials and replicas follow."""
    for _ in range(4):
        team.tick(after_us)
        team.services.controller.step()
        team.api.sweeps.controller.step()
        after_us = 0
    team.tick()


def _failed(team: Team) -> None:
    """A job with a long name fails at once, three times."""
    job = team.submit(LONG, "tomas", 2, "product", gpu="L40S")
    for epoch in (1, 2, 3):
        failure = Failure(rank=1, exit_code=1, signal=None, tail=tuple(TRACEBACK.splitlines()))
        about: dict[str, Any] = {"job_id": job, "epoch": epoch, "node": "c1", "outcome": Outcome.FAILED}
        team.tick(3 * MINUTE)
        team.say(RanksEnded(at_us=team.now, failure=failure, **about), "node/c1/1")
        turn(team, MINUTE)


def _service(team: Team) -> None:
    section = {
        "model": "llama-3.1-8b", "engine": "vllm", "replicas": {"min": 2, "max": 3}, "slo": {"ttft_s": 0.8},
    }  # fmt: skip
    spec = {"name": "chat-assistant", "gpus": 1, "queue": "product", "service": section}
    team.services.declare(ServiceSubmission(spec=spec), "omar")
    turn(team)
    for at, replica in enumerate(team.services.service("chat-assistant").replicas):
        about: dict[str, Any] = {"job_id": JobId(replica.job_id), "epoch": replica.epoch, "rank": 0}
        ready = ReplicaReady(
            at_us=team.now, address=f"http://c1:{9000 + at}", engine="vllm", model="llama-3.1-8b", kv_tokens=171_000,
            slots=64, **about,
        )  # fmt: skip
        team.say(ready, f"{replica.job_id}.{replica.epoch}/rank0")
    turn(team, MINUTE)


def _requests(team: Team) -> None:
    """A gateway tells of the requests of the last hours, and of those of this moment."""
    [first, second] = team.services.service("chat-assistant").replicas
    lines = [
        UsageLine(
            service="chat-assistant", job_id=each.job_id, epoch=each.epoch, tenant="support", key="k1",
            model="llama-3.1-8b", from_us=team.now - HOUR, until_us=team.now, requests=9_400, failed=3,
            input_tokens=7_900_000, cached_tokens=4_200_000, output_tokens=2_350_000, busy_us=50 * MINUTE,
        )
        for each in (first, second)
    ]  # fmt: skip
    busy = [each.model_copy(update={"tenant": "", "key": "", "requests": 0}) for each in lines]
    used = {f"{first.job_id}.{first.epoch}": 96_000, f"{second.job_id}.{second.epoch}": 81_000}
    status = GatewayStatus(
        service="chat-assistant", queued=1, running=37, kv_used=used,
        ttft_p99_us=412_000, tpot_p99_us=31_000, requests_per_s=5.3, tokens_per_s=1_310.0,
    )  # fmt: skip
    report = GatewayReport(
        seq=1, at_us=team.now, url="https://gateway.example:8443", status=[status], usage=[*lines, *busy]
    )
    team.api.client.report("edge", report)
    team.tick()


def _sweep(team: Team) -> None:
    """Nine trials of a sweep by successive halving, of which some still run."""
    values = {"lr": "1e-5..1e-3:log", "warmup": "0.0..0.1", "batch": "16,32,64"}
    section = {"values": values, "search": "random", "trials": 9, "max_running": 3, "rungs": "100..900:3"}
    spec = JobSpec.from_flags(
        run="true --lr {lr} --warmup {warmup} --batch {batch}", gpus="1", name="sft-learning-rate",
        checkpoint_to=str(team.folder / "checkpoints"), queue="product", sweep=section,
    )  # fmt: skip
    sweep_id = new_id("sft-learning-rate", bytes(6))
    wanted = Submission(job_id=sweep_id, spec=spec.model_dump(mode="json"), unprotected=True)
    team.api.sweeps.declare(wanted, "omar")
    turn(team)
    for _ in range(7):
        running = [each for each in team.api.sweeps.sweep(sweep_id).trials if each.state == "running"]
        for each in running[:2]:
            _to_its_rung(team, each.number, JobId(each.job_id), each.rung, each.values)


def _to_its_rung(team: Team, number: int, job_id: JobId, rung: int, values: dict[str, Any]) -> None:
    epoch, step = team.epoch(job_id), (100, 300, 900)[rung]
    loss = 1.9 + 0.9 / step**0.3 + 1.5e3 * abs(values["lr"] - 2e-4) + values["warmup"] + number / 100
    about: dict[str, Any] = {"job_id": job_id, "epoch": epoch, "rank": 0}
    source = f"{job_id}.{epoch}/rank0"
    turn(team, 8 * MINUTE + number * 11 * S)
    team.say(MetricsLogged(at_us=team.now, step=step, names=("loss",), values=(loss,), **about), source)
    ended = rung == 2  # the last one
    team.say(RankLeft(at_us=team.now, how="finished" if ended else "checkpointed", step=step, **about), source)
    outcome = Outcome.FINISHED if ended else Outcome.CHECKPOINTED
    left = RanksEnded(at_us=team.now, job_id=job_id, epoch=epoch, node="c1", outcome=outcome)
    team.say(left, "node/c1/1")
    turn(team, S)
