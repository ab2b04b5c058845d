"""Budgets: set and removed by people, and what is spent of each, with its forecast."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

from fastapi import Depends, Query
from starlette.requests import Request

from cordee.answers.queues import BudgetRules, BudgetView, Name, QueuesSubmission, QueuesView
from cordee.control.access import Access, path_to
from cordee.control.acts import note
from cordee.control.api_route import user_router
from cordee.control.dependencies import Asked, By
from cordee.control.months import Books
from cordee.control.operations import Operations
from cordee.control.roles import Action
from cordee.errors import ForbiddenError, InputError, NotFoundError
from cordee.events import Budget, BudgetRemoved, BudgetSet, Queue
from cordee.schedule.quota.budgets import Kept
from cordee.schedule.quota.held import MILLI
from cordee.schedule.quota.queues import DEFAULT, near
from cordee.units import US_PER_HOUR

_EXAMPLE = "cordee budget set --queue llm --cost '$20,000' --hard"


@dataclass(slots=True)
class BudgetOperations:
    """The requests of people about budgets.

    Attributes:
        operations: those on jobs and queues, which share the log.
        books: the accounts of all attempts.
    """

    operations: Operations
    books: Books

    def set(self, rules: BudgetRules, *, by: Access) -> BudgetView:
        """Set a budget; it replaces that of the same queue, user and period.

        Raises:
            ForbiddenError: `by` does not administer the queue, or the cluster where it names none.
            InputError: it limits nothing, or stops jobs and is not hard.
            NotFoundError: there is no such queue.
        """
        note(object=Budget(queue=rules.queue, user=rules.user).whose, queue=rules.queue or "")
        [budget] = self.checked([rules], by)
        operations = self.operations
        operations.control.note(BudgetSet(at_us=operations.clock.now_us(), budget=budget, by=by.name))
        operations.wake()
        return next(each for each in self.budgets() if (each.queue, each.user, each.per) == budget.key)

    def remove(self, queue: str | None, user: str | None, per: str, *, by: Access) -> BudgetView:
        """Remove a budget.

        Raises:
            ForbiddenError: `by` does not administer the queue, or the cluster where it names none.
            NotFoundError: there is none of this queue, user and period.
        """
        operations, budget = self.operations, Budget(queue=queue, user=user, per=per)
        note(object=budget.whose, queue=queue or "")
        _check_admin(queue, by)
        found = next((each for each in self.budgets() if (each.queue, each.user, each.per) == budget.key), None)
        if found is None:
            raise NotFoundError(f"{budget.whose} has no budget per {per}", hint="`cordee budget ls` lists them")
        at_us = operations.clock.now_us()
        operations.control.note(BudgetRemoved(at_us=at_us, queue=queue, user=user, per=per, by=by.name))
        operations.wake()
        return found

    def set_queues(self, submission: QueuesSubmission, *, by: Access) -> QueuesView:
        """Replace the tree of queues; with budgets set these, and remove all others. All of it is done, or nothing."""
        control = self.operations.control
        wanted = self.checked(submission.budgets or (), by, {each.name for each in submission.queues})
        with control.changed:
            known = {key: kept.budget for key, kept in control.state.quotas.budgets.kept.items()}
            new = known if submission.budgets is None else {budget.key: budget for budget in wanted}
            at_us = self.operations.clock.now_us()
            changes: list[BudgetSet | BudgetRemoved] = [
                BudgetSet(at_us=at_us, budget=budget, by=by.name)
                for budget in new.values()
                if known.get(budget.key) != budget
            ]
            for queue, user, per in known.keys() - new.keys():
                changes.append(BudgetRemoved(at_us=at_us, queue=queue, user=user, per=per, by=by.name))
            return self.operations.set_queues(submission, changes)

    def budgets(self, by: Access | None = None) -> list[BudgetView]:
        """Return the budgets that may be seen, by queue and user; without `by` all."""
        now_us = self.operations.clock.now_us()
        with self.operations.control.changed:
            quotas = self.operations.control.state.quotas
            found = [(each, _spent(each, now_us)) for each in quotas.budgets.kept.values()]
            queues = quotas.queues
        seen = [each for each in found if by is None or by.may(Action.SEE, each[0].budget.user, each[0].budget.queue)]
        views = [self._view(kept, spent, now_us, queues) for kept, spent in seen]
        return sorted(views, key=lambda each: (each.queue or "", each.user or "", each.per))

    def checked(self, wanted: Sequence[BudgetRules], by: Access, names: Collection[str] | None = None) -> list[Budget]:
        """Return budgets that may be set, in a tree of these queues; by default in the present one."""
        found = []
        known = {each.name for each in self.operations.control.state.quotas.queues} if names is None else names
        for rules in wanted:
            _check_admin(rules.queue, by)
            if rules.micro_usd is None and rules.gpu_us is None:
                raise InputError("a budget needs money, GPU time, or both", hint=_EXAMPLE)
            if rules.stops and not rules.hard:
                raise InputError("only a hard budget stops running jobs", hint="make it a hard one: --hard")
            if rules.queue is not None and known and rules.queue not in {*known, DEFAULT}:
                raise NotFoundError(f"there is no queue {rules.queue!r}", hint=near(rules.queue, known))
            found.append(Budget(**rules.model_dump()))
        return found

    def _view(self, kept: Kept, spent: tuple[int, int], now_us: int, queues: Sequence[Queue]) -> BudgetView:
        budget, (from_us, until_us) = kept.budget, kept.period(now_us)
        gpu_us, micro_usd = spent
        ahead: tuple[int | None, int | None] = (None, None)
        if until_us is not None:
            recent = self.books.recent(now_us)
            parts = (until_us - now_us) / max(1, recent.lasts_us)
            recent_gpu = recent_usd = 0.0
            for row in self.books.rows(now_us):
                if budget.user not in (None, row.owner):
                    continue
                if budget.queue is None or budget.queue in path_to(row.queue, queues):
                    part = recent.part_of(row.placed_us, now_us if row.ended_us is None else row.ended_us)
                    recent_gpu += row.gpu_us.held * part
                    recent_usd += row.micro_usd.held * part
            ahead = gpu_us + round(recent_gpu * parts), micro_usd + round(recent_usd * parts)
        return BudgetView(
            **asdict(budget),
            from_us=from_us,
            until_us=until_us,
            spent_micro_usd=micro_usd,
            spent_gpu_us=gpu_us,
            held_gpu_milli=kept.used.rate[0],
            micro_usd_per_hour=kept.used.rate[1] // MILLI,
            percent=kept.reported(now_us),
            ahead_micro_usd=ahead[1],
            ahead_gpu_us=ahead[0],
        )


def _spent(kept: Kept, now_us: int) -> tuple[int, int]:
    gpu, money = kept.used.within(kept.budget.per, now_us)
    return gpu // MILLI, money // (MILLI * US_PER_HOUR)


def _check_admin(queue: str | None, by: Access) -> None:
    if not by.may(Action.ADMINISTER, queue=queue):
        of = "the cluster" if queue is None else f"queue {queue}"
        raise ForbiddenError(f"{by.name} may not set budgets of {of}", hint=f"ask {by.operations.members.operator}")


# -- over HTTP -----------------------------------------------------------------------------------------------------

router = user_router("/v1")


def _over(request: Request, operations: Asked) -> BudgetOperations:
    return BudgetOperations(operations, request.app.state.pages.books)


AskedBudgets = Annotated[BudgetOperations, Depends(_over)]
Optionally = Annotated[Name | None, Query()]


@router.get("/budgets")
def budgets(found: AskedBudgets, by: By) -> list[BudgetView]:
    """Return the budgets that the token may see, with what is spent of each."""
    return found.budgets(by)


@router.put("/budgets")
def set_budget(rules: BudgetRules, found: AskedBudgets, by: By) -> BudgetView:
    """Set a budget; it replaces that of the same queue, user and period."""
    return found.set(rules, by=by)


@router.delete("/budgets")
def remove_budget(
    found: AskedBudgets,
    by: By,
    queue: Optionally = None,
    user: Optionally = None,
    per: Annotated[str, Query(pattern="^(month|total)$")] = "month",
) -> BudgetView:
    """Remove a budget."""
    return found.remove(queue, user, per, by=by)
