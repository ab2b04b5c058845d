"""The HTTP face of the pages: reading and following them."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Depends
from fastapi.responses import Response, StreamingResponse
from starlette.requests import Request

from cordee.control.access import Access
from cordee.control.acts import note
from cordee.control.chargeback import csv_of, lines_of
from cordee.control.dependencies import Asked
from cordee.control.web import others
from cordee.control.web.frame import HEADERS, PageRoute, asset_answer, framed
from cordee.control.web.login import AskedSessions
from cordee.control.web.pages import FOLLOWERS_MAX, FOLLOWERS_OF_ONE_MAX, Pages, Wanted
from cordee.control.web.parts import Parts
from cordee.control.web.sessions import Sessions, session_id
from cordee.errors import BusyError, CordeeError, TokenError
from cordee.view.page import part

_EVERY_S = 1.0  # between two updates of a page
_QUIET_S = 5.0  # after which a page is drawn again, although the log has not changed
_LOOK_S = 0.1

router = APIRouter(route_class=PageRoute, include_in_schema=False)


async def _pages(request: Request) -> Pages:
    pages = request.app.state.pages
    assert isinstance(pages, Pages), "create_app put it there"
    return pages


AskedPages = Annotated[Pages, Depends(_pages)]


class Visit(NamedTuple):
    """A request of a person who is logged in."""

    viewer: Access
    cookie: str
    form: str


async def _visit(request: Request, sessions: AskedSessions, operations: Asked) -> Visit:
    cookie = request.cookies.get(sessions.cookie, "")
    follows = request.url.path == "/live"
    session = await asyncio.to_thread(sessions.of, cookie, follows=follows) if cookie else None
    if session is None:
        raise TokenError("nobody is logged in here, or the session is over", hint="cordee web")
    note(who=session.name, session=session_id(cookie))
    return Visit(Access(session, operations), cookie, sessions.form_token(cookie))


Visitor = Annotated[Visit, Depends(_visit)]


# -- reading ---------------------------------------------------------------------------------------------------------


@router.get("/web/{version}/{name}")
def file(version: str, name: str) -> Response:
    """Return a style sheet, the script or the mark; the version makes a new address of a new file."""
    return asset_answer(name if version else "")


async def _shown(
    request: Request, pages: Pages, visit: Visit, name: str, title: str, *, here: str, ref: str = "", lead: str = ""
) -> Response:
    wanted = Wanted.of(name, ref, request.query_params)
    parts = await pages.drawn(wanted, visit.viewer, request)
    notice = NOTICES.get(request.query_params.get("done", ""), "")
    person = visit.viewer.name
    return await asyncio.to_thread(
        lambda: framed(title, parts, here=here, lead=lead, live=wanted, person=person, form=visit.form, notice=notice)
    )


NOTICES = {
    "stop": "It was asked to stop.",
    "requeue": "It goes to the end of its queue.",
    "pause": "It was asked to save and to leave its GPUs; it waits until it is resumed.",
    "resume": "It may start again.",
    "cordon": "Nothing new starts on the node.",
    "drain": "Nothing new starts on the node, and its attempts were given notice.",
    "uncordon": "The node is back in use.",
}


@router.get("/")
async def now(request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show the cluster and its queue as they are now."""
    return await _shown(request, pages, visit, "now", "Now", here="Now")


