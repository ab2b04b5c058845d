"""Notices of the cloud about this machine, from its metadata service: AWS, Google Cloud and Azure.

One process of a machine asks, on its own thread, and acts on the answer: the agent, or the first rank of a node
without one.

Sources, read in November 2026:
- AWS: docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html (404 until an interruption is
  announced, 2 minutes before; ask every 5 s), rebalance-recommendations.html, instance-metadata-v2-how-it-works.html.
- Google: cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption, .../compute/docs/instances/spot
  (30 s), .../docs/metadata/querying-metadata#waitforchange, .../docs/metadata/getting-live-migration-notice.
- Labels of the machine: AWS `instance-life-cycle`, `placement/partition-number` (instancedata-data-categories.html);
  Google `scheduling/preemptible`, `attributes/physical_host`; Azure `compute/priority`.
- Azure: learn.microsoft.com/azure/virtual-machines/linux/scheduled-events (version 2020-07-01, ask every second, a
  preemption at least 30 s before, the first answer after up to 2 minutes).
"""

import http.client
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from cordee.errors import InputError
from cordee.units import US_PER_S

log = logging.getLogger("cordee")

METADATA_URL = "http://169.254.169.254"
DMI = Path("/sys/class/dmi/id")
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
_CONNECT_S, _READ_S = 1.0, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """The cloud takes this machine back at `deadline_us`, in microseconds since the Unix epoch."""

    why: str
    deadline_us: int

    def left_s(self) -> float:
        """Return the seconds until the deadline."""
        return max(0.0, self.deadline_us / US_PER_S - time.time())


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A warning that the machine may go: a reason to save now, not to leave."""

    why: str


Announcement = Reclaim | Hint


@dataclass(frozen=True, slots=True)
class MetadataAnswer:
    """An answer of the metadata service."""

    status: int
    text: str
    etag: str

    def good(self) -> "MetadataAnswer":
        """Return this answer.

        Raises:
            ValueError: its status is not 200.
        """
        if self.status != 200:
            raise ValueError(f"it answers {self.status}")
        return self


class Http:
    """A client for one address, with a new connection for each request.

    It uses no proxy, which would answer for its own machine, and the standard library, since other clients log each
    request.
    """

    def __init__(self, url: str, patience_s: float = _READ_S) -> None:
        where = urlsplit(url)
        if where.scheme != "http" or not where.hostname:
            raise InputError(f"CORDEE_CLOUD_URL={url} cannot be asked", hint="it is of the form http://host:port")
        self._host, self._port, self.url = where.hostname, where.port or 80, url
        self.patience_s = patience_s

    def ask(
        self,
        path: str,
        headers: Mapping[str, str],
        params: Mapping[str, str] | None = None,
        *,
        method: str = "GET",
        more_s: float = 0.0,
    ) -> MetadataAnswer:
        """Send one request; the service may take `more_s` seconds longer than usual.

        Raises:
            OSError: the service does not answer.
            http.client.HTTPException: the answer is not HTTP.
        """
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(self.patience_s + more_s)
            connection.request(method, f"{path}?{urlencode(params)}" if params else path, headers=dict(headers))
            answer = connection.getresponse()
            return MetadataAnswer(answer.status, answer.read().decode(errors="replace"), answer.headers.get("ETag", ""))
        finally:
            connection.close()


class Cloud:
    """One cloud's metadata service.

    Attributes:
        every_s: time between two looks.
        patience_s: longest wait for the first answer.
    """

    name = ""
    every_s = 5.0
    patience_s = _READ_S

    def labels(self, service: Http) -> dict[str, str]:
        """Return capacity, block and rack of this machine, as far as the service states them; raise as `look` does."""
        raise NotImplementedError

    def look(self, service: Http) -> list[Announcement]:
        """Return all current announcements.

        Raises:
            OSError: the service does not answer.
            http.client.HTTPException: the answer is not HTTP.
            ValueError, LookupError, TypeError: the answer cannot be read.
        """
        raise NotImplementedError


class Aws(Cloud):
    """Instance metadata service, version 2: each request carries a token from a PUT."""

    name = "aws"
    _TOKEN_S = 21_600

    def __init__(self) -> None:
        self._token = ""

    def labels(self, service: Http) -> dict[str, str]:
        """Return the capacity; a rack is not stated, a partition of a placement group stands for one."""
        spot = self._ask(service, "/latest/meta-data/instance-life-cycle").good().text.strip() == "spot"
        group, partition = (
            self._ask(service, f"/latest/meta-data/placement/{key}") for key in ("group-name", "partition-number")
        )
        found = {"capacity": "spot" if spot else "on-demand"}
        if partition.status == 200 and group.status == 200:
            found["rack"] = f"{group.text.strip()}-{partition.text.strip()}"
        return found

    def look(self, service: Http) -> list[Announcement]:
        """Return a spot interruption, or the advice to rebalance."""
        found: list[Announcement] = []
        if answer := self._get(service, "/latest/meta-data/spot/instance-action"):
            at = datetime.fromisoformat(answer["time"])
            found.append(Reclaim(why=f"spot interruption ({answer['action']})", deadline_us=_us(at)))
        if answer := self._get(service, "/latest/meta-data/events/recommendations/rebalance"):
            found.append(Hint(why=f"rebalance recommendation of {answer['noticeTime']}"))
        return found

    def _ask(self, service: Http, path: str) -> MetadataAnswer:
        answer = service.ask(path, {"X-aws-ec2-metadata-token": self._token}) if self._token else None
        if answer is None or answer.status == 401:  # none yet, or too old
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._TOKEN_S)}
            self._token = service.ask("/latest/api/token", ttl, method="PUT").good().text
            answer = service.ask(path, {"X-aws-ec2-metadata-token": self._token})
        return answer

    def _get(self, service: Http, path: str) -> dict[str, Any] | None:
        answer = self._ask(service, path)
        if answer.status == 404:
            return None
        body = json.loads(answer.good().text)
        if not isinstance(body, dict):
            raise ValueError(f"{path} is {body!r}")
        return body


class Gcp(Cloud):
    """Google's metadata server; a request waits there until the value changes, so that no change is seen late."""

    name = "gcp"
    every_s = 1.0  # and the time that the server waits

    def __init__(self, notice_s: float = 30.0, wait_s: int = 10) -> None:
        self._notice_s, self._wait_s = notice_s, wait_s
        self._etag = ""
        self._deadline_us: int | None = None

    def labels(self, service: Http) -> dict[str, str]:
        """Return the capacity, and where the machine is placed compactly its cluster as block and its rack."""
        mine = {"Metadata-Flavor": "Google"}
        spot = service.ask("/computeMetadata/v1/instance/scheduling/preemptible", mine).good().text.strip().upper()
        found = {"capacity": "spot" if spot == "TRUE" else "on-demand"}
        host = service.ask("/computeMetadata/v1/instance/attributes/physical_host", mine)
        parts = host.text.strip().strip("/").split("/") if host.status == 200 else []
        return {**found, "block": parts[0], "rack": parts[1]} if len(parts) == 3 and all(parts) else found

    def look(self, service: Http) -> list[Announcement]:
        """Return a preemption, or maintenance that ends the machine; Google gives no time for either."""
        wait = (
            {"wait_for_change": "true", "timeout_sec": str(self._wait_s), "last_etag": self._etag} if self._etag else {}
        )
        if self._get(service, "preempted", wait) == "TRUE":
            if self._deadline_us is None:
                self._deadline_us = time.time_ns() // 1000 + round(self._notice_s * US_PER_S)
            return [Reclaim(why="preempted", deadline_us=self._deadline_us)]
        self._deadline_us = None
        # Google announces maintenance beforehand only to machines that ask.
        event = self._get(service, "maintenance-event", {})
        return [Hint(why="maintenance will end this machine")] if event == "TERMINATE_ON_HOST_MAINTENANCE" else []

    def _get(self, service: Http, key: str, params: Mapping[str, str]) -> str:
        path, more_s = f"/computeMetadata/v1/instance/{key}", self._wait_s if params else 0.0
        answer = service.ask(path, {"Metadata-Flavor": "Google"}, params, more_s=more_s).good()
        if key == "preempted":
            self._etag = answer.etag
        return answer.text.strip().upper()


