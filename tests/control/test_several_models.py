"""Services whose replicas swap models, over the API: who is ordered to hold what, and what gateways learn of it."""

from typing import Any

import pytest
from services_world import CHAT, S, World, chat

from cordee.answers.services import GatewayReport, GatewayStatus, ReplicaView
from cordee.control.snapshot import loaded, taken
from cordee.errors import SpecError
from cordee.events import ModelOrdered, Outcome, ReplicaReady, ReplicaUnready
from cordee.schedule.policy import Policy

LOAD_US = 2 * S


def three(fewest: int = 2, most: int | None = None, **section: Any) -> dict[str, Any]:
    return chat(fewest, most, models=("./bee", "./cat"), **section)


def holding(world: World) -> list[str | None]:
    return [each.model for each in world.view().replicas]


def load(world: World, *replicas: ReplicaView, after_s: float = 2.0) -> None:
    """Answer for these replicas, by default all that load, that they hold the model that they were ordered to."""
    world.api.scene.time.us += round(after_s * S)
    for at, each in enumerate(replicas or world.of("loading")):
        world.report(
            ReplicaReady, each, rank=0, address=f"http://127.0.0.1:{9000 + at}", engine="llama.cpp", model=each.model,
            slots=4, load_us=LOAD_US,
        )  # fmt: skip
    world.turn()


def say(world: World, **queued: int) -> None:
    """Report requests that wait for models, each since a second ago."""
    rows = [
        GatewayStatus(service="chat", model=f"./{model}", queued=number, oldest_wait_us=S)
        for model, number in queued.items()
    ]
    world.api.client.report("edge", GatewayReport(seq=0, at_us=1, status=rows))
    world.turn()


@pytest.fixture
def swapping(world: World) -> World:
    """Return a world in which two replicas hold the first two of three models."""
    world.api.client.declare(three())
    world.turn()
    assert holding(world) == ["./tiny", "./bee"]
    load(world)
    return world


def test_replicas_begin_with_different_models(swapping: World) -> None:
    view = swapping.view()
    assert (view.state, [each.state for each in view.replicas]) == ("ready", ["ready", "ready"])
    assert [(each.name, each.replicas, each.load_us) for each in view.models] == [
        ("./tiny", 1, LOAD_US), ("./bee", 1, LOAD_US), ("./cat", 0, None),
    ]  # fmt: skip


def test_gateways_learn_of_each_model_with_its_names_and_its_replicas(swapping: World) -> None:
    routes = swapping.api.client.routes().services
    assert [(each.name, each.model, each.models) for each in routes] == [
        ("chat", "./tiny", ["chat", "tiny", "chat/tiny", "./tiny"]),
        ("chat", "./bee", ["bee", "chat/bee", "./bee"]),
        ("chat", "./cat", ["cat", "chat/cat", "./cat"]),
    ]
    assert [[one.model for one in each.endpoints] for each in routes] == [["./tiny"], ["./bee"], []]


def test_a_waiting_model_takes_the_slot_of_an_idle_one(swapping: World) -> None:
    before = len(swapping.api.scene.of(ModelOrdered))
    say(swapping, cat=3, bee=1)
    assert len(swapping.api.scene.of(ModelOrdered)) == before, "each model has just been loaded"
    swapping.turn(LOAD_US / S)
    say(swapping, cat=3, bee=1)
    order = swapping.api.scene.of(ModelOrdered)[-1]
    first, second = swapping.view().replicas
    assert isinstance(order, ModelOrdered) and (order.job_id, order.model) == (first.job_id, "./cat")
    assert (first.state, first.model, second.state, second.model) == ("loading", "./cat", "ready", "./bee")
    assert first.why == "3 requests wait for ./cat, the oldest for 1.0 s"
    # Its open requests go on, and it gets no new ones; without its engine it is no endpoint.
    tiny = swapping.api.client.routes().services[0]
    assert [each.state for each in tiny.endpoints] == ["draining"]
    swapping.report(ReplicaUnready, first, rank=0, why="it loads ./cat in place of ./tiny")
    swapping.turn()
    assert swapping.api.client.routes().services[0].endpoints == []
    assert (swapping.view().state, swapping.view().replicas[0].state) == ("ready", "loading")
    load(swapping, first)
    cat = swapping.api.client.routes().services[2]
    assert [(each.model, each.state) for each in cat.endpoints] == [("./cat", "ready")]
    assert holding(swapping) == ["./cat", "./bee"]


def test_requests_at_two_gateways_wait_for_one_load(swapping: World) -> None:
    swapping.turn(10)
    for name, number in (("edge", 1), ("core", 2)):
        row = GatewayStatus(service="chat", model="./cat", queued=number, oldest_wait_us=number * S)
        swapping.api.client.report(name, GatewayReport(seq=0, at_us=1, status=[row]))
    before = len(swapping.api.scene.of(ModelOrdered))
    swapping.turn()
    swapping.turn()
    [order] = swapping.api.scene.of(ModelOrdered)[before:]
    assert isinstance(order, ModelOrdered) and order.why == "3 requests wait for ./cat, the oldest for 2.0 s"
    assert swapping.view().models[2].queued == 3


