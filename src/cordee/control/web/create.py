"""The pages put into the application."""

from fastapi import FastAPI

from cordee.control.members import token_id
from cordee.control.roles import Bearer
from cordee.control.web import actions, lab, routes
from cordee.control.web.pages import Pages
from cordee.control.web.sessions import BrowserSession, Sessions


def add_pages(app: FastAPI) -> None:
    """Serve the pages beside the API, over the operations that the application has."""
    operations = app.state.operations
    app.include_router(routes.tickets_router)
    app.include_router(routes.router)
    app.include_router(lab.router)
    app.include_router(actions.router)
    if operations is None:  # only the API's description is wanted
        return

    def bearer(session: BrowserSession) -> Bearer | None:
        owners = operations.owners.items()
        return next(
            (each for token, each in owners if each.name == session.name and token_id(token) == session.by), None
        )

    secret = next(iter(operations.owners))  # the home's token comes first
    app.state.sessions = Sessions(secret, operations.clock, bearer)
    app.state.pages = Pages(operations, app.state.services, app.state.sweeps, app.state.artifacts)
