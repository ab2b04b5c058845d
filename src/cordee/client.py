"""The Python face of the HTTP API, and the shapes of what it answers.

`Client()` finds the server of a home by itself, and raises the errors of `cordee.errors` as the server raised them.
"""

import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from cordee import errors
from cordee.errors import CordeeError, NoServerError, ServerError, SpecError, TokenError
from cordee.event_json import decode
from cordee.events import Estimate, Event, Queue
from cordee.ids import JobId
from cordee.ids import job_id as new_job_id

T = TypeVar("T")


class View(BaseModel):
    """What the API answers. Times are microseconds since the Unix epoch, money is integer micro-dollars."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class HealthView(View):
    """The server itself. `problem` is what keeps it from working, such as a full disk."""

    version: str
    pid: int
    home: str
    shutting_down: bool
    live_attempts: int
    log_number: int
    problem: str | None = None


class FailureView(View):
    """The rank that failed first, and its last lines."""

    rank: int | None
    exit_code: int | None
    signal: int | None
    tail: list[str]


class ComparisonView(View):
    """A value of a job as it was planned and as it is measured, in `unit`.

    Nine of ten values are planned between `low` and `high`; `off_by` is the fraction by which the measured value is
    above the planned one; `missed` says that it left the interval.
    """

    quantity: str
    unit: str
    planned: float | None
    low: float | None
    high: float | None
    measured: float | None
    off_by: float | None
    missed: bool


class AttemptView(View):
    """One execution of a job. `leases` are the GPUs held, by node.

    `refused` counts records of the ranks' spools that say what cannot be; `refused_why` is the reason of the last one.
    """

    epoch: int
    state: str
    leases: dict[str, list[int]]
    placed_us: int
    notice_reason: str | None
    ended_us: int | None
    outcome: str | None
    why: str
    failure: FailureView | None
    refused: int = 0
    refused_why: str = ""


class JobView(View):
    """A job in a list."""

    job_id: str
    name: str
    owner: str
    queue: str
    tier: str
    gpus: int
    gpu_name: str | None
    state: str
    why: str
    epoch: int
    step: int | None
    checkpoint_step: int | None
    submitted_us: int
    ended_us: int | None


class JobDetailView(JobView):
    """A job with its attempts, its spec as it was admitted, and what its newest attempt measured beside its estimate.

    `layout` is that of the newest attempt, `estimate_missed` what was said of values outside the estimate.
    """

    attempts: list[AttemptView]
    spec: dict[str, Any]
    layout: str | None
    measured: list[ComparisonView]
    estimate_missed: list[str]


class SpreadView(View):
    """Percentiles of a time over the draws: one in ten is earlier than p10. null: later than `seen_us`."""

    p10_us: int | None
    p50_us: int | None
    p90_us: int | None


class ForecastView(View):
    """A forecast of a job's next start and of its end, from `draws` runs of the scheduler forward from `at_us`.

    Every run went to `seen_us` or to the job's end; run times come from `learnt_from` jobs that have ended;
    `preemptions` is how often the job gets notice, on average.
    """

    at_us: int
    draws: int
    seen_us: int
    learnt_from: int
    start: SpreadView
    end: SpreadView
    preemptions: float


class WhyView(View):
    """Why a job is where it is: one dominant reason, said in `text`; `until_us` is when it ends at the latest.

    `forecast` is there if it was asked for, and the job has not ended; `left_us` is the time until its last step at
    its own pace, where the script said how many there are. `failure` is that of its last attempt.
    """

    job_id: str
    state: str
    reason: str
    text: str
    gpus_needed: int
    gpus_free: int
    blocking: list[str]
    until_us: int | None
    left_us: int | None
    measured: list[ComparisonView]
    estimate_missed: list[str]
    failure: FailureView | None
    forecast: ForecastView | None = None


class NodeView(View):
    """A node.

    `used` names the attempt that holds each GPU; `unavailable` are GPUs with processes that are not Cordee's.
    `cordoned_by` is the operator who took the node out of use; with `drains` its attempts got notice too.
    """

    name: str
    up: bool
    epoch: int
    gpu_name: str
    gpus: int
    used: dict[int, str]
    unavailable: list[int]
    micro_usd_per_gpu_hour: int
    price_source: str
    cordoned_by: str | None = None
    cordon_why: str = ""
    drains: bool = False


class NodeOrder(View):
    """The reason for which an operator takes a node out of use, or back into it."""

    why: Annotated[str, Field(max_length=1000)] = ""


class QueueRules(View):
    """What a queue is to be. `gpu_us_per_day` and `micro_usd_per_day` are of 24 hours, sliding."""

    name: str
    parent: str | None = None
    quota_gpus: int = 0
    limit_gpus: int | None = None
    lend: bool = True
    weight: int = 1
    user_gpus: int | None = None
    gpu_us_per_day: int | None = None
    micro_usd_per_day: int | None = None


class QueueView(QueueRules):
    """A queue as it stands, those inside it counted in.

    GPUs are in thousandths. `lends` is what it leaves of its quota for others; `fair_share_ppb` what it borrowed,
    by its weight, in billionths of the cluster, now and in the past: the least is next.
    """

    depth: int
    held_gpu_milli: int
    borrowed_gpu_milli: int
    lends_gpu_milli: int
    fair_share_ppb: int
    users_gpu_milli: dict[str, int]
    day_gpu_us: int | None
    day_micro_usd: int | None
    running_jobs: int
    waiting_jobs: int
    waiting_gpu_milli: int


class QueuesView(View):
    """The tree of queues, each before those inside it; of a cluster with so many GPUs on nodes that stay."""

    at_us: int
    gpu_milli: int
    queues: list[QueueView]


class QueuesSubmission(View):
    """All queues that there shall be."""

    queues: list[QueueRules]


class SplitView(View):
    """GPU-microseconds or micro-dollars by class; the classes add up to `held` exactly."""

    held: int
    useful: int
    checkpoint: int
    restart: int
    stall: int
    lost: int
    unreported: int


class LostView(View):
    """What was lost for one cause, such as `preempt` or `failure`."""

    cause: str
    gpu_us: int
    micro_usd: int


class CostRowView(View):
    """What one job, user, queue or attempt held. `charged` is what others lost for it.

    `measured` is empty but for a job (its newest attempt) and an attempt.
    """

    key: str
    attempts: int
    gpu_us: SplitView
    micro_usd: SplitView
    lost_by_cause: list[LostView]
    charged_gpu_us: int
    charged_micro_usd: int
    steps: int
    steps_repeated: int
    tokens: int
    micro_usd_per_million_tokens: int | None
    price_sources: list[str]
    measured: list[ComparisonView]


class CostView(View):
    """The bill until `at_us`, by row, and of the whole cluster: capacity = held + idle."""

    by: str
    at_us: int
    rows: list[CostRowView]
    gpu_us: SplitView
    micro_usd: SplitView
    idle_gpu_us: int
    idle_micro_usd: int


class Submission(View):
    """What a client sends to have a job queued; the id is the client's, so that sending it again changes nothing."""

    job_id: str
    spec: dict[str, Any]
    unprotected: bool = False


