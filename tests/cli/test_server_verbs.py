"""The verbs that talk to a server, against a real one with a real agent: what they print, and what they refuse."""

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import TypeAdapter
from verbs import Verb, code_of

from cordee import errors
from cordee.answers.cost import CostView
from cordee.answers.files import FilesView
from cordee.answers.jobs import JobDetailView, JobView, WhyView
from cordee.answers.nodes import NodeView
from cordee.answers.queues import QueuesView
from cordee.answers.services import CostLinesView, NewKeyView, UsageView
from cordee.answers.submissions import DryRunView, Submitted
from cordee.answers.view import HealthView
from cordee.cli.dry_run import VariantView
from cordee.cli.jobs import files_line
from cordee.client import Client
from cordee.errors import CordeeError
from cordee.events import Event

SCHEMAS = Path(__file__).with_name("schemas.json")

ANSWERS: dict[str, Any] = {
    "up": HealthView,
    "run": Submitted,
    "run --dry-run": DryRunView,
    "run --dry-run, compared": list[VariantView],
    "jobs": list[JobView],
    "jobs JOB": JobDetailView,
    "why": WhyView,
    "nodes": list[NodeView],
    "queues": QueuesView,
    "cost": CostView,
    "cost --by tenant": UsageView,
    "cost --usage": CostLinesView,
    "serve keys create": NewKeyView,
    "stop": JobView,
    "down": HealthView,
}


def finished(verb: Verb, home: Path, *words: str) -> str:
    """Run a job to its end; its id."""
    job_id = verb("run", "--gpus", "2", *words).split()[0]
    with Client(home) as client:
        list(client.logs(job_id, follow=True))
    return job_id


