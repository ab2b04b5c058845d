"""The timeline is well-formed, says what the events say, and escapes what users wrote."""

import re
import xml.etree.ElementTree as ET

from cordee.account import attempt_segments
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    CheckpointCommitted,
    Event,
    Job,
    JobEnded,
    JobSubmitted,
    KillOrdered,
    Lease,
    Node,
    NodeUp,
    NoticeGiven,
    NoticeReason,
    Outcome,
    RanksEnded,
    Reported,
    Restored,
    SpanClass,
    Tier,
)
from cordee.ids import JobId
from cordee.view.timeline import JobTrack, Span, timeline_svg, tracks

S = 1_000_000
NODE = NodeUp(at_us=0, node=Node(name="n", epoch=1, gpu_name="H100", gpus=4))
FIRST, SECOND = JobId("first-aaaaaa"), JobId("second-bbbbbb")
SVG = "{http://www.w3.org/2000/svg}"


def useful(from_s: float, to_s: float, first: int, steps: int, epoch: int = 1) -> Event:
    return Reported(
        at_us=round(to_s * S),
        job_id=FIRST,
        epoch=epoch,
        span=SpanClass.USEFUL,
        from_us=round(from_s * S),
        first_step=first,
        steps=steps,
    )


def submitted(job_id: JobId, at_s: int, name: str, tier: Tier = Tier.STANDARD) -> Event:
    return JobSubmitted(at_us=at_s * S, job=Job(job_id=job_id, name=name, owner="o", gpus=4, tier=tier), spec="")


def placed(job_id: JobId, at_s: int, epoch: int = 1) -> Event:
    return AttemptPlaced(at_us=at_s * S, job_id=job_id, epoch=epoch, leases=(Lease(node="n", gpus=(0, 1, 2, 3)),))


def ended(job_id: JobId, at_s: float, outcome: Outcome) -> list[Event]:
    at_us = round(at_s * S)
    return [
        RanksEnded(at_us=at_us, job_id=job_id, epoch=1, node="n", outcome=outcome),
        AttemptEnded(at_us=at_us, job_id=job_id, epoch=1, outcome=outcome, why=""),
    ]


def drawn(events: list[Event]) -> str:
    return timeline_svg(events, attempt_segments(events))


def lanes(events: list[Event]) -> list[JobTrack]:
    return tracks(events, attempt_segments(events))


def committed(at_s: float, step: int, generation: int) -> Event:
    return CheckpointCommitted(
        at_us=round(at_s * S),
        job_id=FIRST,
        epoch=1,
        step=step,
        generation=generation,
        size_bytes=10,
        stall_us=0,
        upload_us=0,
    )


def story(name: str = "first") -> list[Event]:
    return [
        NODE,
        submitted(FIRST, 0, name, Tier.PREEMPTIBLE),
        placed(FIRST, 1),
        useful(2, 6, 0, 40),
        committed(6, 40, 1),
        submitted(SECOND, 7, "second", Tier.PRODUCTION),
        NoticeGiven(
            at_us=7 * S, job_id=FIRST, epoch=1, reason=NoticeReason.PREEMPT, deadline_us=37 * S, for_job=SECOND
        ),
        useful(6, 8, 40, 20),
        KillOrdered(at_us=37 * S, job_id=FIRST, epoch=1, why="grace is over"),
        *ended(FIRST, 38, Outcome.KILLED),
        placed(SECOND, 38),
        *ended(SECOND, 50, Outcome.FINISHED),
        JobEnded(at_us=50 * S, job_id=SECOND, state="done", why=""),
        placed(FIRST, 50, epoch=2),
        Restored(at_us=51 * S, job_id=FIRST, epoch=2, step=40, generation=1),
        useful(51, 60, 40, 90, epoch=2),
    ]


def classes(svg: str) -> list[str]:
    return [element.get("class", "") for element in ET.fromstring(svg).iter()]


def test_every_thing_that_happened_has_its_mark() -> None:
    found = classes(drawn(story()))
    assert found.count("held") == 3
    assert found.count("preempts") == 1
    assert found.count("kill") == 1
    assert found.count("mark") == 1 + 1  # and the legend's
    assert found.count("lost") == 1 + 1
    assert "end done" in found


