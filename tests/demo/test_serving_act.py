"""The claims of the second act fail loudly on false input; its traffic and its figure are read from true ones."""

import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cordee.account.ledger import attempt_segments
from cordee.cli import demo
from cordee.demo import serving_claims as claims
from cordee.demo.lines import line
from cordee.demo.traffic import QUESTIONS, Answer, Traffic, tokens_of
from cordee.errors import ClaimError, InputError, MissingExtraError
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    Event,
    Job,
    JobEnded,
    JobSubmitted,
    Lease,
    Node,
    NodeUp,
    NoticeGiven,
    NoticeReason,
    Outcome,
    RankLeft,
    RanksEnded,
    ReplicaReady,
    ServiceDeclared,
    ServiceScaled,
    Tier,
)
from cordee.ids import JobId
from cordee.view.report import Claim
from cordee.view.slots import SlotMark, holdings, rates, slots_svg

GPT, ONE, TWO = JobId("gpt-aaaaaa"), JobId("chat-bbbbbb"), JobId("chat-cccccc")
NAMES = {GPT: "gpt", ONE: "replica 1", TWO: "replica 2"}
S = 1_000_000
WHOLE = {question: f"text {question}" for question in range(len(QUESTIONS))}


def job(job_id: JobId, at_s: int, gpus: int, tier: Tier, service: str | None = None) -> JobSubmitted:
    made = Job(job_id=job_id, name=job_id.partition("-")[0], owner="ann", gpus=gpus, tier=tier, service=service)
    return JobSubmitted(at_us=at_s * S, job=made, spec="{}")


def placed(job_id: JobId, epoch: int, at_s: int, *gpus: int) -> AttemptPlaced:
    return AttemptPlaced(at_us=at_s * S, job_id=job_id, epoch=epoch, leases=(Lease(node="local", gpus=gpus),))


def ended(job_id: JobId, epoch: int, at_s: int, outcome: Outcome = Outcome.CHECKPOINTED) -> list[Event]:
    return [
        RanksEnded(at_us=at_s * S, job_id=job_id, epoch=epoch, node="local", outcome=outcome),
        AttemptEnded(at_us=at_s * S, job_id=job_id, epoch=epoch, outcome=outcome, why=""),
    ]


def left(rank: int, epoch: int, at_s: int, step: int, how: str = "checkpointed") -> RankLeft:
    return RankLeft(at_us=at_s * S, job_id=GPT, epoch=epoch, rank=rank, how=how, step=step)


def resized(epoch: int, at_s: int, gpus: int, for_job: JobId | None) -> NoticeGiven:
    return NoticeGiven(
        at_us=at_s * S, job_id=GPT, epoch=epoch, reason=NoticeReason.RESIZE, deadline_us=(at_s + 30) * S,
        for_job=for_job, gpus=gpus,
    )  # fmt: skip


def ready(job_id: JobId, epoch: int, at_s: int) -> ReplicaReady:
    return ReplicaReady(
        at_us=at_s * S, job_id=job_id, epoch=epoch, rank=0, address="http://127.0.0.1:1", engine="llama.cpp", model="m"
    )


def story() -> list[Event]:
    """Two ranks shrink to one for the second replica, the first replica is killed, and all comes back."""
    return [
        NodeUp(at_us=0, node=Node(name="local", epoch=1, gpu_name="slot", gpus=3)),
        job(GPT, 0, 2, Tier.PREEMPTIBLE),
        placed(GPT, 1, 0, 0, 1),
        ServiceDeclared(at_us=S, service="chat", revision=1, by="ann", spec="{}", min_replicas=1, max_replicas=2),
        job(ONE, 1, 1, Tier.PRODUCTION, "chat"),
        placed(ONE, 1, 1, 2),
        ready(ONE, 1, 2),
        ServiceScaled(at_us=10 * S, service="chat", replicas=2, why="8 requests for 4 slots each"),
        job(TWO, 10, 1, Tier.PRODUCTION, "chat"),
        resized(1, 10, 1, TWO),
        *(left(rank, 1, 11, 3) for rank in range(2)),
        *ended(GPT, 1, 12),
        placed(TWO, 1, 12, 0),
        placed(GPT, 2, 12, 1),
        ready(TWO, 1, 13),
        *ended(ONE, 1, 15, Outcome.LOST),
        placed(ONE, 2, 15, 2),
        ready(ONE, 2, 17),
        ServiceScaled(at_us=25 * S, service="chat", replicas=1, why="at most 1 were wanted in the last 6 s"),
        *ended(TWO, 1, 26),
        JobEnded(at_us=26 * S, job_id=TWO, state="stopped", why="stopped by its service"),
        resized(2, 26, 2, None),
        left(0, 2, 27, 5),
        *ended(GPT, 2, 28),
        placed(GPT, 3, 28, 0, 1),
        *(left(rank, 3, 40, 6) for rank in range(2)),
        *ended(GPT, 3, 41),
        *ended(ONE, 2, 41),
    ]