class VictimView(View):
    """A job that would be preempted, the reason, and its expected loss."""

    job_id: str
    owner: str
    reason: str
    expected_loss_micro_usd: int


class RehearsalView(View):
    """The consequences of submitting a job now; nothing was submitted.

    Attributes:
        starts_now: whether it would be placed at once.
        reason, text, blocking, until_us: as of `WhyView`.
        nodes: where it would be placed: for certain if it starts now, else as in the median draw; empty: not known.
        racks: how many domains these nodes lie in; null where nodes name none.
        victims: the jobs that it would preempt at once.
        micro_usd_per_hour: on those nodes, else on the dearest GPUs that it may get.
        micro_usd_to_limit: if it runs until its limits of time or cost; null without any.
        micro_usd_to_estimate: if it runs as long as its owner expects; null if that was not said.
        estimate: the plan's answer for its model; null if it names none.
        notes: what was assumed.
    """

    gpus: int
    gpu_name: str | None
    tier: str
    queue: str
    starts_now: bool
    reason: str
    text: str
    blocking: list[str]
    until_us: int | None
    nodes: dict[str, list[int]]
    racks: int | None
    victims: list[VictimView]
    micro_usd_per_hour: int
    micro_usd_to_limit: int | None
    micro_usd_to_estimate: int | None
    estimate: Estimate | None
    notes: list[str]
    forecast: ForecastView | None


class Submitted(View):
    """The job was queued. `notes` say what was assumed; the price is that of the dearest GPUs that it may get."""

    job: JobView
    notes: list[str]
    micro_usd_per_hour: int


class ErrorFacts(View):
    """What is wrong: the name of a class in `cordee.errors`, its message, and what to do."""

    kind: str
    message: str
    hint: str | None


class ErrorView(View):
    """What the API answers when it refuses or fails."""

    error: ErrorFacts


def default_home() -> Path:
    """Where the state lives unless somebody says otherwise: CORDEE_HOME, else `~/.cordee`."""
    return Path(os.environ.get("CORDEE_HOME") or "~/.cordee").expanduser()


def as_body(error: CordeeError) -> dict[str, Any]:
    """An error as the API sends it."""
    return {"error": {"kind": type(error).__name__, "message": error.message, "hint": error.hint}}


