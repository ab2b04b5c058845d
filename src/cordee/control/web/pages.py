"""The pages by their names: what each is made of, and how it is drawn once for all who see the same of it."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from starlette.requests import Request

from cordee.control.access import Access
from cordee.control.lab import Lab
from cordee.control.months import Books, Span
from cordee.control.operations import Operations
from cordee.control.questions import WAITING_MAX, Questions
from cordee.control.services.operations import ServiceOperations
from cordee.control.sweeps.operations import SweepOperations
from cordee.control.web import others
from cordee.control.web.ahead import Forecasts
from cordee.control.web.artifacts import artifact_parts, artifacts_parts
from cordee.control.web.audit import audit_parts
from cordee.control.web.job import LogChoice, job_parts
from cordee.control.web.now import now_parts
from cordee.control.web.parts import Drawings, Parts
from cordee.errors import InputError, NotFoundError

if TYPE_CHECKING:
    from cordee.control.artifacts.operations import ArtifactOperations

NAV = (
    ("n", "Now", "/"),
    ("q", "Queues", "/queues"),
    ("c", "Cost", "/cost"),
    ("o", "Nodes", "/nodes"),
    ("s", "Sweeps", "/sweeps"),
    ("v", "Services", "/services"),
    ("a", "Artifacts", "/artifacts"),
    ("u", "Audit", "/audit"),
    ("l", "Policy lab", "/lab"),
)
"""The key, the name and the path of each page, as the bar has them."""

FOLLOWERS_MAX, FOLLOWERS_OF_ONE_MAX = 256, 64
"""Pages that are followed at a time, by all and by one person; each is a connection that stays open."""

_WORDS_MAX = 200


class Wanted(NamedTuple):
    """A page with its parameters: what its address says."""

    page: str
    ref: str = ""
    epoch: int | None = None
    rank: int | None = None
    words: str = ""
    month: str = ""
    by: str = "user"

    @classmethod
    def of(cls, page: str, ref: str, query: Mapping[str, str]) -> "Wanted":
        """Return what a query asks for.

        Raises:
            InputError: a number is none, or the text is too long.
        """
        words, by = query.get("words", ""), query.get("by") or "user"
        if len(words) > _WORDS_MAX or len(ref) > _WORDS_MAX:
            raise InputError(f"a text in the address has more than {_WORDS_MAX} characters")
        if by not in others.BY:
            raise InputError(f"costs are by {', '.join(others.BY)}, not by {by!r}")
        return cls(page, ref, _number(query, "epoch"), _number(query, "rank"), words, query.get("month", ""), by)


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or len(text) > 9:
        raise InputError(f"{name}={text[:20]!r} is not a number")
    return int(text)


@dataclass(slots=True)
class Pages:
    """All that the pages are made of; `artifacts` are None where their libraries are not installed."""

    operations: Operations
    services: ServiceOperations
    sweeps: SweepOperations
    artifacts: "ArtifactOperations | None"
    forecasts: Forecasts = field(init=False)
    books: Books = field(init=False)
    drawings: Drawings = field(init=False)
    lab: Lab = field(init=False)
    turns: Questions = field(init=False)
    followers: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.forecasts, self.books = Forecasts(self.operations), Books(self.operations)
        self.drawings, self.lab = Drawings(), Lab(self.operations)
        self.turns = Questions(self.operations.control.precedence, most=WAITING_MAX + FOLLOWERS_MAX)

    async def drawn(self, wanted: Wanted, viewer: Access, request: Request | None = None) -> Parts:
        """Return the parts of a page for a viewer; who waits while others are drawn keeps no thread.

        Raises:
            NotFoundError: there is no such page, or nothing of that name.
            OverloadedError: too many wait.
            ClientDisconnect: the client of the request has left.
        """
        _, fresh_s = self._drawing(wanted, viewer)
        if (found := self.drawings.fresh((wanted, viewer.scope), fresh_s)) is not None:
            return found
        return await self.turns.answer(request, lambda _: self.parts(wanted, viewer))

    def parts(self, wanted: Wanted, viewer: Access) -> Parts:
        """Return the same, drawn in this thread.

        Raises:
            NotFoundError: there is no such page, or nothing of that name.
        """
        draw, fresh_s = self._drawing(wanted, viewer)

        def seen() -> Parts:
            return {name: viewer.text(html) for name, html in draw().items()}

        return self.drawings.get((wanted, viewer.scope), seen, fresh_s=fresh_s)

    def month(self, wanted: Wanted) -> Span:
        """Return the month of costs, by default this one.

        Raises:
            InputError: it is no month.
        """
        now_us = self.operations.clock.now_us()
        try:
            return Span.month(wanted.month) if wanted.month else Span.containing(now_us)
        except ValueError:
            raise InputError(f"{wanted.month[:20]!r} is not a month", hint="write it as 2026-11") from None

    def _drawing(self, wanted: Wanted, viewer: Access) -> tuple[Callable[[], Parts], float]:
        """Return what draws a page, and for how many seconds its parts are fresh at least."""
        operations = self.operations
        match wanted.page:
            case "now":
                return lambda: now_parts(operations, self.books, self.forecasts, viewer), 0.5
            case "job":
                choice = LogChoice(wanted.epoch, wanted.rank, wanted.words)
                made_of = operations, self.artifacts, self.books, self.forecasts
                return lambda: job_parts(*made_of, wanted.ref, viewer, choice), 0.5
            case "queues":
                return lambda: others.queues_parts(operations, self.books, viewer), 2.0
            case "nodes":
                return lambda: others.nodes_parts(operations, self.books, viewer), 1.0
            case "node":
                return lambda: others.node_parts(operations, self.books, wanted.ref, viewer), 1.0
            case "sweeps":
                return lambda: others.sweeps_parts(self.sweeps, viewer), 1.0
            case "sweep":
                return lambda: others.sweep_parts(self.sweeps, wanted.ref, viewer), 1.0
            case "services":
                return lambda: others.services_parts(self.services, viewer), 1.0
            case "artifacts":
                return lambda: artifacts_parts(self.artifacts, viewer), 1.0
            case "artifact" if (artifacts := self.artifacts) is not None:
                return lambda: artifact_parts(artifacts, wanted.ref, viewer), 1.0
            case "audit":
                return lambda: audit_parts(operations, viewer), 1.0
            case "cost":
                span, now_us = self.month(wanted), operations.clock.now_us()
                return lambda: others.cost_parts(self.books, span, now_us, wanted.by, viewer), 10.0
        raise NotFoundError(f"there is no page {wanted.page[:40]!r}")
