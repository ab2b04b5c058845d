"""The agents' HTTP routes: logs of ranks come, files of jobs go; each node with its own token, for its own attempts.

What is large does not travel over the link, so that no heartbeat waits behind it.
"""

import asyncio
import json
import re
from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import JSONResponse, Response

from cordee.answers.files import FilesWanted, LogReceived
from cordee.control import logs
from cordee.control.dependencies import Asked, Itself, body_of
from cordee.control.operations import Operations
from cordee.errors import InputError, NotFoundError
from cordee.reports import COUNT_MAX

_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/\*")


Epoch = Annotated[int, Path(ge=1, le=COUNT_MAX)]
router = APIRouter(prefix="/v1/agents", include_in_schema=False)


@router.put("/{node}/logs/{job_id}/{epoch}/{name}")
async def receive_log(
    request: Request, node: Itself, job_id: str, epoch: Epoch, name: str, operations: Asked
) -> Response:
    """Append a part to a rank's log; 409 says where the next part begins."""
    part = await body_of(request, logs.PART_BYTES_MAX)
    given = _RANGE.fullmatch(request.headers.get("content-range", ""))
    if given is None or int(given[2]) - int(given[1]) + 1 != len(part):
        raise InputError(f"Content-Range does not describe a body of {len(part)} bytes", hint="bytes FIRST-LAST/*")
    start = int(given[1])

    def append() -> tuple[int, int]:
        spec_of(operations, node, job_id, epoch)
        log = (operations.home, job_id, epoch, node, name)
        size = logs.receive(*log, start, part)
        return (409, logs.size_of(*log)) if size is None else (200, size)

    status, size = await asyncio.to_thread(append)
    return JSONResponse(LogReceived(size_bytes=size).model_dump(), status_code=status)


@router.post("/{node}/files")
def send_files(node: Itself, wanted: FilesWanted, operations: Asked) -> Response:
    """Return a pack of submitted files of an attempt."""
    files = spec_of(operations, node, wanted.job_id, wanted.epoch).get("files")
    if files is None:
        raise NotFoundError(f"{wanted.job_id} was submitted without its files")
    return Response(operations.files.pack(str(files), wanted.digests), media_type="application/octet-stream")


def spec_of(operations: Operations, node: str, job_id: str, epoch: int) -> dict[str, object]:
    """Return the spec of an attempt that holds, or held, GPUs of a node.

    Raises:
        NotFoundError: there is none.
    """
    leases = {row["epoch"]: json.loads(row["leases"]) for row in operations.store.attempts(job_id)}
    if node not in leases.get(epoch, {}):
        raise NotFoundError(f"{job_id}.{epoch} is no attempt on {node}")
    return dict(json.loads(operations.store.jobs(job_id)[0]["spec"]))
