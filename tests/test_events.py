"""Every event survives its own JSON, and what is not an event is refused."""

import json

import pytest

from cordee.event_json import decode, encode
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    Behind,
    Capacity,
    Estimate,
    EstimateMissed,
    Event,
    Failure,
    Job,
    JobSubmitted,
    Lease,
    Measured,
    Node,
    NodeUp,
    NoticeGiven,
    NoticeReason,
    Outcome,
    RankBehind,
    Reported,
    ServerUp,
    SpanClass,
    Tier,
)
from cordee.ids import JobId

A = JobId("gpt-abcdef")
PLANNED = Estimate(layout="tp2 fsdp2", peak_bytes=7, gpu_memory_bytes=8, gpus=4, step_us=9, flop_per_token=1.5e9)
EVENTS: list[Event] = [
    ServerUp(at_us=1),
    JobSubmitted(at_us=2, job=Job(job_id=A, name="gpt", owner="ada", gpus=4, tier=Tier.PREEMPTIBLE), spec='{"a": 1}'),
    JobSubmitted(at_us=2, job=Job(job_id=A, name="gpt", owner="ada", gpus=4, estimates=(PLANNED,)), spec="{}"),
    NodeUp(at_us=3, node=Node(name="n", epoch=1, gpu_name="H100", gpus=8, capacity=Capacity.SPOT, domain=("b", "r"))),
    AttemptPlaced(at_us=4, job_id=A, epoch=1, leases=(Lease(node="n", gpus=(0, 1)), Lease(node="m", gpus=(3,)))),
    NoticeGiven(at_us=5, job_id=A, epoch=1, reason=NoticeReason.PREEMPT, deadline_us=9, for_job=JobId("b-abcdef")),
    Reported(at_us=6, job_id=A, epoch=1, span=SpanClass.USEFUL, from_us=5, first_step=0, steps=3, loss=1.5),
    Measured(at_us=6, job_id=A, epoch=1, rank=0, step=3, peak_bytes=10**10, step_us=5, tokens_per_s=1.5, mfu=0.4),
    EstimateMissed(at_us=7, job_id=A, epoch=1, quantity="step time", why="its step time is 6 s"),
    RankBehind(
        at_us=7, job_id=A, epoch=1, rank=3, how=Behind.STUCK, step=2, since_us=6, where="train.py:8", stack=("a", "b")
    ),
    AttemptEnded(
        at_us=8,
        job_id=A,
        epoch=1,
        outcome=Outcome.FAILED,
        why="rank 1 exited with 2",
        failure=Failure(rank=1, exit_code=2, signal=None, tail=("Traceback", "boom")),
    ),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_survives_json(event: Event) -> None:
    again = decode(json.loads(json.dumps(encode(event))))
    assert again == event
    assert hash(again) == hash(event)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"kind": "Nonsense", "at_us": 1}, "unknown kind of event: 'Nonsense'"),
        ({"kind": "ServerUp"}, "at_us"),
        ({"kind": "ServerUp", "at_us": 1, "colour": 2}, "ServerUp has no field 'colour'"),
        ({"kind": "NodeUp", "at_us": 1, "node": {"name": "n", "tail": 1}}, "Node has no field 'tail'"),
    ],
)
def test_what_is_no_event_is_refused(data: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        decode(data)
