"""The API without its control loop, and its description, for generated requests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import schemathesis
from api_scene import members_of
from stage import Scene

from cordee.control.api import create_app
from cordee.control.members import PublicAddress
from cordee.control.operations import Operations
from cordee.control.roles import ADMIN, Bearer
from cordee.control.secret_store import SecretStore
from cordee.control.services.operations import ServiceOperations
from cordee.control.store.credentials import Credentials
from cordee.hardware.load import load_catalogue

TOKEN = "the-token-of-this-home"
TOKEN_HEADER = {"Authorization": f"Bearer {TOKEN}"}


@contextmanager
def described_app(folder: Path) -> Iterator[schemathesis.BaseSchema]:
    """Open an application with a log in this folder; an administrator's token is `TOKEN`."""
    scene = Scene(folder)
    operations = Operations(
        control=scene.control,
        store=scene.store,
        clock=scene.time,
        home=folder,
        catalogue=load_catalogue(),
        wake=scene.control.tick,
        owners={TOKEN: Bearer("ada", grants=ADMIN)},
        members=members_of(scene, PublicAddress("https://head:8470", None)),
        secrets=SecretStore(folder, Credentials(scene.store), TOKEN),
    )
    operations.closing = True  # followers are let go at once
    app = create_app(operations)
    app.openapi()  # takes seconds, and schemathesis waits ten
    yield schemathesis.openapi.from_asgi("/openapi.json", app)
    scene.store.close()


OPERATIONS = [
    (method.upper(), path)
    for path, methods in create_app(cast(Operations, None), services=cast(ServiceOperations, object()))
    .openapi()["paths"]
    .items()
    for method in methods
]
