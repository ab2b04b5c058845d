"""Storage by owner, egress saved, and what may be deleted, from the log alone."""

import json

import pytest

from cordee.account.storage import CachedRow, StoredRow, storage_cost
from cordee.cli.cost_storage import print_storage
from cordee.events import (
    ArtifactPushed,
    ArtifactRemoved,
    ArtifactStaged,
    ArtifactTagged,
    CheckpointCommitted,
    HeldSet,
    JobEnded,
)
from cordee.ids import JobId
from world import job, node

DAY = 86_400 * 10**6
GB = 10**9


def submitted(name: str, owner: str, **checkpoint: object):
    event = job(name, 8, owner=owner)
    return type(event)(at_us=0, job=event.job, spec=json.dumps({"checkpoint": checkpoint}))


def commits(name: str, *days: int):
    more = {"stall_us": 0, "upload_us": 0, "epoch": 1, "size_bytes": 10 * GB}
    return [
        CheckpointCommitted(at_us=day * DAY, job_id=JobId(name), step=n, generation=n, **more)
        for n, day in enumerate(days, 1)
    ]


def pushed(name: str, version: int, day: int, **more: object):
    fields = {"digest": f"{name}{version}", "artifact_kind": "model", "size_bytes": 5 * GB, "stored_bytes": GB}
    return ArtifactPushed(at_us=day * DAY, name=name, version=version, by="bea", **(fields | more))


LOG = [
    submitted("kept", "ann", to="s3://b/run", keep="3, every 2, 2d"),
    *commits("kept", 1, 2, 3, 4, 5, 9, 10, 11),  # 2 and 4 for `every`; 6, 7 and 8 are the newest, 9 to 11 the days
    submitted("nowhere", "ann"),
    *commits("nowhere", 1),
    submitted("over", "cid", to="/shared/it's", keep="4"),
    *commits("over", 1, 2, 3, 4, 5),
    JobEnded(at_us=6 * DAY, job_id=JobId("over"), state="done", why=""),
    *(pushed("m", version, 1) for version in range(1, 8)),
    pushed("tuned", 1, 1, base="m1", parents=("m2",)),
    ArtifactTagged(at_us=DAY, name="m", tag="best", version=3, by="bea"),
    ArtifactStaged(at_us=DAY, name="m", version=4, stage="production", by="bea"),
    ArtifactRemoved(at_us=DAY, name="m", version=6, by="bea", why=""),
]


def test_storage_is_counted_by_owner_and_only_what_nothing_needs_is_proposed() -> None:
    found = storage_cost(LOG, 50 * DAY)
    assert found.rows == [
        StoredRow("ann", 50 * GB, 0, 1_150_000),
        StoredRow("cid", 40 * GB, 0, 920_000),
        StoredRow("bea", 0, 7 * GB, 161_000),
    ]
    assert [(each.what, each.size_bytes, each.command) for each in found.deletions] == [
        ("checkpoints of over but the newest 2", 20 * GB, """cordee checkpoint gc '/shared/it'"'"'s/over' --keep 2"""),
        ("m:5", GB, "cordee artifact rm m:5 && cordee artifact gc --yes"),
    ]
    assert storage_cost(LOG, 30 * DAY).deletions == [], "they were used within 30 days"


def test_checkpoints_that_are_gone_already_or_pinned_are_not_proposed() -> None:
    asked: list[str] = []

    def at_most(*generations: int):
        def read(to: str):
            asked.append(to)
            return {each: each < 3 for each in generations}

        return storage_cost(LOG, 50 * DAY, generations=read)

    found = at_most(2, 3, 4, 5)
    first = found.deletions[0]
    assert (first.kind, first.size_bytes, first.checked) == ("checkpoint", 10 * GB, True)
    found = at_most(4, 5)
    assert [each.kind for each in found.deletions] == ["artifact"]
    assert found.rows[1] == StoredRow("cid", 20 * GB, 0, 460_000)
    assert asked == ["/shared/it's/over"] * 2, "checkpoints that nobody would remove are not read"
    assert not storage_cost(LOG, 50 * DAY).deletions[0].checked


def test_egress_is_saved_by_what_prefetches_have_found() -> None:
    def held(url: str, found_gb: int, held_gb: int = 2):
        sizes = {"held_bytes": held_gb * GB, "size_bytes": 2 * GB, "fetched_bytes": 2 * GB}
        return HeldSet(url=url, found_bytes=found_gb * GB, given_bytes=GB, **sizes)

    log = [
        node("n1", data=(held("s3://b/set", 4), held("/shared/set", 9))),
        node("n2", data=(held("s3://b/set", 100),)),
        node("n2", at_us=1, data=(held("s3://b/set", 6, held_gb=0),)),
    ]
    found = storage_cost(log, 1, micro_usd_per_gb_egress=20_000)
    assert found.cached == [
        CachedRow("s3://b/set", 1, 2 * GB, 10 * GB, 2 * GB, 4 * GB, 240_000),
        CachedRow("/shared/set", 1, 2 * GB, 9 * GB, GB, 2 * GB, 0),
    ]


@pytest.mark.parametrize("columns", [80, 120])
def test_the_tables_fit(columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    held = HeldSet(url="s3://a-bucket/a/dataset/of/a/long/name", held_bytes=10**13, size_bytes=10**13)
    print_storage(storage_cost([*LOG, node("n1", data=(held,))], 50 * DAY))
    said = capsys.readouterr().out
    tables = [line for line in said.splitlines() if "GB" in line and "cordee" not in line]
    assert all(len(line) <= columns for line in tables), said
    assert "a month:" in said and "$1.15" in said and "cordee artifact rm m:5" in said
