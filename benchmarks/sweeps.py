"""What a sweep costs until it has found a good trial: ASHA and Bayesian search against random search, preempted.

python benchmarks/sweeps.py [--json] [--seeds 10]

The trials are a surrogate, not a training: the multi-fidelity Hartmann function of 3 parameters of mf-prior-bench
(https://github.com/automl/mf-prior-bench, `mfpbench/synthetic/hartmann`), a published benchmark in closed form. At
fewer steps the function is flatter by a bias and noisier; its authors set both for ranks that early steps predict well
(`good`: 2.5, 2.0) or badly (`terrible`: 4.0, 5.0). Everything that decides is the server's own: the fold of the log and
the policy; this file plays the GPUs, with the times below. A preempted trial saves, and goes on from its bytes on the
next GPU; each attempt pays its restart and its save.
"""

import argparse
import heapq
import json
import math
import random
import statistics
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from cordee.control.sweeps.bayes import propose
from cordee.control.sweeps.policy import decide, reached_target
from cordee.control.sweeps.trial_spec import trial_id, trial_spec
from cordee.control.trials import Sweep, Sweeps, Trial
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    Event,
    Job,
    JobEnded,
    JobPaused,
    JobResumed,
    JobSubmitted,
    Lease,
    MetricsLogged,
    Outcome,
    RankLeft,
    SweepDeclared,
)
from cordee.workload.spec import JobSpec
from cordee.workload.sweep import Value

STEPS, STEP_S, RESTART_S, SAVE_S, GPUS = 81, 300.0, 60.0, 30.0, 8
OPTIMUM, TARGET = -3.86278, -3.6
KINDS = {"good": (2.5, 2.0), "moderate": (3.0, 3.0), "terrible": (4.0, 5.0)}
SHOWN = ("hours", "trials", "preemptions")
WAYS: dict[str, dict[str, Any]] = {
    "random": {"search": "random", "trials": 1_000},
    "ASHA": {"search": "random", "trials": 1_000, "rungs": f"3..{STEPS}:3"},
    "ASHA from a ninth": {"search": "random", "trials": 1_000, "rungs": f"{STEPS}"},
    "ASHA from a third": {"search": "random", "trials": 1_000, "rungs": f"{STEPS // 3}..{STEPS}:3"},
    "Bayes": {"search": "bayes", "trials": 1_000},
    "Bayes + ASHA": {"search": "bayes", "trials": 1_000, "rungs": f"3..{STEPS}:3"},
}

_ALPHA = (1.0, 1.2, 3.0, 3.2)
_A = ((3.0, 10.0, 30.0), (0.1, 10.0, 35.0), (3.0, 10.0, 30.0), (0.1, 10.0, 35.0))
_P = ((3689, 1170, 2673), (4699, 4387, 7470), (1091, 8732, 5547), (381, 5743, 8828))


def hartmann(values: dict[str, Value], step: int, kind: str, seed: int) -> float:
    """Return the loss of a trial after so many steps; at the last one it is the function itself."""
    bias, noise = KINDS[kind]
    left = 1 - math.log(step) / math.log(STEPS)
    point = [float(values[name]) for name in ("x", "y", "z")]
    found = 0.0
    for alpha, a, p in zip(_ALPHA, _A, _P, strict=True):
        inner = sum(scale * (x - at / 10_000) ** 2 for scale, x, at in zip(a, point, p, strict=True))
        found -= (alpha - bias * left) * math.exp(-inner)
    drawn = random.Random(blake2b(f"{seed}/{step}/{point}".encode(), digest_size=8).digest()).gauss()
    return found + abs(drawn) * noise * left


