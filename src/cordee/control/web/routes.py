"""The HTTP face of the pages: reading them, following them, and logging in and out."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, NamedTuple
from urllib.parse import parse_qs, urlsplit

from fastapi import APIRouter, Depends
from fastapi.responses import RedirectResponse, Response, StreamingResponse
from starlette.requests import Request

from cordee.answers.nodes import WebTicketView
from cordee.control.access import Access
from cordee.control.acts import note
from cordee.control.chargeback import csv_of, lines_of
from cordee.control.dependencies import Asked, Owner, Shown, bearer_of, body_of, user_router
from cordee.control.members import token_id
from cordee.control.web import others
from cordee.control.web.frame import HEADERS, PageRoute, asset_answer, framed
from cordee.control.web.pages import Pages, Wanted
from cordee.control.web.parts import Parts
from cordee.control.web.sessions import LASTS_S, Sessions, session_id
from cordee.errors import BusyError, CordeeError, ForbiddenError, TokenError
from cordee.view.page import part

FOLLOWERS_MAX = 256
"""Pages that are followed at a time; each is a connection that stays open."""

FORM_BYTES_MAX = 16_384
_EVERY_S = 1.0  # between two updates of a page
_QUIET_S = 5.0  # after which a page is drawn again, although the log has not changed
_LOOK_S = 0.1

router = APIRouter(route_class=PageRoute, include_in_schema=False)
tickets_router = user_router("/v1")


async def _pages(request: Request) -> Pages:
    pages = request.app.state.pages
    assert isinstance(pages, Pages), "create_app put it there"
    return pages


async def _sessions(request: Request) -> Sessions:
    sessions = request.app.state.sessions
    assert isinstance(sessions, Sessions), "create_app put it there"
    return sessions


AskedPages = Annotated[Pages, Depends(_pages)]
AskedSessions = Annotated[Sessions, Depends(_sessions)]


class Visit(NamedTuple):
    """A request of a person who is logged in."""

    viewer: Access
    cookie: str
    form: str


async def _visit(request: Request, sessions: AskedSessions, operations: Asked) -> Visit:
    cookie = request.cookies.get(sessions.cookie, "")
    session = sessions.of(cookie) if cookie else None
    if session is None:
        raise TokenError("nobody is logged in here, or the session is over", hint="cordee web")
    note(who=session.name, session=session_id(cookie))
    return Visit(Access(session, operations), cookie, sessions.form_token(cookie))


Visitor = Annotated[Visit, Depends(_visit)]


async def form_of(request: Request, sessions: AskedSessions) -> dict[str, str]:
    """Return the fields of a form, which a page of this server must have sent.

    Raises:
        ForbiddenError: another site may have sent it.
        InputError: it is too long.
    """
    _check_origin(request)
    fields = await _fields(request)
    cookie = request.cookies.get(sessions.cookie, "")
    if not sessions.is_form_token(cookie, fields.pop("form", "")):
        raise ForbiddenError("this form is not of your session", hint="go back, reload the page and send it again")
    return fields


Form = Annotated[dict[str, str], Depends(form_of)]


async def _fields(request: Request) -> dict[str, str]:
    body = await body_of(request, FORM_BYTES_MAX)
    found = parse_qs(body.decode(errors="replace"), keep_blank_values=True, max_num_fields=50)
    return {name: values[-1] for name, values in found.items()}


def _check_origin(request: Request) -> None:
    """Refuse what a page of another site sent.

    Raises:
        ForbiddenError: it did.
    """
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "same-origin")
    foreign = origin not in (None, "null") and urlsplit(origin or "").netloc != request.headers.get("host")
    if foreign or site not in ("same-origin", "none"):
        raise ForbiddenError("this request comes from a page of another site")


# -- logging in and out ------------------------------------------------------------------------------------------------


@tickets_router.post("/web-tickets", status_code=201)
def ticket(request: Request, sessions: AskedSessions, owner: Owner, shown: Shown) -> WebTicketView:
    """Return a ticket with which a browser logs in as this user, once and within two minutes."""
    made = sessions.ticket(owner, token_id(shown))
    return WebTicketView(url=f"{request.url.scheme}://{request.url.netloc}/login?ticket={made}")


@router.get("/login")
def login(request: Request, sessions: AskedSessions) -> Response:
    """Show the form of the login, or take a ticket."""
    to, shown = _local(request.query_params.get("next", "/")), request.query_params.get("ticket", "")
    problem = ""
    if shown:
        _check_origin(request)
        found = sessions.redeem(shown)
        if found is not None:
            return _begun(request, sessions, found.name, found.by, to)
        problem = "The ticket is used or too old: `cordee web` makes another one."
    return _login_page(to, problem)


@router.post("/login")
async def log_in(request: Request, sessions: AskedSessions, operations: Asked) -> Response:
    """Take a token, and begin a session."""
    _check_origin(request)
    fields = await _fields(request)
    to, token = _local(fields.get("next", "/")), fields.get("token", "").strip()
    try:
        owner = (await asyncio.to_thread(bearer_of, operations, token)).name
    except CordeeError as error:
        return _login_page(to, f"{error.message[0].upper()}{error.message[1:]}.", status=401)
    return _begun(request, sessions, owner, token_id(token), to)


@router.post("/logout")
async def log_out(sessions: AskedSessions, visit: Visitor, _: Form) -> Response:
    """End the session of this browser."""
    answer = RedirectResponse("/login", status_code=303, headers=HEADERS)
    answer.delete_cookie(sessions.cookie)
    return answer


def _begun(request: Request, sessions: Sessions, name: str, by: str, to: str) -> Response:
    cookie = sessions.begin(name, by)
    note(who=name, token=by, session=session_id(cookie), loud=True)
    answer = RedirectResponse(to, status_code=303, headers=HEADERS)
    answer.set_cookie(
        sessions.cookie,
        cookie,
        max_age=LASTS_S,
        httponly=True,
        samesite="lax",
        secure=request.url.scheme == "https",
    )
    return answer


def _login_page(to: str, problem: str, status: int = 200) -> Response:
    return framed("Log in", {"login": part("login", to, problem, (), template="web/login.html.j2")}, status=status)


def _local(path: str) -> str:
    """Return a path of this server; "/" for an address elsewhere.

    >>> _local("/jobs/x?rank=1"), _local("//evil.example"), _local("https://evil.example")
    ('/jobs/x?rank=1', '/', '/')
    """
    whole = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if whole and "\\" not in path else "/"


# -- reading ---------------------------------------------------------------------------------------------------------


@router.get("/web/{version}/{name}")
def file(version: str, name: str) -> Response:
    """Return a style sheet, the script or the mark; the version makes a new address of a new file."""
    return asset_answer(name if version else "")


def _shown(
    request: Request, pages: Pages, visit: Visit, name: str, title: str, *, here: str, ref: str = "", lead: str = ""
) -> Response:
    wanted = Wanted.of(name, ref, request.query_params)
    parts = pages.parts(wanted, visit.viewer)
    notice = NOTICES.get(request.query_params.get("done", ""), "")
    person = visit.viewer.name
    return framed(title, parts, here=here, lead=lead, live=wanted, person=person, form=visit.form, notice=notice)


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
def now(request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show the cluster and its queue as they are now."""
    return _shown(request, pages, visit, "now", "Now", here="Now")


