"""Budgets and chargeback, as a part of the Python client: `Client().money`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cordee.answers.cost import ChargebackView
from cordee.answers.queues import BudgetView


@dataclass(frozen=True, slots=True)
class Money:
    """The money of a server.

    Attributes:
        ask: returns the server's answer to a request in a shape, as a client does.
        read: returns it as text.
    """

    ask: Callable[..., Any]
    read: Callable[..., str]

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

    def chargeback(self, from_us: int = 0, to_us: int | None = None, idle: str = "apart") -> ChargebackView:
        """Return the chargeback, of months that begin within a stretch of time.

        Args:
            from_us: its begin.
            to_us: its end; None: now.
            idle: `apart`: idle time is a line of its own; `by-use`: it is divided over the others.
        """
        found: ChargebackView = self.ask(ChargebackView, "GET", "/v1/chargeback", params=_stretch(from_us, to_us, idle))
        return found

    def chargeback_csv(self, from_us: int = 0, to_us: int | None = None, idle: str = "apart") -> str:
        """Return the same as CSV."""
        return self.read("GET", "/v1/chargeback.csv", params=_stretch(from_us, to_us, idle))


def _stretch(from_us: int, to_us: int | None, idle: str) -> dict[str, str | int]:
    found: dict[str, str | int] = {"from_us": from_us, "idle": idle}
    return found if to_us is None else found | {"to_us": to_us}
