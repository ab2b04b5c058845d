"""A rehearsal as its rank sees it: a notice after a few steps, some more after the save, and the same again.

The first attempt waits before a step until it gets notice, saves, and runs on past its save. The second one goes on
from that save and runs the same steps. What both report is compared by the server (control/rehearsals/).
"""

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cordee.errors import InputError, StopError
from cordee.events import SpanClass, StepsRehearsed
from cordee.train.checkpoint import rank_state
from cordee.train.checkpoint.state import parts_of
from cordee.train.measure import Meter
from cordee.train.report import Reporter
from cordee.train.stop.agreement import Agreement
from cordee.workload.rehearsal import REHEARSAL_ENV, RehearsedSteps

NOTICE_S_MAX = 600.0  # after so long without a notice, the rank gives up


def rehearsal(
    rank: int, reporter: Reporter, to: str | None, env: Mapping[str, str] | None = None
) -> "Rehearsal | None":
    """Return the rehearsal that this rank takes part in; None: it is none.

    Raises:
        InputError: the script saves nothing.
    """
    text = (os.environ if env is None else env).get(REHEARSAL_ENV)
    if not text:
        return None
    if to is None:
        raise InputError(
            "there is no checkpoint destination, so nothing of this job survives a notice",
            hint="name one: `checkpoint.to` in the job file, --checkpoint-to, or cordee.job(state, to=...)",
        )
    return Rehearsal(RehearsedSteps.read(text), rank, reporter, to)


class Rehearsal:
    """The steps of one rank's rehearsal.

    Attributes:
        resumed: whether this attempt goes on from the checkpoint of an earlier one.
    """

    def __init__(self, steps: RehearsedSteps, rank: int, reporter: Reporter, to: str) -> None:
        self._steps, self._rank, self._reporter, self._to = steps, rank, reporter, to
        self._begun = self.resumed = False
        self._notice_at: int | None = None
        self._first: int | None = None  # the first step that is recorded
        self._losses: list[float | None] = []
        self._loss: Any = None

    def begin(self, step: int, steps_total: int | None) -> None:
        """Begin the loop at this step.

        Raises:
            InputError: the job has too few steps.
        """
        if self._begun:
            return
        self._begun, self.resumed = True, step > 0
        if self.resumed:
            self._first = step
            return
        self._notice_at = self._steps.steps
        if steps_total is not None and steps_total < self._steps.steps + self._steps.replayed:
            needed = self._steps.steps + self._steps.replayed
            raise InputError(
                f"the job has {steps_total} steps, and its rehearsal needs {needed}",
                hint="rehearse it with more steps than it runs, or give --steps and --replay",
            )

    def awaits_notice(self, step: int) -> bool:
        """Return whether this step begins after the notice only."""
        return self._notice_at == step

    def goes_on(self, step: int) -> bool:
        """Return whether the attempt runs on past its durable checkpoint of this step; what follows is recorded."""
        if self.resumed:
            return False
        self._notice_at, self._first = None, step
        self._reporter.switch(SpanClass.USEFUL, step)
        return True

    @property
    def is_past_save(self) -> bool:
        """Return whether the attempt that got notice runs on past its save."""
        return self._first is not None and not self.resumed

    def is_over(self, step: int) -> bool:
        """Return whether all steps were run."""
        return self._first is not None and step >= self._first + self._steps.replayed

    def log(self, loss: object) -> None:
        """Take the loss of the step that runs."""
        if loss is not None:
            self._loss = loss

    def stepped(self) -> None:
        """Record the loss of a step that was run."""
        loss, self._loss = self._loss, None
        if self._first is not None:
            value = None if loss is None else float(loss)
            self._losses.append(value if value is not None and math.isfinite(value) else None)

    def meet(
        self,
        step: int,
        agreement: Agreement,
        meter: Meter,
        capture: Callable[[], None],
        meet: Callable[[], None],
    ) -> None:
        """Meet the other ranks before a step: where the rehearsal gets its notice, not before that.

        Args:
            step: the next one.
            agreement: of the ranks.
            meter: reports what was measured, by which the server knows that this rank waits.
            capture: makes a checkpoint that is due by steps.
            meet: saves or leaves, if the ranks agreed to.

        Raises:
            StopError: no notice came.
        """
        self.begin(step, meter.steps_total)
        if self.is_past_save:
            return
        if not self.resumed:
            capture()
        if self.awaits_notice(step):
            meter.report()
        while self.awaits_notice(step):
            if not agreement.await_request(NOTICE_S_MAX):
                raise StopError(f"no notice came before step {step} of the rehearsal within {NOTICE_S_MAX:.0f} s")
            meet()
        meet()

    def report(self, state: dict[str, Any], step: int, measure: Callable[[], None]) -> None:
        """Report the recorded steps, the state before this step, and by `measure` what was measured."""
        measure()
        self._reporter.append(
            StepsRehearsed,
            rank=self._rank,
            first_step=self._first,
            losses=tuple(self._losses),
            weights=norm_of(state),
            state=tuple(_digests(state, step)),
            to=self._to,
        )


def norm_of(state: dict[str, Any]) -> float | None:
    """Return the norm of this rank's part of all weights; None if it is not finite."""
    total = 0.0
    for entry in state.values():
        for module in parts_of(entry, torch.nn.Module):
            for weight in module.parameters():
                local = weight.to_local() if isinstance(weight, DTensor) else weight
                total += float(torch.linalg.vector_norm(local.detach(), dtype=torch.float64)) ** 2
    return math.sqrt(total) if math.isfinite(total) else None


def _digests(state: dict[str, Any], step: int) -> list[str]:
    """Return `data NAME DIGEST` of each sampler and loader, and `own NAME DIGEST` of what else a rank has."""
    found = []
    for name, is_data, content in rank_state.contents(state, step):
        digest = hashlib.blake2b(content, digest_size=8).hexdigest()
        found.append(f"{'data' if is_data else 'own'} {name} {digest}")
    return found
