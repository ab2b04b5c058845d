"""The page of the policy lab: the newest part of the log, replayed under another policy while the browser waits."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.requests import Request

from cordee.control.access import Access
from cordee.control.lab import DAYS, POLICIES
from cordee.control.roles import Action
from cordee.control.web.frame import PageRoute, framed
from cordee.control.web.parts import Parts
from cordee.control.web.routes import AskedPages, Visitor
from cordee.errors import InputError
from cordee.units import US_PER_HOUR, US_PER_S, format_micro_usd
from cordee.view.page import format_wait, part

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/lab")
async def lab(request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show the form of the lab, and with a policy what it would have done."""
    policy, written = request.query_params.get("policy", ""), request.query_params.get("days", "7")
    if not written.isdecimal() or len(written) > 3:
        raise InputError(f"days={written[:20]!r} is not a number")
    days = int(written)
    ask = part("ask", POLICIES, DAYS, policy or "fifo", days, template="web/lab.html.j2")
    parts: Parts = {"ask": ask}
    if policy:

        async def is_wanted() -> bool:
            return not await request.is_disconnected() and not pages.operations.closing

        found = await pages.lab.replay(policy, days, is_wanted)
        if found is not None:
            shown = part("result", found, policy, _rows(found), _moved(found, visit.viewer), template="web/lab.html.j2")
            parts["result"] = visit.viewer.text(shown)
    person = visit.viewer.name
    return framed("Policy lab", parts, here="Policy lab", person=person, form=visit.form)


def _rows(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return what is compared: a name, as it was, as it would have been."""
    both = [_figures(each) for each in (found["logged"], found["replayed"][0]["result"])]
    return [(name, was, both[1][name]) for name, was in both[0].items()]


def _figures(result: Mapping[str, Any]) -> dict[str, str]:
    summary = result["summary"]
    return {
        "jobs that ended": f"{summary['ended']:,}",
        "jobs that never started": f"{summary['unstarted']:,}",
        "wait for the first start, mean": _figure(summary["wait_s"], "mean"),
        "wait, longest of 99 %": _figure(summary["wait_s"], "p99"),
        "from submission to end, mean": _figure(summary["jct_s"], "mean"),
        "GPU time held, of all": f"{summary['held_fraction']:.1%}",
        "useful, of what was held": f"{summary['goodput']:.1%}",
        "cost of what was held": format_micro_usd(summary["held_micro_usd"]),
        "useful GPU-hours": f"{summary['useful_gpu_us'] / US_PER_HOUR:,.0f}",
        "preemptions": f"{summary['preemptions']:,}",
        "lost and done again, GPU-hours": f"{result['lost_gpu_hours']:,.1f}",
        "lost, in dollars": format_micro_usd(result["lost_micro_usd"]),
    }


class Moved(NamedTuple):
    """A job whose start moves: by its row, or None if it may not be seen; waits in seconds, None: it does not start."""

    row: Mapping[str, Any] | None
    was_s: float | None
    would_be_s: float | None


def _moved(found: Mapping[str, Any], viewer: Access) -> list[Moved]:
    rows = []
    for each in found["replayed"][0]["moved"]:
        row = viewer.operations.row(each["job_id"])
        seen = row if viewer.may(Action.SEE, row["owner"], row["queue"]) else None
        rows.append(Moved(seen, each["was_s"], each["would_be_s"]))
    return rows


def _figure(spread: Mapping[str, float] | None, name: str) -> str:
    return _span(None if spread is None else spread[name])


def _span(seconds: float | None) -> str:
    return "–" if seconds is None else format_wait(seconds * US_PER_S)
