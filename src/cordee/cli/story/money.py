"""Part 5: the bill of what just ran, and the known story under the simulator."""

from collections.abc import Sequence

from cordee.cli.story import claims
from cordee.cli.story.bill import GPUS, Bill
from cordee.cli.story.live import Cast
from cordee.cli.story.stage import Stage
from cordee.cli.story.teller import Teller, bars
from cordee.client import CostRowView, CostView
from cordee.events import AttemptPlaced, Event, RanksEnded
from cordee.ids import JobId
from cordee.simulate.story import BACK_US, USD_PER_GPU_HOUR, Story, known_story
from cordee.units import MICRO_USD, US_PER_HOUR, US_PER_S, format_duration, format_micro_usd
from cordee.view.measured import compared_html
from cordee.view.money import CLASSES, MoneyRow, cases_html, gpu_time, money_html
from cordee.view.report import Claim


def tell_money(teller: Teller, stage: Stage, cast: Cast, bill: Bill) -> Story:
    """Show the ledger of the live run, check that it adds up, and run the 64-GPU story again."""
    lead = (
        "Every microsecond that a job held a GPU is in exactly one class. First the ledger of what just ran; then the "
        f"same scheduler under a virtual clock: {GPUS} H100s on spot capacity, 47 hours in, and the cloud takes a node."
    )
    with teller.part("The money", lead):
        cost = stage.client.cost("job")
        _tell_ledger(teller, stage, cost)
        teller.claim(_nothing_lost(cost, cast))
        story = known_story(bill.survival, step_s=bill.step_s, usd_per_gpu_hour=USD_PER_GPU_HOUR)
        _tell_story(teller, story)
    return story


def _tell_ledger(teller: Teller, stage: Stage, cost: CostView) -> None:
    rows = []
    for row in sorted(cost.rows, key=lambda row: list(stage.names).index(JobId(row.key))):
        name = stage.names[JobId(row.key)]
        parts = ", ".join(f"{cls} {gpu_time(getattr(row.gpu_us, cls))}" for cls in CLASSES if getattr(row.gpu_us, cls))
        teller.line(None, f"{name}: {gpu_time(row.gpu_us.held)} held, {format_micro_usd(row.micro_usd.held)}: {parts}")
        rows.append(MoneyRow(name, _classes(row), row.micro_usd.held))
    teller.figure(money_html(rows))
    teller.figure(compared_html([(stage.names[JobId(row.key)], each) for row in cost.rows for each in row.measured]))
    total = {cls: sum(classes[cls] for classes in map(_classes, cost.rows)) for cls in CLASSES}
    teller.claim(claims.adds_up(total, cost.gpu_us.held, leased_gpu_us(stage.events)))
    for source in sorted({source for row in cost.rows for source in row.price_sources}):
        teller.note(f"Price: {source}.")


def _classes(row: CostRowView) -> dict[str, int]:
    return {cls: getattr(row.gpu_us, cls) for cls in CLASSES}


def leased_gpu_us(events: Sequence[Event]) -> int:
    """GPUs times microseconds between each placement and the end of each of its shares, straight from the log."""
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


def _nothing_lost(cost: CostView, cast: Cast) -> Claim:
    row = next(row for row in cost.rows if row.key == cast.pushed)
    holds = row.gpu_us.lost == 0 and row.steps_repeated == 0
    measured = (
        f"{row.gpu_us.lost} GPU-microseconds lost, {row.steps_repeated} steps repeated in {row.attempts} attempts"
    )
    return claims.check(holds, "The push cost a restart, and no work", measured)


def _tell_story(teller: Teller, story: Story) -> None:
    period, notice = _minutes(story.period_s), _minutes(story.notice_s)
    plain, worst = story.plain.lost_micro_usd, story.interval_worst
    cases = [
        ("No checkpoints", "all 47 hours are done again", plain, 0),
        (f"Every {period}, no notice, worst moment", "", worst.lost_micro_usd, worst.restart_micro_usd),
        (f"Every {period}, no notice, expected", "", *_mean(story)),
        (f"With {notice} of notice, worst and expected", "", *_noticed(story)),
    ]
    shown = [(what, float(lost + again), format_micro_usd(lost + again)) for what, _, lost, again in cases]
    for row in bars(shown, width=24, ascii_only=teller.ascii_only):
        teller.line(None, row)
    teller.figure(cases_html(cases, worst_micro_usd=plain))
    gpu_hours = story.plain.lost_gpu_us / US_PER_HOUR
    measured = f"the simulated ledger: {gpu_hours:,.0f} GPU-hours lost, ${plain / MICRO_USD:,.2f}"
    says = f"Without checkpoints the story loses $8,994 at ${USD_PER_GPU_HOUR:.2f} a GPU-hour"
    teller.claim(claims.check(format_micro_usd(plain) == "$8,994" and gpu_hours == 3008, says, measured))
    teller.claim(_with_interval(story))
    teller.claim(_with_notice(story))
    teller.note(
        f"The plan's interval is {period} for a reclaim a day; one checkpoint takes {format_duration(story.save_s)} at "
        f"2 GB/s a node, and all of them in 47 hours cost {format_micro_usd(worst.checkpoint_micro_usd)}."
    )
    needed = format_duration(story.step_s + story.save_s)
    teller.note(f"A notice shorter than {needed}, a step and a checkpoint, is as good as none for this job.")
    teller.note(
        "Amounts with checkpoints are work done again and the restart. The checkpoint that a notice asks for takes up "
        f"to {format_micro_usd(story.last_save_micro_usd)} more. And with or without any of this the GPUs that are "
        f"left stand idle until the cloud gives another node, here for {_minutes(BACK_US / US_PER_S)}: "
        f"{_range(*story.idle_micro_usd)}."
    )
    teller.note(f"${USD_PER_GPU_HOUR:.2f} is the story's own rate; cordee plan names today's prices and their sources.")


def _with_interval(story: Story) -> Claim:
    worst, plain = story.interval_worst.micro_usd, story.plain.lost_micro_usd
    expected, highest = story.interval_micro_usd, max(loss.micro_usd for loss in story.interval)
    measured = (
        f"{len(story.interval)} seeded reclaims: {format_micro_usd(expected)} on average, "
        f"{format_micro_usd(highest)} at most; worst moment {format_micro_usd(worst)}"
    )
    says = (
        f"With the plan's interval and no notice the reclaim costs {format_micro_usd(expected)}, "
        f"at worst {format_micro_usd(worst)}"
    )
    return claims.check(expected <= highest <= worst < plain / 10, says, measured)


def _with_notice(story: Story) -> Claim:
    lost = sum(loss.lost_micro_usd for loss in story.noticed)
    measured = f"{len(story.noticed)} seeded reclaims: {format_micro_usd(lost)} of work lost in all of them together"
    restart = format_micro_usd(story.noticed_worst.micro_usd)
    notice = _minutes(story.notice_s)
    says = f"With {notice} of notice and a SIGTERM handler no work is lost; the restart costs {restart}"
    return claims.check(lost == 0, says, measured)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min"


def _range(least: int, most: int) -> str:
    low, high = format_micro_usd(least), format_micro_usd(most)
    return low if low == high else f"{low} to {high}"


def _mean(story: Story) -> tuple[int, int]:
    n = len(story.interval)
    lost = sum(loss.lost_micro_usd for loss in story.interval) // n
    return lost, story.interval_micro_usd - lost


def _noticed(story: Story) -> tuple[int, int]:
    worst = story.noticed_worst
    return worst.lost_micro_usd, worst.restart_micro_usd
