"""`cordee nodes` on a real server: a node is cordoned, drained of a job that saves, and put back into use."""

import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import pytest
from pydantic import TypeAdapter
from rich.console import Console

import cordee
from cordee.answers.jobs import JobDetailView
from cordee.answers.nodes import NodeView
from cordee.cli.main import main
from cordee.cli.nodes import detail, node_state, show
from cordee.client import Client
from cordee.control.spawn import is_owned, start_server
from cordee.errors import InputError, NotFoundError
from cordee.view.faults import NodeFault

DEADLINE_S = 60.0

SAVES = """
import os, signal, sys, time
def leave(*_):
    open("saved", "w").write("7")
    sys.exit(75)
signal.signal(signal.SIGTERM, leave)
print("resumed from", open("saved").read() if os.path.exists("saved") else "nothing", flush=True)
while os.path.exists("goes-on"):
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    home = tmp_path_factory.mktemp("server") / "home"
    start_server(home, slots="2")
    with Client(home) as client:
        yield client
        client.down()
    deadline = time.monotonic() + DEADLINE_S
    while is_owned(home) and time.monotonic() < deadline:
        time.sleep(0.05)


def code_of(client: Client, *words: str) -> int:
    try:
        main(["nodes", *words, "--home", str(client.home)])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def until(client: Client, job_id: str, condition: Callable[[JobDetailView], bool]) -> JobDetailView:
    deadline = time.monotonic() + DEADLINE_S
    while not condition(job := client.job(job_id)):
        assert time.monotonic() < deadline, job
        time.sleep(0.05)
    return job


def test_a_job_on_a_drained_node_saves_leaves_and_starts_again(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "goes-on").touch()
    spec = {"name": "gpt", "run": [sys.executable, "-c", SAVES], "gpus": 2, "cwd": str(tmp_path)}
    job_id = client.submit(spec).job.job_id
    lines = client.logs(job_id, follow=True)
    assert any("resumed from nothing" in line for line in lines)
    assert code_of(client, "drain", "local", "--why", "disk errors") == 0
    assert "local: draining, 1 attempt left, by " in capsys.readouterr().out
    job = until(client, job_id, lambda job: job.attempts[-1].ended_us is not None)
    assert (job.state, job.attempts[0].notice_reason, job.attempts[0].outcome) == ("queued", "drain", "checkpointed")
    assert code_of(client) == 0
    assert " drained by " in (out := " ".join(capsys.readouterr().out.split())) and ": disk errors" in out
    assert client.why(job_id).text.endswith("local is cordoned")
    assert code_of(client, "uncordon", "local") == 0
    assert capsys.readouterr().out == "local: up\n"
    assert any("resumed from 7" in line for line in lines)
    (tmp_path / "goes-on").unlink()
    until(client, job_id, lambda job: job.state == "done")


def test_a_cordoned_node_is_shown_and_its_json_follows_the_schema(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert code_of(client, "cordon", "local", "--why", "disk errors", "--json") == 0
        printed = json.loads(capsys.readouterr().out)
        jsonschema.validate(printed, TypeAdapter(NodeView).json_schema())
        assert (printed["cordon_why"], printed["drains"]) == ("disk errors", False)
    assert code_of(client, "--json") == 0
    [listed] = json.loads(capsys.readouterr().out)
    assert listed == printed
    assert code_of(client, "uncordon", "local", "--json") == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            ("cordon", "lokal", "--why", "x"),
            NotFoundError.exit_code,
            "there is no node 'lokal'\nhint: did you mean local? `cordee nodes` lists them",
        ),
        (("cordon",), InputError.exit_code, "cordon needs the name of a node\nhint: `cordee nodes`"),
        (("remove", "local"), InputError.exit_code, "unknown: nodes remove local"),
        (("--why", "x"), 2, "No such option: --why"),
        (("leave", "local"), InputError.exit_code, "local did not join: the server starts its agent itself"),
        (("token",), InputError.exit_code, "no other machine reaches this server: it listens on loopback only"),
        (("cordon", "local"), InputError.exit_code, "cordon needs a reason, which is shown to everybody\nhint: cordee"),
        (("drain", "local", "--why", " "), InputError.exit_code, "drain needs a reason"),
    ],
)
def test_an_order_that_cannot_be_is_refused(
    client: Client, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, said: str
) -> None:
    assert code_of(client, *words) == code
    assert said in capsys.readouterr().err
    assert client.nodes()[0].cordoned_by is None


NODE = NodeView(
    name="n", up=True, epoch=1, gpu_name="H100", gpus=8, used={}, unavailable=[], micro_usd_per_gpu_hour=0,
    price_source="",
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "up"),
        ({"up": False}, "down"),
        ({"cordoned_by": "ann"}, "cordoned by ann"),
        ({"cordoned_by": "ann", "cordon_why": "disk errors"}, "cordoned by ann: disk errors"),
        ({"cordoned_by": "ann", "drains": True}, "drained by ann"),
        ({"cordoned_by": "ann", "up": False}, "down, cordoned by ann"),
        (
            {"cordoned_by": "ann", "drains": True, "used": {0: "a.1", 1: "a.1", 2: "b.1"}},
            "draining, 2 attempts left, by ann",
        ),
    ],
)
def test_the_state_of_a_node_in_words(changes: dict[str, object], state: str) -> None:
    assert node_state(NODE.model_copy(update=changes)) == state


def test_a_name_shows_the_node(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(client, "local") == 0
    out = capsys.readouterr().out
    assert out.startswith("local: up\n  GPUs        2 x slot, 2 free\n  host        ")
    assert "\n  software    cordee " in out and "\n  capacity    on-demand\n" in out
    assert code_of(client, "local", "--json") == 0
    assert json.loads(capsys.readouterr().out)["memory_bytes"] > 0
    assert code_of(client, "lokal") == NotFoundError.exit_code
    assert "there is no node 'lokal'\nhint: did you mean local? " in capsys.readouterr().err


SICK = NODE.model_copy(
    update={
        "name": "gpu-3",
        "used": {0: "gpt.1", 1: "gpt.1"},
        "unavailable": [4, 5, 7],
        "unavailable_why": ["in use", "too hot", "in use"],
        "domain": ["b1", "r7"],
        "island_gpus": 4,
        "cpu_milli": 95_500,
        "memory_bytes": 2 * 10**12,
        "software": ["cordee 0.1.0", "driver 580"],
        "capacity": "spot",
        "price_source": "no price is known",
    }
)


def test_the_detail_says_where_a_node_is_and_what_is_wrong_with_it() -> None:
    assert list(detail(SICK)) == [
        "gpu-3: up",
        "  GPUs        8 x H100, 3 free",
        "  held        0-1 by gpt.1",
        "  unavailable GPUs 4,7 in use; GPU 5 too hot",
        "  place       block b1, rack r7, islands of 4 GPUs",
        "  host        95.5 CPU, 2 TB",
        "  capacity    spot",
        "  price       no price is known",
        "  software    cordee 0.1.0, driver 580",
    ]
    spans = SICK.model_copy(update={"domain": ["b1", "r7", "nvl0"], "island_gpus": 72, "up": False, "down_why": "gone"})
    assert "  place       block b1, rack r7, island nvl0 of 72 GPUs" in (lines := list(detail(spans)))
    assert lines[0] == "gpu-3: down: gone"
    assert "  place       rack r7, islands of 4 GPUs" in list(detail(SICK.model_copy(update={"domain": ["r7"]})))


@pytest.mark.parametrize("name", ["gpu-3", "ip-10-24-133-207.us-west-2.compute.internal"])
def test_the_list_fits_80_columns_with_all_columns(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    screen = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    monkeypatch.setattr("cordee.cli.terminal.stdout", lambda: screen)
    node = {"name": name, "micro_usd_per_gpu_hour": 2_990_000, "gpu_name": "NVIDIA H100 80GB HBM3"}
    show([SICK.model_copy(update=node)])
    lines = screen.file.getvalue().splitlines()
    assert max(map(len, lines[:8])) <= 80
    end = next(line.index("STATE") for line in lines if "STATE" in line)
    first = next(number for number, line in enumerate(lines) if line.startswith(name[:3]))
    assert "".join(line[:end].strip() for line in lines[first : first + 5]).startswith(name), "folded, not cut"
    text = "\n".join(lines)
    assert all(part in text for part in ("b1/r7", "gpt.1 (2),", "95.5 CPU", "$2.99/GPU-h", "others (3)"))
    assert f"{name}: GPUs 4,7 in use; GPU 5 too hot" in " ".join(text.split())


def test_the_list_names_a_node_with_another_version_of_cordee(capsys: pytest.CaptureFixture[str]) -> None:
    other, same = "cordee 0.0.1", f"cordee {cordee.__version__}"
    nodes = [("a", True, other), ("b", True, same), ("c", False, other)]
    show([NODE.model_copy(update={"name": name, "up": up, "software": [it]}) for name, up, it in nodes])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if ", here " in line] == [f"a: {other}, here {cordee.__version__}"], "b is not other"


def test_the_doctor_shows_what_agents_report_and_drains_the_bad(
    client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def doctor(*words: str) -> tuple[int, str]:
        try:
            main(["doctor", *words, "--home", str(client.home)])
        except SystemExit as end:
            return int(end.code or 0), capsys.readouterr().out
        return 0, capsys.readouterr().out

    name = client.nodes()[0].name
    code, out = doctor("--all", "--json")
    assert code == 0 and json.loads(out)["findings"][0]["check"] == f"{name}: agent"
    monkeypatch.setattr("cordee.cli.doctor.faults_of", lambda events: {name: [NodeFault(1, "silent")] * 3})
    code, out = doctor(name, "--drain")
    assert code == 1 and "3 faults, the last: silent" in out
    (node,) = client.nodes()
    assert node.drains and node.cordon_why == "doctor: a lemon 3 faults, the last: silent"
    client.uncordon(name)
    assert doctor("nowhere")[0] == NotFoundError.exit_code
    assert doctor("--drain")[0] == InputError.exit_code