def test_a_job_from_flags_runs_and_its_lines_are_followed(
    verb: Verb, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job_id = finished(verb, home, "--name", "hello", "--env", "WHO=ada", "--", "sh", "-c", "echo $WHO $RANK; pwd")
    lines = verb("logs", job_id).splitlines()
    assert {"[rank0] ada 0", "[rank1] ada 1", f"[rank0] {tmp_path}"} <= set(lines)
    assert "ada 1" in verb("logs", job_id, "--rank", "1")
    assert verb("logs", job_id, "--rank", "1", "--tail", "1").strip() == str(tmp_path)
    assert re.search(rf"{job_id} +done +standard +2 +1 ", verb("jobs"))
    assert "finished" in verb("jobs", job_id)
    assert f"{job_id} finished" in verb("why", "hello")
    assert re.search(rf"{job_id} .*GPU-s.*\$", verb("cost"))
    assert re.search(rf"{job_id}\.1 ", verb("cost", "--by", "epoch"))
    verb("cost", "--trace", "spent.json")
    assert '"name":"attempt 1, 2 GPUs"' in (tmp_path / "spent.json").read_text()


def test_a_job_finds_what_its_shell_finds(verb: Verb, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/this/shell")
    job_id = finished(verb, home, "--", "sh", "-c", "echo $PYTHONPATH $PATH")
    assert f"[rank0] /of/this/shell {os.environ['PATH']}" in verb("logs", job_id)
    for name, value in {"HF_HOME": "/data/hf", "HF_TOKEN": "hf_x", "TERM": "vt100", "OMP_NUM_THREADS": "97"}.items():
        monkeypatch.setenv(name, value)
    job_id = finished(verb, home, "--", "sh", "-c", "echo of=$HF_HOME/$HF_TOKEN/$WANDB_PROJECT/$OMP_NUM_THREADS")
    assert "[rank0] of=/data/hf///" in verb("logs", job_id) and "///97" not in verb("logs", job_id)
    job_id = finished(verb, home, "--env", "PYTHONPATH=/own", "--", "sh", "-c", "echo $PYTHONPATH")
    assert "[rank0] /own" in verb("logs", job_id)


def test_a_job_from_a_file(verb: Verb, home: Path, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: filed\nrun: 'true'\ngpus: 1\nqueue: night\n")
    assert verb("run", str(file)).startswith("filed-")
    assert json.loads(verb("jobs", "filed", "--json"))["queue"] == "night"


def test_follow_leaves_with_the_jobs_own_fate(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("run", "--gpus", "1", "--follow", "--home", str(home), "--")
    assert code_of(*words, "sh", "-c", "echo well") == 0
    assert "well" in capsys.readouterr().out
    assert code_of(*words, "sh", "-c", "echo woe >&2; exit 3") == 1
    said = capsys.readouterr()
    assert said.out.count("woe") == 3, "it was tried three times"
    assert "failed: 3 attempts in a row without a checkpoint" in said.err
    assert "rank 0 failed first (exit code 3):" in said.err
    job_id = re.search(r"(\S+) failed: ", said.err)
    assert job_id is not None and code_of("why", job_id[1], "--home", str(home)) == 0
    shown = capsys.readouterr().out
    assert "rank 0 failed first (exit code 3):\n" in shown and "\n  woe\n" in shown, "why says why"


def test_stop(verb: Verb, home: Path) -> None:
    job_id = verb("run", "--gpus", "1", "--name", "long", "--", "sleep", "600").split()[0]
    assert "stopped" in verb("stop", job_id, "--now", "--wait")
    assert "stopped" in verb("stop", job_id), "a second time changes nothing"


def test_stop_waits_for_events_after_its_request(verb: Verb, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    events = Client.events

    def watched(self: Client, after: int = 0, *, follow: bool = False) -> Iterator[tuple[int, Event]]:
        asked.append(after)
        return events(self, after, follow=follow)

    monkeypatch.setattr(Client, "events", watched)
    job_id = verb("run", "--gpus", "1", "--", "sleep", "600").split()[0]
    with Client(home) as client:
        number = client.health().log_number
    assert f"{job_id} was stopped" in verb("stop", job_id, "--now", "--wait")
    assert asked and asked[0] >= number


@pytest.mark.parametrize("words", [("jobs",), ("why", "ill"), ("nodes",)])
def test_verbs_report_the_problem_of_the_server(
    verb: Verb, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    if words == ("why", "ill"):
        finished(verb, home, "--name", "ill", "--", "true")
    health = Client.health
    monkeypatch.setattr(Client, "health", lambda self: health(self).model_copy(update={"problem": "the disk is full"}))
    assert code_of(*words, "--home", str(home)) == 0
    said = capsys.readouterr()
    assert "the disk is full" in said.err and "the disk is full" not in said.out


def test_a_dry_run_says_what_would_follow_and_submits_nothing(
    verb: Verb, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: dry\nrun: 'true'\ngpus: 2\nestimate: 30m\nlimit: {time: 2h}\n")
    with Client(home) as client:
        before = client.jobs()
        told = verb("run", "--dry-run", str(file))
        assert re.search(r"starts now +yes", told) and re.search(r"on +local:0-1 \(1 node\)", told)
        assert re.search(r"ends +in 30m *\n", told) and re.search(r"preempts +no job", told)
        assert re.search(r"costs +\$5.98 an hour, \$2.99 to its estimate, \$11.96 to its limit", told)
        assert "nothing was submitted; the forecast is from 20 simulations; " in told
        told = verb("run", "--dry-run", str(file), "--gpus", "1,2,3", "--tier", "standard,production")
        assert len(re.findall(r" now +30m ", told)) == 4
        assert "3 standard, 3 production: the job needs 3 GPUs at once, but the whole cluster has 2" in told
        assert client.jobs() == before
    many = ",".join(map(str, range(1, 30)))
    assert code_of("run", "--dry-run", "--gpus", many, "--home", str(home), "--", "true") == errors.InputError.exit_code
    assert "29 variants are too many" in capsys.readouterr().err


def test_why_tells_when_a_job_that_waits_will_start(verb: Verb, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = verb("run", "--gpus", "2", "--name", "holds", "--", "sleep", "600")
    assert "2 GPUs, starts 2 processes, standard, queue default, $" in said
    holds = said.split()[0]
    with Client(home) as client:  # the next cycle places it, which a busy machine may not have turned yet
        deadline = time.monotonic() + 120
        while client.job(holds).state != "running":
            assert time.monotonic() < deadline, verb("why", holds)
            time.sleep(0.05)
    assert code_of("run", "--gpus", "2", "--name", "waits", "--home", str(home), "--", "true") == 0
    printed = capsys.readouterr()
    waits = printed.out.split()[0]
    try:
        # How the times are spread depends on how long the jobs before took, and so on how busy the machine is.
        assert re.search(rf"note: .+; starts .+ \(`cordee why {waits}`\)", printed.err), printed.err
        said = verb("why", waits)
        assert re.search(r"\nstarts .+, ends .+ \(20 simulations; ", said), said
        said = verb("why", holds)
        assert re.search(r"\nends .+ \(20 simulations; ", said), said
    finally:
        for job_id in (waits, holds):
            verb("stop", job_id, "--now", "--wait")


def test_nodes_and_their_price(verb: Verb) -> None:
    out = verb("nodes")
    assert re.search(r"local +up +2 x slot +2 +– +[\d.]+ CPU, [\d.]+ GB +\$2.99/GPU-h", out)
    assert "price: each CPU slot accounted as one H100 on-demand: " in out


def test_queues_are_set_from_a_file_and_shown_as_a_tree(
    verb: Verb, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "queues.yaml"
    file.write_text("queues: {team: {weight: 2, day_cost: $9}, llm: {parent: team, quota: 1, limit: 2}}")
    told = verb("queues", "set", str(file))
    assert re.search(r"team +1 +– +– +1 +2 +– +– +–\n  llm +1 +– +– +1 +1 +– +– +–\n", told)
    assert "0 of 2 GPUs are held; quotas sum to 1" in told
    assert "team: $0 of $9.00 used in the last 24 h" in told and "llm: holds 0 of at most 2 GPUs" in told
    assert code_of("run", "--gpus", "1", "--queue", "lmm", "--home", str(home), "--", "true") == 12
    assert "did you mean llm?" in capsys.readouterr().err
    job_id = finished(verb, home, "--queue", "llm", "--", "true")
    assert json.loads(verb("jobs", job_id, "--json"))["queue"] == "llm"
    file.write_text("queues: {}")
    assert "team" not in verb("queues", "set", str(file))
    assert json.loads(verb("queues", "--json"))["queues"][0]["name"] == "default"


def test_a_secret_reaches_the_rank_and_nobody_else(
    verb: Verb, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    value = "-".join(("s3cret", "value", "of", "this", "test"))  # jobs of other tests captured this file
    monkeypatch.setenv("MY_TOKEN", value)
    shell = f"echo told $MY_TOKEN; echo $MY_TOKEN > {tmp_path}/seen"
    job_id = finished(verb, home, "--name", "hush", "--secret", "MY_TOKEN", "--", "sh", "-c", shell)
    assert (tmp_path / "seen").read_text().strip() == value
    said = verb("logs", job_id) + verb("jobs", job_id, "--json") + verb("cost", "--json")
    assert "told" in said
    for path in home.rglob("*"):
        if path.is_file() and path.parent.name != "secrets":
            said += path.read_bytes().decode(errors="replace")
    assert value not in said


# -- JSON ----------------------------------------------------------------------------------------------------


def test_the_schemas_are_held() -> None:
    """Programs rely on this JSON: change it on purpose only, with `REWRITE=1`, and name it in the changelog."""
    now = {name: TypeAdapter(shape).json_schema() for name, shape in ANSWERS.items()}
    if os.environ.get("REWRITE"):
        SCHEMAS.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
    assert now == json.loads(SCHEMAS.read_text())


@pytest.mark.parametrize(
    ("commit", "changed", "line"),
    [
        (None, 0, "3 files, 5 kB, of no git commit"),
        ("0123456789abcdef", 0, "commit 0123456; 3 files, 5 kB"),
        ("0123456789abcdef", 2, "commit 0123456 + 2 files changed; 3 files, 5 kB"),
    ],
)
def test_the_files_of_a_job_in_words(commit: str | None, changed: int, line: str) -> None:
    seen = FilesView(files=3, size_bytes=5000, commit=commit, changed=changed > 0, files_changed=changed)
    assert files_line(seen) == line


def test_json_of_the_verbs_follows_the_schemas(verb: Verb, tmp_path: Path) -> None:
    schemas = json.loads(SCHEMAS.read_text())
    job_id = json.loads(verb("run", "--gpus", "1", "--json", "--", "sleep", "600"))["job"]["job_id"]
    printed = {
        "jobs": verb("jobs", "--json"),
        "jobs JOB": verb("jobs", job_id, "--json"),
        "why": verb("why", job_id, "--json"),
        "run --dry-run": verb("run", "--dry-run", "--gpus", "2", "--json", "--", "true"),
        "run --dry-run, compared": verb("run", "--dry-run", "--gpus", "1,3", "--json", "--", "true"),
        "nodes": verb("nodes", "--json"),
        "queues": verb("queues", "--json"),
        "cost": verb("cost", "--json"),
        "cost --by tenant": verb("cost", "--by", "tenant", "--json"),
        "cost --usage": verb("cost", "--usage", "--json"),
        "stop": verb("stop", job_id, "--now", "--wait", "--json"),
    }
    for name, text in printed.items():
        jsonschema.validate(json.loads(text), schemas[name])
    logs = [json.loads(line) for line in verb("logs", job_id, "--json").splitlines()]
    assert logs and all(line.keys() == {"line"} for line in logs)


# -- bad input -----------------------------------------------------------------------------------------------

GOOD = {"good.yaml": "run: 'true'\ngpus: 1\n", "train.py": ""}
FILES = {
    "key.yaml": "run: 'true'\ngpus: 1\ncheckpiont: {to: /c}\n",
    "tier.yaml": "run: 'true'\ngpus: 1\ntier: spot\n",
    "broken.yaml": "run: [true\ngpus: 1\n",
    "bare.yaml": "run: 'true'\ngpus: 1\nlimit: {time: 47}\n",
    "large.yaml": "run: 'true'\ngpus: 3\n",
    "wide.yaml": "run: python train.py\ngpus: 2\ntier: preemptible\n",
    "script.yaml": "run: python missing.py\ngpus: 1\n",
    "secret.yaml": "run: 'true'\ngpus: 1\nsecrets: [NOBODY_HAS_THIS]\n",
    "circle.yaml": "queues: {a: {parent: b}, b: {parent: a}}",
    "much.yaml": "queues: {a: {quota: 3}}",
    "quote.yaml": "queues: {a: {qouta: 3}}",
    "model.yaml": "run: 'true'\ngpus: 2xH100\nmodel: {name: llama-3-70b}\n",
}
BAD: list[tuple[tuple[str, ...], type[CordeeError], str]] = [
    (("run", "key.yaml"), errors.SpecError, r"key.yaml:3:1: unknown key 'checkpiont'\nhint: did you mean checkpoint"),
    (("run", "tier.yaml"), errors.SpecError, r"unknown tier 'spot'\nhint: .*capacity: spot"),
    (("run", "broken.yaml"), errors.SpecError, r"broken.yaml:\d+:\d+: not valid YAML"),
    (("run", "bare.yaml"), errors.SpecError, r"bare.yaml:3:9: limit.time: '47' is not a duration"),
    (("run", "nowhere.yaml"), errors.SpecError, "nowhere.yaml cannot be read: No such file"),
    (("run", "large.yaml"), errors.TooLargeError, "the job needs 3 GPUs at once, but the whole cluster has 2"),
    (("run", "wide.yaml"), errors.UnprotectedError, r"unprotected: up to \$5.98 an hour at risk.*--unprotected"),
    (("run", "script.yaml"), errors.ScriptError, "missing.py does not exist"),
    (("run", "secret.yaml"), errors.SpecError, "the secret NOBODY_HAS_THIS is not in the environment"),
    (("run", "model.yaml"), errors.TooLargeError, "the job needs 2 x H100"),
    (("run", "good.yaml", "--tier", "standard"), errors.InputError, "--tier cannot be combined with a job file"),
    (("run", "good.yaml", "--every", "5m"), errors.InputError, "--every cannot be combined with a job file"),
    (("run", "--", "true"), errors.SpecError, "a command needs --gpus"),
    (
        ("run", "--dry-run", "good.yaml", "--every", "5m"),
        errors.InputError,
        "--every cannot be combined with a job file",
    ),
    (("run", "--dry-run", "good.yaml", "--tier", "sport"), errors.SpecError, "tier: Input should be 'production'"),
    (("run", "--dry-run", "large.yaml"), errors.TooLargeError, "the job needs 3 GPUs at once"),
    (("run", "--gpus", "two", "--", "true"), errors.SpecError, "'two' is not a number of GPUs"),
    (("run", "--gpus", "1", "--tier", "sport", "--", "true"), errors.SpecError, "unknown tier 'sport'"),
    (("run", "--gpus", "1", "--every", "5", "--", "true"), errors.SpecError, "'5' is not a duration"),
    (("run", "--gpus", "1", "--env", "X", "--", "true"), errors.SpecError, "--env X is not NAME=VALUE"),
    (("run", "--gpus", "1", "--", "no-such-program"), errors.ScriptError, "'no-such-program' is not an executable"),
    (("stop", "nobody"), errors.NotFoundError, "there is no job 'nobody'"),
    (("why", "nobody"), errors.NotFoundError, "there is no job 'nobody'"),
    (("logs", "nobody"), errors.NotFoundError, "there is no job 'nobody'"),
    (("jobs", "nobody"), errors.NotFoundError, "there is no job 'nobody'"),
    (("cost", "--by", "planet"), errors.InputError, "unknown --by 'planet'"),
    (("queues", "set", "circle.yaml"), errors.QueuesError, "the queues go in a circle: a inside b inside a"),
    (("queues", "set", "much.yaml"), errors.QueuesError, r"3 GPUs are guaranteed \(a 3\), but the cluster has 2"),
    (("queues", "set", "quote.yaml"), errors.SpecError, "quote.yaml:1:14: unknown key 'qouta' in queues.a.*quota"),
    (("queues", "set", "nowhere.yaml"), errors.SpecError, "nowhere.yaml cannot be read: No such file"),
    (("queues", "put", "much.yaml"), errors.InputError, "unknown: queues put much.yaml"),
    (("up",), errors.HomeInUseError, r"a server already runs on .* \(pid \d+\)\nhint: "),
]


@pytest.mark.parametrize(
    ("words", "error", "says"), BAD, ids=lambda value: "-".join(value) if isinstance(value, tuple) else ""
)
def test_bad_input_is_one_clear_error_and_changes_nothing(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    error: type[CordeeError],
    says: str,
) -> None:
    for name, text in (GOOD | FILES).items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    own = words[: words.index("--")] if "--" in words else words
    with Client(home) as client:
        before, secrets = client.jobs(), sorted(home.glob("secrets/*"))
        assert code_of(*own, "--home", str(home), *words[len(own) :]) == error.exit_code
        assert client.jobs() == before
        assert [queue.name for queue in client.queues().queues] == ["default"]
        assert sorted(home.glob("secrets/*")) == secrets
    said = capsys.readouterr()
    assert said.out == ""
    assert re.search(rf"(?s)error: .*{says}", said.err), said.err
    assert said.err.count("error:") == 1
    assert "Traceback" not in said.err


def test_a_wrong_token(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "server.json").write_text((home / "server.json").read_text())
    (other / "token").write_text("wrong\n")
    for words in (("jobs",), ("down",), ("run", "--gpus", "1", "--", "true")):
        own = words[:3] if words[0] == "run" else words
        assert code_of(*own, "--home", str(other), *words[len(own) :]) == errors.TokenError.exit_code
        assert "error: the token is wrong" in capsys.readouterr().err
    (other / "token").unlink()
    assert code_of("jobs", "--home", str(other)) == errors.TokenError.exit_code


# -- how it looks --------------------------------------------------------------------------------------------


def on_terminal(columns: int, *words: str, **env: str) -> str:
    """What a verb prints on a terminal of this width."""
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "cordee", *words]
    with subprocess.Popen(
        argv, env=os.environ | {"COLUMNS": str(columns), "TERM": "xterm"} | env, stdout=theirs
    ) as done:
        os.close(theirs)
        said = b""
        with suppress(OSError):  # how a terminal says that nobody writes to it any more
            while chunk := os.read(ours, 65536):
                said += chunk
        os.close(ours)
    assert done.returncode == 0
    return said.decode()


def test_run_asks_before_an_expensive_job(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    words = ("run", "--gpus", "1", "--home", str(home), "--", "true")
    monkeypatch.setattr("cordee.cli.terminal.may_ask", lambda: True)
    monkeypatch.setattr("cordee.cli.terminal.ask", lambda facts, _: pytest.fail(f"asked: {facts}"))
    assert code_of(*words) == 0
    facts: list[str] = []
    monkeypatch.setattr("cordee.cli.run.ASK_ABOVE_MICRO_USD_PER_HOUR", 2_000_000)
    monkeypatch.setattr("cordee.cli.terminal.ask", lambda said, _: facts.extend(said))
    assert code_of(*words) == 0
    assert facts == ["it costs up to $2.99 an hour", "1 GPU; it starts now"]


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("words", ["jobs", "nodes", "cost"])
def test_tables_stay_inside_the_terminal(home: Path, columns: int, words: str) -> None:
    said = on_terminal(columns, words, "--home", str(home))
    table = re.sub(r"\x1b\[[0-9;]*m", "", said).split("price:")[0].splitlines()
    assert len(table) >= 3
    assert max(map(len, table)) <= columns
    assert "\x1b[3" in said or words != "jobs", "states have a colour"
    if columns == 80:
        assert "\x1b[3" not in on_terminal(columns, words, "--home", str(home), NO_COLOR="1")


@pytest.mark.parametrize("columns", [80, 120])
def test_ids_are_never_cut(verb: Verb, home: Path, columns: int) -> None:
    job_id = finished(verb, home, "--name", "a-name-as-long-as-people-will-make-them", "--", "true")
    said = re.sub(r"\x1b\[[0-9;]*m", "", on_terminal(columns, "jobs", "--home", str(home)))
    assert "…" not in said
    first = [line.strip().split("  ")[0] for line in said.splitlines()]
    assert job_id in "".join(first)


def test_logs_report_that_the_job_goes_on_after_an_interrupt(
    verb: Verb, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> Iterator[str]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Client, "logs", interrupted)
        assert code_of("run", "--gpus", "1", "-f", "--home", str(home), "--", "sleep", "600") == 130
    said = capsys.readouterr()
    job_id = said.out.split()[0]
    assert f"the job continues: cordee logs -f {job_id}" in said.err
    assert '"running"' in verb("jobs", job_id, "--json") or '"queued"' in verb("jobs", job_id, "--json")
    verb("stop", job_id, "--now", "--wait")


def test_piped_tables_have_no_frames_and_cut_nothing(verb: Verb) -> None:
    for words in (("jobs",), ("nodes",), ("cost",)):
        out = verb(*words)
        assert "…" not in out
        assert not re.search("[─│╭]", out)
