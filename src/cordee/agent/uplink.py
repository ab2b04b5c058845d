"""Requests of a transfer thread to the servers that agent.json names: what is too large for the link."""

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from cordee.agent.settings import AgentSettings
from cordee.errors import CordeeError, InputError, from_body
from cordee.servers import check_private
from cordee.tls import client_context

if TYPE_CHECKING:
    import httpx

_TIMEOUT_S = 30.0
_CONFLICT, _SERVERS_OWN = 409, 500
_TOKENS = (401, 403)  # agent.json is read again, since another token may come


class UplinkError(Exception):
    """A request was not carried out.

    Attributes:
        again: whether it may be, later.
    """

    def __init__(self, why: str, *, again: bool) -> None:
        super().__init__(why)
        self.again = again


class Uplink:
    """The servers of one agent's folder. An instance is used on one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._client: httpx.Client | None = None  # of the server that answered last
        self._path = ""

    def put_log(self, job_id: str, epoch: int, name: str, start: int, part: bytes) -> int:
        """Send a part of a log that begins at `start`; return where the next part begins, in any case.

        Raises:
            UplinkError: the server has not stored it.
        """
        headers = {"Content-Range": f"bytes {start}-{start + len(part) - 1}/*"}
        answer = self._request("PUT", f"logs/{quote(job_id)}/{epoch}/{name}", content=part, headers=headers)
        return int(answer.json()["size_bytes"])

    def files(self, job_id: str, epoch: int, digests: list[str]) -> bytes:
        """Return a pack of submitted files of an attempt.

        Raises:
            UplinkError: there is none.
        """
        body = {"job_id": job_id, "epoch": epoch, "digests": digests}
        return self._request("POST", "files", json=body).content

    def artifacts(self, job_id: str, epoch: int, kind: str, digests: list[str]) -> bytes:
        """Return a pack of `chunks` or `manifests` of the artifacts that an attempt reads.

        Raises:
            UplinkError: there is none.
        """
        body = {"job_id": job_id, "epoch": epoch, "kind": kind, "digests": digests}
        return self._request("POST", "artifacts", json=body).content

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()
        self._client = None

    def _request(self, method: str, path: str, **content: object) -> "httpx.Response":
        """Ask the server that answered last, then each known server in turn."""
        import httpx

        reasons = []
        if self._client is not None:
            try:
                return self._answer(self._client, method, path, content)
            except (httpx.HTTPError, CordeeError, UplinkError) as error:
                if isinstance(error, UplinkError) and not error.again:
                    raise
                self.close()
        try:
            settings = AgentSettings.read(self._folder)
            urls = settings.urls()
        except InputError as error:
            raise UplinkError(error.message, again=True) from error
        self._path = f"/v1/agents/{quote(settings.node)}"
        headers = {"Authorization": f"Bearer {settings.token}"}
        for url in urls:
            tls = url.startswith("https:")
            verify = client_context(settings.fingerprint) if tls else False
            client = httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S, trust_env=tls, verify=verify)
            try:
                check_private(url)
                answer = self._answer(client, method, path, content)
            except (httpx.HTTPError, CordeeError, UplinkError) as error:
                client.close()
                if isinstance(error, UplinkError) and not error.again:
                    raise
                reasons.append(f"{url}: {error or type(error).__name__}")
            else:
                self._client = client
                return answer
        raise UplinkError(", ".join(reasons) or "no server runs", again=True)

    def _answer(self, client: "httpx.Client", method: str, path: str, content: dict[str, object]) -> "httpx.Response":
        answer = client.request(method, f"{self._path}/{path}", **content)  # type: ignore[arg-type]
        if answer.is_success or answer.status_code == _CONFLICT:
            return answer
        try:
            error = from_body(answer.json())
        except ValueError:
            error = None
        why = error.message if error is not None else f"HTTP {answer.status_code}"
        raise UplinkError(why, again=answer.status_code >= _SERVERS_OWN or answer.status_code in _TOKENS)
