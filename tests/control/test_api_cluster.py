"""The API about the whole cluster: logs, events, costs, queues and nodes."""

import threading

import pytest
from api_scene import SPEC, TOKEN, Api
from stage import GPT

from cordee.answers.queues import QueuesView
from cordee.client import Client
from cordee.control.tick import Control
from cordee.errors import (
    InputError,
    NotFoundError,
    QueuesError,
    SpecError,
)
from cordee.events import (
    NodeCordoned,
    NodeUncordoned,
    NoticeGiven,
    NoticeReason,
    Outcome,
    Queue,
    RankLeft,
)


def test_the_log_can_be_read_and_followed(api: Api) -> None:
    log = list(enumerate(api.scene.log(), start=1))
    assert list(api.client.events()) == log
    assert list(api.client.events(after=1)) == log[1:]
    followed: list[int] = []
    began = threading.Event()

    def follow() -> None:
        with Client(url=api.url, token=TOKEN) as client:
            for number, _ in client.events(follow=True):
                followed.append(number)
                began.set()

    thread = threading.Thread(target=follow)
    thread.start()
    assert began.wait(60)
    api.client.submit(SPEC)
    api.operations.closing = True
    thread.join(60)
    assert followed == [*(number for number, _ in log), len(log) + 1]


def _log(api: Api, epoch: int, rank: int, text: str) -> None:
    path = api.operations.home / "attempts" / GPT / str(epoch) / "local" / "logs" / f"rank{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def test_logs_by_rank_and_of_all(api: Api) -> None:
    api.client.submit(SPEC, job_id=GPT)
    assert list(api.client.logs("gpt")) == []
    api.scene.control.tick()
    for rank in (0, 1, 10):
        _log(api, 1, rank, f"a{rank}\nb{rank}\n")
    assert list(api.client.logs("gpt", rank=1)) == ["a1", "b1"]
    assert list(api.client.logs("gpt", tail=1)) == ["[rank0] b0", "[rank1] b1", "[rank10] b10"]
    with pytest.raises(NotFoundError, match=r"has no attempt 2"):
        list(api.client.logs("gpt", epoch=2))
    with pytest.raises(NotFoundError, match="its ranks are 0 to 3"):
        list(api.client.logs("gpt", rank=4))


def test_logs_are_followed_over_attempts_to_the_end_of_the_job(api: Api) -> None:
    api.client.submit(SPEC, job_id=GPT)
    api.scene.control.tick()
    _log(api, 1, 0, "one\ntw")
    lines: list[str] = []
    heard = threading.Condition()

    def follow() -> None:
        with Client(url=api.url, token=TOKEN) as client:
            for line in client.logs("gpt", rank=0, follow=True):
                with heard:
                    lines.append(line)
                    heard.notify()

    thread = threading.Thread(target=follow)
    thread.start()
    with heard:
        assert heard.wait_for(lambda: lines == ["one"], 10)
    _log(api, 1, 0, "o\nthree")
    with heard:
        assert heard.wait_for(lambda: lines == ["one", "two"], 10)
    api.scene.ended(GPT, 1, Outcome.LOST)
    api.scene.control.tick()
    _log(api, 2, 0, "again\n")
    with heard:
        assert heard.wait_for(lambda: lines == ["one", "two", "three", "again"], 10)
    api.scene.ended(GPT, 2, Outcome.FINISHED)
    api.scene.control.tick()
    thread.join(60)
    assert not thread.is_alive()


def test_the_cost_adds_up(api: Api) -> None:
    api.client.submit(SPEC, job_id=GPT)
    api.scene.control.tick()
    api.scene.time.us += 1_000_000
    bill = api.client.cost("user")
    assert [row.key for row in bill.rows] == ["ada"]
    for split in (bill.gpu_us, bill.micro_usd, bill.rows[0].gpu_us):
        classes = split.model_dump()
        assert classes.pop("held") == sum(classes.values())
    assert bill.gpu_us.held >= 4_000_000
    assert bill.micro_usd.held == bill.gpu_us.held * 2_000_000 // 3_600_000_000


def test_steps_outlive_the_attempt_that_reached_them(api: Api) -> None:
    api.client.submit(SPEC, job_id=GPT)
    api.scene.control.tick()
    left = RankLeft(at_us=api.scene.time.us, job_id=GPT, epoch=1, rank=0, how="checkpointed", step=40)
    api.scene.agents.report(left, source="gpt-abcdef.1/rank0")
    api.scene.control.tick()
    assert api.client.job("gpt").step == 40


