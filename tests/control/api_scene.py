"""A server on a port of its own, without its control loop."""

import socket
from pathlib import Path
from typing import Any

from stage import Scene

from cordee.client import Client
from cordee.control.api import create_app
from cordee.control.http import WebServer
from cordee.control.listen import Listener
from cordee.control.members import Members, PublicAddress
from cordee.control.operations import Operations
from cordee.control.rehearsals.operations import RehearsalOperations
from cordee.control.roles import ADMIN, Bearer
from cordee.control.secret_store import SecretStore
from cordee.control.services.operations import ServiceOperations
from cordee.control.store.credentials import Credentials
from cordee.control.sweeps.operations import SweepOperations
from cordee.hardware.load import load_catalogue

TOKEN, OTHER = "the-token-of-this-home", "the-token-of-somebody-else"


SPEC: dict[str, Any] = {"run": ["true"], "gpus": 4, "name": "gpt"}


def members_of(scene: Scene, public: PublicAddress | None = None) -> Members:
    """Return the members of a scene, whose operator is ada."""
    return Members(
        control=scene.control, credentials=Credentials(scene.store), clock=scene.time, operator="ada", public=public
    )


class Api:
    """A server without its control loop: a test turns it."""

    def __init__(self, folder: Path, public: Listener | None = None, scene: Scene | None = None) -> None:
        self.scene = scene or Scene(folder)
        self.operations = Operations(
            control=self.scene.control,
            store=self.scene.store,
            clock=self.scene.time,
            home=folder,
            catalogue=load_catalogue(),
            wake=lambda: None,
            owners={TOKEN: Bearer("ada", grants=ADMIN), OTHER: Bearer("bob")},
            members=members_of(self.scene, public and PublicAddress(public.url, public.fingerprint)),
            secrets=SecretStore(folder, Credentials(self.scene.store), TOKEN),
        )
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.services, self.sweeps = ServiceOperations.over(self.operations), SweepOperations.over(self.operations)
        self.rehearsals = RehearsalOperations.over(self.operations)
        app = create_app(self.operations, self.services, self.sweeps, self.rehearsals)
        self.artifacts, self.pages = app.state.artifacts, app.state.pages
        self._http = WebServer(app, listener, public)
        self._http.begin()
        self.client = Client(folder, url=self.url, token=TOKEN)

    def stop(self) -> None:
        self.operations.closing = True
        self._http.end()

    def close(self) -> None:
        self.client.close()
        self.stop()
        self.scene.store.close()
