"""The screen of `cordee top`: nodes and jobs as they are now."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.text import Text

from cordee.answers.metrics import LiveJobView, LiveNodeView, LiveView
from cordee.cli import terminal
from cordee.units import format_bytes, format_count, format_micro_usd, plural

WIDE_COLUMNS = 110
_MEANING = 'BUSY is NVML\'s "utilisation": any kernel ran. MFU: model FLOPs of the peak.'


class _Column(NamedTuple):
    name: str
    text: Callable[[LiveJobView], str | Text]
    right: bool = True
    wide: bool = False


def screen(live: LiveView, console: Console, rows_max: int | None = None) -> RenderableType:
    """Return one screen; with `rows_max` the jobs that come last are only counted."""
    is_wide = console.width >= WIDE_COLUMNS
    shown = live.jobs if rows_max is None else live.jobs[: max(1, rows_max)]
    parts: list[RenderableType] = [_head(live), *map(_node, live.nodes)]
    if shown:
        parts.append(_jobs(shown, is_wide=is_wide))
    else:
        parts.append(Text("\nno job runs or waits"))
    if len(shown) < len(live.jobs):
        parts.append(Text(f"and {plural(len(live.jobs) - len(shown), 'job')} more", "dim"))
    if any(job.busy is not None for job in live.jobs):
        parts.append(Text(_MEANING, "dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _head(live: LiveView) -> Text:
    held, gpus = sum(node.held for node in live.nodes), sum(node.gpus for node in live.nodes if node.up)
    runs = sum(job.state in ("running", "stopping") for job in live.jobs)
    waits = len(live.jobs) - runs
    rate = f"${live.micro_usd_per_hour / 1e6:,.2f} an hour"
    return Text(f"{held} of {gpus} GPUs held, {plural(runs, 'job')} running, {waits} waiting, {rate}", "bold")


def _node(node: LiveNodeView) -> Text:
    cells = 10
    full = round(cells * node.held / node.gpus) if node.gpus else 0
    facts = [f"{node.held}/{node.gpus} {node.gpu_name}"]
    facts += [] if node.busy is None else [f"busy {_percent(node.busy)}"]
    facts += [] if node.memory_bytes is None else [f"memory {format_bytes(node.memory_bytes)}"]
    facts += [] if node.power_w is None else [f"{node.power_w:,.0f} W"]
    facts += [f"{node.unavailable} unavailable"] if node.unavailable else []
    bar = f"{'█' * full}{'░' * (cells - full)}"
    text = Text(f"{node.name}  ", no_wrap=True, overflow="ellipsis")
    text.append(bar, "green" if node.up else "red")
    return text.append(f"  {', '.join(facts) if node.up else 'down'}")


def _jobs(shown: Sequence[LiveJobView], *, is_wide: bool) -> RenderableType:
    columns = [column for column in _COLUMNS if is_wide or not column.wide]
    texts = {column.name: [column.text(job) for job in shown] for column in columns}
    optional = {"LEFT", "LOSS", "TOK/S", "MFU", "BUSY", "MEM", "W"}
    kept = [each for each in columns if each.name not in optional or any(str(cell) != "–" for cell in texts[each.name])]
    table = terminal.table(
        *(each.name for each in kept), right=[each.name for each in kept if each.right], folds=("JOB",)
    )
    for row in zip(*(texts[each.name] for each in kept), strict=True):
        table.add_row(*row)
    return table


def _step(job: LiveJobView) -> str:
    if job.step is None:
        return "–"
    return f"{job.step:,}" if job.steps_total is None else f"{job.step:,}/{job.steps_total:,}"


def _loss(job: LiveJobView) -> str | Text:
    if job.lost_loss:
        return Text("not finite", "bold red")
    return _or_dash(job.loss, lambda loss: f"{loss:.4f}" if abs(loss) < 100 else f"{loss:.4g}")


def _percent(fraction: float | None) -> str:
    return _or_dash(fraction, lambda value: f"{100 * value:.0f} %")


def _or_dash(value: float | None, text: Callable[[float], str]) -> str:
    return "–" if value is None else text(value)


_COLUMNS = (
    _Column("JOB", lambda job: job.job_id, right=False),
    _Column("STATE", lambda job: terminal.state(job.state), right=False),
    _Column("OWNER", lambda job: job.owner, right=False, wide=True),
    _Column("GPUS", lambda job: str(job.gpus)),
    _Column("STEP", _step),
    _Column("LEFT", lambda job: _or_dash(job.left_us, lambda us: terminal.since(0, round(us))), wide=True),
    _Column("LOSS", _loss),
    _Column("TOK/S", lambda job: _or_dash(job.tokens_per_s, lambda rate: format_count(round(rate)))),
    _Column("MFU", lambda job: _percent(job.mfu)),
    _Column("BUSY", lambda job: _percent(job.busy)),
    _Column("MEM", lambda job: _or_dash(job.memory_bytes, lambda size: format_bytes(round(size)))),
    _Column("W", lambda job: _or_dash(job.power_w, lambda power: f"{power:,.0f}"), wide=True),
    _Column("$/H", lambda job: f"{job.micro_usd_per_hour / 1e6:,.2f}"),
    _Column("SPENT", lambda job: format_micro_usd(job.micro_usd), wide=True),
)
