"""The claims of the second act, as checks of the log, the clients' answers, the recorded steps and the ledger."""

from collections.abc import Iterable, Mapping, Sequence

from cordee.answers.services import UsageView
from cordee.demo.claims import check
from cordee.demo.traffic import Answer, tokens_of
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    CheckpointCommitted,
    Event,
    JobSubmitted,
    NoticeGiven,
    NoticeReason,
    Outcome,
    RankLeft,
    ReplicaReady,
    ServiceDeclared,
    ServiceScaled,
    Tier,
)
from cordee.ids import JobId
from cordee.units import US_PER_S, format_duration, format_micro_usd, plural
from cordee.view.report import Claim


def scaled_by_traffic(events: Iterable[Event], service: str, replicas: int) -> Claim:
    """Check that the service rose to so many replicas by the gateway's reports: nobody declared it anew."""
    declared = [each for each in events if isinstance(each, ServiceDeclared) and each.service == service]
    scaled = [each for each in events if isinstance(each, ServiceScaled) and each.service == service]
    reached = next((each for each in scaled if each.replicas == replicas), None)
    measured = "it never rose" if reached is None else f"{plural(replicas, 'replica')}, because {reached.why}"
    holds = reached is not None and len(declared) == 1
    return check(holds, f"Traffic alone raised {service} to {plural(replicas, 'replica')}", measured)


def shrank_for(events: Sequence[Event], job_id: JobId, service: str, gpus: int, names: Mapping[JobId, str]) -> Claim:
    """Check that the job saved and went on with `gpus` ranks at once, for a replica of production tier."""
    replicas = {e.job.job_id: e.job for e in events if isinstance(e, JobSubmitted) and e.job.service == service}
    notice = next((e for e in _resizes(events, job_id) if e.for_job is not None), None)
    gains = None if notice is None or notice.for_job is None else replicas.get(notice.for_job)
    if notice is None or gains is None:
        return check(False, f"{job_id} shrank for a replica of {service}", "no such notice")
    before, after = (_placed(events, job_id, epoch) for epoch in (notice.epoch, notice.epoch + 1))
    how = {e.how for e in events if isinstance(e, RankLeft) and (e.job_id, e.epoch) == (job_id, notice.epoch)}
    holds = gains.tier is Tier.PRODUCTION and how == {"checkpointed"} and after == gpus < before
    says = f"Training shrank from {before} to {plural(gpus, 'rank')} for a replica of production tier"
    took_s = (_ended_us(events, job_id, notice.epoch) - notice.at_us) / US_PER_S
    who = names.get(gains.job_id, gains.job_id)
    measured = (
        f"notice for {who} ({gains.tier}); all ranks left {', '.join(sorted(how))} within {format_duration(took_s)}"
    )
    return check(holds, says, measured)


def survived(
    events: Iterable[Event], victim: JobId, killed_us: int, cut: Sequence[Answer], moved: int, whole: Mapping[int, str]
) -> Claim:
    """Check that a replica died under open streams, that some moved, and that each has the undisturbed text.

    Args:
        events: the log.
        victim: the replica that was killed.
        killed_us: when.
        cut: the answers that were open then.
        moved: of them, those that the gateway counts as gone on with another replica.
        whole: by question, the undisturbed text.
    """
    lost = any(
        isinstance(e, AttemptEnded) and e.job_id == victim and e.outcome is Outcome.LOST and e.at_us >= killed_us
        for e in events
    )
    differ = sum(bool(answer.error) or answer.text != whole.get(answer.question) for answer in cut)
    says = f"A replica was killed with SIGKILL under {len(cut)} open streams, and each client got every token"
    measured = (
        f"{plural(moved, 'stream')} went on with another replica; {differ} of {len(cut)} texts differ from the "
        "undisturbed ones"
    )
    return check(lost and moved > 0 and bool(cut) and differ == 0, says, measured)


def replaced(events: Iterable[Event], victim: JobId, killed_us: int) -> Claim:
    """Check that the killed replica's next attempt got ready by itself."""
    back = next((e for e in events if isinstance(e, ReplicaReady) and e.job_id == victim and e.at_us > killed_us), None)
    took = "never" if back is None else format_duration((back.at_us - killed_us) / US_PER_S)
    measured = f"ready again after: {took}" + ("" if back is None else f", as attempt {back.epoch}")
    return check(back is not None and back.epoch > 1, "The replica started again by itself", measured)


def all_whole(answers: Sequence[Answer], whole: Mapping[int, str]) -> Claim:
    """Check that all answers are whole, and equal to the undisturbed ones to their questions."""
    failed = [answer for answer in answers if answer.error]
    differ = sum(answer.text != whole.get(answer.question) for answer in answers)
    tokens = sum(tokens_of(answer.question) for answer in answers)
    measured = f"{len(answers)} answers, {tokens:,} tokens: {len(failed)} failed, {differ} differ"
    measured += f"; {failed[0].error}" if failed else ""
    return check(bool(answers) and not failed and not differ, "No request failed, and no answer was changed", measured)