def test_useful_steps_that_no_checkpoint_covers_are_lost_when_the_attempt_is_cut_short() -> None:
    first, second = lanes(story())
    assert first.attempts[0].spans == [
        Span("restart", 1 * S, 2 * S),
        Span("useful", 2 * S, 6 * S, 0, 40),
        Span("lost", 6 * S, 38 * S, 40, 20),
    ]
    assert [span.name for span in first.attempts[1].spans] == ["restart", "useful"], "it still runs"
    assert [span.name for span in second.attempts[0].spans] == ["unreported"], "it reported nothing"


def test_a_span_that_straddles_the_commit_is_cut_there() -> None:
    events = [
        NODE,
        submitted(FIRST, 0, "first"),
        placed(FIRST, 0),
        useful(0, 10, 0, 100),
        committed(11, 70, 1),
        *ended(FIRST, 12, Outcome.LOST),
    ]
    (lane,) = lanes(events)
    assert lane.attempts[0].spans == [Span("useful", 0, 7 * S, 0, 70), Span("lost", 7 * S, 12 * S, 70, 30)]


def test_gaps_are_stalls_and_who_leaves_by_itself_loses_nothing() -> None:
    events = [
        NODE,
        submitted(FIRST, 0, "first"),
        placed(FIRST, 0),
        useful(3, 5, 0, 20),
        useful(6, 8, 20, 20),
        committed(8, 40, 1),
        *ended(FIRST, 9, Outcome.CHECKPOINTED),
    ]
    (lane,) = lanes(events)
    seen = [(span.name, span.from_us // S, span.to_us // S) for span in lane.attempts[0].spans]
    assert seen == [("restart", 0, 3), ("useful", 3, 5), ("stall", 5, 6), ("useful", 6, 8), ("restart", 8, 9)]


def test_the_tail_of_a_killed_attempt_is_lost_as_in_the_ledger() -> None:
    """Its last counted step ended at 17 s, it said once more that it was useful, and was killed at 38 s."""
    events = [
        NODE,
        submitted(FIRST, 0, "first"),
        placed(FIRST, 0),
        useful(1, 17, 0, 16),
        committed(17, 16, 1),
        useful(17, 37, 16, 0),
        *ended(FIRST, 38, Outcome.KILLED),
    ]
    (lane,) = lanes(events)
    assert lane.attempts[0].spans == [
        Span("restart", 0, 1 * S),
        Span("useful", 1 * S, 17 * S, 0, 16),
        Span("lost", 17 * S, 38 * S, 16),
    ]
    assert "lost: 21 s" in drawn(events)


def test_a_gap_too_short_to_be_seen_does_not_divide_a_span() -> None:
    events = [NODE, submitted(FIRST, 0, "first"), placed(FIRST, 0)]
    events += [useful(at, at + 0.999, at, 1) for at in range(1000)]
    assert len(lanes(events)[0].attempts[0].spans) == 1999
    assert classes(drawn(events)).count("useful") == 1 + 1  # and the legend's


def test_what_users_wrote_cannot_break_out() -> None:
    svg = drawn(story('<script>"&\x00</b>'))
    assert "<script>" not in svg
    names = [element.text for element in ET.fromstring(svg).iter(f"{SVG}text") if element.get("class") == "name"]
    assert names[0] == '<script>"&</b>'


def test_nothing_is_fetched_from_elsewhere() -> None:
    svg = drawn(story())
    addresses = re.findall(r"(?:https?:)?//[^\"' )]+", svg)
    assert addresses == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"<(image|use|script|foreignObject|a)\b|@import|url\((?!#)", svg)


def test_drawings_stay_inside_their_box() -> None:
    root = ET.fromstring(drawn(story()))
    width = float(root.get("viewBox", "").split()[2])
    for rect in root.iter(f"{SVG}rect"):
        if rect.get("y") is not None:
            assert 0 <= float(rect.get("x", 0)) <= float(rect.get("x", 0)) + float(rect.get("width", 0)) <= width + 2


def test_an_empty_log_and_one_of_a_single_moment_draw_too() -> None:
    ET.fromstring(drawn([]))
    ET.fromstring(drawn([submitted(FIRST, 3, "alone")]))


def test_the_same_events_give_the_same_picture() -> None:
    assert drawn(story()) == drawn(story())
