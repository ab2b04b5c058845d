"""The Python client of the HTTP API; `answers.py` defines its answers.

`Client()` finds the server of a home, and raises the server's errors as the same classes of `cordee.errors`.
"""

import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from pydantic import TypeAdapter

from cordee.answers import (
    CostView,
    HealthView,
    JobDetailView,
    JobView,
    NodeView,
    QueueRules,
    QueuesSubmission,
    QueuesView,
    RehearsalView,
    Submission,
    Submitted,
    WhyView,
)
from cordee.errors import CordeeError, NoServerError, ServerError, SpecError, TokenError, find_error
from cordee.event_json import decode
from cordee.events import Event, Queue
from cordee.ids import JobId
from cordee.ids import job_id as new_job_id

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")


def default_home() -> Path:
    """Return the default home: CORDEE_HOME, else `~/.cordee`."""
    return Path(os.environ.get("CORDEE_HOME") or "~/.cordee").expanduser()


def as_body(error: CordeeError) -> dict[str, Any]:
    """Return an error as the API sends it."""
    return {"error": {"kind": type(error).__name__, "message": error.message, "hint": error.hint}}


def from_body(body: Any) -> CordeeError | None:
    """Return the error in a body that `as_body` made; None if the body has no error."""
    found = body.get("error") if isinstance(body, dict) else None
    if not isinstance(found, dict) or "message" not in found:
        return None
    return find_error(str(found.get("kind")))(str(found["message"]), hint=found.get("hint"))


class Client:
    """A connection to one server. Its methods raise only subclasses of `CordeeError`."""

    def __init__(self, home: Path | None = None, *, url: str | None = None, token: str | None = None) -> None:
        """Connect to the server of a home, or to the one at `url`.

        The token identifies the user: `token`, else CORDEE_TOKEN, else the home's own token.

        Raises:
            NoServerError: no server runs for the home.
            TokenError: the home's token cannot be read.
        """
        import httpx

        self.home = (home or default_home()).absolute()
        self.url = url or _announced(self.home)
        token = token or os.environ.get("CORDEE_TOKEN") or _token(self.home)
        headers = {"Authorization": f"Bearer {token}"}
        # Without TLS the server is on this machine: no proxy from the environment is wanted, and loading the system's
        # certificates would take longer than most requests.
        tls = self.url.startswith("https:")
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=30, trust_env=tls, verify=tls)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def health(self) -> HealthView:
        """Describe the server itself."""
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
            unprotected: accept that a preemptible job without checkpoints loses everything when it is preempted.
            job_id: an id made earlier, to send the same job again if it is not known whether it arrived.
            environ: the environment from which secrets are read.

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
        """Return the consequences of submitting a job now; with draws, also forecast its start and end. Queue nothing.

        Raises:
            AdmissionError: the job would be refused.
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
        """Return every job, newest first."""
        return self._ask(list[JobView], "GET", "/v1/jobs")

    def job(self, job_id: str) -> JobDetailView:
        """Return one job, by its id or by a name that only one job has."""
        return self._ask(JobDetailView, "GET", f"/v1/jobs/{job_id}")

    def stop(self, job_id: str, *, now: bool = False) -> JobView:
        """Ask a job to end after a checkpoint, or `now`."""
        return self._ask(JobView, "POST", f"/v1/jobs/{job_id}/stop", params={"now": now})

    def why(self, job_id: str, *, draws: int = 0) -> WhyView:
        """Explain the state of a job; with draws, also forecast when it starts and ends."""
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
        """Yield the output of one attempt, by default the newest; with `follow`, from it to the job's end."""
        asked = {"epoch": epoch, "rank": rank, "tail": tail, "follow": follow}
        params = {name: value for name, value in asked.items() if value is not None}
        with self._stream(f"/v1/jobs/{job_id}/logs", params) as lines:
            yield from lines

    def nodes(self) -> list[NodeView]:
        """Return every node that was ever up."""
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
        """Return the tree of queues: held, borrowed, lent, waiting."""
        return self._ask(QueuesView, "GET", "/v1/queues")

    def set_queues(self, queues: Iterable[Queue]) -> QueuesView:
        """Replace the tree of queues.

        Raises:
            QueuesError: they break a rule; nothing has changed.
        """
        sent = QueuesSubmission(queues=[QueueRules(**asdict(queue)) for queue in queues])
        return self._ask(QueuesView, "PUT", "/v1/queues", json=sent.model_dump(mode="json"))

    def cost(self, by: str = "job") -> CostView:
        """Return GPU time and cost by `job`, `user`, `queue` or `epoch`."""
        return self._ask(CostView, "GET", "/v1/cost", params={"by": by})

    def events(self, after: int = 0, *, follow: bool = False) -> Iterator[tuple[int, Event]]:
        """Yield the log after a number; with `follow`, as it grows."""
        with self._stream("/v1/events", {"after": after, "follow": follow}) as lines:
            number = 0
            for line in lines:
                field, _, value = line.partition(": ")
                if field == "id":
                    number = int(value)
                elif field == "data":
                    yield number, decode(json.loads(value))

    def down(self) -> HealthView:
        """Ask the server to checkpoint and requeue every job, and then to end; return at once."""
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
    import httpx

    try:
        yield
    except httpx.HTTPError as error:
        raise NoServerError(
            f"no server answers at {url}: {error or type(error).__name__}", hint="start one with `cordee up`"
        ) from error


def _error(answer: "httpx.Response") -> CordeeError:
    try:
        found = from_body(answer.json())
    except ValueError:
        found = None
    return found or ServerError(f"the server answered {answer.status_code} to {answer.request.url.path}")


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
            f"the token {home / 'token'} cannot be read: {error.strerror}",
            hint="it belongs to the user who started the server",
        ) from error


@contextmanager
def _secrets_kept(folder: Path, names: Any, environ: Mapping[str, str]) -> Iterator[None]:
    """Write the named secrets for the agent; restore the folder if the job is refused."""
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
