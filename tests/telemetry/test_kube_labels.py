"""A node file from the labels of a Kubernetes node: a real HTTPS server stands in for the cluster's API server."""

import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cordee.control.listen import self_made

LABELS = {"cloud.google.com/gce-topology-subblock": "r7", "karpenter.sh/capacity-type": "spot"}


class ApiServer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.headers["Authorization"] == "Bearer of-the-account" and self.path == "/api/v1/nodes/gpu-3"
        body = json.dumps({"kind": "Node", "metadata": {"name": "gpu-3", "labels": LABELS}}).encode()
        self.send_response(200 if known else 403)
        self.end_headers()
        self.wfile.write(body if known else b"{}")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[dict[str, str]]:
    certificate = self_made(tmp_path)
    (tmp_path / "ca.crt").write_bytes(certificate.path.read_bytes())
    (tmp_path / "token").write_text("of-the-account\n")
    server = ThreadingHTTPServer(("127.0.0.1", 0), ApiServer)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.path, certificate.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    port = str(server.server_address[1])
    yield {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port, "CORDEE_NODE": "gpu-3"}
    server.shutdown()
    thread.join()
    server.server_close()


def run(folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    words = ["--out", str(folder / "node/labels"), "--account", str(folder)]
    words += ["rack=cloud.google.com/gce-topology-subblock", "capacity=karpenter.sh/capacity-type", "block=missing"]
    argv = [sys.executable, "-m", "cordee.telemetry.kube_labels", *words]
    return subprocess.run(argv, env=os.environ | env, check=False, capture_output=True, text=True)


def test_the_labels_of_the_node_become_its_node_file(pod: dict[str, str], tmp_path: Path) -> None:
    done = run(tmp_path, pod)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "node/labels").read_text() == "rack=r7\ncapacity=spot\n"
    assert done.stderr == "the node has no label missing: its block is not known\n"


def test_a_refusal_ends_the_container(pod: dict[str, str], tmp_path: Path) -> None:
    done = run(tmp_path, pod | {"CORDEE_NODE": "gpu-4"})
    assert done.returncode == 1 and "<HTTPError 403" in done.stderr and not (tmp_path / "node").exists()
