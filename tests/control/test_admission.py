"""Admission: refusals with their numbers, and the job that the scheduler gets."""

import json
import socket
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from admitting import H100, admitted, spec

from cordee.cli.main import main
from cordee.control.admission import Admitted, admit, check_program
from cordee.errors import (
    CatalogueError,
    CordeeError,
    DestinationError,
    DoesNotFitError,
    LayoutError,
    ScriptError,
    SpecError,
    TooLargeError,
    UnprotectedError,
)
from cordee.events import Capacity, Job, Node, Queue, Tier
from cordee.hardware.catalog import Catalogue
from cordee.hardware.load import load_catalogue
from cordee.hardware.measured import Measured
from cordee.ids import JobId
from cordee.plan.wanted import parse_layout
from cordee.planning import plan
from cordee.workload.planned import read_plan
from cordee.workload.spec import JobSpec, parse_spec
from world import mig_table

SLOTS = Node(name="local", epoch=1, gpu_name="slot", gpus=4)
A10 = Node(name="b", epoch=1, gpu_name="NVIDIA A10", gpus=8, micro_usd_per_gpu_hour=750_000)


def test_the_scheduler_gets_the_job(tmp_path: Path) -> None:
    job = admitted(
        spec(
            tmp_path,
            tier="preemptible",
            gpu="H100",
            queue="research",
            priority=3,
            limit={"time_s": 60, "cost_micro_usd": 5},
            checkpoint={"to": "/ckpt", "every_s": 120},
            on_preempt={"grace_s": 12.5, "then": "stop"},
            capacity="on-demand",
        ),
        H100,
    )
    assert job == Job(
        job_id=JobId("gpt-abcdef"),
        name="gpt",
        owner="ada",
        gpus=4,
        queue="research",
        tier=Tier.PREEMPTIBLE,
        priority=3,
        gpu_name="NVIDIA H100 80GB HBM3",  # under the name that the node has
        capacity=Capacity.ON_DEMAND,
        time_limit_us=60_000_000,
        cost_limit_micro_usd=5,
        grace_us=12_500_000,
        requeue=False,
        protected=True,
        checkpoint_every_us=120_000_000,
        min_run_us=60_000_000,  # as long as a restart is expected to take
    )


@pytest.mark.parametrize(
    ("fields", "nodes", "error", "says"),
    [
        ({"gpus": 5}, [SLOTS], TooLargeError, "the job needs 5 GPUs at once, but the whole cluster has 4 of one type"),
        ({"gpus": 1}, [], TooLargeError, "no node is known yet"),
        ({"gpus": 9}, [H100, A10], TooLargeError, "has 8 of one type"),
        ({"gpus": 4, "gpu": "A100-80GB"}, [H100], TooLargeError, "4 x A100.* has 0 of one type"),
        ({"gpus": 4, "capacity": "spot"}, [H100], TooLargeError, r"4 GPUs \(spot\)"),
        ({"gpu": "H1000"}, [H100], CatalogueError, "unknown GPU 'H1000'\nhint: did you mean H100"),
        (
            {"model": {"name": "llama-3-70b"}},
            [H100],
            DoesNotFitError,
            r"does not fit 4 x H100.* over by .* GB\nhint: .*fits",
        ),
        ({"model": {"name": "llama-3-70"}}, [H100], CatalogueError, "did you mean llama-3-70b"),
        ({"model": {"name": "llama-3-8b", "layout": "tp=3"}}, [H100], LayoutError, "3"),
        (
            {"tier": "preemptible"},
            [H100],
            UnprotectedError,
            r"unprotected: up to \$11.96 an hour at risk.*a bill.*\nhint: .*--unprotected",
        ),
        ({"run": ["no-such-program"]}, [SLOTS], ScriptError, "'no-such-program' is not an executable"),
        ({"run": ["python", "-u", "no.py"]}, [SLOTS], ScriptError, "no.py does not exist"),
        ({"checkpoint": {"to": "ftp://host/run"}}, [SLOTS], DestinationError, "no store for ftp://\nhint: use a path"),
        ({"cwd": "/no/such/folder"}, [SLOTS], ScriptError, "folder /no/such/folder does not exist"),
    ],
)
def test_admission_refuses_and_names_the_reason(
    tmp_path: Path, fields: dict[str, Any], nodes: list[Node], error: type[CordeeError], says: str
) -> None:
    with pytest.raises(error, match=f"(?s){says}"):
        admitted(spec(tmp_path, **fields), *nodes)