def came_back(events: Sequence[Event], job_id: JobId, gpus: int) -> Claim:
    """Check that the job grew to its full size by itself when replicas had gone, and saved when it left at last."""
    grown = [e for e in _resizes(events, job_id) if e.for_job is None and e.gpus == gpus]
    sizes = [sum(len(lease.gpus) for lease in e.leases) for e in _placements(events, job_id)]
    saved = [e for e in events if isinstance(e, CheckpointCommitted) and e.job_id == job_id]
    ended = [e.outcome for e in events if isinstance(e, AttemptEnded) and e.job_id == job_id]
    holds = bool(grown) and sizes[0] == sizes[-1] == gpus > min(sizes) and ended[-1:] == [Outcome.CHECKPOINTED]
    measured = f"{', then '.join(map(str, sizes))} ranks; {plural(len(saved), 'checkpoint')}"
    return check(holds, f"Training is back on all {gpus} ranks", measured)


def no_step_lost(events: Sequence[Event], job_id: JobId, lines: Mapping[int, Sequence[Mapping[str, int]]]) -> Claim:
    """Check that over all attempts each step ran once, in order, on every rank of the attempt.

    Args:
        events: the log.
        job_id: the job.
        lines: by rank, what it wrote at the start of each step: {"epoch": 1, "step": 0}.
    """
    steps, even, parts = list[int](), True, list[str]()
    for placed in _placements(events, job_id):
        gpus = sum(len(lease.gpus) for lease in placed.leases)
        ran = [[each["step"] for each in lines.get(rank, ()) if each["epoch"] == placed.epoch] for rank in range(gpus)]
        even = even and all(each == ran[0] for each in ran)
        steps += ran[0]
        parts += [f"{ran[0][0]} to {ran[0][-1]} on {gpus}"] if ran[0] else []
    left = max((e.step for e in events if isinstance(e, RankLeft) and e.job_id == job_id), default=0)
    repeated, missing = len(steps) - len(set(steps)), len(set(range(left)) - set(steps))
    measured = f"{repeated} repeated, {missing} missing of {left} steps; steps " + ", ".join(parts) + " ranks"
    holds = even and left > 0 and steps == list(range(left))
    return check(holds, "No step of the training was lost or repeated", measured)


def billed(usage: UsageView, service: str, answers: Sequence[Answer]) -> Claim:
    """Check that the ledger counts the requests and tokens that the clients counted."""
    row = next(row for row in usage.rows if row.key == service)
    tokens = sum(tokens_of(answer.question) for answer in answers)
    measured = (
        f"billed: {row.tokens.requests} requests, {row.tokens.output:,} tokens; "
        f"the clients got {len(answers)} answers, {tokens:,} tokens"
    )
    holds = (row.tokens.requests, row.tokens.output) == (len(answers), tokens) and row.tokens.failed == 0
    return check(holds, "The ledger has each token that the clients got, once", measured)


def dollars_add_up(usage: UsageView, held_micro_usd: int) -> Claim:
    """Check that the dollars of services and of training sum to the dollars of all leases, to the micro-dollar."""
    serving = sum(row.micro_usd.total for row in usage.rows)
    training = usage.training_micro_usd.held
    measured = (
        f"serving {format_micro_usd(serving)} + training {format_micro_usd(training)} = "
        f"{usage.micro_usd:,} micro-dollars"
    )
    holds = serving + training == usage.micro_usd == held_micro_usd > 0
    return check(holds, "One ledger for both: the dollars of tokens and of steps sum to those of the GPUs", measured)


def _resizes(events: Iterable[Event], job_id: JobId) -> list[NoticeGiven]:
    return [e for e in events if isinstance(e, NoticeGiven) and e.job_id == job_id and e.reason is NoticeReason.RESIZE]


def _placements(events: Iterable[Event], job_id: JobId) -> list[AttemptPlaced]:
    return [e for e in events if isinstance(e, AttemptPlaced) and e.job_id == job_id]


def _placed(events: Iterable[Event], job_id: JobId, epoch: int) -> int:
    """Return the GPUs of an attempt; 0 if it was not placed."""
    return sum(len(lease.gpus) for e in _placements(events, job_id) if e.epoch == epoch for lease in e.leases)


def _ended_us(events: Iterable[Event], job_id: JobId, epoch: int) -> int:
    return next((e.at_us for e in events if isinstance(e, AttemptEnded) and (e.job_id, e.epoch) == (job_id, epoch)), 0)