def test_queues_are_set_as_a_whole_or_not_at_all(api: Api) -> None:
    tree = [Queue(name="team", quota_gpus=4), Queue(name="llm", parent="team", quota_gpus=2, limit_gpus=4)]
    seen = api.client.set_queues(tree)
    assert [(each.name, each.depth, each.quota_gpus) for each in seen.queues] == [
        ("default", 0, 0), ("team", 0, 4), ("llm", 1, 2),
    ]  # fmt: skip
    number = api.scene.control.number
    with pytest.raises(QueuesError, match="5 GPUs are guaranteed"):
        api.client.set_queues([Queue(name="team", quota_gpus=5)])
    with pytest.raises(InputError, match="quota_gpus"):
        api.client._ask(QueuesView, "PUT", "/v1/queues", json={"queues": [{"name": "a", "quota_gpus": "some"}]})
    assert api.scene.control.number == number
    made = api.client.submit(SPEC | {"queue": "llm"})
    llm = api.client.queues().queues[-1]
    assert (llm.waiting_jobs, llm.waiting_gpu_milli, llm.running_jobs) == (1, 4000, 0)
    api.scene.control.tick()
    team, llm = api.client.queues().queues[1:]
    assert (llm.held_gpu_milli, llm.borrowed_gpu_milli, llm.running_jobs) == (4000, 2000, 1)
    assert (team.held_gpu_milli, team.borrowed_gpu_milli, team.running_jobs) == (4000, 0, 1)
    assert llm.users_gpu_milli == {"ada": 4000} and made.job.queue == "llm"
    with pytest.raises(SpecError, match="there is no queue 'research'"):
        api.client.submit(SPEC | {"queue": "research"})


def test_queues_outlive_the_server(api: Api) -> None:
    api.client.set_queues([Queue(name="team", quota_gpus=4, weight=3)])
    api.client.submit(SPEC | {"queue": "team"})
    api.scene.control.tick()
    again = Control(clock=api.scene.time, store=api.scene.store, executor=api.scene.agents)
    assert again.state.quotas.value() == api.scene.control.state.quotas.value()


def test_a_node_is_cordoned_and_put_back_into_use(api: Api) -> None:
    seen = api.client.cordon("local", why="disk errors")
    assert (seen.cordoned_by, seen.cordon_why, seen.drains) == ("ada", "disk errors", False)
    api.client.cordon("local", why="disk errors")
    api.client.submit(SPEC)
    api.scene.control.tick()
    assert api.scene.control.state.attempts == {}, "nothing is placed there"
    assert "local is cordoned" in api.client.why("gpt").text
    seen = api.client.uncordon("local", why="disk replaced")
    assert (seen.cordoned_by, seen.cordon_why) == (None, "")
    api.client.uncordon("local")
    assert api.scene.of(NodeCordoned) == [
        NodeCordoned(at_us=api.scene.of(NodeCordoned)[0].at_us, node="local", by="ada", why="disk errors")
    ]
    [back] = api.scene.of(NodeUncordoned)
    assert isinstance(back, NodeUncordoned)
    assert (back.by, back.why) == ("ada", "disk replaced")
    api.scene.control.tick()
    assert len(api.scene.control.state.attempts) == 1


def test_a_drained_node_gives_its_attempts_notice_once(api: Api) -> None:
    api.client.submit(SPEC)
    api.scene.control.tick()
    for _ in range(2):
        assert api.client.drain("local", why="firmware").drains
        api.scene.control.tick()
    [notice] = api.scene.of(NoticeGiven)
    assert isinstance(notice, NoticeGiven)
    assert notice.reason is NoticeReason.DRAIN
    assert len(api.scene.of(NodeCordoned)) == 1


@pytest.mark.parametrize("order", ["cordon", "drain", "uncordon"])
def test_an_unknown_node_is_not_found_with_the_names_that_there_are(api: Api, order: str) -> None:
    before = api.scene.log()
    with pytest.raises(NotFoundError, match=r"there is no node 'lokal'\nhint: did you mean local"):
        getattr(api.client, order)("lokal")
    assert api.scene.log() == before