def from_body(body: Any) -> CordeeError | None:
    """The error that `as_body` was given; None if this is none."""
    told = body.get("error") if isinstance(body, dict) else None
    if not isinstance(told, dict) or "message" not in told:
        return None
    cls = getattr(errors, str(told.get("kind")), None)
    if not (isinstance(cls, type) and issubclass(cls, CordeeError)):
        cls = ServerError
    return cls(str(told["message"]), hint=told.get("hint"))


class Client:
    """A connection to one server. Every method raises `CordeeError`s only."""

    def __init__(self, home: Path | None = None, *, url: str | None = None, token: str | None = None) -> None:
        """Find the server of a home, or talk to the one at `url`, as whom the token belongs to.

        The token is the one that is given, else CORDEE_TOKEN, else the home's own.

        Raises:
            NoServerError: none is announced in the home.
            TokenError: the home's token cannot be read.
        """
        self.home = (home or default_home()).absolute()
        self.url = url or _announced(self.home)
        token = token or os.environ.get("CORDEE_TOKEN") or _token(self.home)
        headers = {"Authorization": f"Bearer {token}"}
        # The server is on this machine: a proxy from the environment would only be in the way, and reading the
        # system's certificates would take longer than most answers.
        tls = self.url.startswith("https:")
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=30, trust_env=tls, verify=tls)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection."""
        self._http.close()

    def health(self) -> HealthView:
        """The server itself."""
        return self._ask(HealthView, "GET", "/v1/health")

    def submit(
        self,
        spec: Mapping[str, Any],
        *,
        unprotected: bool = False,
        job_id: JobId | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> Submitted:
        """Queue a job.

        The secrets that the spec names are copied from `environ` into the home, where the job's agent finds them;
        they are never sent.

        Args:
            spec: a JobSpec as JSON-ready data.
            unprotected: accept that a preemptible job without checkpoints loses everything when it is pushed.
            job_id: an id drawn earlier, to send the same job again after a doubt.
            environ: where secrets are read.

        Raises:
            AdmissionError: the job was refused, and nothing was queued.
            SpecError: a secret is not in the environment.
        """
        job_id = job_id or new_job_id(str(spec.get("name") or "job"), secrets.token_bytes(6))
        sent = Submission(job_id=job_id, spec=dict(spec), unprotected=unprotected)
        self.check_secrets(sent.spec.get("secrets") or (), environ)
        with _secrets_kept(self.home / "secrets", spec.get("secrets") or (), environ):
            return self._ask(Submitted, "POST", "/v1/jobs", json=sent.model_dump(mode="json"))

    def rehearse(self, spec: Mapping[str, Any], *, unprotected: bool = False, draws: int = 0) -> RehearsalView:
        """What submitting a job would do now; nothing is queued. With draws, also when it would start and end.

        Raises:
            AdmissionError: it would be refused.
        """
        job_id = new_job_id(str(spec.get("name") or "job"), secrets.token_bytes(6))
        sent = Submission(job_id=job_id, spec=dict(spec), unprotected=unprotected)
        body = sent.model_dump(mode="json")
        return self._ask(RehearsalView, "POST", "/v1/rehearse", json=body, params={"draws": draws})

    @staticmethod
    def check_secrets(names: Iterable[str], environ: Mapping[str, str]) -> None:
        """Raise SpecError if a secret is not in the environment."""
        for name in names:
            if name not in environ:
                raise SpecError(
                    f"the secret {name} is not in the environment",
                    hint=f"export {name} before you submit, or take it out of `secrets`",
                )

    def jobs(self) -> list[JobView]:
        """Every job, newest first."""
        return self._ask(list[JobView], "GET", "/v1/jobs")

    def job(self, job_id: str) -> JobDetailView:
        """One job, by its id or by a name that only one job has."""
        return self._ask(JobDetailView, "GET", f"/v1/jobs/{job_id}")

    def stop(self, job_id: str, *, now: bool = False) -> JobView:
        """Ask a job to end after a checkpoint, or `now`."""
        return self._ask(JobView, "POST", f"/v1/jobs/{job_id}/stop", params={"now": now})

    def why(self, job_id: str, *, draws: int = 0) -> WhyView:
        """Why a job is where it is; with draws, also when it starts and ends."""
        return self._ask(WhyView, "GET", f"/v1/jobs/{job_id}/why", params={"draws": draws})

    def logs(
        self,
        job_id: str,
        *,
        epoch: int | None = None,
        rank: int | None = None,
        tail: int | None = None,
        follow: bool = False,
    ) -> Iterator[str]:
        """Lines that the ranks wrote in one attempt, the newest by default; with `follow`, from it to the job's end."""
        asked = {"epoch": epoch, "rank": rank, "tail": tail, "follow": follow}
        params = {name: value for name, value in asked.items() if value is not None}
        with self._stream(f"/v1/jobs/{job_id}/logs", params) as lines:
            yield from lines

    def nodes(self) -> list[NodeView]:
        """Every node that was ever up."""
        return self._ask(list[NodeView], "GET", "/v1/nodes")

    def cordon(self, node: str, *, why: str = "") -> NodeView:
        """Place nothing new on a node; attempts that run there go on."""
        return self._order_node(node, "cordon", why)

    def drain(self, node: str, *, why: str = "") -> NodeView:
        """Cordon a node and give its attempts notice: they save, leave, and start again elsewhere."""
        return self._order_node(node, "drain", why)

    def uncordon(self, node: str, *, why: str = "") -> NodeView:
        """Put a node back into use."""
        return self._order_node(node, "uncordon", why)

    def _order_node(self, node: str, order: str, why: str) -> NodeView:
        return self._ask(NodeView, "POST", f"/v1/nodes/{quote(node, safe='')}/{order}", json={"why": why})

    def queues(self) -> QueuesView:
        """The tree of queues: who holds, borrows, lends and waits."""
        return self._ask(QueuesView, "GET", "/v1/queues")

    def set_queues(self, queues: Iterable[Queue]) -> QueuesView:
        """From now on these queues, and no others.

        Raises:
            QueuesError: they cannot be; nothing has changed.
        """
        sent = QueuesSubmission(queues=[QueueRules(**asdict(queue)) for queue in queues])
        return self._ask(QueuesView, "PUT", "/v1/queues", json=sent.model_dump(mode="json"))

    def cost(self, by: str = "job") -> CostView:
        """What was held and paid, by `job`, `user`, `queue` or `epoch`."""
        return self._ask(CostView, "GET", "/v1/cost", params={"by": by})

    def events(self, after: int = 0, *, follow: bool = False) -> Iterator[tuple[int, Event]]:
        """The log after a number; with `follow`, as it grows."""
        with self._stream("/v1/events", {"after": after, "follow": follow}) as lines:
            number = 0
            for line in lines:
                field, _, value = line.partition(": ")
                if field == "id":
                    number = int(value)
                elif field == "data":
                    yield number, decode(json.loads(value))

    def down(self) -> HealthView:
        """Ask the server to checkpoint and requeue every job and then to end. It answers at once."""
        return self._ask(HealthView, "POST", "/v1/down")

    def _ask(self, shape: type[T], method: str, path: str, **kwargs: Any) -> T:
        with _transport(self.url):
            answer = self._http.request(method, path, **kwargs)
        if answer.is_error:
            raise _error(answer)
        return TypeAdapter(shape).validate_json(answer.content)

    @contextmanager
    def _stream(self, path: str, params: Mapping[str, Any]) -> Iterator[Iterator[str]]:
        with _transport(self.url), self._http.stream("GET", path, params=dict(params), timeout=None) as answer:
            if answer.is_error:
                answer.read()
                raise _error(answer)
            yield answer.iter_lines()


