"""The keys of a job about its metrics: what to do about a spike of the loss, and who else gets the metrics."""

from collections.abc import Mapping
from typing import Any, Literal

OnSpike = Literal["off", "warn", "rollback", "reorder", "stop"]
"""Nothing; a line and an event; back to the checkpoint before, without or with those batches later; the end."""

Tracker = Literal["wandb", "mlflow", "tensorboard"]
TRACKERS = ("wandb", "mlflow", "tensorboard")


def telemetry_env(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment that tells the ranks of a job these keys; `spec` is a JobSpec as JSON.

    >>> telemetry_env({"on_spike": "stop", "track": ["wandb", "mlflow"]})
    {'CORDEE_ON_SPIKE': 'stop', 'CORDEE_TRACK': 'wandb,mlflow'}
    """
    found = {"CORDEE_ON_SPIKE": spec.get("on_spike"), "CORDEE_TRACK": ",".join(spec.get("track") or ())}
    return {name: value for name, value in found.items() if value}