def test_the_risk_can_be_accepted_and_is_noted(tmp_path: Path) -> None:
    wanted = spec(tmp_path, tier="preemptible")
    made = admit(
        wanted,
        job_id=JobId("gpt-abcdef"),
        owner="ada",
        nodes=[H100],
        catalogue=load_catalogue(),
        unprotected=True,
    )
    assert not made.job.protected
    assert any("$11.96 an hour at risk" in note for note in made.notes)


@pytest.mark.parametrize(
    ("fields", "when"),
    [
        ({}, "when a production job preempts it or its node fails"),
        ({"tier": "production"}, "when its node fails"),
        ({"checkpoint": {"to": "/tmp"}}, None),
    ],
)
def test_jobs_of_other_tiers_are_told_the_risk(tmp_path: Path, fields: dict[str, Any], when: str | None) -> None:
    wanted = spec(tmp_path, **fields)
    made = admit(wanted, job_id=JobId("gpt-abcdef"), owner="ada", nodes=[H100], catalogue=load_catalogue())
    told = [note for note in made.notes if note.startswith("unprotected: ")]
    assert [note.endswith(f"loses all its work {when}") for note in told] == ([True] if when else [])


@pytest.mark.parametrize("tier", ["production", "standard"])
def test_other_tiers_may_go_without_checkpoints(tmp_path: Path, tier: str) -> None:
    assert not admitted(spec(tmp_path, tier=tier), SLOTS).protected


def test_a_model_that_fits_brings_its_own_expectations(tmp_path: Path) -> None:
    job = admitted(spec(tmp_path, gpus=8, gpu="H100", model={"name": "llama-3-8b"}, checkpoint={"to": "/c"}), H100)
    # 12 bytes for each of 8.03 billion parameters, at 2 GB/s from one node.
    assert job.save_us == pytest.approx(12 * 8.03e9 / 2e9 * 1e6, rel=0.01)
    assert job.restart_us == pytest.approx(job.save_us + 120e6)
    assert job.min_run_us == job.restart_us
    assert job.checkpoint_every_us > job.save_us


def test_a_job_without_a_model_is_not_preempted_before_it_has_run_as_long_as_its_restart(tmp_path: Path) -> None:
    job = admitted(spec(tmp_path), SLOTS)
    assert job.min_run_us == job.restart_us > 0


def test_admission_expects_what_the_plan_expects(tmp_path: Path) -> None:
    slots = admitted(spec(tmp_path, gpus=8, model={"name": "llama-3-8b"}), replace(SLOTS, gpus=8))
    gpus = admitted(spec(tmp_path, gpus=8, model={"name": "llama-3-8b"}), replace(SLOTS, gpu_name="H100", gpus=8))
    answer = plan("llama-3-8b", "8xH100", framework="torch")
    for job in (slots, gpus):
        assert job.save_us == answer.estimate().save_us and job.restart_us == answer.estimate().restart_us
        assert job.checkpoint_every_us == pytest.approx(answer.survival.period_s * 1e6, abs=1)


