"""The call in the user's script: arguments, with an agent's settings over them, become a job."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cordee.train.job import Job
from cordee.train.settings import settings


def job(  # noqa: PLR0913 - each is a setting of the job
    state: dict[str, Any],
    *,
    to: str | Path | None = None,
    every: str | int | None = None,
    keep: str | int | None = None,
    grace: str | None = None,
    base: str | Path | None = None,
    ram: str | int | None = None,
    hang: str | None = None,
    on_spike: str | None = None,
    keep_best: str | None = None,
    track: str | Sequence[str] | None = None,
) -> Job:
    """Return a training job over this state, to be used as `with cordee.job(...) as job:`.

    Args:
        state: modules, optimizers, objects with state_dict() and load_state_dict(), and plain values; a load replaces
            plain values in this dict.
        to: where checkpoints go: a folder, s3://, gs:// or az://, or several storage levels with commas between, the
            nearest first and the most durable last. Without one the job runs unprotected.
        every: how often to save: a time ("10m"), a number of steps, or "auto" (the default): the interval that loses
            the least time, computed from the cost of a save.
        keep: number of generations to keep, at least 2; or `"3, every 10, 7d"`: also each 10th and those of a week.
        grace: from a notice (SIGTERM, or SIGUSR1 under Slurm) to the end; 30s by default.
        base: another destination; chunks of its pinned checkpoint are not stored again.
        ram: how often to capture the state in memory between checkpoints, as `every`: such a capture survives its
            process, but not its machine. "auto" (the default) does it where it saves time, "off" never; it doubles the
            memory for captures.
        hang: time without a step after which all ranks start again from the newest checkpoint; never by default.
        on_spike: what to do when the logged loss leaves its usual range, or is not finite: "warn" (the default),
            "rollback" (back to the checkpoint before, without those batches), "reorder" (with those batches later),
            "stop" or "off".
        keep_best: the name of a metric: whenever `log` has a lower value of it than ever before, a checkpoint is made,
            and stays until a better one replaces it. The value must be the same on all ranks.
        track: "wandb", "mlflow" or "tensorboard", or some of them: where else the metrics go.

    Under a Cordee agent the agent's settings win over these arguments.
    """
    return Job(
        state,
        settings(
            to=to,
            every=every,
            keep=keep,
            grace=grace,
            base=base,
            ram=ram,
            hang=hang,
            on_spike=on_spike,
            keep_best=keep_best,
            track=track,
        ),
    )
