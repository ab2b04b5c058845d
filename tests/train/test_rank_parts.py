"""What a rank is told, how it hears signals, and what it keeps for itself."""

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cordee.errors import InputError, LayoutError, UnitError
from cordee.plan.layout import Layout
from cordee.telemetry.cloud import Aws
from cordee.telemetry.notices import Notice, read_notice, write_hint, write_notice
from cordee.train import rank_exit
from cordee.train.checkpoint import rank_state
from cordee.train.checkpoint.state import decode, encode, gather, names_in
from cordee.train.entry import job
from cordee.train.measure import PERIOD_S, Meter
from cordee.train.mesh import layout_mesh
from cordee.train.report import Reporter
from cordee.train.settings import Every, settings
from cordee.train.step_timer import StepTimer
from cordee.train.stop.agreement import Agreement
from cordee.train.stop.notice import Notices
from cordee.workload.keep import Keep


def test_the_agent_wins_over_arguments_and_arguments_over_defaults() -> None:
    alone = settings({}, to="here", every="10m", keep=5, grace="1m")
    assert (alone.to, alone.every, alone.keep, alone.grace_s) == ("here", Every(seconds=600.0), Keep(5), 60.0)
    assert (alone.job_id, alone.epoch, alone.spool) == (None, None, None)
    told = {
        "CORDEE_JOB": "a-bcdefg",
        "CORDEE_EPOCH": "3",
        "CORDEE_SPOOL": "/spool",
        "CORDEE_CHECKPOINT_TO": "/there",
        "CORDEE_CHECKPOINT_EVERY": "30",
        "CORDEE_CHECKPOINT_KEEP": "4",
        "CORDEE_GRACE_S": "12.5",
    }
    under = settings(told, to="here", every="10m", keep=5, grace="1m")
    assert (under.to, under.keep, under.grace_s, under.epoch) == ("/there", Keep(4), 12.5, 3)
    assert under.every == Every(seconds=30.0)
    unsaid = settings({**told, "CORDEE_CHECKPOINT_EVERY": "auto"}, every=500)
    assert unsaid.every == Every(steps=500), "auto says nothing, so the script's own word counts"
    assert settings({}) == settings({}, every="auto", keep=2, grace="30s")


def test_under_an_agent_the_scripts_own_folder_holds_one_for_each_job() -> None:
    told = {"CORDEE_JOB": "a-bcdefg", "CORDEE_EPOCH": "1"}
    assert settings(told, to="here").to == "here/a-bcdefg", "what ran there before has epochs of its own"
    assert settings(told).to is None


def test_checkpoints_in_a_copy_of_the_submitted_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = {"CORDEE_JOB": "a-bcdefg", "CORDEE_EPOCH": "1", "CORDEE_FILES": str(tmp_path)}
    for to in ("ckpt", f"{tmp_path}/ckpt", "/elsewhere, ckpt"):
        with pytest.raises(InputError, match="a copy of the submitted files that is removed after this attempt"):
            settings(told, to=to)
    assert settings(told, to="/elsewhere").to == "/elsewhere/a-bcdefg"
    assert settings(told, to="s3://bucket/run").to == "s3://bucket/run/a-bcdefg"
    assert settings({**told, "CORDEE_CHECKPOINT_TO": "/there"}, to="ckpt").to == "/there"
    here = {**told, "CORDEE_FOLDER": "/home/ada/gpt"}
    assert settings(here, to="ckpt").to == "/home/ada/gpt/ckpt/a-bcdefg", "the submitter's folder, not its copy"


def test_a_bare_number_of_seconds_is_refused() -> None:
    with pytest.raises(UnitError):
        settings({}, every="600")
    with pytest.raises(UnitError):
        settings({}, grace=30)  # type: ignore[arg-type]
    for every in (0, 2.5):
        with pytest.raises(InputError, match=f"every={every} steps"):
            settings({}, every=every)  # type: ignore[arg-type]


def test_fewer_than_two_generations_are_refused() -> None:
    for keep in (0, 1):
        with pytest.raises(InputError, match=f"keep={keep} generations.*at least 2"):
            settings({}, keep=keep)


@pytest.mark.parametrize("name", ["CORDEE_CHECKPOINT_EVERY", "CORDEE_GRACE_S"])
def test_the_environment_has_plain_numbers_and_an_error_names_the_variable(name: str) -> None:
    with pytest.raises(InputError, match=rf"{name}=10m is not a plain number\nhint: times are in seconds"):
        settings({name: "10m"})


