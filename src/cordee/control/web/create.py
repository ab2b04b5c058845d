"""The pages put into the application."""

from fastapi import FastAPI

from cordee.control.members import token_id
from cordee.control.roles import Bearer
from cordee.control.store.sessions import SessionRows
from cordee.control.web import actions, lab, login, routes
from cordee.control.web.oidc_settings import read_oidc
from cordee.control.web.pages import Pages
from cordee.control.web.sessions import BrowserSession, Sessions


def add_pages(app: FastAPI) -> None:
    """Serve the pages beside the API, over the operations that the application has.

    Raises:
        InputError: the home's `oidc.toml` cannot be used.
        MissingExtraError: it needs a library that is not installed.
    """
    operations = app.state.operations
    app.include_router(login.tickets_router)
    app.include_router(login.router)
    app.include_router(routes.router)
    app.include_router(lab.router)
    app.include_router(actions.router)
    if operations is None:  # only the API's description is wanted
        return
    oidc = read_oidc(operations.home)

    def bearer(session: BrowserSession) -> Bearer | None:
        if oidc is not None and session.by == oidc.id:
            grants = oidc.grants(session.groups)
            return Bearer(session.name, grants=grants) if grants else None
        owners = operations.owners.items()
        return next(
            (each for token, each in owners if each.name == session.name and token_id(token) == session.by), None
        )

    secret = next(iter(operations.owners))  # the home's token comes first
    sessions = Sessions(secret, operations.clock, SessionRows(operations.store), bearer)
    app.state.sessions, app.state.oidc = sessions, None
    if oidc is not None:
        from cordee.control.web.oidc import Provider

        app.state.oidc = Provider(oidc, operations.clock, sessions.signature)
    app.state.pages = Pages(operations, app.state.services, app.state.sweeps, app.state.artifacts)
