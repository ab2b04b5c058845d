"""Tokens of nodes: each is good for one node, and for the routes of agents only.

Nodes that joined have drawn tokens (`members.py`); those whose agents the server starts have derived ones.
"""

import hmac
from collections.abc import Callable
from typing import Protocol

from cordee.errors import ForbiddenError, TokenError

NEW_TOKEN = "`cordee nodes token` prints a new one, on a machine that uses the server"


class NodeTokens(Protocol):
    """An issuer of tokens for agents that an engine starts."""

    def issue(self, node: str) -> str:
        """Return a token for a node."""
        ...


class DerivedTokens:
    """Tokens derived from the server's secret: `NODE.HMAC`, so that nothing is stored."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def issue(self, node: str) -> str:
        """Return the token of a node, always the same."""
        return f"{node}.{hmac.digest(self._secret, f'node {node}'.encode(), 'sha256').hex()}"

    def cluster_key(self) -> str:
        """Return the key by which nodes know each other when they give pieces of datasets."""
        return hmac.digest(self._secret, b"neighbours", "sha256").hex()

    def node_of(self, token: str) -> str | None:
        """Return the node whose token this is; None: no node's."""
        node, _, _ = token.rpartition(".")
        return node if hmac.compare_digest(token.encode(), self.issue(node).encode()) else None


def check_node(name: str, token: str, node_of: Callable[[str], str | None]) -> None:
    """Check that a token is this node's.

    Raises:
        ForbiddenError: it is another node's.
        TokenError: it is no node's.
        NodeLeftError: it was that of a node which has left.
    """
    found = node_of(token)
    if found is None:
        hint = f"a node that has left joins again: {NEW_TOKEN}"
        raise TokenError("the token is no node's" if token else "no token was sent", hint=hint)
    if found != name:
        raise ForbiddenError(
            f"this token is node {found}'s, not {name}'s", hint="each node has an agent.json of its own"
        )