@contextmanager
def _transport(url: str) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise NoServerError(
            f"no server answers at {url}: {error or type(error).__name__}", hint="start one with `cordee up`"
        ) from error


def _error(answer: httpx.Response) -> CordeeError:
    try:
        told = from_body(answer.json())
    except ValueError:
        told = None
    return told or ServerError(f"the server answered {answer.status_code} to {answer.request.url.path}")


def _announced(home: Path) -> str:
    try:
        url = json.loads((home / "server.json").read_text()).get("url")
    except FileNotFoundError:
        raise NoServerError(f"no server runs on {home}", hint="start one with `cordee up`") from None
    except (OSError, ValueError, AttributeError) as error:
        raise NoServerError(f"{home / 'server.json'} cannot be read: {error}", hint="start a server again") from error
    if url is None:
        raise NoServerError(f"the server on {home} is starting and takes no jobs yet", hint="ask again in a moment")
    return str(url)


def _token(home: Path) -> str:
    try:
        return (home / "token").read_text().strip()
    except OSError as error:
        raise TokenError(
            f"the token {home / 'token'} cannot be read: {error.strerror}", hint="it belongs to who started the server"
        ) from error


@contextmanager
def _secrets_kept(folder: Path, names: Any, environ: Mapping[str, str]) -> Iterator[None]:
    """Write the named secrets for the agent; if the job is refused, the folder is as it was before."""
    before = {name: (folder / name).read_bytes() if (folder / name).exists() else None for name in names}
    for name in names:
        _write_private(folder / name, environ[name].encode())
    try:
        yield
    except CordeeError:
        for name, old in before.items():
            if old is None:
                (folder / name).unlink(missing_ok=True)
            else:
                _write_private(folder / name, old)
        raise


def _write_private(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
    new.replace(path)
