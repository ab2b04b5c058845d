"""Notifications: their messages, the file of destinations, and delivery over real sockets by a real server."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from email import message_from_string, policy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.answers.jobs import AttemptView, FailureView, JobDetailView
from cordee.cli.main import main
from cordee.client import Client
from cordee.control.notify import notifier as notifier_module
from cordee.control.notify.destinations import Destinations, Quiet, read_destinations
from cordee.control.notify.messages import TEXT_CHARS_MAX, message_of
from cordee.control.notify.notifier import Jobs, Notifier
from cordee.control.spawn import is_owned, start_server
from cordee.control.store.sql import SqlStore
from cordee.errors import InputError, SpecError
from cordee.events import (
    AttemptEnded,
    Behind,
    Event,
    JobEnded,
    NoticeGiven,
    NoticeReason,
    Outcome,
    RankBehind,
    RanksStarted,
)
from cordee.workload.notify import Notify

WAIT_S = 60.0
NOON = datetime(2026, 3, 4, 12, 0)
NOON_US = round(NOON.timestamp() * 1e6)


def until(holds: Callable[[], object], what: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


def attempt(epoch: int = 1, tail: tuple[str, ...] = (), **leases: list[int]) -> AttemptView:
    failure = FailureView(rank=3, exit_code=1, signal=None, tail=list(tail)) if tail else None
    return AttemptView(
        epoch=epoch,
        state="running",
        leases=leases or {"n1": [0, 1]},
        placed_us=0,
        notice_reason=None,
        ended_us=None,
        outcome=None,
        why="",
        failure=failure,
    )


def job(*attempts: AttemptView, notify: dict[str, object] | None = None, **more: object) -> JobDetailView:
    values = {
        "job_id": "gpt-abcdef",
        "name": "gpt",
        "owner": "ada",
        "queue": "default",
        "tier": "standard",
        "gpus": 2,
        "gpu_name": None,
        "state": "running",
        "why": "",
        "epoch": len(attempts),
        "step": None,
        "checkpoint_step": None,
        "submitted_us": NOON_US,
        "ended_us": None,
        "attempts": list(attempts),
        "spec": {} if notify is None else {"notify": notify},
        "estimate": None,
        "measured": [],
        "estimate_missed": [],
    }
    return JobDetailView.model_validate(values | more)


OF = {"at_us": NOON_US + 90_000_000, "job_id": "gpt-abcdef"}


@pytest.mark.parametrize(
    ("event", "about", "kind", "text"),
    [
        (
            RanksStarted(**OF, epoch=1, node="n1"),
            job(attempt(n1=[0, 1], n2=[0])),
            "start",
            "starts on 3 GPUs of 2 nodes, 1m30s after its submission",
        ),
        (
            RanksStarted(**OF, epoch=2, node="n1"),
            job(attempt(1), attempt(2)),
            "start",
            "starts again on 2 GPUs of n1, attempt 2",
        ),
        (
            NoticeGiven(**OF, epoch=1, reason=NoticeReason.PREEMPT, deadline_us=1, for_job="release-abcdef"),
            job(attempt(), checkpoint_step=40),
            "preemption",
            "has notice to leave: release-abcdef takes its GPUs; step 40 is saved, and it is queued again",
        ),
        (
            RankBehind(**OF, epoch=1, rank=1, how=Behind.STUCK, step=7, since_us=NOON_US, where="train.py:79"),
            job(attempt()),
            "hang",
            "hangs: rank 1 has made no progress for 1m30s in step 7, at train.py:79",
        ),
        (
            JobEnded(**OF, state="done", why=""),
            job(attempt(), step=400),
            "end",
            "is done, 1m30s after its submission, at step 400, $41.20",
        ),
        (
            JobEnded(**OF, state="failed", why="rank 3 exited with 1"),
            job(attempt(tail=("a", "b", "c", "d", "e", "ValueError: x < y"))),
            "failure",
            "failed after 1m30s, $41.20: rank 3 exited with 1\nb\nc\nd\ne\nValueError: x < y",
        ),
        (
            AttemptEnded(**OF, epoch=1, outcome=Outcome.FAILED, why="rank 3 exited with 1"),
            job(attempt(tail=("boom",))),
            "failure",
            "failed in attempt 1, and starts again: rank 3 exited with 1\nboom",
        ),
    ],
)
def test_the_message_of_an_event(event: Event, about: JobDetailView, kind: str, text: str) -> None:
    message = message_of(7, event, about, 41_200_000)
    assert message is not None
    assert (message.id, message.kind, message.text) == ("7", kind, f"gpt-abcdef {text}")


def test_no_message() -> None:
    gang = job(attempt(n1=[0], n2=[0]), ended_us=1)
    silent: list[Event] = [
        RanksStarted(**OF, epoch=1, node="n2"),  # the message of n1 is for the gang
        NoticeGiven(**OF, epoch=1, reason=NoticeReason.STOP, deadline_us=1),
        RankBehind(**OF, epoch=1, rank=1, how=Behind.SLOW, step=7, since_us=1),
        AttemptEnded(**OF, epoch=1, outcome=Outcome.FAILED, why="x"),  # the job's own end says it
        AttemptEnded(**OF, epoch=1, outcome=Outcome.CHECKPOINTED, why="x"),
    ]
    assert [message_of(1, event, gang, 0) for event in silent] == [None] * len(silent)


def test_a_text_is_bounded() -> None:
    message = message_of(1, JobEnded(**OF, state="failed", why="x" * 100_000), job(), 0)
    assert message is not None and len(message.text) == TEXT_CHARS_MAX


# -- the file --------------------------------------------------------------------------------------------


def write(home: Path, text: str, mode: int = 0o600) -> Path:
    path = home / "notify.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[ops", "cannot be read"),
        ("ops = 1", "[ops]: it is not a table"),
        ('[ops]\nslak = "https://x"', "[ops]: slak: Extra inputs are not permitted"),
        ("[ops]", "[ops]: give one of webhook, slack and email"),
        ('[ops]\nslack = "https://x"\nwebhook = "https://x"', "give one of webhook, slack and email"),
        ('[ops]\nslack = "file:///etc/passwd"', "[ops]: slack: 'file:///etc/passwd' is not an http or https URL"),
        ('[me]\nemail = "a@b.c"', "email needs smtp"),
        ('[me]\nemail = "a@b.c"\nsmtp = "mail"', "[me]: smtp: 'mail' is not smtp://HOST:PORT"),
        ('[ops]\nslack = "https://x"\nquiet = "at night"', "[ops]: quiet: 'at night' are no hours: write 22:00-07:00"),
        ('[default]\nto = ["nobody"]', "[default]: the server has no destination 'nobody' of notifications"),
        ('[default]\non = ["fail"]', "[default]: on.0: Input should be 'start', 'end', 'failure'"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError) as error:
        read_destinations(tmp_path)
    assert message in error.value.message and str(path) in error.value.message


def test_the_file_is_its_owners(tmp_path: Path) -> None:
    path = write(tmp_path, "", 0o644)
    with pytest.raises(InputError, match="open to others") as error:
        read_destinations(tmp_path)
    assert error.value.hint == f"chmod 600 {path}"
    path.unlink()
    assert read_destinations(tmp_path) == Destinations()


def test_a_job_says_where_and_what_else_the_default_holds(tmp_path: Path) -> None:
    write(
        tmp_path, '[default]\nto = ["ops"]\non = ["failure"]\n[ops]\nslack = "https://x"\n[me]\nwebhook = "http://y"\n'
    )
    found = read_destinations(tmp_path)
    assert found.wants("ops", "failure", Notify()) and not found.wants("ops", "end", Notify())
    assert found.wants("ops", "start", Notify(on=["start"])) and not found.wants("me", "failure", Notify())
    assert found.wants("me", "failure", Notify(to="me")) and not found.wants("ops", "failure", Notify(to="me"))
    assert not found.wants("ops", "failure", Notify(to=[])), "none at all"
    with pytest.raises(SpecError, match="it has: me, ops"):
        found.check(["obs"])


@given(st.times(), st.times(), st.datetimes(datetime(2026, 1, 2), datetime(2026, 12, 1)))
def test_quiet_hours(begin: datetime, end: datetime, now: datetime) -> None:
    begin, end = begin.replace(second=0, microsecond=0), end.replace(second=0, microsecond=0)
    if begin == end:
        return
    until_ = Quiet.of(f"{begin:%H:%M}-{end:%H:%M}").until(now)
    inside = begin <= now.time() < end if begin < end else now.time() >= begin or now.time() < end
    assert (until_ is not None) == inside
    if until_ is not None:
        assert until_.time() == end and timedelta() < until_ - now <= timedelta(days=1)


# -- delivery --------------------------------------------------------------------------------------------


class Receiver:
    """A web server that keeps what it gets, answers the first requests as told, and hangs where it should."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, str]]] = []
        self.failures = 0
        self.released = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/hangs":
                    receiver.released.wait(WAIT_S)
                    return
                status = 500 if receiver.failures else 200
                receiver.failures = max(0, receiver.failures - 1)
                if status == 200:
                    receiver.got.append((self.path, body))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def texts(self, path: str) -> list[str]:
        return [body["text"] for each, body in self.got if each == path]

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


