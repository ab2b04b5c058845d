"""Which user's process listens at the other end of a connection."""

import os
import socket
from collections.abc import Iterator

import pytest

from cordee import servers
from cordee.servers import is_of_user


@pytest.fixture
def line() -> Iterator[socket.socket]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connected,
    ):
        yield connected


def test_the_user_that_listens_is_found_by_a_question_and_in_the_table(line: socket.socket) -> None:
    own = os.getuid()
    address, port = socket.inet_aton("127.0.0.1"), line.getpeername()[1]
    assert (is_of_user(line, own), is_of_user(line, own + 1)) == (True, False)
    assert servers._listens(address, port) == own
    assert [servers._listens_by_table(address, port, each) for each in (own, own + 1)] == [True, False]


def test_where_nobody_listens_any_more_it_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connected = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    with connected, accepted:
        assert not is_of_user(connected, os.getuid())

        def refused(*_: object) -> None:
            raise PermissionError

        monkeypatch.setattr(servers, "_listens", refused)
        assert not is_of_user(connected, os.getuid()), "the table says the same"
