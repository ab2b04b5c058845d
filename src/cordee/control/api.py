"""The HTTP face of the operations: /v1, JSON, a bearer token, and errors that a client can raise again."""

import asyncio
import getpass
import json
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

import cordee
from cordee import errors
from cordee.account.sums import By as CostBy
from cordee.answers.cost import CostView
from cordee.answers.files import FileDigests, FilesReceived
from cordee.answers.jobs import JobDetailView, JobView, WhyView
from cordee.answers.nodes import Joined, JoinRequest, JoinTokenRequest, JoinTokenView, Leaving, NodeOrder, NodeView
from cordee.answers.queues import QueuesSubmission, QueuesView
from cordee.answers.submissions import DryRunView, Submission, Submitted
from cordee.answers.view import HealthView
from cordee.control import (
    audit_routes,
    budgets,
    chain_routes,
    chargeback,
    costs,
    job_metrics,
    logs,
    tenants_api,
    tunnels,
)
from cordee.control.agents import transfers
from cordee.control.agents.executor import AgentsExecutor
from cordee.control.api_description import Described, describe
from cordee.control.api_route import ApiRoute, Page, Paged, user_router
from cordee.control.audited import Audited
from cordee.control.budgets import AskedBudgets
from cordee.control.dependencies import (
    REFUSALS,
    Asked,
    By,
    Itself,
    MayJoin,
    Owner,
    body_of,
    known_query,
    refuse_exposed_secrets,
)
from cordee.control.files import PACK_BYTES_MAX
from cordee.control.operations import Operations
from cordee.control.questions import Asking, Costly, Questions
from cordee.control.rehearsals import routes as rehearsals_routes
from cordee.control.rehearsals.operations import RehearsalOperations
from cordee.control.roles import Action
from cordee.control.services import routes as services_routes
from cordee.control.services.operations import ServiceOperations
from cordee.control.sweeps import routes as sweeps_routes
from cordee.control.sweeps.operations import SweepOperations
from cordee.control.web.create import add_pages
from cordee.errors import CordeeError, InputError, MissingExtraError, NotFoundError, as_body
from cordee.event_json import encode
from cordee.reports import COUNT_MAX

EVENTS_AT_ONCE = 500
DRAWS_MAX = 1_000
_HEALTH_AT_ONCE = 4  # threads of its own: other requests may wait for the database
_OVERLOADED_S = 10

# The most specific class decides; an error that is not listed is the server's own failure.
_STATUS: tuple[tuple[type[CordeeError], int], ...] = (
    (errors.OverloadedError, 429),
    (errors.BodyTooLargeError, 413),
    (errors.KeyReusedError, 409),
    (errors.TokenError, 401),
    (errors.ForbiddenError, 403),
    (errors.NameTakenError, 409),
    (errors.BusyError, 409),
    (errors.NotFoundError, 404),
    (errors.InputError, 422),
    (errors.AdmissionError, 409),
    (errors.StandbyError, 503),
    (errors.StoreError, 503),
)


def local_owner() -> str:
    """Return the owner of the home's token: the user that runs the server."""
    return getpass.getuser()


Draws = Annotated[int, Query(ge=0, le=DRAWS_MAX)]
Count = Annotated[int, Query(ge=0, le=COUNT_MAX)]
_agents_bearer = HTTPBearer(auto_error=False, scheme_name="Node", description="A node's token, or a join token.")

router = user_router("/v1")
agents_router = APIRouter(
    prefix="/v1/agents",
    dependencies=[Security(_agents_bearer), Depends(known_query)],
    responses=REFUSALS,
    route_class=ApiRoute,
)


@router.get("/health")
async def health(request: Request, operations: Asked) -> HealthView:
    """Describe the server itself."""
    return await to_thread.run_sync(operations.health, limiter=request.app.state.first)


@router.post("/jobs", status_code=201)
def submit(submission: Submission, operations: Asked, by: By, request: Request) -> Submitted:
    """Queue a job, or refuse it and change nothing."""
    refuse_exposed_secrets(request, submission.secrets)
    by.check_submits(submission.spec, submission.job_id)
    return operations.submit(submission, by.name)


@router.post("/dry-run")
async def dry_run(
    request: Request, submission: Submission, operations: Asked, costly: Costly, by: By, draws: Draws = 0
) -> DryRunView:
    """Try a submission: where and when the job starts, what it preempts, what it costs; nothing is queued."""

    def work(asks: Asking) -> DryRunView:
        by.check_submits(submission.spec)
        return by.dry_run(operations.dry_run(submission, by.name, draws, asks.cpu_s))

    return await costly.answer(request, work)


