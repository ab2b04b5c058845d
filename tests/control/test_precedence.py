"""Threads that work for requests give way to what decides."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from starlette.requests import ClientDisconnect

from cordee.control.acts import Act, carried_out
from cordee.control.precedence import TURN_S, Precedence
from cordee.control.questions import Asking
from cordee.control.store.sql import SqlStore
from cordee.control.store.tables import jobs


@contextmanager
def beside(work: Callable[[], object]) -> Iterator[threading.Thread]:
    """Work in another thread, which has ended afterwards."""
    thread = threading.Thread(target=work)
    thread.start()
    yield thread
    thread.join(60)
    assert not thread.is_alive()


def until_one_waits(precedence: Precedence) -> None:
    deadline_s = time.monotonic() + 60
    while not precedence.waiting:
        assert time.monotonic() < deadline_s, "nobody gives way"
        time.sleep(0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    store = SqlStore(f"sqlite:///{tmp_path / 'cordee.db'}", precedence=Precedence(wait_s=60))
    yield store
    store.close()


@pytest.mark.parametrize("how", ["read", "write", "archive", "question"])
def test_a_request_gives_way_until_the_decision_is_made(store: SqlStore, how: str) -> None:
    precedence, done = store.precedence, list[str]()

    def ask() -> None:
        with carried_out(Act(0)):
            work()
        done.append(how)

    def work() -> None:
        if how == "read":
            store.read(sa.select(jobs.c.job_id))
        elif how == "write":
            with store.writing():
                pass
        elif how == "archive":
            store.archive.retired()
        else:
            Asking(precedence).check()

    with precedence:
        thread = threading.Thread(target=ask)
        thread.start()
        until_one_waits(precedence)
        assert done == [] and thread.is_alive()
        assert store.jobs() == [], "the thread that decides does not wait for itself"
    thread.join(60)
    assert done == [how]


def test_a_thread_that_works_for_no_request_does_not_wait(store: SqlStore) -> None:
    """A link's thread may hold the executor's lock, for which the decision would wait."""
    with store.precedence, beside(store.jobs):
        pass
    assert store.precedence.waiting == []


def test_a_request_ends_however_much_there_is_to_decide() -> None:
    precedence = Precedence(wait_s=0.001)
    with precedence, beside(precedence.give_way):
        pass
    precedence.give_way()


def test_a_question_whose_client_left_ends_where_it_gives_way() -> None:
    asking = Asking(Precedence())
    asking.check()
    asking.left = True
    with pytest.raises(ClientDisconnect):
        asking.check()


def test_turns_are_short_while_it_decides() -> None:
    before_s, precedence = sys.getswitchinterval(), Precedence()
    with precedence:
        with precedence:  # a change that consists of changes
            pass
        assert sys.getswitchinterval() < TURN_S
    assert sys.getswitchinterval() == pytest.approx(before_s)