def but(change: Callable[[Event], Event | None]) -> list[Event]:
    return [changed for event in story() if (changed := change(event)) is not None]


def without(kind: type) -> list[Event]:
    return but(lambda event: None if isinstance(event, kind) else event)


LINES = {
    0: [{"epoch": 1 if step < 3 else 2 if step < 5 else 3, "step": step} for step in range(6)],
    1: [{"epoch": 1 if step < 3 else 3, "step": step} for step in (0, 1, 2, 5)],
}


def answer(question: int = 0, text: str | None = None, error: str = "") -> Answer:
    said = WHOLE[question] if text is None else text
    return Answer(question, said, begun_us=13 * S, first_us=14 * S, ended_us=18 * S, error=error)


def survived(events: list[Event], cut: list[Answer], moved: int = 1) -> Claim:
    return claims.survived(events, ONE, 14 * S, cut, moved, WHOLE)


TRUE: dict[str, Callable[[], Claim]] = {
    "scaled": lambda: claims.scaled_by_traffic(story(), "chat", 2),
    "shrank": lambda: claims.shrank_for(story(), GPT, "chat", 1, NAMES),
    "survived": lambda: survived(story(), [answer(0), answer(1)]),
    "replaced": lambda: claims.replaced(story(), ONE, 14 * S),
    "whole": lambda: claims.all_whole([answer(0), answer(7)], WHOLE),
    "back": lambda: claims.came_back(story(), GPT, 2),
    "steps": lambda: claims.no_step_lost(story(), GPT, LINES),
}
FALSE: dict[str, Callable[[], Claim]] = {
    "a user scaled it": lambda: claims.scaled_by_traffic([*story(), story()[3]], "chat", 2),
    "it never rose": lambda: claims.scaled_by_traffic(without(ServiceScaled), "chat", 2),
    "no notice": lambda: claims.shrank_for(without(NoticeGiven), GPT, "chat", 1, NAMES),
    "it left without a checkpoint": lambda: claims.shrank_for(
        but(lambda event: replace(event, how="aborted") if event == left(1, 1, 11, 3) else event), GPT, "chat", 1, NAMES
    ),
    "it did not go on": lambda: claims.shrank_for(
        but(lambda event: None if event == placed(GPT, 2, 12, 1) else event), GPT, "chat", 1, NAMES
    ),
    "no replica was lost": lambda: survived(without(AttemptEnded), [answer()]),
    "no stream was open": lambda: survived(story(), []),
    "no stream moved": lambda: survived(story(), [answer()], moved=0),
    "a token too few": lambda: survived(story(), [answer(), answer(1, "text ")]),
    "it broke off": lambda: survived(story(), [answer(error="without [DONE]")]),
    "no replica came back": lambda: claims.replaced(story(), ONE, 20 * S),
    "another text": lambda: claims.all_whole([answer(), answer(1, "text 2")], WHOLE),
    "a request failed": lambda: claims.all_whole([answer(), answer(error="status 503")], WHOLE),
    "nobody asked": lambda: claims.all_whole([], WHOLE),
    "it stayed small": lambda: claims.came_back(story()[:-7], GPT, 2),
    "it never shrank": lambda: claims.came_back(story()[:4], GPT, 2),
    "a step twice": lambda: claims.no_step_lost(story(), GPT, {**LINES, 0: [*LINES[0][:3], *LINES[0][2:]]}),
    "a step missing": lambda: claims.no_step_lost(story(), GPT, {**LINES, 0: LINES[0][:4]}),
    "a rank less": lambda: claims.no_step_lost(story(), GPT, {0: LINES[0]}),
}


@pytest.mark.parametrize("name", TRUE)
def test_what_is_true_holds_and_says_what_was_measured(name: str) -> None:
    found = TRUE[name]()
    assert found.holds and any(char.isdigit() for char in found.measured)


