"""The HTTP face of logging in and out: with a token, a ticket, or an identity provider."""

import asyncio
from typing import Annotated, Any
from urllib.parse import parse_qs, urlsplit

from fastapi import APIRouter, Depends
from fastapi.responses import RedirectResponse, Response
from starlette.requests import Request

from cordee.answers.nodes import WebTicketView
from cordee.control.acts import note
from cordee.control.api_route import user_router
from cordee.control.dependencies import Asked, Owner, Shown, bearer_of, body_of
from cordee.control.members import token_id
from cordee.control.web.frame import HEADERS, PageRoute, framed
from cordee.control.web.sessions import LASTS_S, BrowserSession, Sessions, new_cookie, session_id
from cordee.errors import CordeeError, ForbiddenError, NotFoundError
from cordee.view.page import part

FORM_BYTES_MAX = 16_384
_BACK = "/login/back"

router = APIRouter(route_class=PageRoute, include_in_schema=False)
tickets_router = user_router("/v1")


async def _sessions(request: Request) -> Sessions:
    sessions = request.app.state.sessions
    assert isinstance(sessions, Sessions), "create_app put it there"
    return sessions


async def _provider(request: Request) -> Any:
    """Return the identity provider, a `web.oidc.Provider`; None: this server has none."""
    return request.app.state.oidc


AskedSessions = Annotated[Sessions, Depends(_sessions)]
MaybeProvider = Annotated[Any, Depends(_provider)]


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


@tickets_router.post("/web-tickets", status_code=201)
def ticket(request: Request, sessions: AskedSessions, owner: Owner, shown: Shown) -> WebTicketView:
    """Return a ticket with which a browser logs in as this user, once and within two minutes."""
    made = sessions.ticket(owner, token_id(shown))
    return WebTicketView(url=f"{request.url.scheme}://{request.url.netloc}/login?ticket={made}")


@router.get("/login")
def login(request: Request, sessions: AskedSessions, provider: MaybeProvider) -> Response:
    """Show the form of the login, or take a ticket."""
    to, shown = _local(request.query_params.get("next", "/")), request.query_params.get("ticket", "")
    problem = ""
    if shown:
        _check_origin(request)
        found = sessions.redeem(shown)
        if found is not None:
            return _begun(request, sessions, found, to)
        problem = "The ticket is used or too old: `cordee web` makes another one."
    return _login_page(provider, to, problem)


@router.post("/login")
async def log_in(request: Request, sessions: AskedSessions, operations: Asked, provider: MaybeProvider) -> Response:
    """Take a token, and begin a session."""
    _check_origin(request)
    fields = await _fields(request)
    to, token = _local(fields.get("next", "/")), fields.get("token", "").strip()
    try:
        owner = (await asyncio.to_thread(bearer_of, operations, token)).name
    except CordeeError as error:
        return _login_page(provider, to, f"{error.message[0].upper()}{error.message[1:]}.", status=401)
    return await asyncio.to_thread(_begun, request, sessions, BrowserSession(owner, token_id(token)), to)


@router.get("/login/with")
def log_in_elsewhere(request: Request, sessions: AskedSessions, provider: MaybeProvider) -> Response:
    """Send the browser to the identity provider."""
    to = _local(request.query_params.get("next", "/"))
    address, kept = _known(provider).begin(_address(request, provider) + _BACK, to)
    answer = RedirectResponse(address, status_code=303, headers=HEADERS)
    # It comes back from another site, so the cookie must not be a strict one.
    secure = request.url.scheme == "https"
    answer.set_cookie(
        f"{sessions.cookie}_login", kept, max_age=600, path=_BACK, httponly=True, samesite="lax", secure=secure
    )
    return answer


@router.get(_BACK)
def come_back(request: Request, sessions: AskedSessions, provider: MaybeProvider) -> Response:
    """Take the identity provider's answer, and begin a session."""
    name = f"{sessions.cookie}_login"
    found = _known(provider).finish(request.cookies.get(name, ""), request.query_params)
    roles = " ".join(f"{grant.role.name.lower()}={grant.queue}" for grant in found.grants)
    note(detail=f"{', '.join(found.groups) or 'no group'}: {roles}")
    session = BrowserSession(found.name, provider.settings.id, tuple(found.groups))
    answer = _begun(request, sessions, session, _local(found.to))
    answer.delete_cookie(name, path=_BACK)
    return answer


@router.post("/logout")
async def log_out(request: Request, sessions: AskedSessions, provider: MaybeProvider, form: Form) -> Response:
    """End the session of this browser, and offer to log out at the identity provider too."""
    cookie = request.cookies.get(sessions.cookie, "")
    await asyncio.to_thread(_ended, sessions, cookie)
    answer: Response = RedirectResponse("/login", status_code=303, headers=HEADERS)
    if provider is not None:
        address = await asyncio.to_thread(_left, provider, _address(request, provider) + "/login")
        if address is not None:
            html = part("left", provider.settings.name, address, template="web/login.html.j2")
            answer = framed("Logged out", {"left": html})
    answer.delete_cookie(sessions.cookie)
    return answer


def _ended(sessions: Sessions, cookie: str) -> None:
    bearer = sessions.of(cookie)
    note(who="" if bearer is None else bearer.name, session=session_id(cookie))
    sessions.end(cookie)


def _left(provider: Any, back: str) -> str | None:
    """Return where people log out at the provider; None if it has no such address, or does not answer."""
    try:
        address: str | None = provider.leave(back)
    except CordeeError:
        return None
    return address


def _begun(request: Request, sessions: Sessions, session: BrowserSession, to: str) -> Response:
    cookie = new_cookie()
    note(who=session.name, token=session.by, session=session_id(cookie))
    sessions.begin(session, cookie)
    answer = RedirectResponse(to, status_code=303, headers=HEADERS)
    secure = request.url.scheme == "https"
    answer.set_cookie(sessions.cookie, cookie, max_age=LASTS_S, httponly=True, samesite="lax", secure=secure)
    return answer


def _known(provider: Any) -> Any:
    if provider is None:
        raise NotFoundError("this server knows no identity provider", hint="log in with a token")
    return provider


def _address(request: Request, provider: Any) -> str:
    """Return the address of these pages, as the provider is told."""
    return provider.settings.url or f"{request.url.scheme}://{request.url.netloc}"


def _login_page(provider: Any, to: str, problem: str, status: int = 200) -> Response:
    names = () if provider is None else (provider.settings.name,)
    html = part("login", to, problem, names, template="web/login.html.j2")
    return framed("Log in", {"login": html}, status=status)


def _local(path: str) -> str:
    """Return a path of this server; "/" for an address elsewhere.

    >>> _local("/jobs/x?rank=1"), _local("//evil.example"), _local("https://evil.example")
    ('/jobs/x?rank=1', '/', '/')
    """
    whole = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if whole and "\\" not in path else "/"
