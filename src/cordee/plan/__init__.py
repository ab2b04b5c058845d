"""The planner: memory, layouts, time, survival and money before a run. Pure: facts come in as arguments."""

import sys
from importlib import import_module
from types import ModuleType

from cordee.plan.ask import Answer, Request, ask, ask_curve
from cordee.plan.expect import Assumptions
from cordee.plan.layout import Layout
from cordee.plan.settings import Settings
from cordee.plan.training import Training
from cordee.plan.wanted import parse_layout

__all__ = ["Answer", "Assumptions", "Layout", "Request", "Settings", "Training", "ask", "ask_curve", "parse_layout"]


class _CallablePackage(ModuleType):
    """`cordee.plan` is this package and also what a notebook calls: `cordee.plan("llama-3-8b", "8xH100")`."""

    def __call__(self, model: str, gpus: str, **settings: object) -> Answer:
        """Plan a model on GPUs; see `cordee.planning.plan`, which reads the files that this room may not read."""
        answer = import_module("cordee.planning").plan(model, gpus, **settings)
        assert isinstance(answer, Answer)
        return answer


sys.modules[__name__].__class__ = _CallablePackage