@router.post("/files/missing")
def missing_files(files: FileDigests, operations: Asked, owner: Owner) -> FileDigests:
    """Return those contents of submitted files that must be sent before a job of this user can name them."""
    return FileDigests(digests=operations.files.missing(files.digests, owner))


@router.put("/files")
async def add_files(request: Request, operations: Asked, owner: Owner) -> FilesReceived:
    """Store a pack of contents: records `<BLAKE3 in hex> <bytes>`, a newline, the content.

    Trees of this user, and their jobs, may then name these contents.
    """
    packed = await body_of(request, PACK_BYTES_MAX)
    return FilesReceived(received=await asyncio.to_thread(operations.add_files, packed, owner))


@router.post("/jobs/{job_id}/files", include_in_schema=False)
def job_files(job_id: str, files: FileDigests, operations: Asked, by: By) -> Response:
    """Return a pack of contents of a job's files: for a server that stands by, and for the job's owner."""
    found = by.job(job_id, Action.CHANGE, "read its files")
    return Response(operations.job_files(found, files.digests), media_type="application/octet-stream")


@router.get("/jobs")
def jobs(operations: Asked, by: By, page: Paged) -> list[JobView]:
    """Return the jobs that the token may see, newest first."""
    found: list[JobView] = []
    after, rows_max = _after(page), page.limit + 1
    while len(found) < rows_max:
        rows = operations.jobs(after=after, limit=rows_max)
        found += (job for job in rows if by.sees(job))
        if len(rows) < rows_max:
            break
        after = (rows[-1].submitted_us, rows[-1].job_id)
    return by.views(page.cut(found, lambda job: f"{job.submitted_us} {job.job_id}"))


@router.get("/jobs/{ref}")
def job(ref: str, operations: Asked, by: By) -> JobDetailView:
    """Return one job with its attempts; who may change it sees which files it has, and what it wrote."""
    job_id = by.job(ref)
    return by.view(operations.job(job_id, names=by.changes_id(job_id)))


@router.post("/jobs/{ref}/stop")
def stop(ref: str, operations: Asked, by: By, now: bool = False) -> JobView:
    """Ask a job to end, after a checkpoint or now."""
    return by.view(operations.stop(by.job(ref, Action.CHANGE, "stop it"), by=by.name, now=now))


@router.get("/jobs/{ref}/why")
async def why(request: Request, ref: str, operations: Asked, costly: Costly, by: By, draws: Draws = 0) -> WhyView:
    """Explain the state of a job; with draws, also forecast when it starts and ends."""

    def work(asks: Asking) -> WhyView:
        return by.view(operations.why(by.job(ref), draws, asks.cpu_s))

    return await costly.answer(request, work) if draws else await asyncio.to_thread(work, Asking())


@router.get(
    "/jobs/{ref}/logs",
    response_class=StreamingResponse,
    responses={206: {"description": "The bytes of one log that the header Range names."}, 416: {"model": str}},
)
def read_logs(
    request: Request,
    operations: Asked,
    by: By,
    ref: str,
    *,
    epoch: Annotated[int | None, Query(ge=1, le=COUNT_MAX)] = None,
    rank: Annotated[int | None, Query(ge=0, le=COUNT_MAX)] = None,
    tail: Annotated[int | None, Query(ge=0, le=COUNT_MAX)] = None,
    follow: bool = False,
) -> Response:
    """Return the output of one attempt, by default the newest; with follow, from it to the job's end.

    The header Range asks for bytes of one rank's log as they are, without labels.
    """
    job = operations.job(by.job(ref))
    _check_rank(job, None if follow else epoch, rank)

    def files(which: int) -> list[Path]:
        return logs.log_files(operations.home, job.job_id, which, rank)

    if "range" in request.headers:
        return _one_log(files(epoch or job.epoch), whole=tail is None and not follow)
    if follow:
        several = rank is None and job.gpus > 1
        followed = logs.follow(files, lambda: operations.progress(job.job_id), epoch, several)
        return StreamingResponse(followed, media_type="text/plain; charset=utf-8")
    lines = logs.lines(files(epoch or job.epoch), tail)
    return StreamingResponse(lines, media_type="text/plain; charset=utf-8")


@router.get("/nodes")
def nodes(operations: Asked, by: By, page: Paged) -> list[NodeView]:
    """Return every node that was ever up, by name."""
    return by.views(page.of(operations.nodes(), lambda node: node.name))


@router.post("/nodes/{name}/cordon")
def cordon(name: str, order: NodeOrder, operations: Asked, by: By) -> NodeView:
    """Place nothing new on a node."""
    by.check(Action.CHANGE, "cordon nodes")
    return operations.cordon(name, by=by.name, why=order.why)