@dataclass
class World:
    """One sweep on GPUs that are taken away every `every_s` seconds on average; infinite: never."""

    spec: JobSpec
    kind: str
    seed: int
    every_s: float
    resumes: bool = True  # whether a promoted trial goes on from its bytes; else it begins anew
    now_s: float = 0.0
    gpu_s: float = 0.0
    preemptions: int = 0
    sweeps: Sweeps = field(default_factory=Sweeps)
    ends: list[tuple[float, int, int]] = field(default_factory=list)  # of attempts: time, trial, step then

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.apply(SweepDeclared(at_us=0, sweep="s-abcdef", by="ann", spec=self.spec.model_dump_json()))

    @property
    def sweep(self) -> Sweep:
        return self.sweeps.sweeps["s-abcdef"]

    def apply(self, *events: Event) -> None:
        for event in events:
            self.sweeps.apply(event)

    def run(self) -> None:
        """Run until the target is reached."""
        while (found := decide(self.sweep)).end is None:
            for number in (*found.resume, *found.promote):
                trial = self.sweep.trials[number]
                self.apply(JobResumed(at_us=0, job_id=trial.job_id, by="", why=""))
                self.start(trial)
            for _ in range(found.start):
                self.start(self.submit(len(self.sweep.trials) + 1))
            self.now_s, number, step = heapq.heappop(self.ends)
            self.end(self.sweep.trials[number], step)

    def submit(self, number: int) -> Trial:
        section = self.sweep.section
        values = propose(self.sweep, number) if section.way == "bayes" else section.point(number)
        job_id = trial_id("s-abcdef", self.spec, number)
        job = Job(job_id=job_id, name="s", owner="ann", gpus=1, sweep="s-abcdef", trial=number)
        self.apply(JobSubmitted(at_us=0, job=job, spec=trial_spec(self.spec, number, values).model_dump_json()))
        return self.sweep.trials[number]

    def start(self, trial: Trial) -> None:
        """Place an attempt, and note when it ends: at its next rung, or when its GPU is taken away."""
        lease = Lease(node="n", gpus=(0,))
        self.apply(AttemptPlaced(at_us=0, job_id=trial.job_id, epoch=trial.epoch + 1, leases=(lease,)))
        first = trial.step if self.resumes or trial.step not in self.sweep.section.rung_steps else 0
        to = next((rung for rung in self.sweep.section.rung_steps if rung > trial.step), STEPS)
        taken_s = 1e9 if math.isinf(self.every_s) else self.random.expovariate(1 / self.every_s)
        steps = min(to - first, max(0, int((taken_s - RESTART_S) / STEP_S)))
        if first + steps < to:
            self.preemptions += 1
        lasts_s = RESTART_S + steps * STEP_S + SAVE_S
        self.gpu_s += lasts_s
        heapq.heappush(self.ends, (self.now_s + lasts_s, trial.number, max(trial.step, first + steps)))

    def end(self, trial: Trial, step: int) -> None:
        common: dict[str, Any] = {"at_us": 0, "job_id": trial.job_id, "epoch": trial.epoch}
        if step and step in (*self.sweep.section.rung_steps, STEPS):
            loss = hartmann(trial.values, step, self.kind, self.seed)
            self.apply(MetricsLogged(**common, rank=0, step=step, names=("loss",), values=(loss,)))
        self.apply(RankLeft(**common, rank=0, how="checkpointed", step=step))
        self.apply(AttemptEnded(**common, outcome=Outcome.CHECKPOINTED, why=""))
        if step == STEPS:
            self.apply(JobEnded(at_us=0, job_id=trial.job_id, state="done", why="finished"))
        elif step in self.sweep.section.rung_steps and len(trial.rungs) < self.sweep.section.rung_steps.index(step) + 1:
            self.apply(JobPaused(at_us=0, job_id=trial.job_id, why=""))
        else:
            self.start(trial)


def measure(way: str, kind: str, seed: int, every_s: float, *, resumes: bool = True) -> dict[str, float]:
    """Return GPU-hours, hours, trials and preemptions until a trial has reached the target."""
    values = dict.fromkeys(("x", "y", "z"), "0.0..1.0")
    section = {"values": values, "max_running": GPUS, "target": TARGET, "seed": seed} | WAYS[way]
    spec = JobSpec.from_flags(run="true", gpus="1", name="s", checkpoint_to="/ckpt", sweep=section)
    world = World(spec, kind, seed, every_s, resumes)
    world.run()
    left_s = sum(at_s - world.now_s for at_s, *_ in world.ends)  # trials that the target has stopped
    return {
        "gpu_hours": (world.gpu_s - left_s) / 3600,
        "hours": world.now_s / 3600,
        "trials": len(world.sweep.trials),
        "reached": float(reached_target(world.sweep) is not None),
        "preemptions": world.preemptions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--way", action="append", choices=WAYS)
    args = parser.parse_args()
    rows = []
    for kind in args.kind or KINDS:
        for every_s in (math.inf, 4 * 3600.0):
            cases = [(way, True) for way in args.way or ("random", "ASHA", "ASHA from a ninth", "ASHA from a third")]
            cases += [("ASHA", False)] if args.way is None else []
            for way, resumes in cases:
                found = [measure(way, kind, seed, every_s, resumes=resumes) for seed in range(1, args.seeds + 1)]
                hours = sorted(each["gpu_hours"] for each in found)
                row = {
                    "surrogate": kind,
                    "reached": sum(each["reached"] for each in found),
                    "preempted_every_h": None if math.isinf(every_s) else every_s / 3600,
                    "search": way if resumes else f"{way}, each rung from step 0",
                    "gpu_hours_median": round(statistics.median(hours), 1),
                    "gpu_hours_least": round(hours[0], 1),
                    "gpu_hours_most": round(hours[-1], 1),
                    **{name: round(statistics.median(each[name] for each in found), 1) for name in SHOWN},
                }
                rows.append(row)
                if not args.json:
                    print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)
    if args.json:
        print(json.dumps({"target": TARGET, "optimum": OPTIMUM, "seeds": args.seeds, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
