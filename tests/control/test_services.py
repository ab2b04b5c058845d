"""Services over the API, with agents that a test plays: declared, ready, scaled, updated, restarted, ended."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from api_scene import OTHER
from services_world import CHAT, S, World, chat
from stage import JOB, NODE, URGENT

from cordee.answers.artifacts import CollectRequest
from cordee.answers.services import GatewayStatus, ReplicaView, UsageLine
from cordee.artifacts import ArtifactClient, PushWanted
from cordee.client import Client
from cordee.control.fold import Fold
from cordee.control.services.operations import ServiceOperations
from cordee.control.services.rollout import NO_ROOM_US
from cordee.control.services.scaling import ReplicaTerms, Scaler
from cordee.control.snapshot import loaded, taken
from cordee.errors import ForbiddenError, InputError, NotFoundError, SpecError, TooLargeError
from cordee.events import (
    AttemptPlaced,
    CheckpointCommitted,
    JobSubmitted,
    Lease,
    NodeUp,
    NoticeGiven,
    NoticeReason,
    Outcome,
    Queue,
    ReplicaUnready,
    ServiceScaled,
    TokensServed,
)
from cordee.ids import JobId
from cordee.schedule.policy import Policy
from cordee.workload.service import SETTINGS_ENV, ReplicaSettings, ServiceSpec
from cordee.workload.spec import JobSpec
from world import mig_table


def test_a_service_gets_its_replicas_and_is_ready_when_they_are(world: World) -> None:
    made = world.api.client.declare(CHAT)
    assert (made.state, made.revision, made.wanted, made.replicas) == ("starting", 1, 2, [])
    world.turn()
    assert world.states() == ["loading", "loading"]
    world.get_ready(world.of("loading")[0])
    assert (world.view().state, world.states()) == ("degraded", ["ready", "loading"])
    world.get_ready()
    assert (world.view().state, world.view().replicas[0].address) == ("ready", "http://127.0.0.1:9000")
    assert world.api.client.services() == [world.view()]


def test_a_replica_is_an_ordinary_job_of_the_service_and_its_revision(world: World) -> None:
    world.api.client.declare(CHAT | {"service": CHAT["service"] | {"drain_s": 7.0, "flags": {"parallel": 4}}})
    world.turn()
    [first, _] = world.api.scene.of(JobSubmitted)
    assert isinstance(first, JobSubmitted)
    job, spec = first.job, json.loads(first.spec)
    assert (job.service, job.revision, job.name, job.owner, job.tier) == ("chat", 1, "chat", "ada", "production")
    assert job.grace_us == 7 * S
    settings = ReplicaSettings.model_validate_json(spec["env"][SETTINGS_ENV])
    assert (settings.engine, settings.model, settings.flags) == ("llama.cpp", "./tiny", {"--parallel": 4})
    assert spec["service"] is None and "cordee.serve.replica" in spec["run"]


def test_the_same_declaration_changes_nothing_and_numbers_alone_start_no_update(world: World) -> None:
    world.api.client.declare(CHAT)
    world.turn()
    world.get_ready()
    before = world.view()
    number = world.api.scene.control.number
    assert world.api.client.declare(CHAT) == before.model_copy(update={"notes": world.api.client.declare(CHAT).notes})
    assert world.api.scene.control.number == number
    world.api.client.declare(chat(1, 3))
    world.turn()
    assert (world.view().revision, world.view().min, world.view().max) == (1, 1, 3)
    assert {each.job_id for each in world.view().replicas} == {each.job_id for each in before.replicas}


def test_scaling_starts_the_missing_and_drains_the_newest(world: World) -> None:
    world.api.client.declare(CHAT)
    world.turn()
    world.get_ready()
    first, second = world.view().replicas
    scaled = world.api.client.scale("chat", "3")
    assert (scaled.wanted, scaled.why) == (3, "ada set it to 3")
    world.turn()
    assert world.states() == ["ready", "ready", "loading"]
    world.get_ready()
    world.api.client.scale("chat", "1")
    world.turn()
    assert world.states() == ["ready", "draining", "draining"]
    assert world.view().replicas[0].job_id == first.job_id != second.job_id
    world.leave()
    assert world.states() == ["ready"]
    with pytest.raises(InputError, match=r"'0': the most must be 1 to 10,000"):
        world.api.client.scale("chat", "0")


def test_an_update_replaces_one_replica_after_the_other_and_never_has_fewer_ready(world: World) -> None:
    world.api.client.declare(CHAT)
    world.turn()
    world.get_ready()
    world.api.client.declare(chat(context=2048))
    world.turn()
    assert (world.view().state, world.view().revision) == ("updating", 2)
    for _ in range(2):
        assert world.states().count("ready") == 2 and world.states().count("loading") == 1
        world.get_ready()
        assert world.states().count("ready") == 2 and world.states().count("draining") == 1
        world.leave()
    assert world.view().state == "ready"
    assert [(each.revision, each.state) for each in world.view().replicas] == [(2, "ready"), (2, "ready")]


def test_an_update_without_a_free_gpu_ends_an_old_replica_first_if_enough_stay(world: World) -> None:
    world.api.client.declare(chat(2, 4))
    world.turn()
    world.say(queued=40)
    for _ in range(2):  # the slots of a replica are known when one is ready
        world.turn()
        world.get_ready()
    assert world.states() == ["ready"] * 4, "all four slots of the node"
    world.api.client.declare(chat(2, 4, context=2048))
    world.turn()
    assert world.states() == ["ready"] * 4 + ["waiting"]
    world.say(queued=40)
    world.turn(NO_ROOM_US / S + 1)
    assert sorted(world.states()) == ["draining", "ready", "ready", "ready", "waiting"]
    world.say(queued=40)
    world.turn(NO_ROOM_US / S + 1)
    assert world.states().count("draining") == 1, "one after the other"
    world.leave()
    assert world.states().count("loading") == 1


def test_a_replica_that_fails_soon_is_started_again_ever_later(world: World) -> None:
    world.api.client.declare(chat(1))
    world.turn()
    for failures in (1, 2):
        for _ in range(3):  # attempts that the scheduler makes of one job
            world.leave(*world.of("loading"), outcome=Outcome.FAILED)
        if failures == 1:
            assert world.states() == ["loading"], "the first restart is at once"
            assert "its last replica failed: 3 attempts in a row" in world.view().why
    assert world.states() == []
    assert "its last replica failed (2 replicas in a row)" in world.view().why
    world.turn(9)
    assert world.states() == []
    world.turn(2)
    assert world.states() == ["loading"]
    world.get_ready()
    assert (world.view().state, world.view().why) == ("ready", "")


def test_a_ready_replica_that_is_killed_starts_again_at_once(world: World) -> None:
    world.api.client.declare(chat(1))
    world.turn()
    world.get_ready()
    [before] = world.of("ready")
    world.leave(before, outcome=Outcome.LOST)
    [after] = world.of("loading")
    assert (after.job_id, after.epoch) == (before.job_id, 2)
    assert world.view().state == "degraded"


def test_an_engine_that_does_not_answer_is_unready_until_it_does(world: World) -> None:
    world.api.client.declare(chat(1))
    world.turn()
    world.get_ready()
    [replica] = world.of("ready")
    world.report(ReplicaUnready, replica, rank=0, why="no answer for 5 s")
    world.turn()
    assert [(each.state, each.why) for each in world.view().replicas] == [("unready", "no answer for 5 s")]
    world.get_ready(replica)
    assert world.states() == ["ready"]


def test_a_replica_that_must_leave_is_replaced_before_it_is_gone(world: World) -> None:
    world.api.client.declare(chat(1))
    world.turn()
    world.get_ready()
    world.api.scene.control._append(
        NoticeGiven(
            at_us=world.api.scene.time.us,
            job_id=JobId(world.of("ready")[0].job_id),
            epoch=1,
            reason=NoticeReason.DRAIN,
            deadline_us=world.api.scene.time.us + 30 * S,
        )
    )
    world.turn()
    assert world.states() == ["draining", "loading"]
    world.leave()
    assert world.states() == ["loading"], "it does not come back beside its successor"


def test_standby_replicas_are_ready_and_take_over_at_once(world: World) -> None:
    world.api.client.declare(chat(1, standby=1))
    world.turn()
    world.get_ready()
    assert world.states() == ["ready", "standby"]
    assert [each.state for each in world.api.client.routes().services[0].endpoints] == ["ready", "standby"]
    world.leave(world.of("ready")[0], outcome=Outcome.LOST)
    assert world.states() == ["loading", "ready"]


def test_a_backlog_starts_replicas_and_a_quiet_window_ends_them(world: World) -> None:
    world.api.client.declare(chat(1, 3, window_s=60.0))
    world.turn()
    world.get_ready()
    world.say(queued=20, running=4)
    world.turn()
    assert (world.view().wanted, len(world.view().replicas)) == (3, 3)
    assert world.api.scene.of(ServiceScaled)[-1].why == "24 requests for 4 slots each"  # type: ignore[attr-defined]
    world.get_ready()
    for _ in range(8):
        world.say(queued=0, running=1)
        world.turn(10)
    assert world.view().wanted == 1
    assert world.states() == ["ready", "draining", "draining"]


def test_a_price_keeps_replicas_away_and_the_service_says_so(world: World) -> None:
    world.api.client.declare(chat(1, 3, max_micro_usd_per_hour=4_500_000))
    world.turn()
    world.get_ready()
    for _ in range(2):
        world.say(queued=20, running=4)
        world.turn()
        found = world.view()
        assert (found.wanted, len(found.replicas), found.micro_usd_per_hour) == (2, 2, 2_000_000)
        why = "24 requests for 4 slots each; 3 replicas would cost $6.00 an hour, and $4.50 is the most"
        assert found.why == why, "as long as it holds"
    # Another price is no update, and has an effect at once.
    world.api.client.declare(chat(1, 3, max_micro_usd_per_hour=6_000_000))
    world.turn()
    assert (world.view().wanted, world.view().revision, world.view().why) == (3, 1, "24 requests for 4 slots each")


def test_a_replica_takes_the_requests_for_which_its_plan_meets_the_slo(world: World) -> None:
    world.api.client.declare(chat(1, 4))
    world.turn()
    world.get_ready()
    service = world.api.scene.control.fold.directory.services["chat"]
    spec = ServiceSpec.model_validate(chat(1, 4)["service"])
    busy = [GatewayStatus(service="chat", running=6)]
    for within_slo, wanted in ((None, 2), (8, 2), (2, 4)):  # the engine has 4 slots
        found = Scaler().decide(service, spec, busy, ReplicaTerms(0, within_slo), S)
        assert found.replicas == wanted, within_slo


def test_fewer_replicas_free_whole_nodes_first(world: World) -> None:
    scene, spec = world.api.scene, {"run": "true", "name": "gpt", "cwd": "/work"}
    scene.control.submit(replace(JOB, gpus=3), json.dumps(spec | {"gpus": 3}))
    scene.control.submit(replace(URGENT, gpus=1), json.dumps(spec | {"gpus": 1}))
    world.turn()
    scene.agents.report(NodeUp(at_us=scene.time.us, node=replace(NODE, name="n2")), source="node/n2/1")
    world.api.client.declare(chat(2, 3))
    world.turn()
    world.get_ready()
    scene.ended(URGENT.job_id, 1, Outcome.FINISHED)
    world.turn()
    world.api.client.scale("chat", "3")
    world.turn()
    assert [each.node for each in world.view().replicas] == ["n2", "n2", "local"], "the fullest node that has room"
    world.get_ready()
    world.api.client.scale("chat", "1")
    world.turn()
    left = [(each.node, each.state) for each in world.view().replicas]
    assert left == [("n2", "draining"), ("n2", "draining"), ("local", "ready")], "the newest one stays"


def test_four_replicas_share_a_gpu_and_pay_a_quarter_each(world: World) -> None:
    world.api.client.declare(chat(4) | {"gpu_milli": 250})
    world.turn()
    placed = [each.leases for each in world.api.scene.of(AttemptPlaced)]  # type: ignore[attr-defined]
    assert placed == [(Lease(node="local", gpus=(0,), milli=250),)] * 4
    assert world.view().micro_usd_per_hour == 500_000
    world.turn(3600)
    rows = {row.key: row for row in world.api.client.cost("service").rows}
    assert rows["chat"].gpu_us.held == pytest.approx(3600 * S, rel=0.01), "four quarters of an hour"
    assert rows["chat"].micro_usd.held == pytest.approx(2_000_000, rel=0.01)


def test_replicas_on_mig_instances_are_cut_out_of_one_gpu_and_pay_their_slices(world: World) -> None:
    h100 = replace(NODE, name="m", gpus=1, gpu_name="NVIDIA H100 80GB HBM3", mig=mig_table("H100").gpus((0,)))
    world.api.scene.agents.report(NodeUp(at_us=world.api.scene.time.us, node=h100), "node/m/1")
    world.turn()
    small = chat(3, engine="vllm") | {"mig": "2g.20gb", "gpu": h100.gpu_name}
    world.api.client.declare(small)
    world.turn()
    leases = [lease for each in world.api.scene.of(AttemptPlaced) for lease in each.leases]  # type: ignore[attr-defined]
    assert {(lease.node, lease.gpus, lease.milli) for lease in leases} == {("m", (0,), 250)}
    assert sorted(lease.instance.start for lease in leases if lease.instance) == [0, 2, 4], "each where it may begin"
    specs = [JobSpec.model_validate_json(each.spec) for each in world.api.scene.of(JobSubmitted)]  # type: ignore[attr-defined]
    flags = ReplicaSettings.model_validate_json(specs[0].env[SETTINGS_ENV]).flags
    assert "--gpu-memory-utilization" not in flags, "to its engine an instance is a whole GPU"
    world.api.client.scale("chat", "4")
    world.turn()
    assert world.states().count("waiting") == 1, "a fourth one may begin at none of these"
    assert world.view().micro_usd_per_hour == 500_000, "a quarter of the GPU"


def test_scale_to_zero_and_back_with_a_held_request(world: World) -> None:
    world.api.client.declare(chat(0, 2, idle_s=30.0))
    world.turn()
    assert (world.view().state, world.view().replicas) == ("idle", [])
    world.say(queued=1)
    world.turn()
    assert (world.view().wanted, world.states()) == (1, ["loading"])
    world.get_ready()
    world.say(running=1)
    world.turn(5)
    for _ in range(4):
        world.say(running=0)
        world.turn(10)
    assert (world.view().wanted, world.states()) == (0, ["draining"])
    world.leave()
    assert world.view().state == "idle"


def test_an_ended_service_ends_its_replicas_and_may_be_declared_again(world: World) -> None:
    world.api.client.declare(CHAT)
    world.turn()
    world.get_ready()
    assert world.api.client.end_service("chat").state == "ended"
    world.turn()
    assert world.states() == ["draining", "draining"]
    with pytest.raises(SpecError, match="2 of its replicas are leaving"):
        world.api.client.declare(CHAT)
    world.leave()
    assert world.view().replicas == []
    assert world.api.client.end_service("chat").why == "stopped by ada"
    again = world.api.client.declare(CHAT)
    assert (again.revision, again.state) == (2, "starting")


def test_a_server_that_was_killed_goes_on_where_it_was(world: World) -> None:
    world.api.client.declare(CHAT)
    world.turn()
    world.get_ready(world.of("loading")[0])
    before = world.view()
    world.api.scene.restart()
    world.api.operations.control, world.api.operations.store = world.api.scene.control, world.api.scene.store
    world.api.services.controller = ServiceOperations.over(world.api.operations).controller
    assert world.view() == before
    world.turn()
    assert world.states() == ["ready", "loading"]


def test_services_survive_a_snapshot(world: World) -> None:
    world.api.client.declare(CHAT)
    world.turn()
    world.get_ready(world.of("loading")[0])
    fold = world.api.scene.control.fold
    again: Fold = loaded(taken(fold), Policy(), fold.number)
    assert again.directory.services == fold.directory.services
    assert again.directory.version == fold.directory.version
    assert again.directory.of(JobId(world.view().replicas[0].job_id)) is not None


def test_gateways_learn_of_changes_and_only_of_those(world: World) -> None:
    world.api.client.declare(chat(1))
    world.turn()
    first = world.api.client.routes()
    assert [(each.name, each.models, each.endpoints) for each in first.services] == [
        ("chat", ["chat", "tiny", "./tiny"], [])
    ]
    assert world.api.client.routes(after=first.version, wait_s=0.2).version == first.version
    world.get_ready()
    second = world.api.client.routes(after=first.version, wait_s=20)
    assert second.version > first.version
    [endpoint] = second.services[0].endpoints
    assert (endpoint.state, endpoint.kv_tokens, endpoint.slots) == ("ready", 1000, 4)
    assert endpoint.id == world.view().replicas[0].job_id + ".1"


def test_usage_is_counted_once_however_often_it_is_sent(world: World) -> None:
    world.api.client.declare(chat(1))
    world.turn()
    world.get_ready()
    [replica] = world.view().replicas
    line = UsageLine(
        service="chat", job_id=replica.job_id, epoch=1, tenant="a", from_us=1, until_us=2, requests=3, output_tokens=50
    )
    assert world.say(seq=1, usage=[line]) == 1
    assert world.say(seq=1, usage=[line]) == 1
    assert world.say(seq=1) == 1, "status alone"
    assert world.say(seq=2, usage=[line]) == 2
    served = world.api.scene.of(TokensServed)
    assert [(each.gateway, each.tenant, each.output_tokens) for each in served] == [("edge", "a", 50)] * 2  # type: ignore[attr-defined]
    foreign = line.model_copy(update={"service": "chta"})
    assert world.say(seq=3, usage=[foreign, line]) == 3, "a gateway must not send a line for ever that nobody takes"
    assert len(world.api.scene.of(TokensServed)) == 3


def test_only_the_operators_gateways_report_usage_and_only_owners_load(world: World) -> None:
    world.api.client.declare(chat(1))
    world.turn()
    line = UsageLine(service="chat", job_id="chat-abcdef", epoch=1, tenant="a", from_us=1, until_us=2, requests=3)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"usage": [line]}, "bob may not report usage: operators do, since a bill is made of it"),
        ({"running": 2}, "bob may not report the load of chat, a service of ada"),
    ]
    for fields, message in cases:
        with (
            Client(world.api.client.home, url=world.api.url, token=OTHER) as bob,
            pytest.raises(ForbiddenError) as error,
        ):
            world.say(client=bob, seq=1, **fields)
        assert error.value.message == message
    assert not world.api.scene.of(TokensServed) and not world.view().measured.running


def test_what_gateways_say_is_in_the_view_until_they_are_silent(world: World) -> None:
    world.api.client.declare(chat(1))
    world.turn()
    world.get_ready()
    [replica] = world.view().replicas
    world.say(running=2, kv_used={f"{replica.job_id}.1": 250}, ttft_p99_us=90_000, requests_per_s=1.5)
    measured = world.view().measured
    assert (measured.running, measured.kv_fraction, measured.ttft_p99_us) == (2, 0.25, 90_000)
    world.say(running=2, kv_used={f"{replica.job_id}.1": 250, "chat-zzzzzz.1": 900})
    assert world.view().measured.kv_fraction == 0.25, "a replica that left, or leaves, is not counted"
    world.say(running=2, kv_used={f"{replica.job_id}.1": 250}, ttft_p99_us=90_000, requests_per_s=1.5)
    assert world.view().urls == ["http://127.0.0.1:8000"]
    world.turn(20)
    assert (world.view().measured.running, world.view().urls) == (0, [])


def test_refusals_change_nothing(world: World) -> None:
    number = world.api.scene.control.number
    with pytest.raises(TooLargeError, match=r"9 GPUs, and the engine llama.cpp starts on one node: the largest has 4"):
        world.api.client.declare(CHAT | {"gpus": 9})
    with pytest.raises(SpecError, match="has no section `service`"):
        world.api.client.declare({"run": ["true"], "gpus": 1})
    with pytest.raises(SpecError, match=r"chat is a service, not a job\n.*/v1/services"):
        world.api.client.submit(CHAT)
    with pytest.raises(SpecError, match=r"there is no job 'gpt'\n"):
        world.api.client.declare(CHAT | {"service": {"model": "job:gpt"}})
    with pytest.raises(NotFoundError, match="there is no service 'chta'"):
        world.api.client.service("chta")
    assert world.api.scene.control.number == number


def test_a_model_may_be_what_a_job_has_trained(world: World) -> None:
    world.api.scene.control.submit(JOB, json.dumps({"run": "true", "gpus": 4, "name": "gpt", "cwd": "/work"}))
    with pytest.raises(SpecError, match=r"the job gpt-abcdef has no checkpoint.to\n.*--checkpoint-to"):
        world.api.client.declare(CHAT | {"service": {"model": "job:gpt"}})


def test_a_revision_serves_the_newest_checkpoint_at_its_declaration(world: World) -> None:
    control, time = world.api.scene.control, world.api.scene.time
    section = {"checkpoint": {"to": "/ckpt"}, "model": {"config": "base/config.json"}}
    spec = {"run": "true", "gpus": 1, "name": "gpt", "cwd": "/models"} | section
    control.submit(replace(JOB, gpus=1), json.dumps(spec))
    world.turn()

    def save(step: int) -> None:
        sizes = {"generation": 1, "size_bytes": 1, "stall_us": 0, "upload_us": 0}
        saved = CheckpointCommitted(at_us=time.us, job_id=JOB.job_id, epoch=1, step=step, **sizes)
        world.api.scene.agents.report(saved, source=f"{JOB.job_id}.1/rank0")
        world.turn()

    def settings() -> list[tuple[int, int | None, str | None]]:
        specs = [json.loads(each.spec) for each in world.api.scene.of(JobSubmitted)[1:]]  # type: ignore[attr-defined]
        found = [ReplicaSettings.model_validate_json(each["env"][SETTINGS_ENV]) for each in specs]
        weights = [each.trained["job:gpt"] for each in found]
        assert {each.checkpoint for each in weights} == {"/ckpt/gpt-abcdef"}
        return [(one.revision, each.step, each.like) for one, each in zip(found, weights, strict=True)]

    # The service has the job's name, and so have its replicas.
    gpt = {"name": "gpt", "gpus": 1, "service": {"model": "job:gpt", "engine": "llama.cpp"}}
    save(400)
    world.api.client.declare(gpt)
    world.turn()
    save(800)
    world.api.client.scale("gpt", "2")
    world.turn()
    assert settings() == [(1, 400, "/models/base")] * 2, "a replica that starts later has the same weights"
    other = gpt | {"service": gpt["service"] | {"like": "/tok", "replicas": {"max": 2}}}
    assert world.api.client.declare(other).revision == 2
    world.turn()
    assert set(settings()[2:]) == {(2, 800, "/tok")}


def test_a_revision_serves_the_version_of_an_artifact_at_its_declaration(world: World, tmp_path: Path) -> None:
    artifacts, section = ArtifactClient(world.api.client), CHAT["service"] | {"model": "artifact:gpt:best"}

    def push(word: str, **wanted: Any) -> str:
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(word)
        return artifacts.push(tmp_path / "model", wanted.pop("name", "gpt"), PushWanted(**wanted)).version.digest

    def served() -> list[tuple[int, str, str]]:
        specs = [JobSpec.model_validate_json(each.spec) for each in world.api.scene.of(JobSubmitted)]  # type: ignore[attr-defined]
        found = [ReplicaSettings.model_validate_json(each.env[SETTINGS_ENV]) for each in specs]
        versions = [each.artifacts["artifact:gpt:best"] for each in found]
        assert {each.store for each in versions} == {str(world.api.operations.home / "artifacts")}
        assert [each.artifacts for each in specs] == [(version.digest,) for version in versions], "its node fetches it"
        return [(one.revision, each.ref, each.digest) for one, each in zip(found, versions, strict=True)]

    with pytest.raises(SpecError, match="there is no artifact gpt:best"):
        world.api.client.declare(CHAT | {"service": section})
    first = push("one", tag="best")
    one = section | {"replicas": {"min": 1, "max": 1}}
    world.api.client.declare(CHAT | {"service": one})
    world.turn()
    second = push("two", tag="best")
    world.api.client.scale("chat", "2")
    world.turn()
    declared = ServiceSpec.model_validate(world.view().spec["service"]).versions["artifact:gpt:best"]
    assert (declared.ref, declared.config, declared.file) == ("gpt:1", "one", "config.json")
    assert served() == [(1, "gpt:1", first)] * 2, "a replica that starts later has the same weights"
    assert world.api.client.declare(CHAT | {"service": section}).revision == 2, "the tag names another one by now"
    world.turn()
    assert set(served()[2:]) == {(2, "gpt:2", second)}
    with pytest.raises(InputError, match="gpt:2 has the tag best"):
        artifacts.remove("gpt:2")
    artifacts.tag("gpt:2", "best", remove=True)
    with pytest.raises(InputError, match="gpt:2 is served by chat"):
        artifacts.remove("gpt:2")
    assert [each.ref for each in artifacts.collect(CollectRequest(keep=1, name="gpt")).versions] == ["gpt:1"]
    push("three", name="low-rank", kind="adapter")
    with pytest.raises(SpecError, match="low-rank:1 is of the kind adapter, and a service serves a model"):
        world.api.client.declare(CHAT | {"service": {"model": "artifact:low-rank"}})


def test_a_replica_that_is_refused_is_tried_again_and_its_reason_is_said(world: World) -> None:
    control = world.api.scene.control
    control.set_queues([Queue(name="web", quota_gpus=2)])
    world.api.client.declare(chat(1) | {"queue": "web"})
    control.set_queues([])
    control.set_queues([Queue(name="other")])
    world.turn()
    assert world.view().why == "there is no queue 'web'"
    control.set_queues([Queue(name="web", quota_gpus=2)])
    world.turn(5)
    assert world.states() == [], "not at each turn"
    world.turn(6)
    assert (world.view().why, world.states()) == ("", ["loading"])


def test_training_makes_room_for_a_replica_and_grows_back(world: World) -> None:
    """Traffic takes a GPU from an elastic, preemptible job, which shrinks; when traffic falls it has them all again."""
    scene = world.api.scene
    train = {"run": ["true"], "gpus": 3, "name": "gpt", "tier": "preemptible", "elastic": {"sizes": [2, 1]}}
    job_id = JobId(world.api.client.submit(train, unprotected=True).job.job_id)
    world.api.client.declare(chat(1, 2, window_s=60.0))
    world.turn()
    world.get_ready()
    assert (gpus_of(world, job_id), world.states()) == (3, ["ready"]), "the node is full"
    world.turn(3600)

    world.say(queued=20, running=4)
    world.turn()
    assert world.states() == ["ready", "waiting"]
    [notice] = scene.of(NoticeGiven)
    assert isinstance(notice, NoticeGiven)
    assert (notice.job_id, notice.reason, notice.gpus) == (job_id, "resize", 2)
    assert notice.for_job == world.of("waiting")[0].job_id, "the replica, which is charged for the loss"
    world.leave(ReplicaView.model_validate(world.view().replicas[0].model_dump() | {"job_id": job_id, "epoch": 1}))
    assert (gpus_of(world, job_id), world.states()) == (2, ["ready", "loading"]), "both run at once"
    world.get_ready()

    for _ in range(8):
        world.say(running=1)
        world.turn(10)
    assert world.states() == ["ready", "draining"]
    world.leave()
    world.turn(7200)
    [_, growth] = [each for each in scene.of(NoticeGiven) if isinstance(each, NoticeGiven) and each.job_id == job_id]
    assert (growth.reason, growth.gpus) == ("resize", 3)
    world.leave(ReplicaView.model_validate(world.view().replicas[0].model_dump() | {"job_id": job_id, "epoch": 2}))
    assert (gpus_of(world, job_id), world.states()) == (3, ["ready"])


def gpus_of(world: World, job_id: JobId) -> int:
    attempt = world.api.scene.control.state.attempts[job_id]
    assert not attempt.leaving
    return attempt.gpus