@router.post("/nodes/{name}/drain")
def drain(name: str, order: NodeOrder, operations: Asked, by: By) -> NodeView:
    """Cordon a node and give its attempts notice."""
    by.check(Action.CHANGE, "drain nodes")
    return operations.cordon(name, by=by.name, why=order.why, drain=True)


@router.post("/nodes/{name}/uncordon")
def uncordon(name: str, order: NodeOrder, operations: Asked, by: By) -> NodeView:
    """Put a node back into use."""
    by.check(Action.CHANGE, "put nodes back into use")
    return operations.uncordon(name, by=by.name, why=order.why)


@router.post("/join-tokens", status_code=201)
def join_token(request: JoinTokenRequest, operations: Asked, by: By) -> JoinTokenView:
    """Return a token with which machines join as nodes: those see the secrets of their jobs."""
    by.check(Action.ADMINISTER, "let nodes in or out: a node sees the secrets of its jobs")
    return operations.members.issue(request, by.name)


@router.post("/nodes/{name}/leave")
def leave(name: str, operations: Asked, by: By) -> Leaving:
    """Drain a node that joined; let it go if no attempt is left."""
    by.check(Action.CHANGE, "let nodes in or out")
    return operations.members.leave(name, by.name)


@agents_router.post("/join", status_code=201)
def join(joining: JoinRequest, operations: Asked, token: MayJoin) -> Joined:
    """Join as a node, with a join token; return the node's own token."""
    others = [] if operations.standby is None else [url for url in operations.standby.servers if url]
    return operations.members.join(token, joining, others)


@agents_router.post("/{node}/leave")
def leave_as_node(node: Itself, operations: Asked) -> Leaving:
    """Drain the node that asks, with its own token; let it go if no attempt is left."""
    return operations.members.leave(node)


@router.get("/queues")
def queues(operations: Asked, by: By) -> QueuesView:
    """Return the tree of queues: held, borrowed, lent, waiting."""
    return by.queues(operations.queues())


@router.put("/queues")
def set_queues(submission: QueuesSubmission, of_app: AskedBudgets, by: By) -> QueuesView:
    """Replace the tree of queues, or refuse and change nothing."""
    by.check(Action.ADMINISTER, "change the queues")
    return of_app.set_queues(submission, by=by)


@router.get("/cost")
async def cost(request: Request, operations: Asked, costly: Costly, asks: By, by: CostBy = "job") -> CostView:
    """Return GPU time and cost until now: the rows of what the token may see, and the sums of all."""
    sees = None if asks.sees_all else asks.sees
    return await costly.answer(request, lambda asking: asks.view(costs.cost(operations, by, sees, asking.check)))


@router.get("/events", response_class=StreamingResponse)
def events(operations: Asked, by: By, after: Count = 0, follow: bool = False) -> StreamingResponse:
    """Return what the token may see of the log after a number, as server-sent events."""
    return StreamingResponse(_events(operations, by, after, follow), media_type="text/event-stream")


@router.post("/down", status_code=202)
def down(operations: Asked, by: By) -> HealthView:
    """Give every attempt notice, and end when all have left."""
    by.check(Action.ADMINISTER, "end the server")
    return operations.down()


def _after(page: Page) -> tuple[int, str] | None:
    """Return the job with which the page before ended: when it was submitted, and its id."""
    if not page.cursor:
        return None
    submitted, _, job_id = page.after().partition(" ")
    if not submitted.isdecimal() or len(submitted) > 18:
        raise NotFoundError("the cursor is none of a list of jobs", hint="begin again, without cursor")
    return int(submitted), job_id


def _one_log(found: Sequence[Path], *, whole: bool) -> FileResponse:
    """Return the answer to a request for a range of bytes."""
    if len(found) != 1 or not whole:
        raise InputError(
            f"Range needs one log without tail and follow, and {len(found)} match", hint="say which: ?rank=0&epoch=1"
        )
    return FileResponse(found[0], media_type="text/plain; charset=utf-8")


def _check_rank(job: JobDetailView, epoch: int | None, rank: int | None) -> None:
    if epoch is not None and all(attempt.epoch != epoch for attempt in job.attempts):
        raise NotFoundError(
            f"{job.job_id} has no attempt {epoch}", hint=f"it has {len(job.attempts)}: see `cordee jobs {job.job_id}`"
        )
    if rank is not None and rank >= max(1, job.gpus):
        raise NotFoundError(f"{job.job_id} has no rank {rank}", hint=f"its ranks are 0 to {max(1, job.gpus) - 1}")