class Azure(Cloud):
    """Scheduled Events, of this machine and of others in its set: `Resources` names them."""

    name = "azure"
    every_s = 1.0
    patience_s = 130.0

    def __init__(self) -> None:
        self._me = ""

    def labels(self, service: Http) -> dict[str, str]:
        """Return the capacity; Azure states no rack."""
        text = {"api-version": "2021-02-01", "format": "text"}
        priority = service.ask("/metadata/instance/compute/priority", {"Metadata": "true"}, text).good().text.strip()
        return {"capacity": "spot" if priority.lower() == "spot" else "on-demand"}

    def look(self, service: Http) -> list[Announcement]:
        """Return preemptions and deletions, which end the work, and reboots, announced 10 minutes before."""
        mine = {"Metadata": "true"}
        if not self._me:
            name = {"api-version": "2021-02-01", "format": "text"}
            self._me = service.ask("/metadata/instance/compute/name", mine, name).good().text.strip().lower()
        found: list[Announcement] = []
        answer = service.ask("/metadata/scheduledevents", mine, {"api-version": "2020-07-01"}).good()
        for event in json.loads(answer.text)["Events"]:
            if self._me not in [resource.lower() for resource in event["Resources"]]:
                continue
            kind, text = event["EventType"], event.get("NotBefore")
            at = parsedate_to_datetime(text) if text else datetime.now(UTC)  # blank once it has started
            if kind in ("Preempt", "Terminate"):
                found.append(Reclaim(why=kind.lower(), deadline_us=_us(at)))
            elif kind in ("Reboot", "Redeploy"):
                found.append(Hint(why=f"{kind.lower()} not before {text or 'now'}"))
        return found


