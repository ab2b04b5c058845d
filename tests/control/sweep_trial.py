"""A trial without torch: its loss follows from its value and its step, and its state is a file of its own.

It reports and leaves as the SDK's loop does. `--crash` makes the trial of that value fail.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from cordee.events import RankLeft, Restored
from cordee.train.metrics import Metrics
from cordee.train.report import Reporter
from cordee.train.settings import settings
from cordee.train.trial import rungs, trial


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--crash", type=float)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    assert trial() == {"lr": args.lr}
    if args.lr == args.crash:
        print("it crashes", file=sys.stderr)
        return 3
    saved = settings()
    assert saved.to is not None
    state = Path(saved.to) / "state.json"
    step = json.loads(state.read_text())["step"] if state.exists() else 0
    reporter = Reporter(saved, 0)
    metrics = Metrics(reporter, 0)
    reporter.append(Restored, step=step, generation=None)
    end = next(rung for rung in rungs() if rung > step)
    while step < end:
        with (args.out / os.environ["CORDEE_JOB"]).open("a") as steps:
            steps.write(f"{step}\n")
        step += 1
        metrics.log({"loss": abs(args.lr - 0.3) + 1 / step}, step)
    state.parent.mkdir(parents=True, exist_ok=True)
    state.write_text(json.dumps({"step": step}))
    metrics.report(step)
    over = end == rungs()[-1]
    reporter.append(RankLeft, rank=0, how="finished" if over else "checkpointed", step=step)
    reporter.close()
    return 0 if over else 75


if __name__ == "__main__":
    sys.exit(main())