@router.get("/queues")
def queues(request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show the tree of queues."""
    return _shown(request, pages, visit, "queues", "Queues", here="Queues")


@router.get("/nodes")
def nodes(request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show the nodes."""
    return _shown(request, pages, visit, "nodes", "Nodes", here="Nodes")


@router.get("/sweeps")
def sweeps(request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show the sweeps."""
    return _shown(request, pages, visit, "sweeps", "Sweeps", here="Sweeps")


@router.get("/sweeps/{ref}")
def sweep(ref: str, request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show one sweep."""
    return _shown(request, pages, visit, "sweep", ref, here="Sweeps", ref=ref)


@router.get("/services")
def services(request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show the services."""
    return _shown(request, pages, visit, "services", "Services", here="Services")


@router.get("/artifacts")
def artifacts(request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show the artifacts."""
    return _shown(request, pages, visit, "artifacts", "Artifacts", here="Artifacts")


@router.get("/artifacts/{ref:path}")
def artifact(ref: str, request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show one version of an artifact with its lineage."""
    return _shown(request, pages, visit, "artifact", ref, here="Artifacts", ref=ref)


@router.get("/audit")
def audit(request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show who did what."""
    return _shown(request, pages, visit, "audit", "Audit", here="Audit")


@router.get("/jobs/{ref}")
def job(ref: str, request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show one job."""
    found = pages.operations.job(visit.viewer.job(ref))
    return _shown(request, pages, visit, "job", found.name, here="", ref=found.job_id, lead=found.job_id)


@router.get("/cost")
def cost(request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Show the costs of a month."""
    wanted = Wanted.of("cost", "", request.query_params)
    span, now_us = pages.month(wanted), pages.operations.clock.now_us()
    names = others.months_until(pages.books.first_us(now_us), now_us)
    chosen = part("months", names, span.name, wanted.by, template="web/cost.html.j2")
    parts: Parts = {"months": chosen, **pages.parts(wanted, visit.viewer)}
    return framed("Cost", parts, here="Cost", lead=f"{span.name}, in UTC", person=visit.viewer.name, form=visit.form)


@router.get("/cost.csv")
def cost_csv(request: Request, pages: AskedPages, visit: Visitor) -> Response:
    """Return the chargeback of a month as CSV."""
    wanted = Wanted.of("cost", "", request.query_params)
    span, now_us = pages.month(wanted), pages.operations.clock.now_us()

    def draw() -> Parts:
        return {"csv": csv_of(lines_of(pages.books, visit.viewer, now_us, from_us=span.from_us, to_us=span.to_us))}

    text = pages.drawings.get(("csv", wanted, visit.viewer.scope), draw, fresh_s=10.0)["csv"]
    name = f"cordee-{span.name}.csv"
    headers = HEADERS | {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(text, media_type="text/csv; charset=utf-8", headers=headers)


# -- following -------------------------------------------------------------------------------------------------------


@router.get("/live")
async def live(request: Request, pages: AskedPages, sessions: AskedSessions, visit: Visitor) -> Response:
    """Return the parts of a page whenever they change, as server-sent events."""
    query = request.query_params
    wanted = Wanted.of(query.get("page", ""), query.get("ref", ""), query)
    if pages.followers >= FOLLOWERS_MAX:
        raise BusyError(f"{FOLLOWERS_MAX} pages are followed already", hint="reload this page later")
    await asyncio.to_thread(pages.parts, wanted, visit.viewer)  # what cannot be drawn is refused here
    stream = _followed(pages, sessions, wanted, visit)
    return StreamingResponse(stream, media_type="text/event-stream", headers=HEADERS | {"X-Accel-Buffering": "no"})


async def _followed(pages: Pages, sessions: Sessions, wanted: Wanted, visit: Visit) -> AsyncIterator[str]:
    operations, sent = pages.operations, Parts()
    pages.followers += 1
    try:
        while not operations.closing and sessions.of(visit.cookie) is not None:
            number = operations.control.number
            try:
                parts = await asyncio.to_thread(pages.parts, wanted, visit.viewer)
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
        pages.followers -= 1
