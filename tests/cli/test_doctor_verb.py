"""`cordee doctor`: on this machine, and of nodes by what their agents report."""

import json
import os
import resource
import sys
from pathlib import Path

import pytest
from verbs import run

from cordee.agent import findings, probes
from cordee.agent.findings import limit, room, write_speed
from cordee.answers.nodes import NodeView
from cordee.cli.doctor import calibration_findings, node_findings
from cordee.hardware.load import load_catalogue
from cordee.view.faults import NodeFault


def test_this_machine_without_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor", "--slots", "2", "--quick", "--to", str(tmp_path), "--json")
    answer = json.loads(out)
    states = {each["check"]: each["state"] for each in answer["findings"]}
    assert states["driver"] == "ok" and f"checkpoints to {tmp_path}" in states and "clock" in states
    assert code == (answer["state"] == "bad") and list(tmp_path.iterdir()) == []


def test_a_table_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    code, out, _ = run(capsys, "doctor", "--slots", "1", "--quick", "--to", str(file))
    assert code == 1 and "cannot be written: File exists" in out
    assert f"checkpoints to {file}: give a folder that this user can write to: --to" in out


def test_it_says_when_a_machine_was_calibrated_and_what_changed(tmp_path: Path) -> None:
    (none,) = calibration_findings(tmp_path, "here")
    assert none.state == "ok" and none.figure.startswith("none")
    (tmp_path / "hardware").mkdir()
    entry = '["{0}"]\nas_of = "2026-11-20"\n["{0}".fingerprint]\nhost = "{1}"\ndevice = "{0}"\ntorch = "1.0"\n'
    for name, host in (("cpu", "here"), ("H100", "there")):
        (tmp_path / "hardware" / f"{name}.toml").write_text(entry.format(name, host))
    (found,) = calibration_findings(tmp_path, "here")
    assert (found.check, found.state) == ("calibration of cpu", "warn")
    assert found.figure.startswith("of 2026-11-20; changed since: ") and "torch" in found.figure
    assert "cordee calibrate" in found.hint


def test_limits_and_room_are_graded(tmp_path: Path) -> None:
    assert limit("x", resource.RLIM_INFINITY, 1, 2, "nofile", str).state == "ok"
    assert [limit("x", soft, 1024, 65536, "nofile", str).state for soft in (65536, 4096, 256)] == ["ok", "warn", "bad"]
    assert room("x", tmp_path / "nowhere", 1, 2, "h").state == "bad"
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert [room("x", tmp_path, least, enough, "h").state for least, enough in ((1, 1), (1, 2 * free))] == [
        "ok",
        "warn",
    ]
    assert write_speed(tmp_path, 1 << 20).figure.endswith("1.049 MB written and synced")


def test_a_kernel_log_that_is_closed_is_no_log_without_xids(tmp_path: Path) -> None:
    assert findings.xids([1], tmp_path / "nowhere") is None
    (tmp_path / "kmsg").write_text("no Xid")
    assert findings.xids([1], tmp_path / "kmsg") == {}


@pytest.mark.parametrize(("speed", "state"), [(700e12, "ok"), (480e12, "warn"), (300e12, "bad")])
def test_a_product_is_held_against_the_catalogue(speed: float, state: str) -> None:
    gpu = load_catalogue().find_gpu("H100")
    (found,) = probes._product({"flop_per_s": [speed, speed]}, gpu, 2)
    assert (
        found.state == state
        and found.check == "product of GPUs 0, 1"
        and found.expected.startswith(f"{gpu.peak_flop_per_s('bf16') * gpu.matmul_fraction / 1e12:.0f}")
    )


def test_an_all_reduce_is_held_against_the_link() -> None:
    gpu = load_catalogue().find_gpu("H100")
    rates = [fraction * gpu.link_bytes_per_s for fraction in (0.7, 0.3, 0.1)]
    assert [probes._reduce({"bytes_per_s": rate}, gpu).state for rate in rates] == ["ok", "warn", "bad"]


def test_work_that_hangs_or_fails_is_bad_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(probes.probe_findings("slot", 0, load_catalogue(), limit_s=0.05))
    assert [each.state for each in found] == ["bad", "bad"] and "did not end within" in found[0].figure
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "failed with exit code 1" in next(probes.probe_findings("slot", 0, load_catalogue())).figure


@pytest.mark.slow
def test_the_probes_run_on_the_cpu() -> None:
    found = list(probes.probe_findings("slot", 0, load_catalogue()))
    assert [each.state for each in found] == ["ok", "ok"], found


def node(**more: object) -> NodeView:
    fields = {"name": "a", "up": True, "epoch": 1, "gpu_name": "H100", "gpus": 8, "used": {}, "unavailable": [],
              "micro_usd_per_gpu_hour": 0, "price_source": ""}  # fmt: skip
    return NodeView.model_validate(fields | more)


def test_a_node_is_judged_by_its_agents_reports() -> None:
    assert [each.state for each in node_findings(node(), [])] == ["ok"]
    sick = node(unavailable=[1, 2], unavailable_why=["3 uncorrectable memory errors", "in use by others"],
                clock_off_us=5_000_000, refused=2)  # fmt: skip
    states = {each.check: each.state for each in node_findings(sick, [NodeFault(1, "silent")])}
    assert states == {
        "agent": "ok",
        "GPU 1": "bad",
        "GPU 2": "warn",
        "clock": "warn",
        "reports": "warn",
        "faults": "warn",
    }
    found = {each.check: each for each in node_findings(node(reachable=False), [NodeFault(1, "silent")] * 3)}
    assert found["agent"].state == "bad" and found["a lemon"].figure == "3 faults, the last: silent"
