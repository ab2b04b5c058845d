"""Cordee: plan, schedule, survive and account for training and serving large models.

Importing this package is light: no torch, no server, no GPU library. What is heavy is imported where it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cordee import plan
    from cordee.planning import serve_plan
    from cordee.storage.cache.api import Data, data
    from cordee.train.data.sampler import ElasticBatchSampler
    from cordee.train.entry import job
    from cordee.train.job import Job
    from cordee.train.trial import trial

__all__ = ["Data", "ElasticBatchSampler", "Job", "__version__", "data", "job", "plan", "serve_plan", "trial"]

_LAZY = {
    "data": "cordee.storage.cache.api",
    "Data": "cordee.storage.cache.api",
    "job": "cordee.train.entry",
    "Job": "cordee.train.job",
    "ElasticBatchSampler": "cordee.train.data.sampler",
    "serve_plan": "cordee.planning",
    "trial": "cordee.train.trial",
}


def __dir__() -> list[str]:
    """List what is imported on first use too, so that a notebook completes it."""
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "import_module"})


def __getattr__(name: str) -> Any:
    """Import the SDK and the planners on first use, so that `import cordee` needs no torch."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name == "plan":
        return import_module("cordee.plan")  # a package that can be called
    raise AttributeError(f"module 'cordee' has no attribute {name!r}")
