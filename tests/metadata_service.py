"""A stand-in for the metadata services of AWS, Google and Azure: a real HTTP server that speaks what they document.

It is not theirs: what is tested against it is our reading of their pages, which `cordee/telemetry/cloud.py` names.
Set the attributes to have something announced; whoever waits at `preempted` learns of it at once, as with Google.
"""

import hashlib
import json
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class MetadataService:
    """Serves until closed.

    Attributes:
        action, rebalance: AWS; None answers 404.
        preempted, maintenance: Google.
        events, name: Azure.
        life_cycle, group, partition; preemptible, physical_host; priority: the machine, in each cloud's words.
        status: answer everything with this, if it is set.
        asked: the paths, in order.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.action: dict[str, str] | None = None
        self.rebalance: dict[str, str] | None = None
        self.preempted, self.maintenance = "FALSE", "NONE"
        self.events: list[dict[str, Any]] = []
        self.name = "trainer_3"
        self.life_cycle, self.preemptible, self.priority = "on-demand", "FALSE", "Regular"
        self.group: str | None = None
        self.partition: str | None = None
        self.physical_host: str | None = None
        self.status: int | None = None
        self.tokens: set[str] = set()
        self.asked: list[str] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    def set(self, **values: Any) -> None:
        with self.changed:
            for name, value in values.items():
                setattr(self, name, value)
            self.changed.notify_all()

    def interrupt(self, in_s: float, action: str = "terminate") -> None:
        """AWS takes the machine: the time is a whole second, as theirs is."""
        self.set(action={"action": action, "time": (_now(in_s)).strftime("%Y-%m-%dT%H:%M:%SZ")})

    def schedule(self, kind: str, in_s: float | None, *resources: str) -> None:
        """Azure; without a time the event has started, and NotBefore is blank."""
        when = "" if in_s is None else format_datetime(_now(in_s), usegmt=True)
        event = {
            "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": list(resources or (self.name,)),
            "EventStatus": "Started" if in_s is None else "Scheduled",
            "NotBefore": when,
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }
        self.set(events=[*self.events, event])

    def until_asked(self, path: str, times: int = 1, *, since: int | None = None) -> None:
        """Return when it was asked for so often from now on, or after the first `since` requests."""
        with self.changed:
            first = len(self.asked) if since is None else since
            asked = self.changed.wait_for(lambda: self.asked[first:].count(path) >= times, 30)
            assert asked, f"{path} was not asked for"

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    # -- the three protocols -------------------------------------------------------------------------------

    def answer(self, method: str, path: str, query: dict[str, str], headers: Any) -> tuple[int, str, dict[str, str]]:
        if self.status is not None:
            return self.status, "", {}
        if path.startswith("/latest/"):
            return (*self._aws(method, path, headers), {})
        if path.startswith("/computeMetadata/v1/instance/"):
            return self._gcp(path.rsplit("/", 1)[1], query, headers)
        return (*self._azure(path, query, headers), {})

    def _aws(self, method: str, path: str, headers: Any) -> tuple[int, str]:
        if path == "/latest/api/token":
            ttl = int(headers.get("X-aws-ec2-metadata-token-ttl-seconds", 0))
            if method != "PUT" or not 1 <= ttl <= 21_600:
                return 400, ""
            token = f"token-{len(self.asked)}=="
            self.tokens.add(token)
            return 200, token
        if headers.get("X-aws-ec2-metadata-token") not in self.tokens:
            return 401, ""
        paths = {"spot/instance-action": self.action, "events/recommendations/rebalance": self.rebalance}
        key = path.removeprefix("/latest/meta-data/")
        texts = {
            "instance-life-cycle": self.life_cycle,
            "placement/group-name": self.group,
            "placement/partition-number": self.partition,
        }
        if texts.get(key) is not None:
            return 200, str(texts[key])
        found = paths.get(key)
        return (404, "<html>404 - Not Found</html>") if found is None else (200, json.dumps(found))

    def _gcp(self, key: str, query: dict[str, str], headers: Any) -> tuple[int, str, dict[str, str]]:
        if headers.get("Metadata-Flavor") != "Google":
            return 403, "", {}
        if key == "physical_host" and self.physical_host is None:
            return 404, "", {}
        name = {"maintenance-event": "maintenance"}.get(key, key)

        def etag() -> str:
            return hashlib.sha256(getattr(self, name).encode()).hexdigest()[:16]

        if query.get("wait_for_change") == "true":
            with self.changed:
                last, patience_s = query.get("last_etag") or etag(), float(query.get("timeout_sec", "3600"))
                self.changed.wait_for(lambda: etag() != last, patience_s)
        return 200, getattr(self, name), {"ETag": etag(), "Metadata-Flavor": "Google"}

    def _azure(self, path: str, query: dict[str, str], headers: Any) -> tuple[int, str]:
        if headers.get("Metadata") != "true":
            return 400, "Bad Request"
        if path == "/metadata/instance/compute/name" and query.get("format") == "text" and "api-version" in query:
            return 200, self.name
        if path == "/metadata/instance/compute/priority" and query.get("format") == "text":
            return 200, self.priority
        if path == "/metadata/scheduledevents" and query.get("api-version") == "2020-07-01":
            return 200, json.dumps({"DocumentIncarnation": len(self.events), "Events": self.events})
        return 404, ""


def _handler(service: MetadataService) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            where = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(where.query).items()}
            status, body, headers = service.answer(self.command, where.path, query, self.headers)
            with service.changed:
                service.asked.append(where.path)
                service.changed.notify_all()
            try:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())
            except OSError:
                self.close_connection = True  # whoever asked has gone

        do_PUT = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


def _now(in_s: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=in_s)