def test_a_job_carries_an_estimate_for_each_of_its_sizes(tmp_path: Path) -> None:
    big = replace(H100, gpus=64)
    job = admitted(spec(tmp_path, gpus=64, gpu="H100", model={"name": "llama-3-8b"}, elastic={"at_least": 16}), big)
    assert [each.gpus for each in job.estimates] == [64, 32, 16] == [job.gpus, *job.sizes]
    for each in job.estimates:
        assert parse_layout(each.layout).plainest(each.gpus).gpus == each.gpus
        assert each.step_us and each.step_us_low and each.step_us_high and each.mfu
        assert each.step_us_low < each.step_us < each.step_us_high
        assert 0 < each.allocated_bytes < each.peak_bytes < each.gpu_memory_bytes
        tokens_per_s = each.tokens_per_step / each.step_us * 1e6
        assert each.mfu_at(tokens_per_s) == pytest.approx(each.mfu, rel=1e-3)
    assert (job.estimates[0].save_us, job.estimates[0].restart_us) == (job.save_us, job.restart_us)


def test_a_job_that_may_get_either_kind_of_gpu_has_no_step_to_expect(tmp_path: Path) -> None:
    [estimate] = admitted(spec(tmp_path, gpus=8, model={"name": "llama-3-8b"}), H100, replace(A10, gpus=8)).estimates
    assert (estimate.step_us, estimate.step_us_low, estimate.mfu) == (None, None, None)
    assert estimate.gpu_memory_bytes == load_catalogue().find_gpu("H100").visible_bytes


def test_a_plan_is_admitted_as_it_was_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "llama-3-8b", "--gpus", "8xH100", "--batch", "64", "--json"])
    text = capsys.readouterr().out
    for layout in (None, "tp=2"):
        planned = read_plan(text, source="plan.json", layout=layout)
        wanted = JobSpec.from_flags(run="true", gpus=None, plan=planned).model_copy(update={"cwd": str(tmp_path)})
        job = admitted(wanted, H100)
        rows = json.loads(text)["layouts"]
        found = rows[0] if layout is None else next(row for row in rows if row["tp"] == 2)
        [estimate] = job.estimates
        assert (estimate.layout, estimate.peak_bytes) == (found["layout"], found["peak_bytes"])
        assert estimate.step_us == pytest.approx(found["step_s"] * 1e6, abs=1)


TUNED = {"name": "llama-3-8b", "seq": 2048, "global_batch": 16}


def test_what_is_tuned_is_what_admission_plans(tmp_path: Path) -> None:
    """8B in full needs more than a 24 GB card, with adapters over 4 bits it does not; both say the same as the plan."""
    card = replace(A10, gpus=1)
    with pytest.raises(DoesNotFitError, match="does not fit 1 x A10"):
        admitted(spec(tmp_path, gpus=1, model=TUNED), card)
    for stage in (None, "dpo"):
        tune = {"train": "qlora", "rank": 8, "targets": "q,v"} | ({"stage": stage} if stage else {})
        [estimate] = admitted(spec(tmp_path, gpus=1, model=TUNED | {"tune": tune}), card).estimates
        answer = plan(
            "llama-3-8b", "1xA10", seq_tokens=2048, global_batch=16, train="qlora", rank=8, targets="q,v", stage=stage
        )
        assert answer.best is not None and answer.best.step_s is not None
        assert (estimate.layout, estimate.peak_bytes) == (str(answer.best.layout), answer.best.peak_bytes)
        assert estimate.step_us == pytest.approx(answer.best.step_s * 1e6, abs=1)
        assert estimate.flop_per_token == pytest.approx(answer.estimate().flop_per_token)


