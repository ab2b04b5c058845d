"""Sentences about a profile, for the terminal and the page."""

from cordee.telemetry.profile.account import RankReport, short_name
from cordee.telemetry.profile.answer import PlanOfProfile
from cordee.telemetry.profile.compare import Efficiency
from cordee.telemetry.profile.ranks import Skew
from cordee.telemetry.profile.sweep import Breakdown
from cordee.units import format_duration, plural

SIDES = {
    "device": " from its first kernel to the end of its last",
    "host": "; no GPU in this profile: self times of the host's threads",
    "tracks": " from the first slice in the file to the last",
}
CAUSES = {"host": "the host", "queued": "dependency", "unknown": "not known"}
PLAN_NOTE = (
    "A profile shows a bubble as exposed point-to-point kernels that wait for another stage, or as idle time where no "
    "such kernel spins. Planned idle time is the host's."
)


def format_us(value_us: float) -> str:
    """Return microseconds with a unit.

    >>> format_us(129_012), format_us(42), format_us(0.25), format_us(2_500_000), format_us(7.2e9), format_us(0)
    ('129 ms', '42 us', '0.25 us', '2.5 s', '2h', '0')
    """
    size = abs(value_us)
    if size >= 60e6:
        return format_duration(value_us / 1e6)
    for unit, least, per in (("s", 1e6, 1e6), ("ms", 1e3, 1e3), ("us", 0, 1)):
        if size >= least and size:
            shown = value_us / per
            return f"{shown:,.0f} {unit}" if abs(shown) >= 1000 else f"{shown:.3g} {unit}"
    return "0"


def span_parts(time: Breakdown) -> dict[str, float]:
    """Return the five parts of the span, which add up to it."""
    return {
        "alone": time.alone_us, "hidden": time.hidden_us, "transfer": time.exposed_transfer_us,
        "waiting": time.exposed_waiting_us, "idle": time.idle_us,
    }  # fmt: skip


def verdict(report: RankReport) -> str:
    """Return the main figures in a sentence or two."""
    time = report.time
    words = f"Computing {time.compute_fraction:.2%} of the time, "
    if time.hidden_fraction is None:
        return f"{words}idle {time.idle_fraction:.2%}; nothing communicates."
    words += f"communicating {time.communication_fraction:.2%}, idle {time.idle_fraction:.2%}."
    words += (
        f" {time.hidden_fraction:.2%} of the communication is hidden behind compute, "
        f"{format_us(time.exposed_us)} is exposed"
        f" ({time.exposed_fraction:.2%} of the time)."
    )
    if report.waiting_kernels_us:
        words += (
            f" Kernels that only wait take {format_us(report.waiting_kernels_us)} of the "
            f"{format_us(report.communication_kernels_us)} of communication kernels."
        )
    return words


def efficiency_sentences(efficient: Efficiency) -> tuple[str, str]:
    """Return a sentence about the busy time, as nvidia-smi shows it, and one about the MFU."""
    busy = (
        f"Utilisation as nvidia-smi shows it: {efficient.busy_fraction:.1%}. It counts a kernel that waits as busy: "
        f"computing is {efficient.compute_fraction:.1%}."
    )
    if efficient.mfu is not None:
        assert efficient.peak_flop_per_s is not None and efficient.flop_per_step is not None, "the MFU is of both"
        steps = plural(efficient.steps, "step")
        wrong = " More than 100%: the model, the layout or the number of steps is wrong."
        doubt = wrong if efficient.mfu > 1 else ""
        return busy, (
            f"MFU: {efficient.mfu:.1%}, {efficient.flop_per_step / 1e12:,.4g} TFLOP a step, {steps}, of a peak of "
            f"{efficient.peak_flop_per_s / 1e12:,.4g} TFLOP/s.{doubt}"
        )
    if efficient.flop_per_step is not None:
        return busy, "MFU: not known, since the peak of this GPU is not; name a known GPU with --gpu H100."
    return busy, "MFU: not known from a profile alone; add --flop-per-step, --job, or --plan with model and layout."


def fitted(name: str, width: int) -> str:
    """Return a kernel's name without parameters, cut at its start: names differ at the end, except for NCCL's.

    >>> fitted("void at::native::reduce_kernel<512, 1>(int)", 20)
    '...ve::reduce_kernel'
    >>> fitted("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 20)
    'AllReduce_Sum_bf1...'
    """
    bare = short_name(name)
    if bare in ("cutlass::device_kernel", "cutlass::Kernel", "cutlass::Kernel2"):
        inside = name.partition("<")[2].partition("<")[0].partition(">")[0]
        bare = f"{inside.strip()} (cutlass)"
    if len(bare) <= width:
        return bare
    collective = bare.removeprefix("ncclDevKernel_").removeprefix("ncclKernel_")
    if len(collective) < len(bare):
        return collective if len(collective) <= width else collective[: width - 3] + "..."
    return "..." + bare[3 - width :]


def idle_sentences(report: RankReport) -> list[str]:
    """Return sentences on the causes of idle time."""
    idle = report.idle
    if report.side != "device":
        return []
    if not idle.launched:
        return ["The profile has no launches, so the causes of idle time are not known."]
    host = f"{format_us(idle.host_us)} waiting for the host: the next kernel was launched when the GPU was idle."
    queued = f"{format_us(idle.queued_us)} with the next kernel queued: waiting for another stream, or for its launch."
    words = [f"{host} {queued}"]
    if idle.queue_us_median is not None:
        words.append(f"The median kernel starts {format_us(idle.queue_us_median)} after its launch.")
    if idle.stretches:
        worst = idle.stretches[0]
        words.append(
            f"Launch-bound for {format_us(idle.launch_bound_us)}. The worst stretch starts at "
            f"{format_us(worst.start_us)}: {worst.operations:,} operations in {format_us(worst.length_us)}, "
            f"{format_us(worst.idle_us)} of it idle."
        )
    held = [gap for gap in idle.longest if gap.cause == "host" and gap.host]
    if held:
        words.append(f"During the longest such gap, {format_us(held[0].length_us)}, the host was in {held[0].host}.")
    return words


def skew_sentences(waits: Skew) -> list[str]:
    """Return sentences on stragglers."""
    if not waits.matched:
        words = ["No collective ran on several of these ranks, so stragglers are not known."]
    else:
        most = max(waits.ranks, key=lambda each: each.caused_us)
        total = sum(each.caused_us for each in waits.ranks)
        words = [
            f"{waits.matched:,} collectives matched. The rank with the least time in one came last: the others waited."
        ]
        if total:
            words.append(
                f"The straggler is {most.label}: it caused {format_us(most.caused_us)} of {format_us(total)} of "
                f"waiting and came last in {most.last:,} of {waits.matched:,}."
            )
    if waits.unmatched:
        words.append(f"Not matched, since the ranks have different numbers of them: {'; '.join(waits.unmatched[:4])}.")
    return words


def planned_layout(planned: PlanOfProfile) -> str:
    """Return the model, the GPUs and the layout that were planned, with the job."""
    job = f"job {planned.job}: " if planned.job else ""
    return f"{job}{planned.model}, {planned.gpus} x {planned.gpu}, {planned.layout}"
