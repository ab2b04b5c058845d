"""Requests and answers of a server, as the examples of /openapi.json.

`PYTHONPATH=tests:tests/control python tests/control/api_examples.py` records them anew after a change of the API.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import httpx
from api_scene import SPEC, TOKEN
from web_world import Team, a_week

import cordee.control
from cordee.control.api import create_app

TARGET = Path(cordee.control.__file__).parent / "api_examples.json"
SWEEP = {
    "run": ["true", "{lr}"], "gpus": 1, "name": "lr", "checkpoint": {"to": "/data/lr"},
    "sweep": {"values": {"lr": {"choices": [0.1, 0.01]}}, "metric": "loss", "goal": "min"},
}  # fmt: skip
SERVICE = {
    "name": "chat", "gpus": 1, "queue": "product",
    "service": {"model": "./tiny", "engine": "llama.cpp", "replicas": {"min": 1, "max": 2}},
}  # fmt: skip
MAINTENANCE = {"from_us": 1_795_910_400_000_000, "until_us": 1_795_917_600_000_000, "why": "new firmware"}
_VERBS = ("hold", "requeue", "stop")
REQUESTS: tuple[tuple[str, str, str, Any], ...] = (
    ("POST", "/v1/jobs", "/v1/jobs", {"job_id": "gpt-abcdef", "spec": SPEC, "unprotected": False}),
    ("POST", "/v1/dry-run", "/v1/dry-run", {"job_id": "gpt-bcdefg", "spec": SPEC, "unprotected": False}),
    ("POST", "/v1/rehearsals", "/v1/rehearsals", {"job_id": "gpt-rehearsal-cdefgh", "spec": SPEC}),
    ("POST", "/v1/sweeps", "/v1/sweeps", {"job_id": "lr-abcdef", "spec": SWEEP}),
    *(("POST", f"/v1/sweeps/{{ref}}/{verb}", f"/v1/sweeps/lr/{verb}", None) for verb in ("pause", "resume")),
    ("POST", "/v1/services", "/v1/services", {"spec": SERVICE}),
    ("POST", "/v1/services/{name}/scale", "/v1/services/chat/scale", {"replicas": "1..3"}),
    ("POST", "/v1/gateways/{name}/reports", "/v1/gateways/gw/reports", {"seq": 0, "at_us": 1_795_824_000_000_000}),
    ("POST", "/v1/web-tickets", "/v1/web-tickets", None),
    ("POST", "/v1/files/missing", "/v1/files/missing", {"digests": ["a" * 64]}),
    ("POST", "/v1/reservations", "/v1/reservations", MAINTENANCE | {"gpus": 8, "queue": "product"}),
    ("POST", "/v1/nodes/{name}/maintenance", "/v1/nodes/a2/maintenance", MAINTENANCE),
    ("POST", "/v1/nodes/{name}/cordon", "/v1/nodes/a3/cordon", {"why": "a fan is loud"}),
    ("POST", "/v1/nodes/{name}/drain", "/v1/nodes/a3/drain", {"why": "to be swapped"}),
    ("POST", "/v1/nodes/{name}/uncordon", "/v1/nodes/a3/uncordon", {"why": "swapped"}),
    ("POST", "/v1/keys", "/v1/keys", {"tenant": "support", "name": "bot", "models": []}),
    ("PUT", "/v1/tenants/{name}", "/v1/tenants/support", {"weight": 2.0}),
    ("PUT", "/v1/queues", "/v1/queues", {"queues": [{"name": "research", "quota_gpus": 24, "weight": 3}]}),
    ("PUT", "/v1/budgets", "/v1/budgets", {"queue": "research", "micro_usd": 20_000_000_000, "hard": True}),
    *(("POST", f"/v1/jobs/{{ref}}/{verb}", f"/v1/jobs/eval-nightly/{verb}", None) for verb in ("pause", "resume")),
    *(("POST", f"/v1/jobs/{{ref}}/{verb}", f"/v1/jobs/dpo-sweep-base/{verb}", None) for verb in _VERBS),
    ("POST", "/v1/jobs/{ref}/prioritize", "/v1/jobs/diffusion-xl/prioritize", None),
)  # fmt: skip
READS = (
    "/v1/health", "/v1/jobs", "/v1/nodes", "/v1/queues", "/v1/budgets", "/v1/live", "/v1/cost", "/v1/sweeps",
    "/v1/services", "/v1/rehearsals", "/v1/maintenance", "/v1/reservations", "/v1/keys", "/v1/tenants", "/v1/usage",
    "/v1/usage/lines", "/v1/gateway/routes", "/v1/audit",
    "/v1/chargeback",
)  # fmt: skip
OF_ONE = (
    ("/v1/jobs/{ref}", "llama-8b-pretrain", ("", "/why", "/metrics", "/cost")),
    ("/v1/sweeps/{ref}", "lr", ("",)),
    ("/v1/services/{name}", "chat", ("",)),
)
ENDS = (
    ("DELETE", "/v1/sweeps/{ref}", "/v1/sweeps/lr"),
    ("DELETE", "/v1/services/{name}", "/v1/services/chat"),
    ("DELETE", "/v1/budgets", "/v1/budgets?queue=research"),
    ("DELETE", "/v1/keys/{key}", "/v1/keys/bot"),
    ("POST", "/v1/down", "/v1/down"),
)


def recorded(team: Team) -> dict[str, dict[str, Any]]:
    """Return requests and answers of this server by method and path."""
    found: dict[str, dict[str, Any]] = {}
    with httpx.Client(base_url=team.api.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as client:

        def keep(method: str, path: str, answer: httpx.Response, sent: Any = None) -> None:
            assert answer.is_success, (method, path, answer.text)
            found[f"{method} {path}"] = {"answer": _short(answer.json())} | ({} if sent is None else {"request": sent})

        for method, path, url, sent in REQUESTS:
            keep(method, path, client.request(method, url, json=sent), sent)
            team.tick()
        for path in READS:
            keep("GET", path, client.get(path))
        for path, ref, parts in OF_ONE:
            for part in parts:
                keep("GET", path + part, client.get(f"{path.partition('{')[0]}{ref}{part}"))
        booked, reserved = (client.get(f"/v1/{each}").json()[0] for each in ("maintenance", "reservations"))
        path = "/v1/maintenance/{booking}"
        keep("DELETE", path, client.delete(f"/v1/maintenance/{booked['booking']}"))
        path = "/v1/reservations/{reservation}"
        keep("DELETE", path, client.delete(f"/v1/reservations/{reserved['reservation']}"))
        for method, path, url in ENDS:
            keep(method, path, client.request(method, url))
    return found


def _short(value: Any) -> Any:
    """Return an answer with at most two entries in each list, and no folder of this machine."""
    if isinstance(value, list):
        return [_short(each) for each in value[:2]]
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    if isinstance(value, str) and value.startswith(tempfile.gettempdir()):
        return "/home/ada/.cordee"
    return value


def missing() -> list[str]:
    """Return the operations whose answers are JSON and have no example."""
    paths = create_app(None, services=object()).openapi()["paths"]  # type: ignore[arg-type]
    answers = {
        f"{method.upper()} {path}": next(each for code, each in operation["responses"].items() if code[0] == "2")
        for path, methods in paths.items()
        for method, operation in methods.items()
    }
    shapes = {name: each.get("content", {}).get("application/json", {}) for name, each in answers.items()}
    return [name for name, shape in shapes.items() if shape.get("schema") and "example" not in shape]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        team = a_week(Path(folder))
        try:
            lines = [f"{json.dumps(name)}: {json.dumps(example)}" for name, example in recorded(team).items()]
            TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        finally:
            team.close()
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes; without an example: {', '.join(missing())}")
