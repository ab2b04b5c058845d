"""A server whose services' replicas and gateways a test plays."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from api_scene import Api

from cordee.answers.services import GatewayReport, GatewayStatus, ReplicaView, ServiceView, UsageLine
from cordee.client import Client
from cordee.events import Outcome, RanksEnded, ReplicaReady
from cordee.ids import JobId

S = 1_000_000
CHAT: dict[str, Any] = {
    "name": "chat",
    "gpus": 1,
    "service": {"model": "./tiny", "engine": "llama.cpp", "replicas": {"min": 2, "max": 2}},
}


def chat(fewest: int = 2, most: int | None = None, **section: Any) -> dict[str, Any]:
    replicas = {"min": fewest, "max": fewest if most is None else most}
    return CHAT | {"service": CHAT["service"] | {"replicas": replicas} | section}


@dataclass
class World:
    """A server whose replicas a test plays, on one node of four slots."""

    api: Api

    def turn(self, seconds: float = 0.0) -> None:
        """Let time pass; then turn the loop until nothing more follows."""
        self.api.scene.time.us += round(seconds * S)
        for _ in range(4):
            self.api.scene.control.tick()
            self.api.services.controller.step()
        self.api.scene.control.tick()

    def view(self) -> ServiceView:
        return self.api.client.service("chat")

    def states(self) -> list[str]:
        return [each.state for each in self.view().replicas]

    def of(self, state: str) -> list[ReplicaView]:
        return [each for each in self.view().replicas if each.state == state]

    def report(self, kind: Callable[..., Any], replica: ReplicaView, **fields: Any) -> None:
        event = kind(at_us=self.api.scene.time.us, job_id=replica.job_id, epoch=replica.epoch, **fields)
        self.api.scene.agents.report(event, source=f"{replica.job_id}.{replica.epoch}/rank0")

    def get_ready(self, *replicas: ReplicaView) -> None:
        """Answer for these replicas, by default all that load, that their engine is ready."""
        for at, each in enumerate(replicas or self.of("loading")):
            address = f"http://127.0.0.1:{9000 + at}"
            self.report(
                ReplicaReady, each, rank=0, address=address, engine="llama.cpp", model="tiny", kv_tokens=1000, slots=4
            )
        self.turn()

    def leave(self, *replicas: ReplicaView, outcome: Outcome = Outcome.CHECKPOINTED) -> None:
        """End the processes of these replicas, by default of all that drain."""
        for each in replicas or self.of("draining"):
            now = self.api.scene.time.us
            ended = RanksEnded(at_us=now, job_id=JobId(each.job_id), epoch=each.epoch, node="local", outcome=outcome)
            self.api.scene.agents.report(ended)
        self.turn()

    def say(
        self, seq: int = 0, usage: list[UsageLine] | None = None, client: Client | None = None, **status: Any
    ) -> int:
        """Report as a gateway does."""
        found = [GatewayStatus(service="chat", **status)] if status else []
        sent = GatewayReport(seq=seq, at_us=1, url="http://127.0.0.1:8000", status=found, usage=usage or [])
        return (client or self.api.client).report("edge", sent).seq
