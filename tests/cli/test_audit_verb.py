"""`cordee audit`: what it prints, what it finds in a database and in a file, and its exit codes."""

import json
import sqlite3
from pathlib import Path

import pytest
from verbs import run

from cordee.control.acts import Act
from cordee.control.store.audit import DONE, REFUSED
from cordee.control.store.sql import SqlStore

S = 1_000_000


@pytest.fixture
def home(tmp_path: Path) -> Path:
    store = SqlStore(f"sqlite:///{tmp_path}/cordee.db")
    job = {"object": "gpt-abcdef", "queue": "research"}
    submitted = Act(1_795_392_000 * S, "10.0.0.7", "cordee/1", named="POST /v1/jobs", who="ada", **job)
    stopped = Act(1_795_392_060 * S, "10.0.0.8", named="POST /v1/jobs/{ref}/stop", who="bob", **job)
    store.audit.add([(submitted, DONE, 1), (stopped, REFUSED, 12)])
    store.close()
    return tmp_path


def test_records_are_listed_and_filtered(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "audit", "ls", "--offline", "--home", str(home))
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and lines[0][:2] == ["RECORD", "AT"]
    assert lines[1][:6] == ["2", "2026-11-23", "00:01:00", "bob", "10.0.0.8", "POST"]
    assert lines[1][-5:] == ["/v1/jobs/{ref}/stop", "×", "12", "gpt-abcdef", "refused"]
    assert lines[2][0] == "1" and lines[2][-1] == "done"
    code, out, _ = run(capsys, "audit", "ls", "--offline", "--home", str(home), "--user", "ada", "--json")
    assert [(each["number"], each["who"]) for each in json.loads(out)] == [(1, "ada")]
    for more, found in ((("--queue", "product"), 0), (("--until", "2026-11-23 00:01"), 1), (("-n", "1"), 1)):
        _, out, _ = run(capsys, "audit", "ls", "--offline", "--home", str(home), *more, "--json")
        assert len(json.loads(out)) == found, more


def test_a_log_is_verified_copied_and_checked_against_the_copy(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where, copy = ("--offline", "--home", str(home)), str(home / "audit.jsonl")
    code, out, _ = run(capsys, "audit", "verify", *where)
    assert code == 0 and out.startswith("2 records: no fault found\nkeep this elsewhere")
    head = out.split()[-1]
    assert run(capsys, "audit", "export", copy, *where) == (0, f"{copy}: 2 records\n", "")
    assert run(capsys, "audit", "export", copy, *where)[0] == 10, "it is not written over"
    assert run(capsys, "audit", "verify", copy, "--head", head)[0] == 0
    connection = sqlite3.connect(home / "cordee.db")
    connection.execute("delete from audit where number = 2")
    connection.execute("update audit_head set number = 1, hash = (select hash from audit)")
    connection.commit()
    connection.close()
    assert run(capsys, "audit", "verify", *where)[0] == 0, "nothing in the database tells"
    for known in (("--head", head), ("--copy", copy)):
        code, out, _ = run(capsys, "audit", "verify", *where, *known, "--json")
        assert (code, json.loads(out)["fault"]) == (1, "record 2 is missing: the log reached to record 2")
    lines = Path(copy).read_text().replace("ada", "eve")
    Path(copy).write_text(lines)
    code, out, _ = run(capsys, "audit", "verify", copy)
    assert (code, out) == (1, "record 1 was changed: its hash is of other content\n")


def test_wrong_words_are_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "audit", "verify", "--offline", "--home", str(home), "--head", "12")
    assert code == 10 and "'12' is not NUMBER:HASH" in err
    code, _, err = run(capsys, "audit", "verify", str(home / "cordee.db"))
    assert code == 10 and "cannot be read" in err
    code, _, err = run(capsys, "audit", "ls", "--database", "sqlite:///x")
    assert code == 10 and "add --offline" in err