@pytest.mark.parametrize("name", FALSE)
def test_what_is_false_fails_loudly(name: str) -> None:
    with pytest.raises(ClaimError, match="does not hold"):
        FALSE[name]()


def test_the_lines_of_services_say_who_gains_and_why() -> None:
    said = [text for event in story() if (text := line(event, NAMES)) is not None]
    assert "replica 2 is queued: production tier, one slot" in said
    assert "chat wants 2 replicas: 8 requests for 4 slots each" in said
    assert "gpt gets notice: replica 2 needs slots, go on with 1 rank" in said
    assert "gpt gets notice: there is room again, go on with 2 ranks" in said
    assert "replica 1 has answered a first token (llama.cpp) and gets requests" in said


def test_each_slot_shows_its_holders_and_the_load_keeps_its_sum() -> None:
    events = story()
    held = holdings(events)
    assert {each.slot for each in held} == {("local", gpu) for gpu in range(3)}
    first = sorted((each.from_us // S, NAMES[each.job_id], each.to_us // S) for each in held if each.slot[1] == 0)
    assert first == [(0, "gpt", 12), (12, "replica 2", 26), (28, "gpt", 41)]
    requests = [(at * S, (at + 3) * S) for at in range(30)]
    per_s = rates(requests, 0, 41 * S)
    assert abs(sum(per_s) / len(per_s) * 41 - 30) < 0.1
    marks = [SlotMark(10 * S, "8 users"), SlotMark(10 * S, "replica <1> killed")]
    svg = slots_svg(events, attempt_segments(events), NAMES, requests, marks, title="Slots")
    drawn = ElementTree.fromstring(svg)
    texts = [each.text for each in drawn.iter() if each.tag.endswith("text")]
    assert {"slot 0", "slot 1", "slot 2", "gpt", "replica 2", "replica <1> killed"} <= set(texts)


# -- traffic -----------------------------------------------------------------------------------------------------

STREAM = [
    b'data: {"choices":[{"delta":{"role":"assistant","content":null},"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"al"},"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"most"},"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n',
    b"data: [DONE]\n\n",
]


class Replies(BaseHTTPRequestHandler):
    """Answers with what the server holds in `status` and `body`."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def do_GET(self) -> None:
        self.send_response(self.server.status)  # type: ignore[attr-defined]
        self.end_headers()
        self.wfile.write(self.server.body)  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def reply() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Replies)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "events", "error"),
    [
        (200, STREAM, ""),
        (200, STREAM[:-1], "without [DONE]"),
        (200, STREAM[:3], "'none', without [DONE]"),
        (200, [*STREAM[:3], b'data: {"error":{"message":"upstream failed"}}\n\n'], "upstream failed"),
        (503, [b"no replica"], "status 503"),
    ],
)
def test_an_answer_is_whole_or_says_why_not(
    reply: ThreadingHTTPServer, status: int, events: list[bytes], error: str
) -> None:
    reply.status, reply.body = status, b"".join(events)  # type: ignore[attr-defined]
    traffic = Traffic(f"http://127.0.0.1:{reply.server_port}", "chat")
    traffic.ask(2)
    [found] = traffic.answers
    assert error in found.error and bool(error) == bool(found.error)
    assert found.text == ("almost" if status == 200 else "")
    assert not traffic.streaming and not traffic.has_open_since(found.ended_us)


def test_the_gateways_count_of_moved_requests_is_read(reply: ThreadingHTTPServer) -> None:
    name = "cordee_gateway_requests_moved_total"
    text = f'# HELP {name} Moved.\n{name}{{service="chat",why="failure"}} 3\n{name}{{service="chat",why="drain"}} 4\n'
    reply.status, reply.body = 200, text.encode()  # type: ignore[attr-defined]
    assert Traffic(f"http://127.0.0.1:{reply.server_port}", "chat").moved() == 7


def test_answers_have_several_lengths() -> None:
    assert len({tokens_of(question) for question in range(len(QUESTIONS))}) == len(QUESTIONS)


# -- the verb ----------------------------------------------------------------------------------------------------


def test_without_the_extra_the_second_act_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SERVING_NEEDS", ("no_such_library",))
    assert demo._acts(None) == (("training",), ["no_such_library"])
    assert demo._acts("training") == (("training",), [])
    with pytest.raises(MissingExtraError, match="needs no_such_library"):
        demo._acts("serving")
    with pytest.raises(InputError, match="no act 'encore'"):
        demo._acts("encore")