class MailServer:
    """As much of SMTP as one mail needs."""

    def __init__(self) -> None:
        self.mails: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"smtp://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, connection.makefile("rw", newline="\r\n") as file:
                answers = {"DATA": "354 go on", "QUIT": "221 bye"}
                print("220 here", file=file, flush=True)
                while line := file.readline():
                    word = line.split()[0].upper()
                    print(answers.get(word, "250 ok"), file=file, flush=True)
                    if word == "DATA":
                        lines = iter(file.readline, ".\r\n")
                        self.mails.append("".join(lines))
                        print("250 taken", file=file, flush=True)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture
def mail() -> Iterator[MailServer]:
    mail = MailServer()
    yield mail
    mail.close()


class Scene:
    """A notifier over a real database, whose jobs and clock the test says."""

    def __init__(self, home: Path) -> None:
        self.store = SqlStore(f"sqlite:///{home / 'cordee.db'}")
        self.now, self.jobs = NOON, {"gpt-abcdef": job(attempt())}
        self.costs: dict[str, int] = {}
        self.limits: dict[str, int] = {}
        self.home, self._count = home, 0
        self.append(RanksStarted(**OF, epoch=1, node="n1"))
        self.begin()

    def begin(self) -> None:
        jobs = Jobs(lambda: self._count, self.jobs.__getitem__, lambda: self.costs, lambda: self.limits)
        self.notifier = Notifier(self.home, self.store, jobs, now=lambda: self.now)
        self.notifier.start()

    def append(self, *events: Event) -> None:
        self.store.commit(list(events))
        self._count += len(events)

    def mark(self, name: str) -> int:
        return self.store.marks([f"notify/{name}"])[f"notify/{name}"]

    def close(self) -> None:
        self.notifier.end()
        self.store.close()


