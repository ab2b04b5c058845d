"""The list of artifacts: a column for each fact, in the order of its head."""

from datetime import UTC, datetime
from io import StringIO

from rich.console import Console

from cordee.answers.artifacts import VersionView
from cordee.cli.artifact_text import print_list


def version(ref: str, *, queue: str, tags: tuple[str, ...] = (), job_id: str | None = None) -> VersionView:
    name, _, number = ref.partition(":v")
    facts = {"digest": "ab" * 32, "kind": "model", "size_bytes": 2 * 10**9, "stored_bytes": 10**9, "by": "ada"}
    others = {"stage": "", "base": "", "note": "", "key": "", "signed": False}
    pushed_us = round(datetime.now(UTC).timestamp() * 1e6)
    return VersionView.model_validate(
        {"ref": ref, "name": name, "version": int(number), "queue": queue, "tags": list(tags), "job_id": job_id}
        | {"pushed_us": pushed_us, **facts, **others}
    )


def printed(*found: VersionView) -> list[str]:
    console = Console(file=StringIO(), width=120)
    print_list(console, found)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def test_the_queue_of_a_version_stands_below_its_head() -> None:
    head, first, second = printed(
        version("llama:v1", queue="research"), version("llama:v2", queue="product", tags=("best",), job_id="ft-a")
    )
    at = head.index("QUEUE")
    assert [line[at:].split()[0] for line in (first, second)] == ["research", "product"]
    assert second.split()[-2:] == ["best", "ft-a"] and head.split()[-2:] == ["TAGS", "JOB"]


def test_columns_that_all_versions_leave_empty_are_left_out() -> None:
    head, line = printed(version("llama:v1", queue="research"))
    assert head.split()[-1] == "QUEUE" and line.split()[-1] == "research"
