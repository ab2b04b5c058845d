"""The choice of an engine by `cordee up --on`."""

import hashlib
from importlib.util import find_spec
from pathlib import Path

from cordee.agent.settings import AgentSettings
from cordee.control.engines.local import LocalEngine, NodeConfig
from cordee.control.engines.port import Engine, Host
from cordee.control.engines.ray import RayEngine
from cordee.control.engines.slurm import SlurmEngine, SlurmRequest
from cordee.control.node_tokens import NodeTokens
from cordee.errors import InputError, MissingExtraError

LOCAL, NONE = "local", "none"


def check_engine(on: str) -> None:
    """Check the name of an engine.

    Raises:
        InputError: there is no such engine.
        MissingExtraError: its library is not installed.
    """
    if SlurmRequest.names(on):
        SlurmRequest.parse(on)
        return
    kind, _, address = on.partition(":")
    if on not in (LOCAL, NONE, "ray") and not (kind == "ray" and address.removeprefix("//")):
        raise InputError(
            f"{on!r} names no machines",
            hint="write --on local for this machine, --on none if nodes join by themselves, --on slurm for nodes of a "
            "Slurm cluster, --on ray for the Ray cluster that this machine is a node of, --on ray:HOST:6379 for one of "
            "several, or --on ray://HOST:10001 through Ray Client",
        )
    if kind == "ray" and find_spec("ray") is None:
        raise MissingExtraError("a Ray cluster needs ray: not installed", hint="pip install 'cordee[server,ray]'")
    if on.startswith("ray://") and find_spec("grpc") is None:
        hint = "pip install 'ray[client]', or run the server on a node of the cluster: --on ray"
        raise MissingExtraError("Ray Client needs grpc: not installed", hint=hint)


def engine_of(
    on: str,
    home: Path,
    tokens: NodeTokens,
    host: Host,
    *,
    node: str = LOCAL,
    slots: int | None,
    url: str | None,
    fingerprint: str | None,
) -> Engine:
    """Return the engine of this name, which `check_engine` has passed.

    Args:
        on: `local`, `none`, `ray`, `ray:HOST:PORT` (the head), `ray://HOST:PORT` (Ray Client) or a `SlurmRequest`.
        home: the server's.
        tokens: of the nodes.
        host: the part of the server that engines ask.
        node: the name of this machine's node, for `local`.
        slots: offer this many CPU slots of each node, in place of GPUs.
        url: where other machines reach the server; None: they do not.
        fingerprint: of the server's certificate; None: an authority signed it.

    Raises:
        InputError: the engine's nodes do not reach the server.
    """
    if on == LOCAL:
        return LocalEngine(home, [NodeConfig(name=node, slots=slots)], tokens)
    if on == NONE:
        return LocalEngine(home, [], tokens)
    if url is None:
        raise InputError(
            "the nodes of a cluster do not reach this server, which listens for this machine only",
            hint="give --listen 0.0.0.0:8470",
        )
    if SlurmRequest.names(on):
        return SlurmEngine(SlurmRequest.parse(on), home=home, host=host, slots=slots)
    address = on if on.startswith("ray://") else on.removeprefix("ray").removeprefix(":") or "auto"
    return RayEngine(
        address="auto" if address == "ray://auto" else address,
        home=home,
        # The same for a standby, which has the same secret.
        namespace=f"cordee-{hashlib.sha256(tokens.issue('ray').encode()).hexdigest()[:8]}",
        settings=lambda node: AgentSettings(
            node=node, token=tokens.issue(node), servers=(url,), fingerprint=fingerprint
        ),
        slots=slots,
    )
