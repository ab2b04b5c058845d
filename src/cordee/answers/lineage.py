"""The lineage of a version as boxes: its data, code and plan, the job and its dollars, itself, what came of it."""

from collections.abc import Callable

from cordee.answers.artifacts import MakerView, RelativeView, VersionDetailView
from cordee.units import US_PER_HOUR, format_micro_usd, plural
from cordee.view.lineage import Box

_HOW = {
    "made from": "it was made from this",
    "stored as a difference to": "its base",
    "parent of": "was made from it",
    "base of": "is stored as a difference to it",
}
_BEFORE = ("made from", "stored as a difference to")
_COMMIT_CHARS, _COMMAND_CHARS = 12, 40

Link = Callable[[str], str]
"""Return the address of the page of a job or of a version; "": there is none."""


def lineage_of(
    found: VersionDetailView, job_page: Link = lambda job: "", version_page: Link = lambda ref: ""
) -> list[list[Box]]:
    """Return the columns of `view.lineage`: what the version was made from, its job, itself, what was made from it."""

    def relative(each: RelativeView) -> Box:
        return Box(name_of(each), _HOW[each.how], "" if each.removed else version_page(each.ref))

    before = [relative(each) for each in found.lineage if each.how in _BEFORE]
    after = [relative(each) for each in found.lineage if each.how not in _BEFORE]
    after += [Box(job_id, "a job that used it", job_page(job_id)) for job_id in found.used_by]
    job = []
    if found.maker is not None:
        before += _inputs(found.maker)
        job = [Box(found.maker.job_id, used(found.maker), job_page(found.maker.job_id))]
    elif found.job_id:
        job = [Box(found.job_id, "the job that made it")]
    return [before, job, [Box(found.ref, "" if job else f"by {found.by}", is_self=True)], after]


def _inputs(maker: MakerView) -> list[Box]:
    """Return the code and the plan of a job."""
    made = []
    if maker.commit or maker.command:
        code = f"commit {maker.commit[:_COMMIT_CHARS]}" if maker.commit else "its command"
        made.append(Box(code, maker.command[:_COMMAND_CHARS] or "its code"))
    if maker.layout:
        steps = "" if maker.steps is None else f", {plural(maker.steps, 'step')}"
        made.append(Box(maker.layout, f"its plan{steps}"))
    return made


def used(maker: MakerView) -> str:
    """Return what a job has used until now, in words."""
    return f"{maker.gpu_us / US_PER_HOUR:.2f} GPU-hours, {format_micro_usd(maker.micro_usd)}"


def name_of(each: RelativeView) -> str:
    """Return the name of a relative."""
    return f"{each.ref} (removed)" if each.removed else each.ref
