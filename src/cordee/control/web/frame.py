"""The frame around the parts of a page: answers with the headers of security, errors, and the files that pages load."""

import hashlib
from collections.abc import Callable, Coroutine
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from fastapi.routing import APIRoute
from starlette.requests import Request

import cordee
from cordee import errors
from cordee.control.web.pages import NAV, Wanted
from cordee.control.web.parts import Parts
from cordee.errors import CordeeError, ForbiddenError, InputError, NotFoundError, TokenError
from cordee.view.markup import palette_css
from cordee.view.page import environment, page, part

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Scripts come from this server's own file only. Drawings bring their styles with them, so those may be inline."""

HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
HSTS = f"max-age={365 * 86_400}"
"""Sent from the port of HTTPS only: browsers apply it to every port of the host, and there may be other servers."""

_HTTPS_PORT = 443
"""To be reached over TLS only. It holds for all ports of a name; browsers ignore it for addresses and self-made
certificates."""

_TYPES = {"style.css": "text/css", "web.js": "text/javascript", "mark.svg": "image/svg+xml"}


@cache
def asset(name: str) -> bytes:
    """Return a file that pages load.

    Raises:
        NotFoundError: there is none of that name.
    """
    folder = files("cordee.view") / "templates"
    if name == "style.css":
        fills = str(environment().globals["fills_css"])
        sheets = [(folder / each).read_text() for each in ("page.css", "web/web.css")]
        return "\n".join([palette_css(), sheets[0], fills, sheets[1]]).encode()
    if name == "mark.svg":
        ink = '<svg xmlns="http://www.w3.org/2000/svg" fill="none" stroke="#b1442f" stroke-width="3"'
        return (folder / "mark.svg").read_text().replace("<svg", ink).encode()
    if name == "web.js":
        return (folder / "web" / "web.js").read_bytes()
    raise NotFoundError(f"there is no file {name!r}")


@cache
def version() -> str:
    """Return a name of this version of the files: browsers keep a file for as long as it has the same one."""
    return hashlib.sha256(b"".join(asset(name) for name in _TYPES)).hexdigest()[:12]


def asset_answer(name: str) -> Response:
    """Return a file as an answer, which may be kept for a year: its address changes with its content."""
    kept = {"Cache-Control": "public, max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}
    return Response(asset(name), media_type=_TYPES.get(name), headers=kept)


def framed(
    title: str,
    parts: Parts,
    *,
    here: str = "",
    lead: str = "",
    live: Wanted | None = None,
    person: str = "",
    form: str = "",
    notice: str = "",
    status: int = 200,
) -> HTMLResponse:
    """Return a whole page.

    Args:
        title: its name.
        parts: of it.
        here: its name in the bar.
        lead: a sentence under the title.
        live: what is followed, for a page that stays current.
        person: who is logged in.
        form: what the forms of this session carry.
        notice: what has just been done.
        status: of the answer.
    """
    html = page(
        "web/frame.html.j2",
        title=title,
        parts=parts,
        here=here,
        lead=lead,
        live="" if live is None else "/live?" + _query(live),
        kind="" if live is None else live.page,
        person=person,
        form=form,
        notice=notice,
        nav=NAV if person else (),
        version=version(),
        cordee=cordee.__version__,
    )
    return HTMLResponse(html, status_code=status, headers=HEADERS)


def _query(wanted: Wanted) -> str:
    return urlencode({name: value for name, value in wanted._asdict().items() if value not in (None, "")})


_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class PageRoute(APIRoute):
    """A route whose errors are pages; who is not logged in is sent to the login."""

    def get_route_handler(self) -> _Handler:
        """Return the handler."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            found = await handled(request)
            if request.url.scheme == "https" and request.url.port in (None, _HTTPS_PORT):
                found.headers["Strict-Transport-Security"] = HSTS
            return found

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except TokenError as error:
                if request.method == "GET" and request.url.path not in ("/live", "/login"):
                    to = request.url.path + (f"?{request.url.query}" if request.url.query else "")
                    return RedirectResponse(f"/login?next={quote(to, safe='')}", status_code=303, headers=HEADERS)
                return _error_page(error, 401)
            except RequestValidationError:
                return _error_page(InputError("the address has a part that cannot be read"), 422)
            except CordeeError as error:
                return _error_page(error, _status(error))

        return answer


def _status(error: CordeeError) -> int:
    kinds = ((NotFoundError, 404), (ForbiddenError, 403), (InputError, 422), (errors.AdmissionError, 409))
    return next((code for cls, code in kinds if isinstance(error, cls)), 503)


def _error_page(error: CordeeError, status: int) -> HTMLResponse:
    parts = {"error": part("error", error.message, error.hint or "", template="web/login.html.j2")}
    return framed(HTTPStatus(status).phrase, parts, status=status)