@pytest.mark.parametrize(
    "words",
    [
        ["--train", "dora", "--rank", "8", "--targets", "q,v", "--base-bits", "fp8", "--packed", "512"],
        ["--freeze", "embeddings,0..15", "--optimizer", "adamw-8bit", "--optimizer-in-backward", "--batch", "1"],
        ["--train", "qlora", "--stage", "dpo,reference=model"],
        ["--train", "lora", "--stage", "grpo,group=4,prompt=256,updates=2"],
        ["--train", "qlora", "--lora-dropout", "0.1", "--fused-qkv", "--quantize-head", "--dequantized", "2"],
        ["--train", "lora", "--fsdp-version", "1", "--model-code", "hf", "--compile"],
    ],
)
def test_a_plan_of_fine_tuning_is_admitted_as_it_was_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "llama-3-8b", "--gpus", "1xH100", "--seq", "2048", "--batch", "16", *words, "--json"])
    text = capsys.readouterr().out
    wanted = JobSpec.from_flags(run="true", gpus=None, plan=read_plan(text, source="plan.json"))
    [estimate] = admitted(wanted.model_copy(update={"cwd": str(tmp_path)}), replace(H100, gpus=1)).estimates
    best = json.loads(text)["layouts"][0]
    assert (estimate.layout, estimate.peak_bytes) == (best["layout"], best["peak_bytes"])
    assert estimate.step_us == pytest.approx(best["step_s"] * 1e6, abs=1)


def test_slots_have_no_memory_limit(tmp_path: Path) -> None:
    made = admit(
        spec(tmp_path, model={"name": "llama-3-70b"}),
        job_id=JobId("gpt-abcdef"),
        owner="ada",
        nodes=[SLOTS],
        catalogue=load_catalogue(),
    )
    assert any("CPU slots have none" in note for note in made.notes)


def _with_calibrated_cpu() -> Catalogue:
    catalogue = load_catalogue()
    marks = {"device": "cpu", "host": socket.gethostname()}
    cpu = replace(
        catalogue.find_gpu("A10"), name="cpu-here-1t", aliases=(), flop_per_s={"fp32": 1e11},
        memory_bytes=64 * 10**9, measured=Measured({}, {}, marks, "2026-11-29"),
    )  # fmt: skip
    return replace(catalogue, gpus=(*catalogue.gpus, cpu))


def test_slots_of_a_calibrated_host_have_a_step_time_and_no_memory_and_those_elsewhere_neither(tmp_path: Path) -> None:
    def made(node: Node, precision: str) -> Admitted:
        wanted = spec(tmp_path, gpus=2, model={"name": "gpt2", "precision": precision})
        catalogue = _with_calibrated_cpu()
        return admit(wanted, job_id=JobId("gpt-abcdef"), owner="ada", nodes=[node], catalogue=catalogue)

    here, elsewhere, wider = made(SLOTS, "fp32"), made(replace(SLOTS, name="far"), "fp32"), made(SLOTS, "bf16")
    [planned], [unknown], [other] = (each.job.estimates for each in (here, elsewhere, wider))
    assert planned.step_us and planned.mfu and planned.gpu_memory_bytes == planned.peak_bytes == 0
    assert "its step is planned on cpu-here-1t, as it was calibrated" in here.notes
    assert (unknown.step_us, other.step_us) == (None, None) and planned.save_us == unknown.save_us == other.save_us
    assert any(note.startswith("no step time is planned on cpu-here-1t: ") for note in wider.notes)


def test_a_job_for_either_of_two_kinds_is_told_why_it_has_no_step_time(tmp_path: Path) -> None:
    wanted = spec(tmp_path, gpus=8, model={"name": "llama-3-8b"})
    notes = {}
    for nodes in ((H100, A10), (H100,), (H100, replace(H100, name="c", gpu_name="H100"))):
        made = admit(wanted, job_id=JobId("gpt-abcdef"), owner="ada", nodes=nodes, catalogue=load_catalogue())
        [first, *_] = made.job.estimates
        notes[nodes] = [note for note in made.notes if "no step time" in note]
        assert (first.step_us is None) == bool(notes[nodes])
    assert list(notes.values()) == [
        ["no step time is planned: the job may run on A10 or H100; name one: --gpus 8xH100"],
        [],
        [],
    ], "two names of one chip are one kind"