@router.get("/queues")
async def queues(request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show the tree of queues."""
    return await _shown(request, pages, visit, "queues", "Queues", here="Queues")


@router.get("/nodes")
async def nodes(request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show the nodes."""
    return await _shown(request, pages, visit, "nodes", "Nodes", here="Nodes")


@router.get("/nodes/{name}")
async def node(name: str, request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show one node."""
    return await _shown(request, pages, visit, "node", name, here="Nodes", ref=name)


@router.get("/sweeps")
async def sweeps(request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show the sweeps."""
    return await _shown(request, pages, visit, "sweeps", "Sweeps", here="Sweeps")


@router.get("/sweeps/{ref}")
async def sweep(ref: str, request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show one sweep."""
    return await _shown(request, pages, visit, "sweep", ref, here="Sweeps", ref=ref)


@router.get("/services")
async def services(request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show the services."""
    return await _shown(request, pages, visit, "services", "Services", here="Services")


@router.get("/artifacts")
async def artifacts(request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show the artifacts."""
    return await _shown(request, pages, visit, "artifacts", "Artifacts", here="Artifacts")


@router.get("/artifacts/{ref:path}")
async def artifact(ref: str, request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show one version of an artifact with its lineage."""
    return await _shown(request, pages, visit, "artifact", ref, here="Artifacts", ref=ref)


@router.get("/audit")
async def audit(request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show who did what."""
    return await _shown(request, pages, visit, "audit", "Audit", here="Audit")


@router.get("/jobs/{ref}")
async def job(ref: str, request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show one job."""
    found = await asyncio.to_thread(lambda: pages.operations.job(visit.viewer.job(ref)))
    return await _shown(request, pages, visit, "job", found.name, here="", ref=found.job_id, lead=found.job_id)


@router.get("/cost")
async def cost(request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show the costs of a month."""
    wanted = Wanted.of("cost", "", request.query_params)
    span, now_us = pages.month(wanted), pages.operations.clock.now_us()
    drawn = await pages.drawn(wanted, visit.viewer, request)

    def framed_parts() -> Response:
        names = others.months_until(pages.books.first_us(now_us), now_us)
        parts: Parts = {"months": part("months", names, span.name, wanted.by, template="web/cost.html.j2"), **drawn}
        lead = f"{span.name}, in UTC"
        return framed("Cost", parts, here="Cost", lead=lead, person=visit.viewer.name, form=visit.form)

    return await asyncio.to_thread(framed_parts)


@router.get("/cost.csv")
async def cost_csv(request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Return the chargeback of a month as CSV."""
    wanted = Wanted.of("cost", "", request.query_params)
    span, now_us = pages.month(wanted), pages.operations.clock.now_us()

    def draw() -> Parts:
        return {"csv": csv_of(lines_of(pages.books, visit.viewer, now_us, from_us=span.from_us, to_us=span.to_us))}

    key = "csv", wanted, visit.viewer.scope
    text = (await pages.turns.answer(request, lambda _: pages.drawings.get(key, draw, fresh_s=10.0)))["csv"]
    name = f"cordee-{span.name}.csv"
    headers = HEADERS | {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(text, media_type="text/csv; charset=utf-8", headers=headers)


# -- following -------------------------------------------------------------------------------------------------------


@router.get("/live")
async def live(request: Request, pages: AskedPages, sessions: AskedSessions, visit: Visitor) -> Response:
    """Return the parts of a page whenever they change, as server-sent events."""
    query = request.query_params
    wanted = Wanted.of(query.get("page", ""), query.get("ref", ""), query)
    if pages.followers.total() >= FOLLOWERS_MAX:
        raise BusyError(f"{FOLLOWERS_MAX} pages are followed already", hint="reload this page later")
    if pages.followers[visit.viewer.name] >= FOLLOWERS_OF_ONE_MAX:
        raise BusyError(f"{FOLLOWERS_OF_ONE_MAX} pages of {visit.viewer.name} are followed already", hint="close some")
    await pages.drawn(wanted, visit.viewer)  # what cannot be drawn is refused here
    stream = _followed(pages, sessions, wanted, visit)
    return StreamingResponse(stream, media_type="text/event-stream", headers=HEADERS | {"X-Accel-Buffering": "no"})


async def _followed(pages: Pages, sessions: Sessions, wanted: Wanted, visit: Visit) -> AsyncIterator[str]:
    operations, sent = pages.operations, Parts()
    pages.followers[visit.viewer.name] += 1
    try:
        while not operations.closing and await asyncio.to_thread(sessions.of, visit.cookie, follows=True) is not None:
            number = operations.control.number
            try:
                parts = await pages.drawn(wanted, visit.viewer)
            except CordeeError:
                return  # it is gone, or the database is: the browser asks again
            fresh = {name: html for name, html in parts.items() if sent.get(name) != html}
            if fresh:
                body = {"at_us": operations.clock.now_us(), "parts": fresh}
                yield f"event: parts\ndata: {json.dumps(body)}\n\n"
                sent = parts
            else:
                yield ": nothing has changed\n\n"
            waited_s = 0.0
            while waited_s < _QUIET_S and not operations.closing:
                if waited_s >= _EVERY_S and operations.control.number != number:
                    break
                await asyncio.sleep(_LOOK_S)
                waited_s += _LOOK_S
    finally:
        pages.followers[visit.viewer.name] -= 1