async def _events(operations: Operations, by: By, after: int, follow: bool) -> AsyncIterator[str]:
    """Yield the log as server-sent events; `id` is the event's number in the log.

    A follower polls the log's number ten times a second: one waiting thread per follower would exhaust the pool.
    """
    while True:
        page = await asyncio.to_thread(_page, operations, by, after)
        for number, body in page:
            if body is not None:
                yield f"id: {number}\ndata: {json.dumps(body)}\n\n"
            after = number
        if not page and (not follow or operations.closing):
            return
        while follow and operations.control.number <= after and not operations.closing:
            await asyncio.sleep(logs.POLL_S)


def _page(operations: Operations, by: By, after: int) -> list[tuple[int, dict[str, Any] | None]]:
    found = islice(operations.store.events(after), EVENTS_AT_ONCE)
    return [(number, by.event(event, encode(event))) for number, event in found]


def _answer(error: CordeeError) -> JSONResponse:
    status = next((code for cls, code in _STATUS if isinstance(error, cls)), 500)
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": str(_OVERLOADED_S)}}.get(status)
    return JSONResponse(as_body(error), status_code=status, headers=headers)


async def _cordee_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, CordeeError), "registered for this class"
    return _answer(error)


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError), "registered for this class"
    complaints: Sequence[dict[str, object]] = error.errors()
    first = complaints[0]
    where = ".".join(map(str, first["loc"])) if isinstance(first["loc"], tuple) else ""
    return _answer(InputError(f"{where}: {first['msg']}", hint="/openapi.json describes every request"))


async def _unknown(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException), "registered for this class"
    if error.status_code == 404:
        return _answer(NotFoundError(f"there is nothing at {request.url.path}", hint="see /openapi.json"))
    body = as_body(errors.ServerError(f"{request.method} {request.url.path}: {error.detail}"))
    headers = {"Allow": _methods(request)} if error.status_code == 405 else error.headers
    return JSONResponse(body, status_code=error.status_code, headers=headers)


async def _left(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


def _methods(request: Request) -> str:
    """Return the methods of a path, as the header Allow lists them."""
    found = {
        method
        for route in (*request.app.routes, *router.routes)
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }
    return ", ".join(sorted(found))


def above_jobs(operations: Operations) -> tuple[ServiceOperations, SweepOperations, RehearsalOperations]:
    """Create the parts whose controllers make jobs, over the operations on jobs."""
    return ServiceOperations.over(operations), SweepOperations.over(operations), RehearsalOperations.over(operations)


def _include_artifacts(app: FastAPI, operations: Operations) -> None:
    """Serve artifacts where their libraries are installed."""
    app.state.artifacts = None
    try:
        from cordee.control.artifacts import routes
        from cordee.control.artifacts.operations import ArtifactOperations
    except MissingExtraError:
        return
    app.state.artifacts = ArtifactOperations(operations)
    app.include_router(routes.router)
    app.include_router(routes.node_router)


def create_app(
    operations: Operations,
    services: ServiceOperations | None = None,
    sweeps: SweepOperations | None = None,
    rehearsals: RehearsalOperations | None = None,
    agents: AgentsExecutor | None = None,
) -> FastAPI:
    """Create the application around the operations; tunnels need the links to the agents."""
    app = FastAPI(title="Cordee", version=cordee.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.operations = operations
    app.state.questions = Questions(None if app.state.operations is None else operations.control.precedence)
    app.state.first = CapacityLimiter(_HEALTH_AT_ONCE)
    app.state.services = services or ServiceOperations.over(operations)
    app.state.sweeps = sweeps or SweepOperations.over(operations)
    app.state.rehearsals = rehearsals or RehearsalOperations.over(operations)
    for above in (services_routes, sweeps_routes, rehearsals_routes):
        app.include_router(above.router)
    for each in (router, audit_routes.router, budgets.router, chargeback.router, job_metrics.router):
        app.include_router(each)
    for each in (chain_routes.router, tenants_api.router, tenants_api.metrics_router):
        app.include_router(each)
    _include_artifacts(app, operations)
    app.include_router(agents_router)
    app.include_router(transfers.router)
    add_pages(app)
    if app.state.operations is not None:  # else only the API's description is wanted
        app.add_middleware(Audited, operations=operations)
    if agents is not None:
        tunnels.add_routes(app, tunnels.Tunnels(operations, agents))
    app.add_exception_handler(CordeeError, _cordee_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _unknown)
    app.add_exception_handler(ClientDisconnect, _left)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    app.add_route("/openapi.json", Described(app).answer, include_in_schema=False)
    return app