@pytest.mark.parametrize(
    "run",
    [
        "true",
        "cd /tmp && whatever",
        "LR=1 python train.py --lr $LR",
        "python train.py | tee log",
        "./tool --flag",
        ["python", "-W", "error", "train.py"],
        ["python", "-m", "some.module"],
        ["python", "-c", "print()"],
        ["sh", "-c", "anything"],
        ["torchrun", "--nproc-per-node", "4", "train.py"],
    ],
)
def test_programs_that_are_there(tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    for name in ("tool", "torchrun", "python"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    check_program(spec(tmp_path, run=run))


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ("python no.py", "no.py does not exist"),
        ("python no.py | tee log", "no.py does not exist"),
        ("LR=1 nothing", "'nothing' is not an executable"),
        (["./train.py"], "'./train.py' is not an executable"),  # it is there, and may not be executed
        (["torchrun", "--nproc-per-node", "4", "no.py"], "no.py does not exist"),
    ],
)
def test_programs_that_are_not(tmp_path: Path, run: Any, says: str) -> None:
    (tmp_path / "train.py").write_text("")
    for name in ("torchrun", "python"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    with pytest.raises(ScriptError, match=says):
        check_program(spec(tmp_path, run=run, env={"PATH": f"{tmp_path}:/bin:/usr/bin"}))


def test_shape_size_and_host_are_passed_on(tmp_path: Path) -> None:
    more = {"place": {"unit": 2, "within": "rack"}, "elastic": {"at_least": 2}, "limit": {"preemptions": 3}}
    more["retries"] = {"script": 0, "exit": {17: 2}}
    job = admitted(spec(tmp_path, cpus=6.5, memory_bytes=10**9, estimate_s=60, **more), SLOTS)
    assert job.retries == (("exit 17", 2), ("script", 0))
    assert (job.unit_gpus, job.within, job.sizes, job.preemptions_max) == (2, "rack", (2,), 3)
    assert (job.cpu_milli, job.memory_bytes, job.estimate_us) == (6500, 10**9, 60_000_000)
    part = admitted(spec(tmp_path, gpus=1, gpu_milli=250), SLOTS)
    assert (part.gpus, part.gpu_milli) == (1, 250)


def test_an_elastic_job_gets_the_sizes_that_its_model_fits(tmp_path: Path) -> None:
    big = Node(name="a", epoch=1, gpu_name="NVIDIA H100 80GB HBM3", gpus=64)
    job = admitted(spec(tmp_path, gpus=64, model={"name": "llama-3-70b"}, elastic={"at_least": 1}), big)
    assert job.sizes == (32, 16)  # 1.13 TB of states and what a step needs: 16 GPUs hold 1.28 TB
    # It waits for no more than it needs at least.
    assert admitted(spec(tmp_path, gpus=8, elastic={"at_least": 4}), SLOTS).gpus == 8
    with pytest.raises(TooLargeError, match="the job needs 5 GPUs at once"):
        admitted(spec(tmp_path, gpus=8, elastic={"sizes": [5, 6]}), SLOTS)
    with pytest.raises(DoesNotFitError, match="does not fit 8 x H100"):
        admitted(spec(tmp_path, gpus=64, model={"name": "llama-3-70b"}, elastic={"sizes": [8]}), big)


def test_a_host_that_is_too_small_is_no_place_to_wait_for(tmp_path: Path) -> None:
    counted = Node(name="a", epoch=1, gpu_name="slot", gpus=4, cpu_milli=32_000, memory_bytes=64 * 10**9)
    assert admitted(spec(tmp_path, cpus=32), counted).cpu_milli == 32_000
    with pytest.raises(TooLargeError, match=r"4 GPUs of the job need 33 CPU cores, but .* have 32 together"):
        admitted(spec(tmp_path, cpus=33), counted)
    with pytest.raises(TooLargeError, match=r"need 65 GB of host memory, but .* have 64 GB together"):
        admitted(spec(tmp_path, memory_bytes=65 * 10**9), counted)
    assert admitted(spec(tmp_path, memory_bytes=65 * 10**9), SLOTS)  # nobody counts there


MIG = replace(H100, name="m", mig=mig_table("H100").gpus((0, 1)))


def test_a_mig_instance_is_admitted_in_its_size(tmp_path: Path) -> None:
    wanted = parse_spec("run: 'true'\ngpus: 3g.40gb").model_copy(update={"cwd": str(tmp_path)})
    job = admitted(wanted, MIG, H100)
    assert (job.gpus, job.gpu_milli, job.mig) == (1, 500, "3g.40gb")
    assert micro_usd_per_hour_of(wanted, MIG) == 2_990_000 // 2
    fixed = replace(MIG, mig=replace(mig_table("H100").gpus((0,)), fixed=((0, 4, 4, "3g.40gb"),)))
    assert admitted(wanted, fixed).gpu_milli == 500


def micro_usd_per_hour_of(wanted: JobSpec, *nodes: Node) -> int:
    found = admit(wanted, job_id=JobId("a"), owner="ada", nodes=nodes, catalogue=load_catalogue())
    return found.micro_usd_per_hour


@pytest.mark.parametrize(
    ("gpus", "error", "says"),
    [
        ("4g.90gb", TooLargeError, "a MIG instance 4g.90gb, and no node .* has that profile\nhint: .*1g.10gb"),
        ("H100:1g.10gb+gfx", TooLargeError, "no node that it may use has that profile"),
        (
            "1g.10gb",
            SpecError,
            "0.125 of NVIDIA H100 80GB HBM3; 0.25 of NVIDIA A100-SXM4-40GB\nhint: name one: gpus: NVI",
        ),
    ],
)
def test_a_mig_instance_that_no_node_has_is_refused(
    tmp_path: Path, gpus: str, error: type[CordeeError], says: str
) -> None:
    a100 = replace(H100, name="c", gpu_name="NVIDIA A100-SXM4-40GB", mig=mig_table("A100-40").gpus((0,)))
    wanted = parse_spec(f"run: 'true'\ngpus: {gpus}").model_copy(update={"cwd": str(tmp_path)})
    with pytest.raises(error, match=f"(?s){says}"):
        admitted(wanted, MIG, a100, A10)
    with pytest.raises(TooLargeError, match="no GPU of the cluster is in MIG mode"):
        admitted(wanted, H100)


@pytest.mark.parametrize(
    ("gpus", "says"),
    [
        ("5g.50gb", "no GPU of the catalogue has a MIG profile '5g.50gb'\nhint: .*known are 1g.10gb"),
        ("H100:9g.10gb", "H100 has no MIG profile '9g.10gb'\nhint: did you mean 1g.10gb"),
        ("H100:1g.11gb", "H100 has no MIG profile '1g.11gb'\nhint: did you mean 1g.10gb"),
        ("H100:1g.5gb", "H100 has no MIG profile '1g.5gb'"),
        ("A10:1g.10gb", "no MIG profile of A10 is known\nhint: leave 1g.10gb out, or name another GPU: A100-40"),
    ],
)
def test_a_name_that_no_gpu_has_for_a_profile_is_refused_whatever_nodes_there_are(
    tmp_path: Path, gpus: str, says: str
) -> None:
    wanted = parse_spec(f"run: 'true'\ngpus: {gpus}").model_copy(update={"cwd": str(tmp_path)})
    for nodes in ((), (H100,), (MIG, A10)):
        with pytest.raises(CatalogueError, match=f"(?s){says}"):
            admitted(wanted, *nodes)
    known_to_its_driver = replace(MIG, mig=replace(mig_table("H100").gpus((0,)), fixed=((0, 0, 1, "1g.11gb"),)))
    own = parse_spec("run: 'true'\ngpus: 1g.11gb").model_copy(update={"cwd": str(tmp_path)})
    assert admitted(own, known_to_its_driver).mig == "1g.11gb"


QUEUES = (Queue(name="research", limit_gpus=4, user_gpus=2), Queue(name="product", micro_usd_per_day=10_000_000))


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"queue": "reserch"}, SpecError, "there is no queue 'reserch'\nhint: did you mean research"),
        ({"queue": "research", "gpus": 8}, TooLargeError, "it needs 8 GPUs, and queue research may hold 4 at most"),
        ({"queue": "research"}, TooLargeError, "it needs 4 GPUs, and queue research lets a user hold 2 at most"),
    ],
)
def test_a_queue_refuses_what_it_can_never_let_start(
    tmp_path: Path, fields: dict[str, Any], error: type[CordeeError], says: str
) -> None:
    with pytest.raises(error, match=f"(?s){says}"):
        admitted(spec(tmp_path, **fields), H100, queues=QUEUES)
    assert admitted(spec(tmp_path, queue="product"), H100, queues=QUEUES).queue == "product"
    assert admitted(spec(tmp_path), H100, queues=QUEUES).queue == "default"


