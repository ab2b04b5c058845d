"""The times of full garbage collections, and the caller's settings, which are restored."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from cordee.control.collector import collected_when_idle


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    """Undo for each test the freeze at the end of collection (tests/conftest.py)."""
    gc.unfreeze()
    yield
    gc.freeze()


class Circle:
    def __init__(self) -> None:
        self.me = self


def test_idle_moments_collect_and_everything_is_as_before_at_the_end() -> None:
    before = gc.get_threshold()
    with collected_when_idle() as idle:
        assert gc.get_threshold() != before
        gone = weakref.ref(Circle())
        idle()
        assert gone() is None
        assert gc.get_freeze_count() > 0
        again = weakref.ref(Circle())
        idle()  # too little is new since
        assert again() is not None
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert again() is None


def test_a_process_that_is_never_idle_freezes_nothing() -> None:
    with collected_when_idle():
        pass
    assert gc.get_freeze_count() == 0


def test_some_idle_moments_also_collect_frozen_objects() -> None:
    with collected_when_idle() as idle:
        circle = Circle()
        gone = weakref.ref(circle)
        idle()
        del circle
        for _ in range(50):
            assert gone() is not None  # frozen with its circle
            for _ in range(5):
                gc.collect(1)  # as if much were new
            idle()
        assert gone() is None
