"""Traces of submissions: from the client over the server and the agent to the rank, at a real OTLP receiver."""

import json
import queue
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from api_scene import TOKEN
from web_world import HOUR, S, Team

from cordee import tracing
from cordee.client import Client
from cordee.control.spans import OtelSpans
from cordee.control.spawn import start_server

collector = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="OpenTelemetry's exporter is not installed"
)
WAIT_S = 60.0


@dataclass(slots=True)
class Receiver:
    """A receiver of OTLP over HTTP. `spans` are those that came, by name."""

    url: str
    arrived: "queue.Queue[Any]" = field(default_factory=queue.Queue)
    spans: dict[str, Any] = field(default_factory=dict)

    def wait(self, *names: str) -> None:
        while not set(names) <= self.spans.keys():
            found = self.arrived.get(timeout=WAIT_S)
            self.spans[found.name] = found


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = collector.ExportTraceServiceRequest()
            sent.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            for resource in sent.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        received.arrived.put(span)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received = Receiver(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    tracing._tracer.cache_clear()
    yield received
    tracing._tracer.cache_clear()
    server.shutdown()
    server.server_close()


def in_ids(span: Any) -> tuple[str, str]:
    return span.trace_id.hex(), span.parent_span_id.hex()


def test_one_trace_from_the_client_to_the_rank(tmp_path: Path, receiver: Receiver) -> None:
    home = tmp_path / "home"
    start_server(home, slots="1")
    with Client(home) as client:
        spec = {"name": "hello", "run": ["sh", "-c", "echo $TRACEPARENT"], "gpus": 1}
        job_id = client.submit(spec).job.job_id
        said = re.search(r"00-([0-9a-f]{32})-([0-9a-f]{16})-0", "".join(client.logs(job_id, follow=True)))
        receiver.wait("cordee submit", "submitted", "queued", "start of ranks", "attempt")
        client.down()
    spans = receiver.spans
    root = spans["cordee submit"]
    assert said is not None and said.groups() == (root.trace_id.hex(), root.span_id.hex())
    for name in ("submitted", "queued", "start of ranks", "attempt"):
        assert in_ids(spans[name]) == (root.trace_id.hex(), root.span_id.hex()), name
        assert {each.key: each.value.string_value for each in spans[name].attributes}["cordee.job"] == job_id
    assert spans["queued"].end_time_unix_nano == spans["start of ranks"].start_time_unix_nano
    lines = map(json.loads, (home / "server.log").read_text().splitlines())
    [logged] = [line for line in lines if line["event"] == "a job was submitted"]
    assert (logged["job_id"], logged["trace_id"]) == (job_id, root.trace_id.hex())


def test_the_log_says_when_the_first_step_began(tmp_path: Path, receiver: Receiver) -> None:
    team = Team(tmp_path)
    try:
        with tracing.span("of a pipeline") as parent:
            assert parent is not None
            job_id = team.submit("gpt", "ines", 8, "language", env={tracing.VARIABLE: parent})
        team.start(job_id)
        team.train((job_id, 100, 1000), lasts_us=HOUR)
        before = team.api.scene.control.number
        assert OtelSpans(team.api.scene.store, lambda: before).read(0) == before
        receiver.wait("of a pipeline", "queued", "start of ranks", "until the first step")
        root, first = receiver.spans["of a pipeline"], receiver.spans["until the first step"]
        assert in_ids(first) == (root.trace_id.hex(), root.span_id.hex())
        assert first.start_time_unix_nano == receiver.spans["start of ranks"].end_time_unix_nano
        assert first.end_time_unix_nano >= first.start_time_unix_nano > receiver.spans["queued"].start_time_unix_nano
    finally:
        team.close()


def test_nothing_is_traced_where_nobody_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    with tracing.span("nothing") as parent:
        assert parent is None
    team = Team(tmp_path)
    try:
        with Client(tmp_path, url=team.api.url, token=TOKEN) as client:
            made = client.submit({"name": "plain", "run": ["true"], "gpus": 1})
        assert tracing.VARIABLE not in team.api.operations.job(made.job.job_id).spec["env"]
        spans = OtelSpans(team.api.scene.store, lambda: 0)
        threads = threading.active_count()
        spans.start()
        assert threading.active_count() == threads
        spans.end()
    finally:
        team.close()


def test_times_of_a_trace_are_never_negative(receiver: Receiver) -> None:
    tracing.note("backwards", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", 5 * S, 3 * S, job="a")
    receiver.wait("backwards")
    span = receiver.spans["backwards"]
    assert span.start_time_unix_nano == span.end_time_unix_nano == 5 * S * 1000
    assert in_ids(span) == ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
