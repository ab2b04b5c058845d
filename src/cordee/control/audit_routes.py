"""The HTTP face of the audit log: administrators see the records of their queues, and everybody the own ones."""

from typing import Annotated

from fastapi import Query

from cordee.answers.audit import AuditRecordView, AuditView
from cordee.control.access import Access
from cordee.control.api_route import user_router
from cordee.control.dependencies import Asked, By
from cordee.control.roles import Action
from cordee.control.store.audit import PAGE, AuditFilter
from cordee.reports import COUNT_MAX

router = user_router("/v1")
Number = Annotated[int, Query(ge=0, le=COUNT_MAX)]
Name = Annotated[str | None, Query(max_length=200)]


def wanted_by(
    by: Access,
    *,
    user: str | None = None,
    about: str | None = None,
    queue: str | None = None,
    from_us: int = 0,
    until_us: int | None = None,
) -> AuditFilter:
    """Return the records that somebody asks for, and may see."""
    queues: set[str] | None = None
    if not by.may(Action.ADMINISTER):
        names = {each.name for each in by.operations.control.state.quotas.queues}
        queues = {name for name in names if by.may(Action.ADMINISTER, queue=name)}
    return AuditFilter(
        who=user, object=about, queue=queue, queues=queues, own=by.name, from_us=from_us, until_us=until_us
    )


@router.get("/audit")
def audit(
    operations: Asked,
    by: By,
    *,
    after: Number = 0,
    limit: Annotated[int, Query(ge=1, le=PAGE)] = PAGE,
    user: Name = None,
    about: Name = None,
    queue: Name = None,
    from_us: Number = 0,
    until_us: Annotated[int | None, Query(ge=0, le=COUNT_MAX)] = None,
    newest: bool = False,
) -> AuditView:
    """Return records of the audit log, after a number or the newest: of queues that one administers, and one's own."""
    log = operations.store.audit
    wanted = wanted_by(by, user=user, about=about, queue=queue, from_us=from_us, until_us=until_us)
    head = log.head()  # first: the records then reach at least to it
    found = log.newest(wanted, limit)[::-1] if newest else log.page(wanted, after=after, limit=limit)
    return AuditView(records=[AuditRecordView.of(each) for each in found], head=str(head), whole=wanted.queues is None)
