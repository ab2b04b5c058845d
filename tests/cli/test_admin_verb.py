"""`cordee admin`: the lines that it prints, and its exit codes."""

import json
import sqlite3
from pathlib import Path

import pytest
from verbs import run

from cordee.control.store.sessions import SessionRows
from cordee.control.store.sql import SqlStore
from cordee.events import ServerUp


def test_a_home_is_backed_up_checked_and_restored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home, new, file = tmp_path / "home", tmp_path / "new", str(tmp_path / "a.tar.gz")
    home.mkdir()
    store = SqlStore(f"sqlite:///{home}/cordee.db")
    store.commit([ServerUp(at_us=number) for number in range(3)])
    store.close()
    (home / "token").write_text("secret")
    code, out, _ = run(capsys, "admin", "backup", file, "--home", str(home))
    assert code == 0 and out.startswith(f"{file}: 3 events, 1 file, ")
    assert run(capsys, "admin", "check", file) == (0, "3 events: no fault found\n", "")
    code, out, _ = run(capsys, "admin", "restore", file, "--home", str(new))
    assert (code, out) == (0, f"{new}: 3 events, 1 file; start it: cordee up --home {new}\n")
    code, _, err = run(capsys, "admin", "restore", file, "--home", str(new))
    assert code == 34 and "is not empty: it holds 2 files, such as cordee.db\nhint: " in err
    connection = sqlite3.connect(new / "cordee.db")
    connection.execute("delete from log where number = 2")
    connection.commit()
    connection.close()
    code, out, _ = run(capsys, "admin", "check", "--home", str(new), "--json")
    fault = "the log's last number is 3, and it can be read up to 1"
    assert (code, json.loads(out)) == (1, {"number": 3, "faults": [fault]})
    code, out, _ = run(capsys, "admin", "check", "--home", str(new))
    assert code == 1 and out.startswith(fault + "\nhint: ")


def test_all_sessions_of_a_person_are_ended_and_that_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = SqlStore(f"sqlite:///{tmp_path}/cordee.db")
    for key, name in (("a", "ada"), ("b", "ada"), ("c", "bob")):
        SessionRows(store).add(key, name, "token", [], now_us=1, over_us=0)
    assert run(capsys, "admin", "logout", "ada", "--home", str(tmp_path)) == (0, "2 sessions of ada ended\n", "")
    assert SessionRows(store).get("a") is None and SessionRows(store).get("c") is not None
    [record] = store.audit.records()
    assert (record.operation, record.object) == ("admin logout", "ada")
    store.close()