CLOUDS: dict[str, type[Cloud]] = {cloud.name: cloud for cloud in (Aws, Gcp, Azure)}


def detect(dmi: Path = DMI) -> str | None:
    """Return the cloud that this machine's firmware names, without using the network."""

    def field(name: str) -> str:
        try:
            return (dmi / name).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return ""

    if field("sys_vendor") == "Amazon EC2" or field("bios_version").endswith(".amazon"):
        return Aws.name
    if field("product_name") == "Google Compute Engine":
        return Gcp.name
    return Azure.name if field("chassis_asset_tag") == _AZURE_TAG else None


def cloud_here(env: Mapping[str, str] | None = None, dmi: Path = DMI) -> Cloud | None:
    """Return the cloud to ask: CORDEE_CLOUD if it is set (`none`: no cloud), else the one that `detect` finds.

    Raises:
        InputError: there is no such cloud, or one of its variables cannot be read.
    """
    env = os.environ if env is None else env
    cloud = env.get("CORDEE_CLOUD") or detect(dmi)
    if cloud is None or cloud == "none":
        return None
    if cloud not in CLOUDS:
        raise InputError(f"CORDEE_CLOUD={cloud} is not known", hint=f"it may be {', '.join(CLOUDS)} or none")
    Http(env.get("CORDEE_CLOUD_URL") or METADATA_URL)  # raises here, not on another thread
    notice = env.get("CORDEE_CLOUD_NOTICE_S")
    if cloud == Gcp.name and notice:
        try:
            return Gcp(float(notice))
        except ValueError:
            raise InputError(
                f"CORDEE_CLOUD_NOTICE_S={notice} is not a number", hint="it is in seconds, without a unit"
            ) from None
    return CLOUDS[cloud]()


class CloudWatch:
    """A daemon thread that looks for announcements until it is closed, and passes each on once.

    Args:
        on_reclaim: called on that thread, and again if the deadline changes.
        on_withdrawn: called when the service no longer announces the reclaim.
        on_labels: called once, with the labels of this machine; None: they are not asked for.
    """

    def __init__(
        self,
        cloud: Cloud,
        *,
        on_reclaim: Callable[[Reclaim], None],
        on_hint: Callable[[Hint], None] = lambda hint: None,
        on_withdrawn: Callable[[Reclaim], None] = lambda reclaim: None,
        on_labels: Callable[[dict[str, str]], None] | None = None,
        url: str | None = None,
    ) -> None:
        self._cloud = cloud
        self._service = Http(url or os.environ.get("CORDEE_CLOUD_URL") or METADATA_URL, cloud.patience_s)
        self._on_reclaim, self._on_hint, self._on_withdrawn = on_reclaim, on_hint, on_withdrawn
        self._on_labels = on_labels
        self._ended = threading.Event()
        self._reclaim: Reclaim | None = None
        self._hinted: set[Hint] = set()
        self._answered: bool | None = None
        self._thread = threading.Thread(target=self._run, name="cordee-cloud", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 0.0) -> None:
        """Stop looking; wait for a request under way for `timeout_s` at most."""
        self._ended.set()
        if timeout_s:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                found = self._cloud.look(self._service)
            except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
                self._note(error)
            else:
                self._note(None)
                self._pass_on(found)
                self._service.patience_s = _READ_S
                self._pass_labels_on()
            self._ended.wait(self._cloud.every_s)

    def _pass_labels_on(self) -> None:
        on_labels, self._on_labels = self._on_labels, None
        if on_labels is None:
            return
        try:
            on_labels(self._cloud.labels(self._service))
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            log.warning("%s does not say where this machine stands: %s", self._cloud.name, error)

    def _note(self, error: Exception | None) -> None:
        answered = error is None
        if answered == self._answered or self._ended.is_set():
            return
        self._answered = answered
        if answered:
            log.info("%s announces reclaims of this machine at %s", self._cloud.name, self._service.url)
        else:
            boxed = self._cloud.name == Aws.name and isinstance(error, TimeoutError)
            hint = " (in a container? give it the host's network, or AWS a hop limit of 2)" if boxed else ""
            log.warning("%s cannot be asked about reclaims of this machine: %s%s", self._cloud.name, error, hint)

    def _pass_on(self, found: list[Announcement]) -> None:
        reclaims = [each for each in found if isinstance(each, Reclaim)]
        soonest = min(reclaims, key=lambda each: (each.deadline_us, each.why), default=None)
        before, self._reclaim = self._reclaim, soonest
        if soonest is not None and soonest != before:
            self._on_reclaim(soonest)
        elif soonest is None and before is not None:
            self._on_withdrawn(before)
        for hint in found:
            if isinstance(hint, Hint) and hint not in self._hinted:
                self._hinted.add(hint)
                self._on_hint(hint)


def _us(at: datetime) -> int:
    return round(at.timestamp() * US_PER_S)