def test_a_busy_model_stays_four_loads(swapping: World) -> None:
    endpoints = [f"{each.job_id}.1" for each in swapping.view().replicas]

    def busy() -> None:
        rows = [
            GatewayStatus(service="chat", model=model, running=1, open={endpoint: 1})
            for model, endpoint in zip(("./tiny", "./bee"), endpoints, strict=True)
        ]
        rows.append(GatewayStatus(service="chat", model="./cat", queued=1, oldest_wait_us=S))
        swapping.api.client.report("edge", GatewayReport(seq=0, at_us=1, status=rows))
        swapping.turn()

    for _ in range(3):
        swapping.turn(LOAD_US / S)
        busy()
        assert swapping.states() == ["ready", "ready"]
    swapping.turn(LOAD_US / S)
    busy()
    assert sorted(swapping.states()) == ["loading", "ready"]


def test_a_crowded_model_takes_an_idle_slot_and_a_new_replica_what_is_wanted_most(swapping: World) -> None:
    swapping.turn(10)
    say(swapping, tiny=9)
    swapping.turn(LOAD_US / S)
    say(swapping, tiny=9)
    assert holding(swapping) == ["./tiny", "./bee"], "its oldest request has not waited for as long as a load"
    busy = {f"{each.job_id}.1": 4 for each in swapping.view().replicas if each.model == "./tiny"}
    rows = [GatewayStatus(service="chat", model="./tiny", queued=9, running=4, open=busy, oldest_wait_us=3 * S)]
    swapping.api.client.report("edge", GatewayReport(seq=0, at_us=1, status=rows))
    swapping.turn()
    assert holding(swapping) == ["./tiny", "./tiny"]
    swapping.api.client.scale("chat", "3")
    swapping.turn()
    assert holding(swapping) == ["./tiny"] * 3


def test_a_replica_that_dies_within_a_swap_comes_back_with_the_model_most_wanted(swapping: World) -> None:
    swapping.turn(10)
    say(swapping, cat=2)
    [loading] = swapping.of("loading")
    swapping.leave(loading, outcome=Outcome.LOST)
    [again] = swapping.of("loading")
    assert (again.job_id, again.epoch, again.model) == (loading.job_id, 2, "./cat")


def test_a_model_that_does_not_load_waits_and_the_others_are_served(swapping: World) -> None:
    swapping.turn(10)
    say(swapping, cat=2)
    [loading] = swapping.of("loading")
    swapping.leave(loading, outcome=Outcome.FAILED)
    [again] = swapping.of("loading")
    assert again.model == "./cat", "the first restart is at once"
    swapping.leave(again, outcome=Outcome.FAILED)
    [other] = swapping.of("loading")
    assert other.model in ("./tiny", "./bee")
    assert swapping.view().models[2].why.startswith("it did not load: ")
    load(swapping, other)
    swapping.turn(5)
    say(swapping, cat=2)
    assert swapping.states() == ["ready", "ready"], "ten seconds after the second failure"
    swapping.turn(5)
    say(swapping, cat=2)
    assert sorted(str(each) for each in holding(swapping)) in (["./bee", "./cat"], ["./cat", "./tiny"])


def test_an_update_swaps_no_model_of_the_old_revision(swapping: World) -> None:
    swapping.turn(10)
    swapping.api.client.declare(three(context=2048))
    swapping.turn()
    old = [each for each in swapping.view().replicas if each.revision == 1]
    say(swapping, cat=2)
    assert [each.model for each in old] == ["./tiny", "./bee"]
    [new] = [each for each in swapping.view().replicas if each.revision == 2]
    assert (new.state, new.model) == ("loading", "./tiny")


def test_models_and_loads_survive_a_snapshot(swapping: World) -> None:
    swapping.turn(10)
    say(swapping, cat=2)
    swapping.leave(swapping.of("loading")[0], outcome=Outcome.FAILED)
    fold = swapping.api.scene.control.fold
    again = loaded(taken(fold), Policy(), fold.number)
    assert again.directory.services == fold.directory.services
    assert again.directory.services["chat"].load_failures["./cat"].number == 1


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"service": {"models": ["./b"]}, "run": "serve"}, "service.models are models beside service.model"),
        ({"service": {"model": "./a", "models": ["./b"]}, "run": "serve"}, "the command of run has none to swap"),
        (
            {"service": {"model": "./a", "models": ["./b"], "engine": "command"}, "run": "serve"},
            "service.models are models beside service.model",
        ),
        ({"service": {"model": "./a", "models": ["./b", "./b"]}}, "service.models names ./b twice"),
        ({"service": {"model": "./a", "models": ["./a"]}}, "service.models names ./a twice"),
    ],
)
def test_models_that_cannot_be_swapped_are_refused(world: World, spec: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        world.api.client.declare({"name": "chat", "gpus": 1, **spec})


def test_a_model_that_is_not_in_the_folder_is_refused(world: World, tmp_path: Any) -> None:
    (tmp_path / "tiny").mkdir()
    spec = three() | {"cwd": str(tmp_path)}
    with pytest.raises(SpecError, match=r"the model \./bee of the service: there is no such file or folder in "):
        world.api.client.declare(spec)
    assert world.api.client.declare(CHAT | {"cwd": str(tmp_path)}).name == "chat"
