"""Part 5: the ledger of the live run, and a reclaim of 64 GPUs in the simulator."""

import math
from collections.abc import Sequence

from cordee.answers.cost import CostRowView, CostView
from cordee.demo import claims
from cordee.demo.live import LiveJobs
from cordee.demo.memory import GPUS, Sizing
from cordee.demo.narrator import Narrator
from cordee.demo.reclaim import BACK_US, USD_PER_GPU_HOUR, ReclaimLosses, play_reclaims
from cordee.demo.stage import Stage
from cordee.events import AttemptPlaced, Event, RanksEnded
from cordee.ids import JobId
from cordee.units import MICRO_USD, US_PER_HOUR, US_PER_S, format_duration, format_micro_usd, plural
from cordee.view.markup import CLASSES, class_label
from cordee.view.measured import compared_html
from cordee.view.money import MoneyRow, cases_html, gpu_time, money_html
from cordee.view.report import Claim


def show_costs(narrator: Narrator, stage: Stage, jobs: LiveJobs, sizing: Sizing) -> ReclaimLosses:
    """Show the ledger of the live run, check that it adds up, and simulate a reclaim of 64 GPUs."""
    lead = (
        "Every microsecond that a job held a GPU is in exactly one class. First the ledger of what just ran; then the "
        f"same scheduler under a virtual clock: {GPUS} H100s on spot capacity, 47 hours in, and the cloud takes a node."
    )
    with narrator.part("The cost", lead):
        cost = stage.client.cost("job")
        _show_ledger(narrator, stage, cost)
        narrator.claim(_nothing_lost(cost, jobs))
        # A notice of as many minutes as a step and a checkpoint need: less is as good as none.
        needed_s = sizing.step_s + sizing.survival.checkpoint_s
        seen = play_reclaims(
            sizing.survival,
            step_s=sizing.step_s,
            usd_per_gpu_hour=USD_PER_GPU_HOUR,
            notice_s=60.0 * math.ceil(needed_s / 60),
        )
        _show_reclaims(narrator, seen)
    return seen


def _show_ledger(narrator: Narrator, stage: Stage, cost: CostView) -> None:
    rows = []
    for row in sorted(cost.rows, key=lambda row: list(stage.names).index(JobId(row.key))):
        name = stage.names[JobId(row.key)]
        held = {class_label(cls): gpu_us for cls, gpu_us in _classes(row).items() if gpu_us}
        parts = ", ".join(f"{name} {gpu_time(gpu_us)}" for name, gpu_us in held.items())
        narrator.screen.line(
            None, f"{name}: {gpu_time(row.gpu_us.held)} held, {format_micro_usd(row.micro_usd.held)}: {parts}"
        )
        rows.append(MoneyRow(name, _classes(row), row.micro_usd.held))
    narrator.figure(money_html(rows))
    narrator.figure(compared_html([(stage.names[JobId(row.key)], each) for row in cost.rows for each in row.measured]))
    total = {cls: sum(classes[cls] for classes in map(_classes, cost.rows)) for cls in CLASSES}
    narrator.claim(claims.adds_up(total, cost.gpu_us.held, leased_gpu_us(stage.events)))
    for source in sorted({source for row in cost.rows for source in row.price_sources}):
        narrator.note(f"Price: {source}.")


def _classes(row: CostRowView) -> dict[str, int]:
    return {cls: getattr(row.gpu_us, cls) for cls in CLASSES}


def leased_gpu_us(events: Sequence[Event]) -> int:
    """Return GPUs times microseconds from each placement to the end of each rank group, straight from the log."""
    open_leases: dict[tuple[JobId, int, str], tuple[int, int]] = {}
    total = 0
    for event in events:
        if isinstance(event, AttemptPlaced):
            for lease in event.leases:
                open_leases[event.job_id, event.epoch, lease.node] = (event.at_us, len(lease.gpus))
        elif isinstance(event, RanksEnded):
            from_us, gpus = open_leases.pop((event.job_id, event.epoch, event.node), (event.at_us, 0))
            total += (event.at_us - from_us) * gpus
    return total


def _nothing_lost(cost: CostView, jobs: LiveJobs) -> Claim:
    row = next(row for row in cost.rows if row.key == jobs.preempted)
    holds = row.gpu_us.lost == 0 and row.steps_repeated == 0
    repeated = f"{plural(row.steps_repeated, 'step')} repeated in {plural(row.attempts, 'attempt')}"
    measured = f"{row.gpu_us.lost} GPU-microseconds lost, {repeated}"
    return claims.check(holds, "The preemption cost a restart, and no work", measured)