@pytest.fixture
def scene(tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(notifier_module, "_LOOK_S", 0.02)
    monkeypatch.setattr(notifier_module, "_BUDGET_S", 0.02)
    monkeypatch.setattr(notifier_module, "RETRIES_S", (0.01, 0.01))
    write(
        tmp_path,
        f"""
        [default]
        to = ["ops", "night"]
        on = ["start", "end", "failure", "hang", "budget"]
        [ops]
        webhook = "{receiver.url}/ops"
        [night]
        slack = "{receiver.url}/night"
        quiet = "22:00-07:00"
        """,
    )
    scene = Scene(tmp_path)
    until(lambda: scene.mark("ops") == scene.mark("night") == 1)
    yield scene
    scene.close()


def ended(state: str = "done", after_s: float = 0.0) -> JobEnded:
    return JobEnded(at_us=NOON_US + round(after_s * 1e6), job_id="gpt-abcdef", state=state, why="x")


def test_each_destination_has_a_place_of_its_own_and_the_past_is_not_sent(scene: Scene, receiver: Receiver) -> None:
    scene.append(ended())
    until(lambda: len(receiver.got) == 2)
    assert receiver.texts("/ops") == ["gpt-abcdef is done, 0 ms after its submission"] == receiver.texts("/night")
    assert receiver.got[0][1].get("id", "2") == "2"
    until(lambda: scene.mark("ops") == scene.mark("night") == 2)
    scene.notifier.end()
    scene.begin()
    scene.append(ended("failed"))
    until(lambda: len(receiver.got) == 4)
    assert len(receiver.texts("/ops")) == 2, "a server that starts again sends nothing twice"


def test_a_message_is_tried_again_and_given_up_in_the_end(scene: Scene, receiver: Receiver) -> None:
    receiver.failures = 1
    scene.append(ended())
    until(lambda: len(receiver.got) == 2)
    receiver.failures = 6  # three tries at each of two destinations
    scene.append(ended())
    until(lambda: scene.mark("ops") == scene.mark("night") == 3)
    assert len(receiver.got) == 2
    scene.append(ended())
    until(lambda: len(receiver.got) == 4)


def test_quiet_hours_hold_what_is_not_urgent(scene: Scene, receiver: Receiver) -> None:
    scene.now = NOON.replace(hour=23)
    scene.append(ended(after_s=39_600), ended("failed", 39_600), ended(after_s=39_600))
    until(lambda: len(receiver.texts("/ops")) == 3 and receiver.texts("/night"))
    assert ["failed" in text for text in receiver.texts("/night")] == [True]
    until(lambda: scene.notifier._followers["night"]._number == 4)
    assert scene.mark("night") == 1, "what is held is not lost with the server"
    scene.now = NOON + timedelta(hours=19, minutes=1)
    until(lambda: len(receiver.texts("/night")) == 2)
    assert receiver.texts("/night")[1].startswith("2 messages of the quiet hours\n```gpt-abcdef is done")
    until(lambda: scene.mark("night") == 4)


def test_messages_of_a_long_outage_are_left_out(scene: Scene, receiver: Receiver) -> None:
    scene.append(ended(after_s=-30_000), ended("failed"))
    until(lambda: scene.mark("ops") == 3)
    assert ["failed" in text for text in receiver.texts("/ops")] == [True]


def test_a_budget_is_notified_once(scene: Scene, receiver: Receiver) -> None:
    scene.costs["gpt-abcdef"], scene.limits["gpt-abcdef"] = 399_000_000, 500_000_000
    scene.append(ended())
    until(lambda: len(receiver.got) == 2)
    scene.costs["gpt-abcdef"] = 401_000_000
    until(lambda: len(receiver.got) == 4)
    assert "has cost $401.00, 80 % of its limit of $500.00" in receiver.texts("/ops")[1]
    scene.append(ended())
    until(lambda: len(receiver.got) == 6)
    assert sum("limit" in text for text in receiver.texts("/ops")) == 1


def test_a_server_notifies_and_no_job_waits_for_a_receiver(
    tmp_path: Path, receiver: Receiver, mail: MailServer, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    write(
        home,
        f"""
        [hook]
        webhook = "{receiver.url}/hook"
        [hangs]
        webhook = "{receiver.url}/hangs"
        [me]
        email = "ada@example.org"
        smtp = "{mail.url}"
        """,
    )
    start_server(home, slots="1")
    with Client(home) as client:
        fails = {"name": "gpt", "run": ["sh", "-c", "echo the reason >&2; exit 3"], "gpus": 1}
        with pytest.raises(SpecError, match="no destination 'hok' of notifications; it has: hangs, hook, me"):
            client.submit(fails | {"notify": {"to": ["hok"]}})
        until(lambda: all(Marks(home).of(name) for name in ("hook", "hangs", "me")))
        job_id = client.submit(fails | {"notify": {"to": ["hook", "hangs", "me"]}}).job.job_id
        until(lambda: receiver.got and mail.mails)
        _, body = receiver.got[0]
        assert (body["kind"], body["job_id"], body["name"]) == ("failure", job_id, "gpt")
        assert "rank 0 exited with 3" in body["text"] and body["text"].endswith("\nthe reason")
        read = message_from_string(mail.mails[0], policy=policy.default)
        assert read["To"] == "ada@example.org" and read["Subject"].strip().startswith(f"{job_id} failed in attempt 1")
        assert "the reason" in read.get_content()
        began = time.monotonic()
        client.down()
        until(lambda: not is_owned(home))
        assert time.monotonic() - began < notifier_module.RETRIES_S[-1], "the hanging one is not waited for"
    with pytest.raises(SystemExit) as exit_:
        main(["admin", "notify", "hook", "--home", str(home)])
    assert not exit_.value.code and "hook (webhook) took a test message" in capsys.readouterr().out
    assert receiver.got[-1][1]["text"] == f"a test message of the server in {home}"


class Marks:
    """The marks of a server's database, read beside it."""

    def __init__(self, home: Path) -> None:
        self._url = f"sqlite:///{home / 'cordee.db'}"

    def of(self, name: str) -> int:
        store = SqlStore(self._url)
        try:
            return store.marks([f"notify/{name}"])[f"notify/{name}"]
        finally:
            store.close()
