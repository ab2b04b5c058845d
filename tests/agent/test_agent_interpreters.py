"""The software of jobs' interpreters: agents of one gang whose environments differ, real processes."""

import os
import re
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
from agent_world import World, python

from cordee.agent.interpreters import Interpreters, Software
from cordee.events import Lease, NodeUp, Outcome, RanksStarted

LEASES = (Lease(node="a", gpus=(0,)), Lease(node="b", gpus=(0,)))
WAITS = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"


def environment(folder: Path, torch: str | None) -> Path:
    """Make a virtual environment with the metadata of a torch, which cannot be imported; return its programs."""
    packages = folder / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(os.path.realpath(sys.executable))
    (folder / "bin/torchrun").write_text(f"#!{folder}/bin/python\n")
    (folder / "bin/torchrun").chmod(0o755)
    (folder / "pyvenv.cfg").write_text(f"home = {Path(os.path.realpath(sys.executable)).parent}\n")
    install(folder, torch)
    return folder / "bin"


def install(folder: Path, torch: str | None) -> None:
    (packages,) = folder.glob("lib/*/site-packages")
    for old in packages.glob("torch-*"):
        shutil.rmtree(old)
    if torch:
        (packages / f"torch-{torch}.dist-info").mkdir()
        (packages / f"torch-{torch}.dist-info/METADATA").write_text(f"Name: torch\nVersion: {torch}\n")
        (packages / "torch").mkdir(exist_ok=True)
        (packages / "torch/__init__.py").write_text("raise SystemExit('torch was imported')\n")


class Asker:
    """Interpreters, and a loop that waits for them."""

    def __init__(self) -> None:
        self._woken = threading.Event()
        self.interpreters = Interpreters(self._woken.set)

    def ask(self, run: str | list[str], path: Path, *, known: bool = False) -> Software:
        found: list[Software] = []
        self.interpreters.ask({"run": run, "env": {"PATH": f"{path}:/usr/bin:/bin"}}, os.environ, found.append)
        assert bool(found) is known
        if not found:
            assert self._woken.wait(60)
            self._woken.clear()
            self.interpreters.step()
        return found[0]


def test_an_interpreter_is_read_once_and_again_when_its_packages_change(tmp_path: Path) -> None:
    bin_, asker = environment(tmp_path / "env", "2.5.1+cu124"), Asker()
    own = Software(".".join(map(str, sys.version_info[:3])), "2.5.1+cu124")
    assert asker.ask(["python", "train.py"], bin_) == own
    assert asker.ask("cd src && torchrun train.py", bin_, known=True) == own
    began_s = time.process_time()
    for _ in range(100):
        asker.ask("python train.py", bin_, known=True)
    assert time.process_time() - began_s < 0.1, (
        "a start of a gang waits for it: 1 ms at the most, 0.1 ms on an idle core"
    )
    install(tmp_path / "env", "2.6.0")
    assert asker.ask(["python", "train.py"], bin_).torch == "2.6.0"
    install(tmp_path / "env", None)
    assert asker.ask(["python", "train.py"], bin_).torch == ""


@pytest.mark.parametrize("run", ["true", "source env/bin/activate && python t.py", "uv run python t.py", ["no-such"]])
def test_an_interpreter_that_the_command_does_not_name_is_not_known(tmp_path: Path, run: str | list[str]) -> None:
    assert Asker().ask(run, environment(tmp_path / "env", "2.5.1"), known=True) == Software()


def test_one_that_does_not_answer_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho no JSON\n")
    (tmp_path / "python").chmod(0o755)
    assert Asker().ask(["python"], tmp_path) == Software()


@pytest.mark.parametrize(
    ("other", "fits"),
    [
        (("3.11.9", "2.5.1"), True),
        (("3.11.2", ""), True),
        (("", ""), True),
        (("3.12.2", "2.5.1"), False),
        (("3.11.2", "2.5.1+cu124"), False),
    ],
)
def test_ranks_meet_under_one_minor_version_of_python_and_one_torch(other: tuple[str, str], fits: bool) -> None:
    assert Software("3.11.2", "2.5.1").fits(Software(*other)) is fits


def test_a_node_with_another_torch_ends_its_ranks_and_says_both_versions(tmp_path: Path) -> None:
    world = World(tmp_path / "home", nodes=())
    try:
        for name, torch in (("a", "2.5.1"), ("b", "2.6.0")):
            path = environment(tmp_path / f"env-{name}", torch)
            world.join(name, tmp_path / name, path=path, code=NEWER if name == "b" else None)
        world.until(lambda: {event.node.name for event in world.log if isinstance(event, NodeUp)} == {"a", "b"})
        world.start(["python", "-c", WAITS], leases=LEASES)
        ended = world.ended()
        assert (ended.node, ended.outcome) == ("b", Outcome.FAILED)
        own = re.escape(".".join(map(str, sys.version_info[:3])))
        assert re.fullmatch(
            rf"the job's interpreter on b is Python {own} with torch 2\.6\.0, on a, the node of rank 0, "
            rf"Python {own} with torch 2\.5\.1; hint: install .*",
            ended.why,
        )
        world.kill()
        assert {each.node for each in world.ended(groups=2)} == {"a", "b"}
        # Another Cordee that speaks the protocol is no reason.
        world.start(python(WAITS), epoch=2, leases=LEASES)
        world.until(lambda: len(world.of(RanksStarted, epoch=2)) == 2)
        assert not world.pending
        world.kill(epoch=2)
        world.ended(epoch=2, groups=2)
        software = {event.node.name: event.node.software[0] for event in world.log if isinstance(event, NodeUp)}
        assert software["b"] == "cordee 99.1" != software["a"]
    finally:
        world.close()


NEWER = """
import runpy, cordee
cordee.__version__ = "99.1"
runpy.run_module("cordee.agent", run_name="__main__")
"""