def test_without_queues_a_queue_is_a_name(tmp_path: Path) -> None:
    assert admitted(spec(tmp_path, queue="whatever"), SLOTS).queue == "whatever"


def test_an_elastic_job_needs_no_more_of_its_queue_than_its_least(tmp_path: Path) -> None:
    job = admitted(spec(tmp_path, queue="research", elastic={"at_least": 2}), H100, queues=QUEUES)
    assert job.gpus == 4 and job.sizes == (2,)


# -- without GPUs --------------------------------------------------------------------------------------------

WITH_HOST = replace(H100, cpu_milli=64_000, memory_bytes=512 << 30)


def without_gpus(folder: Path, **fields: Any) -> JobSpec:
    return spec(folder, gpus=0, **fields)


def test_a_job_without_gpus_has_one_core_unless_it_says_more(tmp_path: Path) -> None:
    assert admitted(without_gpus(tmp_path), WITH_HOST).cpu_milli == 1000
    asked = admitted(without_gpus(tmp_path, cpus=2.5, memory_bytes=1 << 30, tier="preemptible"), WITH_HOST)
    assert (asked.gpus, asked.cpu_milli, asked.memory_bytes) == (0, 2500, 1 << 30)


def test_a_job_without_gpus_pays_for_its_cores(tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text('[cpu]\nusd_per_core_hour = 0.04\nsource = "a bill"\nas_of = "2026-11"\n')
    made = admit(
        without_gpus(tmp_path, cpus=2),
        job_id=JobId("prepare-abcdef"),
        owner="ada",
        nodes=[WITH_HOST],
        catalogue=load_catalogue(prices),
    )
    assert (made.job.micro_usd_per_cpu_hour, made.micro_usd_per_hour) == (40_000, 80_000)
    assert admitted(without_gpus(tmp_path), WITH_HOST).micro_usd_per_cpu_hour == 0, "no price, no cost"
    prices.write_text("[cpu]\nusd_per_core_hour = -1\n")
    with pytest.raises(CatalogueError, match="cpu lacks 'source'"):
        load_catalogue(prices)


@pytest.mark.parametrize(
    ("fields", "nodes", "says"),
    [
        ({"cpus": 65}, [WITH_HOST], "needs 65 CPU cores on one node, and the largest has 64"),
        ({"memory_bytes": 1 << 40}, [WITH_HOST], "1.1 TB of host memory on one node, and the largest has 549.8 GB"),
        ({}, [], "needs a node at once, but the whole cluster has 0"),
    ],
)
def test_a_job_without_gpus_that_no_node_can_hold_is_refused(
    tmp_path: Path, fields: dict[str, Any], nodes: list[Node], says: str
) -> None:
    with pytest.raises(TooLargeError, match=says):
        admitted(without_gpus(tmp_path, **fields), *nodes)


@pytest.mark.parametrize(
    "more", ["model: {name: llama-3-8b}", "elastic: {at_least: 1}", "place: {within: node}", "service: {model: x}"]
)
def test_keys_of_gpus_are_refused_without_gpus(more: str) -> None:
    with pytest.raises(SpecError, match="and gpus is 0"):
        parse_spec(f"run: python prepare.py\ngpus: 0\n{more}\n")