def _show_reclaims(narrator: Narrator, seen: ReclaimLosses) -> None:
    period, notice = _minutes(seen.period_s), _minutes(seen.notice_s)
    plain, worst = seen.plain.lost_micro_usd, seen.interval_worst
    cases = [
        ("No checkpoints", "all 47 hours are done again", plain, 0),
        (f"Every {period}, no notice, worst moment", "", worst.lost_micro_usd, worst.restart_micro_usd),
        (f"Every {period}, no notice, expected", "", *_mean(seen)),
        (f"With {notice} of notice, worst and expected", "", *_noticed(seen)),
    ]
    shown = [(what, float(lost + again), format_micro_usd(lost + again)) for what, _, lost, again in cases]
    narrator.screen.amounts(shown)
    narrator.figure(cases_html(cases, worst_micro_usd=plain))
    gpu_hours = seen.plain.lost_gpu_us / US_PER_HOUR
    measured = f"the simulated ledger: {gpu_hours:,.0f} GPU-hours lost, ${plain / MICRO_USD:,.2f}"
    says = f"Without checkpoints the reclaim loses $8,994 at ${USD_PER_GPU_HOUR:.2f} a GPU-hour"
    narrator.claim(claims.check(format_micro_usd(plain) == "$8,994" and gpu_hours == 3008, says, measured))
    narrator.claim(_with_interval(seen))
    narrator.claim(_with_notice(seen))
    narrator.note(
        f"The plan's interval is {period} for a reclaim a day; one checkpoint takes {format_duration(seen.save_s)} at "
        f"2 GB/s a node, and all of them in 47 hours cost {format_micro_usd(worst.checkpoint_micro_usd)}."
    )
    needed = format_duration(seen.step_s + seen.save_s)
    narrator.note(f"A notice shorter than {needed}, a step and a checkpoint, is as good as none for this job.")
    narrator.note(
        "Amounts with checkpoints are work done again and the restart. The checkpoint that a notice asks for takes up "
        f"to {format_micro_usd(seen.last_save_micro_usd)} more. And with or without any of this the GPUs that are "
        f"left stand idle until the cloud gives another node, here for {_minutes(BACK_US / US_PER_S)}: "
        f"{_range(*seen.idle_micro_usd)}."
    )
    narrator.note(
        f"${USD_PER_GPU_HOUR:.2f} is the rate of this example; cordee plan names today's prices and their sources."
    )


def _with_interval(seen: ReclaimLosses) -> Claim:
    worst, plain = seen.interval_worst.micro_usd, seen.plain.lost_micro_usd
    expected, highest = seen.interval_micro_usd, max(loss.micro_usd for loss in seen.interval)
    measured = (
        f"{len(seen.interval)} seeded reclaims: {format_micro_usd(expected)} on average, "
        f"{format_micro_usd(highest)} at most; worst moment {format_micro_usd(worst)}"
    )
    says = (
        f"With the plan's interval and no notice the reclaim costs {format_micro_usd(expected)}, "
        f"at worst {format_micro_usd(worst)}"
    )
    return claims.check(expected <= highest <= worst < plain / 10, says, measured)


def _with_notice(seen: ReclaimLosses) -> Claim:
    lost = sum(loss.lost_micro_usd for loss in seen.noticed)
    measured = f"{len(seen.noticed)} seeded reclaims: {format_micro_usd(lost)} of work lost in total"
    restart = format_micro_usd(seen.noticed_worst.micro_usd)
    notice = _minutes(seen.notice_s)
    says = f"With {notice} of notice and a SIGTERM handler no work is lost; the restart costs {restart}"
    return claims.check(lost == 0, says, measured)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min"


def _range(least: int, most: int) -> str:
    low, high = format_micro_usd(least), format_micro_usd(most)
    return low if low == high else f"{low} to {high}"


def _mean(seen: ReclaimLosses) -> tuple[int, int]:
    n = len(seen.interval)
    lost = sum(loss.lost_micro_usd for loss in seen.interval) // n
    return lost, seen.interval_micro_usd - lost


def _noticed(seen: ReclaimLosses) -> tuple[int, int]:
    worst = seen.noticed_worst
    return worst.lost_micro_usd, worst.restart_micro_usd