def test_signals_that_are_a_notice() -> None:
    assert settings({}).signals == (signal.SIGTERM,)
    assert settings({"SLURM_JOB_ID": "7"}).signals == (signal.SIGTERM, signal.SIGUSR1)
    named = settings({"SLURM_JOB_ID": "7", "CORDEE_SIGNALS": "usr1, SIGUSR2"}).signals
    assert named == (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    for name in ("KILL", "CHLD", "usr3"):
        with pytest.raises(InputError, match=f"CORDEE_SIGNALS names {name.upper()}, which cannot be a notice"):
            settings({"CORDEE_SIGNALS": name})


def test_one_rank_of_a_node_asks_the_cloud() -> None:
    cloud = {"CORDEE_CLOUD": "aws"}
    assert isinstance(settings({**cloud, "LOCAL_RANK": "0"}).cloud, Aws)
    assert settings({**cloud, "LOCAL_RANK": "1"}).cloud is None
    assert settings({**cloud, "SLURM_LOCALID": "3"}).cloud is None
    assert settings({"CORDEE_CLOUD": "none", "LOCAL_RANK": "0"}).cloud is None


def test_agent_notice_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    assert read_notice(None) is None and read_notice(spool) is None
    told = Notice(deadline_us=time.time_ns() // 1000 + 9_000_000, machine_stays=False)
    write_notice(spool, told)
    assert read_notice(spool) == told and 0 < told.left_s() <= 9
    for broken in ("", "[]", '{"deadline_us": "soon"}', '{"deadline_us": null}'):
        (spool / "notice.json").write_text(broken)
        assert read_notice(spool) is None
    write_notice(tmp_path / "spool" / "notice.json", told)  # no folder: the signal goes all the same


def test_a_timer_that_fails_costs_no_later_one(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    notices = Notices([], lambda number: None)
    try:
        notices.at("fails", 0.0, lambda: int("no number"))
        notices.at("later", time.monotonic() + 0.01, done.set)
        assert done.wait(30) and "ValueError" in caplog.text
    finally:
        notices.close()


def test_a_hint_of_the_agent_waits_until_there_is_something_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_exit, "HINT_LOOK_S", 0.01)
    env = {"CORDEE_SPOOL": str(tmp_path), "CORDEE_JOB": "a-bcdefg", "CORDEE_EPOCH": "1"}
    told, heard = settings(env), threading.Semaphore(0)
    write_hint(tmp_path, 1, "maintenance")
    rank = rank_exit.RankExit(told, 0, Reporter(told, 0), StepTimer(), heard.release)
    try:
        assert not heard.acquire(timeout=0.1)
        rank.agreement = Agreement(first_step=0)
        assert heard.acquire(timeout=30) and not heard.acquire(timeout=0.1), "once"
        write_hint(tmp_path, 2, "maintenance, again")
        assert heard.acquire(timeout=30)
        assert rank.by_s is None, "nobody has to leave"
    finally:
        rank.close()


def test_the_pace_is_the_median_of_the_last_steps() -> None:
    pace = StepTimer()
    assert pace.step_s() is None and pace.boundary_s() == 0.0
    for _ in range(30):
        pace.began()
        assert pace.inside
        pace.ended()
    assert pace.step == 30 and not pace.inside
    usual_s = pace.step_s()
    assert usual_s is not None and usual_s > 0.0
    pace._took_s.append(1000.0)  # an evaluation
    assert pace.step_s() < 1.0
    pace._took_s.extend([1000.0] * 20)
    pace.began()
    assert 900.0 < pace.boundary_s() <= 1000.0
    assert not pace.is_overdue()
    pace._began_s -= 3000.0
    assert 1900.0 < pace.boundary_s() <= 2100.0, "what is late may be as late again"
    assert pace.is_overdue()


def test_a_signal_reaches_the_thread_while_the_main_thread_is_blocked_and_earlier_handlers_run() -> None:
    earlier, heard = [], threading.Event()
    before = signal.signal(signal.SIGUSR2, lambda number, frame: earlier.append(number))
    try:
        notices = Notices([signal.SIGUSR2], lambda number: heard.set())
        os.kill(os.getpid(), signal.SIGUSR2)
        assert heard.wait(60)
        notices.close()
        assert earlier == [signal.SIGUSR2]
        os.kill(os.getpid(), signal.SIGUSR2)  # given back
        assert earlier == [signal.SIGUSR2] * 2
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_forked_childs_signal_is_not_the_ranks() -> None:
    heard: list[int] = []
    notices = Notices([signal.SIGUSR2], heard.append)
    child = os.fork()
    if child == 0:
        for _ in range(1000):
            time.sleep(0.01)  # SIGUSR2 ends it: the default action is back, from the first line on
        os._exit(0)
    os.kill(child, signal.SIGUSR2)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGUSR2
    notices.close()
    assert heard == []


def test_timers_are_called_in_order_and_replaced_by_name() -> None:
    called: list[str] = []
    done, all_are_set = threading.Event(), threading.Event()
    notices = Notices([], lambda number: None)
    now = time.monotonic()
    notices.at("first", now, all_are_set.wait)
    notices.at("a", now + 60, lambda: called.append("never"))
    notices.at("b", now + 0.02, lambda: (called.append("b"), done.set()))
    notices.at("a", now + 0.01, lambda: called.append("a"))
    all_are_set.set()
    assert done.wait(60)
    notices.close()
    assert called == ["a", "b"]


class Loader:
    """A data loader that keeps the state of a generator, or much more."""

    def __init__(self, kept: torch.Tensor) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return {"at": 3, "generator": [self.kept]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["generator"][0]


def test_a_small_state_with_tensors_is_the_ranks_own_and_a_large_one_is_shared() -> None:
    state: dict[str, Any] = {"data": Loader(torch.get_rng_state()), "average": Loader(torch.zeros(2**18 + 1))}
    assert rank_state.capture(state)["own"].keys() == {"data"}
    tensors, values = gather(state)
    assert list(tensors) == ["average/generator/0"] and names_in(values["data"]) == set()
    rank_state.restore(state, decode(encode({"own": {"data": {"at": 3, "generator": [torch.ones(2)]}}}, "extras")))
    assert torch.equal(state["data"].kept, torch.ones(2))


def test_generators_and_plain_state_come_back_and_tensors_are_left_to_the_checkpoint() -> None:
    state: dict[str, Any] = {"model": torch.nn.Linear(2, 2), "seen": 7, "average": torch.ones(2), "path": ["a", 1]}
    kept = rank_state.capture(state)
    assert kept["own"] == {"seen": 7, "path": ["a", 1]}

    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(1))]

    first = draw()
    state["seen"] = 9
    rank_state.restore(state, kept)
    rank_state.restore_rng(kept["rng"])
    assert draw() == first
    assert state["seen"] == 7


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_model_in_flat_parts_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    """FSDP1: its first save would fail in the middle of the training."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        inner = FullyShardedDataParallel(torch.nn.Linear(2, 1), device_id=torch.device("cpu"))
        with (
            pytest.raises(InputError, match="'model' is wrapped in FullyShardedDataParallel"),
            job({"model": torch.nn.Sequential(inner)}, to=tmp_path / "to"),
        ):
            pass
    finally:
        torch.distributed.destroy_process_group()


def test_the_planned_layout_reaches_the_script() -> None:
    found = settings({"CORDEE_LAYOUT": "tp2 pp2 fsdp4", "WORLD_SIZE": "16"})
    assert found.planned.layout == Layout(tp=2, pp=2, dp=4, zero=3)
    assert settings({}).planned.layout is None
    assert settings({"CORDEE_ESTIMATE": '{"of": "another version"}'}).planned.estimate is None
    with pytest.raises(InputError, match="CORDEE_LAYOUT cannot be read"):
        settings({"CORDEE_LAYOUT": "qp2"})
    with pytest.raises(LayoutError, match="is for 16 ranks, but the gang has 8"):
        layout_mesh(Layout(tp=2, pp=2, dp=4, zero=3), 8)


class Heard:
    """A reporter that keeps what it is given."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []

    def append(self, kind: type, **values: Any) -> None:
        self.reports.append(values)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_measures_after_its_first_steps_then_every_few_seconds_and_at_the_end(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, peak = [0.0], [100]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr("cordee.train.measure.peak_memory", lambda: (peak[0], None))
    pace, heard = StepTimer(), Heard()
    meter = Meter(heard, pace, rank, settings({}))  # type: ignore[arg-type]
    for step in range(200):
        pace.began()
        now_s[0] += 1.0
        meter.log(10, {})
        pace.ended()
        peak[0] += step == 100
        meter.stepped()
    meter.report()
    meter.report()
    if rank:
        assert [each["step"] for each in heard.reports] == [3], "its peak has not grown by more than 1 %"
        return
    assert [each["step"] for each in heard.reports] == [*range(3, 200, round(PERIOD_S)), 200]
    assert heard.reports[1]["tokens_per_s"] == 10.0
    assert (heard.reports[1]["step_us"], heard.reports[-1]["peak_bytes"]) == (1_000_000, 101)
