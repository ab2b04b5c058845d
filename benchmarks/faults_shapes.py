"""Scenes of `faults.py` that look at one process from inside: shapes that change, memory that grows, late mutation."""

import gc
import json
import os
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from cordee.train.checkpoint.checkpointer import Checkpointer
from faults_world import Context, Gang, Outcome, Run, digest_of


class Saver:
    """The same three calls over Checkpointer and over DCP."""

    def __init__(self, name: str, to: Path) -> None:
        self.name, self.to = name, to
        self.pending: Any = None
        if name == "cordee":
            self.checkpointer = Checkpointer(str(to), rank=0, world_size=1, keep=2)
            self.found = self.checkpointer.open()
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def save(self, state: dict[str, torch.Tensor], step: int) -> None:
        """Asynchronous."""
        if self.name == "cordee":
            self.checkpointer.save({"state": state}, step=step, extras={})
            return
        # A fresh planner that keeps its plans is what Megatron-like loops use; the cache is the class's own.
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        self.pending = dcp.async_save(dict(state), checkpoint_id=self.to / f"{step:04d}", planner=planner)

    def wait(self) -> None:
        """Durable."""
        if self.name == "cordee":
            self.checkpointer.wait(60)
        else:
            self.pending.result()

    def load(self, into: dict[str, torch.Tensor], step: int) -> None:
        """In place."""
        if self.name == "cordee":
            commit = self.checkpointer.newest()
            assert commit is not None and commit.step == step, "what was saved last is the newest"
            self.checkpointer.load({"state": into}, commit)
        else:
            dcp.load(into, checkpoint_id=self.to / f"{step:04d}")


def inside(run: Run, script: Any) -> Outcome:
    """Run it in a forked process; what it returns is a dict of survived, wrong and note."""
    told = run.folder / "told.json"

    def play(ctx: Context) -> None:
        torch.set_num_threads(1)
        os.environ["FAULTS_FOLDER"] = str(ctx.folder)
        told.write_text(json.dumps(script(Saver(run.name, Path(ctx.to)))))

    gang = Gang(play, [Context(run.folder, run.to, 0, 1, 1, 0)], {})
    run.attempts = 1
    run.gangs.append(gang)
    if gang.wait(120) != [0]:
        return Outcome(False, None, False, run.last_words())
    found = json.loads(told.read_text())
    return Outcome(found["survived"], 0, found["wrong"], found["note"])


def reshaped(run: Run) -> Outcome:
    """Save, change names and shapes, save again, load: nothing may be missing or of the shape before."""
    rows = [run.rng.randrange(1, 400) for _ in range(4)]
    extra = run.rng.random() < 0.5

    def script(saver: Saver) -> dict[str, Any]:
        for step, n_rows in enumerate(rows, 1):
            state = {"w": torch.randn(n_rows, 8)} | ({f"extra{step}": torch.randn(5)} if extra else {})
            saver.save(state, step)
            saver.wait()
            into = {name: torch.zeros_like(each) for name, each in state.items()}
            saver.load(into, step)
            if any(not torch.equal(into[name], each) for name, each in state.items()):
                return {"survived": False, "wrong": True, "note": f"save {step} lost what was new in it"}
        return {"survived": True, "wrong": False, "note": ""}

    return inside(run, script)


def mutated(run: Run) -> Outcome:
    """The trainer goes on at once; what is saved must be what was there when it was asked for."""
    size = run.rng.randrange(10, 4_000_000)

    def script(saver: Saver) -> dict[str, Any]:
        state = {"w": torch.randn(size), "small": torch.randn(3)}
        for step in (1, 2, 3):
            was = digest_of(list(state.values()))
            saver.save(state, step)
            for each in state.values():
                each.fill_(step)
            saver.wait()
            into = {name: torch.zeros_like(each) for name, each in state.items()}
            saver.load(into, step)
            if digest_of(list(into.values())) != was:
                return {"survived": False, "wrong": True, "note": f"save {step} holds what was changed after it"}
            for each in state.values():
                each.normal_()
        return {"survived": True, "wrong": False, "note": ""}

    return inside(run, script)


def grown(run: Run) -> Outcome:
    """Resident memory of trainer and uploader over 30 saves of 16 MB, from the fifth on."""

    def script(saver: Saver) -> dict[str, Any]:
        state = {f"w{number}": torch.randn(1_000_000) for number in range(4)}
        size_bytes = sum(each.nbytes for each in state.values())
        me, start = psutil.Process(), 0
        for step in range(1, 31):
            saver.save(state, step)
            saver.wait()
            for each in state.values():
                each.add_(1)
            gc.collect()
            now = sum(each.memory_info().rss for each in [me, *me.children(recursive=True)])
            start = now if step == 5 else start
        grew = (now - start) / size_bytes
        note = f"grew by {grew:.2f} of a state" if grew > 0.5 else ""
        return {"survived": grew <= 0.5, "wrong": False, "note": note}

    return inside(run, script)
