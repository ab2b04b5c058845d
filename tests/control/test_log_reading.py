"""Readers of logs: whole lines, the last ones, and a bounded memory however large a log is."""

import asyncio
import tracemalloc
from pathlib import Path

import pytest

from cordee.control.logs import READ_BYTES, follow, lines
from cordee.units import MiB


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "node1" / "logs" / "rank0.log"
    path.parent.mkdir(parents=True)
    return path


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("tail", [0, 1, 2, 7, 8, 10**15, None])
def test_the_last_lines_of_a_log(log: Path, end: str, tail: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cordee.control.logs.READ_BYTES", 16)
    written = [f"line {number}" for number in range(8)]
    log.write_text("\n".join(written) + end)
    found = "".join(lines([log], tail)).splitlines()
    assert found == (written if tail is None else written[len(written) - min(tail, 8) :])


def test_the_lines_of_several_ranks_are_labelled(log: Path) -> None:
    other = log.with_name("rank1.log")
    log.write_text("a\n\nb\n")
    other.write_text("c")
    assert "".join(lines([log, other])) == "[rank0] a\n[rank0] \n[rank0] b\n[rank1] c\n"


@pytest.mark.parametrize("follows", [False, True])
def test_a_reader_of_a_huge_log_holds_little_of_it(log: Path, follows: bool) -> None:
    with log.open("wb") as file:
        file.truncate(128 * MiB)  # one line, without an end

    async def first() -> str:
        followed = follow(lambda _: [log], lambda: (1, False, False), None, False)
        return await anext(followed) + await anext(followed)

    tracemalloc.start()
    try:
        if follows:
            assert len(asyncio.run(first())) == 2 * (READ_BYTES + 1)
        else:
            assert len(next(lines([log], 10**15))) == READ_BYTES + 1
        assert tracemalloc.get_traced_memory()[1] < 16 * MiB
    finally:
        tracemalloc.stop()


def test_a_follower_waits_for_the_end_of_a_line_and_gives_the_rest_at_the_end(log: Path) -> None:
    states = iter([(1, False, False), (1, False, False), (1, True, True)])
    texts = iter(["one\ntw", "one\ntwo\nthr", "one\ntwo\nthree"])

    def progress() -> tuple[int, bool, bool]:
        log.write_text(next(texts))
        return next(states)

    async def read() -> list[str]:
        return [part async for part in follow(lambda _: [log], progress, None, False)]

    assert asyncio.run(read()) == ["one\n", "two\n", "three\n"]
