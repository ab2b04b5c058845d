"""The pages of queues, nodes, sweeps and services, and that of the cost of a month."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice

from cordee.account.usage import Tokens
from cordee.answers.nodes import NodeView
from cordee.answers.queues import QueueView
from cordee.answers.services import ServiceView
from cordee.control.access import Access
from cordee.control.budgets import BudgetOperations
from cordee.control.chains import ChainOperations
from cordee.control.months import Books, Costs, Span, name_in
from cordee.control.operations import Operations
from cordee.control.services.operations import ServiceOperations
from cordee.control.services.routes import seen_services
from cordee.control.sweeps.operations import SweepOperations
from cordee.control.sweeps.picture import best_text, drawing, metric_text, ranked, rung_rows, rungs_text, value_text
from cordee.control.sweeps.routes import seen_sweep, seen_sweeps
from cordee.control.web.parts import Parts
from cordee.errors import NotFoundError
from cordee.events import Budget, Event, NodeCordoned, NodeDown, NodeUncordoned, NodeUp, Queue
from cordee.units import MICRO_USD, US_PER_HOUR, US_PER_S, format_micro_usd, plural
from cordee.view.chart import Axis, ChartLine, chart_svg
from cordee.view.faults import faults_of
from cordee.view.frame import Frame, framed
from cordee.view.markup import CLASSES
from cordee.view.measured import compared_texts
from cordee.view.money import MoneyRow, money_html
from cordee.view.page import part

NODES_SHOWN = 500
HISTORY_SHOWN = 100
ROWS_SHOWN = 40
WEEKS = 8
BY = ("user", "queue", "project", "job", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    """A queue beside its siblings: its part of the GPU time of each of the last weeks, oldest first, and its due.

    Attributes:
        weeks: of the GPU time of the queue above it, or of all.
        due: what its weight gave it of that at the end of each week; None: it was not there.
    """

    view: QueueView
    weeks: Sequence[float]
    due: Sequence[float | None]


def queues_parts(operations: Operations, books: Books, viewer: Access) -> Parts:
    """Return the parts of the page of queues."""
    found = viewer.queues(operations.queues())
    ends = [found.at_us - ago * _WEEK_US for ago in reversed(range(WEEKS))]
    weeks = [books.held_by_queue(Span(end_us - _WEEK_US, end_us, ""), found.at_us) for end_us in ends]
    trees = [books.queues_at(end_us) for end_us in ends]
    children: dict[str | None, list[QueueView]] = {}
    for each in found.queues:
        children.setdefault(each.parent, []).append(each)
    rows = []
    for each in found.queues:
        mine, above = _below(each.name, children), _below(each.parent, children)
        sums = [(_sum(week, mine), sum(week.values()) if each.parent is None else _sum(week, above)) for week in weeks]
        parts = [held / total if total else 0.0 for held, total in sums]
        rows.append(QueueRow(view=each, weeks=parts, due=[_due(each.name, tree) for tree in trees]))
    tree = part("queues", rows, found.gpu_milli, template="web/queues.html.j2")
    return {"tree": tree, "budgets": _budgets(books, viewer)}


def _budgets(books: Books, viewer: Access) -> str:
    found = BudgetOperations(viewer.operations, books).budgets(viewer)
    rows = [(each, Budget(queue=each.queue, user=each.user).whose) for each in found]
    recent = books.recent(viewer.operations.clock.now_us())
    return part("budgets", rows, recent.lasts_us, template="web/budgets.html.j2")


_WEEK_US = 7 * 24 * US_PER_HOUR


def _below(name: str | None, children: Mapping[str | None, Sequence[QueueView]]) -> set[str]:
    found = set() if name is None else {name}
    for each in children.get(name, ()):
        found |= _below(each.name, children)
    return found


def _sum(held: Mapping[str, int], names: Iterable[str]) -> int:
    return sum(held.get(name, 0) for name in names)


def _due(name: str, queues: Sequence[Queue]) -> float | None:
    """Return the part of a queue's weight in that of its siblings; None: it is not in this tree.

    >>> _due("llm", [Queue(name="llm", parent="lab", weight=3), Queue(name="vision", parent="lab"), Queue(name="lab")])
    0.75
    """
    own = next((each for each in queues if each.name == name), None)
    if own is None:
        return None
    whole = sum(each.weight for each in queues if each.parent == own.parent)
    return own.weight / whole if whole else 0.0


def nodes_parts(operations: Operations, books: Books, viewer: Access) -> Parts:
    """Return the parts of the page of nodes: their state, maintenance to come, and their history."""
    nodes, events = viewer.views(operations.nodes()), books.node_events()
    faults = faults_of(events)
    order = sorted(nodes, key=lambda node: (node.up and node.cordoned_by is None and not node.unavailable, node.name))
    shown = [(node, faults.get(node.name, [])) for node in order[:NODES_SHOWN]]
    return {
        "nodes": _node_part("nodes", shown, len(nodes) - len(shown), viewer.operates),
        "maintenance": _node_part("maintenance", ChainOperations(operations).bookings()),
        "history": _node_part("history", _history(events)),
    }


def node_parts(operations: Operations, books: Books, name: str, viewer: Access) -> Parts:
    """Return the parts of the page of one node: its state, its faults with their causes, and its history.

    Raises:
        NotFoundError: there is no such node.
    """
    node = viewer.view(node_of(operations, name))
    events = [each for each in books.node_events() if name_in(each) == name]
    faults = faults_of(books.node_events()).get(name, [])
    bookings = [each for each in ChainOperations(operations).bookings() if each.node == name]
    return {
        "nodes": _node_part("nodes", [(node, faults)], 0, viewer.operates),
        "faults": _node_part("faults", faults),
        "maintenance": _node_part("maintenance", bookings),
        "history": _node_part("history", _history(events)),
    }


def node_of(operations: Operations, name: str) -> NodeView:
    """Return a node.

    Raises:
        NotFoundError: there is none of this name.
    """
    found = next((node for node in operations.nodes() if node.name == name), None)
    if found is None:
        raise NotFoundError(f"there is no node {name[:80]!r}")
    return found


def _node_part(macro: str, *values: object) -> str:
    return part(macro, *values, template="web/nodes.html.j2")


def _history(events: Sequence[Event]) -> list[tuple[int, str, str, str]]:
    shown = (each for each in reversed(events) if isinstance(each, NodeUp | NodeDown | NodeCordoned | NodeUncordoned))
    return [_happened(each) for each in islice(shown, HISTORY_SHOWN)]


def _happened(event: NodeUp | NodeDown | NodeCordoned | NodeUncordoned) -> tuple[int, str, str, str]:
    if isinstance(event, NodeUp):
        away = len(event.node.unavailable)
        about = f"{plural(event.node.gpus, 'GPU')} {event.node.gpu_name}"
        return event.at_us, event.node.name, "up", about + (f", {away} unavailable" if away else "")
    if isinstance(event, NodeDown):
        return event.at_us, event.node, "down", event.why
    if isinstance(event, NodeCordoned):
        word = "drains" if event.drain else "cordoned"
        return event.at_us, event.node, word, f"by {event.by}" + (f": {event.why}" if event.why else "")
    return event.at_us, event.node, "in use again", f"by {event.by}" + (f": {event.why}" if event.why else "")


def sweeps_parts(sweeps: SweepOperations, viewer: Access) -> Parts:
    """Return the list of sweeps."""
    found = seen_sweeps(sweeps, viewer)
    rows = [(each, rungs_text(each), "" if each.best is None else best_text(each, each.best)) for each in found]
    return {"sweeps": part("sweeps", rows, template="web/sweeps.html.j2")}


def sweep_parts(sweeps: SweepOperations, ref: str, viewer: Access) -> Parts:
    """Return the parts of one sweep.

    Raises:
        NotFoundError: there is none.
    """
    sweep = sweeps.sweep(seen_sweep(ref, sweeps, viewer))
    found = ranked(sweep)
    logged = [each for each in found if each.metric is not None]
    names = list(sweep.trials[0].values) if sweep.trials else []
    rows = [(each, [value_text(each.values[name]) for name in names], metric_text(each.metric)) for each in found[:200]]
    best = "" if sweep.best is None else best_text(sweep, sweep.best)
    declared = sweeps.declared(sweep.sweep_id)
    with sweeps.operations.control.changed:
        rungs = [] if declared is None else rung_rows(declared)
    halving = [(each, metric_text(each.best), metric_text(each.last)) for each in rungs]
    template = "web/sweeps.html.j2"
    return {
        "summary": part("summary", sweep, rungs_text(sweep), best, template=template),
        "picture": part("picture", drawing(sweep, logged) if len(logged) > 1 else "", template=template),
        "halving": part("halving", sweep, halving, template=template) if halving else "",
        "trials": part("trials", sweep, names, rows, len(found) - len(rows), template=template),
    }


def services_parts(services: ServiceOperations, viewer: Access) -> Parts:
    """Return the services with their load, their latencies and the cost of their tokens."""
    found, prices, control = seen_services(services, viewer), services.tenants.prices(), viewer.operations.control
    now_us = viewer.operations.clock.now_us()
    with control.changed:
        lines = control.ledger.usage(now_us)
    priced = {line.key.service for line in lines if line.tokens.output}  # of others there are weights only
    tokens: dict[str, Tokens] = {}
    for line in lines:
        if line.to_us > now_us - _WEEK_US:
            tokens[line.key.service] = tokens.get(line.key.service, Tokens()) + line.tokens
    rows = [
        (each, prices.get(each.name) if each.name in priced else None, tokens.get(each.name), _compared(each))
        for each in found
        if each.state != "ended"
    ]
    return {"services": part("services", rows, template="web/services.html.j2")}


def _compared(service: ServiceView) -> list[tuple[str, str, str, str]]:
    return [(row.quantity, *compared_texts(row)) for row in service.compared if row.planned is not None]


def cost_parts(books: Books, span: Span, now_us: int, by: str, viewer: Access) -> Parts:
    """Return the parts of the costs of a month."""
    costs = books.costs(span, now_us, viewer)
    rows = [
        MoneyRow(key, {name: amounts.gpu_us.get(name, 0) for name in CLASSES}, amounts.paid)
        for key, amounts in list(costs.by[by].items())[:ROWS_SHOWN]
    ]
    template = "web/cost.html.j2"
    over = span.to_us <= now_us
    return {
        "total": part("total", costs, over, template=template),
        "budgets": _budgets(books, viewer),
        "days": part("days", _days(costs), template=template),
        "by": part(
            "by", costs, by, BY, money_html(rows) if rows else "", len(costs.by[by]) - len(rows), template=template
        ),
        "lost": part("lost", costs.lost[:ROWS_SHOWN], len(costs.lost) - ROWS_SHOWN, template=template),
    }


_WIDE, _NARROW = Frame("wide", 1080, 92, 120, 260), Frame("narrow", 420, 64, 0, 240)


def _days(costs: Costs) -> str:
    """Return the chart of dollars by day: held, and of the whole capacity."""
    if len(costs.days) < 2:
        return ""
    days = list(enumerate([*costs.days, costs.days[-1]], start=1))  # a day's value is drawn until the next one begins
    days = days[next((at for at, (_, (_, whole)) in enumerate(days) if whole), 0) :]
    held = [(float(day), paid / MICRO_USD) for day, (paid, _) in days]
    offered = [(float(day), whole / MICRO_USD) for day, (_, whole) in days]
    lines = [ChartLine("held", held, steps=True), ChartLine("capacity", offered, dashed=True, steps=True)]
    axes = (
        Axis("day", lambda day: f"{day:.0f}", ticks=range(days[0][0], days[-1][0], max(1, len(days) // 8))),
        Axis("dollars a day", lambda usd: format_micro_usd(round(usd * MICRO_USD))),
    )
    return framed(lambda frame: chart_svg(lines, *axes, label="Dollars a day", frame=frame), _WIDE, _NARROW)


def months_until(first_us: int, now_us: int) -> list[str]:
    """Return the months from one moment to another, the newest first.

    >>> months_until(0, 40 * 86_400_000_000)
    ['1970-02', '1970-01']
    """
    last, found = datetime.fromtimestamp(first_us / US_PER_S, UTC), list[str]()
    span = Span.containing(now_us)
    while len(found) < 24:
        found.append(span.name)
        if span.name <= f"{last:%Y-%m}":
            break
        span = span.before()
    return found
