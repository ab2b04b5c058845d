"""Budgets and chargeback, as a part of the Python client: `Client().money`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cordee.answers.queues import BudgetView


@dataclass(frozen=True, slots=True)
class Money:
    """The money of a server.

    Attributes:
        ask: returns the server's answer to a request, as a client does.
    """

    ask: Callable[..., Any]

    def budgets(self) -> list[BudgetView]:
        """Return the budgets with what is spent of each."""
        found: list[BudgetView] = self.ask(list[BudgetView], "GET", "/v1/budgets")
        return found

    def set_budget(self, **rules: Any) -> BudgetView:
        """Set a budget; the fields are those of `BudgetRules`."""
        found: BudgetView = self.ask(BudgetView, "PUT", "/v1/budgets", json=rules)
        return found

    def remove_budget(self, **whose: str) -> BudgetView:
        """Remove the budget of a `queue`, a `user`, or both, `per` month or total."""
        found: BudgetView = self.ask(BudgetView, "DELETE", "/v1/budgets", params=whose)
        return found
