"""Entering a job: a state that cannot be saved is refused; settings of the checkpoint that win are logged."""

import logging
import os
import pty
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from test_job import environment
from torch.utils.data import DataLoader

import cordee
import forks
from cordee.errors import CheckpointError, InputError, InUseError
from cordee.storage.sealed import seal

WAIT_S = 120


def test_a_plain_data_loader_in_the_state_is_refused_with_what_to_use(tmp_path: Path) -> None:
    loader = DataLoader(range(8))
    with (
        pytest.raises(InputError, match="'data' is a DataLoader") as refused,
        cordee.job({"data": loader}, to=tmp_path),
    ):
        pass
    assert "ElasticBatchSampler" in str(refused.value.hint) and "StatefulDataLoader" in str(refused.value.hint)
    assert not list(tmp_path.glob("log/*")), "nothing has begun"


def test_a_value_that_cannot_be_saved_is_refused_by_its_path(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"seen/1 is a builtins\.object"),
        cordee.job({"seen": [0, object()]}, to=tmp_path),
    ):
        pass


class Odd:
    """An object whose state cannot be saved."""

    def state_dict(self) -> dict[str, object]:
        return {"file": object()}

    def load_state_dict(self, state: dict[str, object]) -> None: ...


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"odd": Odd()}, "odd/file is a builtins.object"),
        ({"optimizer": torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0)}, "no module in the state owns"),
        ({"data": iter(DataLoader(range(8)))}, "'data' is a BaseDataLoaderIter"),
        ({"data": torch.utils.data.RandomSampler(range(8))}, "'data' is a Sampler"),
    ],
)
def test_what_every_save_would_fail_at_is_refused(tmp_path: Path, state: dict[str, object], message: str) -> None:
    with pytest.raises((InputError, CheckpointError), match=message), cordee.job(state, to=tmp_path):
        pass


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_resume_says_when_the_checkpoints_learning_rate_wins(tmp_path: Path, caplog, scheduled: bool) -> None:
    def resume(lr: float, steps: int) -> str:
        caplog.clear()
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        state = {"model": model, "optimizer": optimizer}
        if scheduled:
            state["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with caplog.at_level(logging.INFO, "cordee"), cordee.job(state, to=tmp_path, every=100) as job:
            for _ in job.steps(steps):
                optimizer.step()
                if scheduled:
                    state["scheduler"].step()
        return caplog.text

    resume(0.1, 3)
    assert "learning rate" not in resume(0.1, 4)
    assert "optimizer: the checkpoint's learning rate (0.1) wins over the script's (0.5)" in resume(0.5, 5)


SCRIPT = """
import os, signal, sys, cordee
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
with cordee.job({"n": 0}, to=sys.argv[1], every=2, grace="10s") as job:
    for step in job.steps(1000):
        if step == 5:
            job._saving.finish(30.0)
            os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize("is_notice", [False, True])
def test_ctrl_c_says_what_is_durable_or_is_a_notice(tmp_path: Path, is_notice: bool) -> None:
    env = os.environ | ({"CORDEE_SIGNALS": "INT"} if is_notice else {})
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)
    if is_notice:
        assert run.returncode == 75 and "its checkpoint is durable" in run.stderr, run.stderr
    else:
        assert run.returncode == -signal.SIGINT, run.stderr
        assert "interrupted in step 5; durable: step 4; start it again to go on" in run.stderr


TERMINAL = str(Path(__file__).with_name("terminal_script.py"))


@pytest.mark.parametrize("hangs", [False, True])
def test_ctrl_c_in_a_terminal_saves_and_a_second_one_ends_at_once(tmp_path: Path, hangs: bool) -> None:
    person, terminal = pty.openpty()
    how = "hangs" if hangs else "trains"
    run = forks.start([sys.executable, TERMINAL, str(tmp_path), how, os.ttyname(terminal)], environment())
    shown = ""

    def until(text: str) -> None:
        nonlocal shown
        while text not in shown:
            assert select.select([person], [], [], WAIT_S)[0], shown
            shown += os.read(person, 4096).decode()

    try:
        until("in step 5")
        os.write(person, b"\x03")  # The terminal sends SIGINT to the processes in its foreground.
        until("Ctrl-C again ends it at once")
        if hangs:
            while run.poll() is None:  # one that comes too soon is a launcher's copy of the first
                os.write(person, b"\x03")
                with suppress(subprocess.TimeoutExpired):
                    run.wait(0.2)
            until("ends at once, durable: nothing; start it again to go on")
        else:
            until("its checkpoint is durable; start it again to go on")
        assert run.wait(WAIT_S) == (128 + signal.SIGINT if hangs else 75)
    finally:
        run.kill()
        os.close(person)
        os.close(terminal)


def test_a_second_start_does_not_take_the_folder_from_a_live_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, write = os.pipe()
    first = forks.start([sys.executable, TERMINAL, str(tmp_path), "hangs"], environment(), stdout=write)
    os.close(write)
    try:
        with os.fdopen(read) as said:
            assert said.readline() == "in step 5\n"
        monkeypatch.setattr("cordee.storage.writer.ENDING_S", 0.1)
        with pytest.raises(InUseError, match=rf"in use by process {first.pid} on \S+, which began .* ago") as refused:
            enter(tmp_path)
        assert "CORDEE_TAKE_OVER=1" in str(refused.value.hint)
        monkeypatch.setenv("CORDEE_TAKE_OVER", "1")
        enter(tmp_path)
    finally:
        first.kill()
        first.wait(WAIT_S)
    monkeypatch.delenv("CORDEE_TAKE_OVER")
    enter(tmp_path)  # the first one is dead, the second one has closed the folder
    of_elsewhere = {"nonce": "0", "since_us": 1, "host": "gpu-7", "where": "elsewhere", "pid": 1, "started": 1}
    (tmp_path / "writer").write_bytes(seal({"format": 1, **of_elsewhere}))
    enter(tmp_path)
    assert "from process 1 on gpu-7" in caplog.text
    assert not (tmp_path / "writer").exists()


def enter(to: Path) -> None:
    with cordee.job({"n": 0}, to=to):
        pass
