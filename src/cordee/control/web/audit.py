"""The page of the audit log."""

from cordee.control.access import Access
from cordee.control.audit_routes import wanted_by
from cordee.control.operations import Operations
from cordee.control.web.parts import Parts
from cordee.view.page import part

SHOWN = 200


def audit_parts(operations: Operations, viewer: Access) -> Parts:
    """Return the newest records that the viewer may see."""
    log, wanted = operations.store.audit, wanted_by(viewer)
    rows, head = log.newest(wanted, SHOWN), str(log.head())
    return {"audit": part("audit", rows, wanted.queues is None, head, template="web/audit.html.j2")}
