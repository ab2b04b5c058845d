"""A team's cluster of forty GPUs as its pages show it: five users, a queue, a preemption, a drained node, a sweep."""

import math
import random
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from api_scene import Api
from stage import Scene

from cordee.answers.artifacts import PushCommit, StageRequest, TagRequest, UseRequest, VersionView
from cordee.answers.queues import QueueRules, QueuesSubmission
from cordee.answers.submissions import Submission
from cordee.control.access import Access
from cordee.control.roles import ADMIN, Bearer
from cordee.control.services.operations import ServiceOperations
from cordee.events import (
    Budget,
    BudgetSet,
    CheckpointCommitted,
    Event,
    GpusSampled,
    Measured,
    MetricsLogged,
    Node,
    NodeDown,
    NodeUp,
    Outcome,
    RankLeft,
    RanksEnded,
    RanksStarted,
    Reported,
    Restored,
    SpanClass,
)
from cordee.ids import JobId
from cordee.ids import job_id as new_id
from cordee.storage.destination import open_blobs
from cordee.storage.registry.manifest import Kind
from cordee.storage.registry.signature import make_key, public_key, sign
from cordee.storage.registry.store import ArtifactStore, files_below

S, MINUTE, HOUR, DAY = 1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000
START_US = 1_795_392_000 * S  # 2026-11-23, midnight UTC
H100 = Node(
    name="a1", epoch=1, gpu_name="NVIDIA H100 80GB HBM3", gpus=8, micro_usd_per_gpu_hour=2_990_000,
    price_source="H100 on-demand: Lambda H100 SXM, as quoted by cliffcenter.com, AMD inference economics (2026-05-18)",
    domain=("block-1", "rack-a"), island_gpus=8,
)  # fmt: skip
NODES = tuple(
    replace(H100, name=f"{rack}{number}", domain=("block-1", f"rack-{rack}"))
    for rack, count in (("a", 3), ("b", 2))
    for number in range(1, count + 1)
)
QUEUES = [
    QueueRules(name="research", quota_gpus=24, weight=3),
    QueueRules(name="vision", parent="research", quota_gpus=8, weight=1),
    QueueRules(name="language", parent="research", quota_gpus=16, weight=2),
    QueueRules(name="product", quota_gpus=16, weight=1, limit_gpus=32),
]


@dataclass
class Team:
    """The server of the team, whose agents and clock a test plays."""

    folder: Path
    api: Api = field(init=False)
    ids: dict[str, JobId] = field(default_factory=dict)
    saved: dict[JobId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.api = Api(self.folder, scene=Scene(self.folder, node=NODES[0], at_us=START_US))
        for node in NODES[1:]:
            self.say(NodeUp(at_us=self.now, node=node), f"node/{node.name}/1")
        self.tick()
        self.api.operations.set_queues(QueuesSubmission(queues=QUEUES))
        self.tick()

    @property
    def now(self) -> int:
        return self.api.scene.time.us

    @property
    def services(self) -> ServiceOperations:
        return self.api.services

    def tick(self, after_us: int = 0) -> None:
        self.api.scene.time.us += after_us
        for _ in range(3):
            self.api.scene.control.tick()

    def say(self, event: Event, source: str) -> None:
        self.api.scene.agents.report(event, source=source)

    def submit(self, name: str, owner: str, gpus: int, queue: str, **more: Any) -> JobId:
        spec = {"run": ["true"], "name": name, "gpus": gpus, "queue": queue, **more}
        job_id = new_id(name, bytes([len(self.ids)] * 6))
        self.api.operations.submit(Submission(job_id=job_id, spec=spec, unprotected=True), owner)
        self.ids[name] = job_id
        self.tick()
        return job_id

    def epoch(self, job_id: JobId) -> int:
        return self.api.scene.control.state.attempts[job_id].epoch

    def start(self, job_id: JobId) -> None:
        attempt = self.api.scene.control.state.attempts[job_id]
        for lease in attempt.leases:
            started = RanksStarted(at_us=self.now, job_id=job_id, epoch=attempt.epoch, node=lease.node)
            self.say(started, f"node/{lease.node}/1")
        step, epoch = self.saved.get(job_id, 0), attempt.epoch
        generation = 1 if step else None
        event = Restored(at_us=self.now + 90 * S, job_id=job_id, epoch=epoch, step=step, generation=generation)
        self.say(event, f"{job_id}.{epoch}/rank0")
        folder = self.folder / "attempts" / job_id / str(attempt.epoch) / attempt.leases[0].node / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(min(2, attempt.gpus)):
            lines = [f"step {step * 50:>6}  loss {2.1 + 6 * math.exp(-step / 9):.4f}" for step in range(1, 60)]
            lines[17] = "WARNING: one NCCL retry on rank 3, all-reduce went on"
            (folder / f"rank{rank}.log").write_text("\n".join(lines) + "\n")
        self.tick()

    def train(self, *jobs: tuple[JobId, int, int], save: bool = True, lasts_us: int = HOUR, ends: bool = True) -> None:
        """Let jobs do so many of all their steps in this time, and report as their ranks do."""
        pieces, begun_us = 12, self.now
        first = {job_id: self.saved.get(job_id, 0) for job_id, *_ in jobs}
        for piece in range(pieces):
            self.api.scene.time.us = max(self.now, begun_us + lasts_us * (piece + 1) // pieces)
            from_us = begun_us + lasts_us * piece // pieces
            for job_id, steps, total in jobs:
                done = first[job_id] + steps * (piece + 1) // pieces
                step = first[job_id] + steps * piece // pieces
                self._reports(job_id, from_us, step, done, total, lasts_us // max(1, steps))
        for job_id, steps, _ in jobs if save else ():
            about: dict[str, Any] = {"job_id": job_id, "epoch": self.epoch(job_id), "step": first[job_id] + steps}
            saved = CheckpointCommitted(
                at_us=self.now,
                generation=1,
                size_bytes=96_000_000_000,
                stall_us=1_400_000,
                upload_us=38_000_000,
                **about,
            )
            self.say(saved, f"{job_id}.{self.epoch(job_id)}/rank0")
            self.saved[job_id] = first[job_id] + steps
        if ends:
            self.tick()

    def _reports(self, job_id: JobId, from_us: int, step: int, done: int, total: int, step_us: int) -> None:
        attempt = self.api.scene.control.state.attempts[job_id]
        source = f"{job_id}.{attempt.epoch}/rank0"
        about: dict[str, Any] = {"at_us": self.now, "job_id": job_id, "epoch": attempt.epoch}
        loss = 2.05 + 6 * math.exp(-done / 400) + 0.06 * math.sin(done * 1.7)
        tokens = (done - step) * 524_288
        counted: dict[str, Any] = {"first_step": step, "steps": done - step, "tokens": tokens, "loss": loss}
        save_us = (self.now - from_us) // 40
        until_us = self.now - save_us
        self.say(Reported(**about | {"at_us": until_us}, span=SpanClass.USEFUL, from_us=from_us, **counted), source)
        self.say(Reported(**about, span=SpanClass.CHECKPOINT, from_us=until_us), source)
        tokens_per_s = 6_400.0 * attempt.gpus * (1 + 0.02 * math.sin(done))
        measured: dict[str, Any] = {"peak_bytes": 71_300_000_000, "steps_total": total, "step_us": step_us}
        self.say(Measured(**about, rank=0, step=done, tokens_per_s=tokens_per_s, mfu=0.41, **measured), source)
        self.say(MetricsLogged(**about, rank=0, step=done, names=("loss",), values=(loss,)), source)
        for lease in attempt.leases:
            busy = 0.95 - 0.3 * zero_to_one(job_id) + 0.02 * math.sin(step)
            power: dict[str, Any] = {"power_mw": 612_000 * len(lease.gpus), "energy_mj": 10**9}
            busy_each = tuple(busy + 0.03 * math.cos(3 * gpu + step) for gpu in lease.gpus)
            memory = tuple(72_400_000_000 - 400_000_000 * (gpu % 3) for gpu in lease.gpus)
            each = {"busy_each": busy_each, "memory_bytes_each": memory}
            here: dict[str, Any] = {"node": lease.node, "gpus": len(lease.gpus), "memory_bytes": max(memory), **each}
            self.say(GpusSampled(**about, from_us=from_us, busy=busy, **here, **power), f"node/{lease.node}/1")

    def leave(self, job_id: JobId, how: str, outcome: Outcome) -> None:
        attempt = self.api.scene.control.state.attempts[job_id]
        about: dict[str, Any] = {"job_id": job_id, "epoch": attempt.epoch}
        left = RankLeft(at_us=self.now, rank=0, how=how, step=attempt.committed_step or 0, **about)
        self.say(left, f"{job_id}.{attempt.epoch}/rank0")
        for lease in attempt.leases:
            self.say(RanksEnded(at_us=self.now, node=lease.node, outcome=outcome, **about), f"node/{lease.node}/1")
        self.tick()

    def close(self) -> None:
        self.api.close()


def zero_to_one(text: str) -> float:
    return sum(map(ord, text)) % 97 / 97


def a_week(folder: Path) -> Team:
    """Return the team on a Friday afternoon."""
    team = Team(folder)
    for budget in (
        Budget(queue="research", micro_usd=4_000_000_000, hard=True),
        Budget(user="yuki", gpu_us=500 * HOUR),
        Budget(queue="product", per="total", micro_usd=1_500_000_000, hard=True, stops=True),
    ):
        team.api.scene.control.note(BudgetSet(at_us=team.now, budget=budget, by="ada"))
    saves = {"checkpoint": {"to": str(folder / "checkpoints")}}
    early = team.submit("tokenizer-ablation", "tomas", 8, "language", **saves)
    team.start(early)
    team.train((early, 900, 900), lasts_us=20 * HOUR)
    team.leave(early, "done", Outcome.FINISHED)
    team.say(NodeDown(at_us=team.now, node="b2", epoch=1, why="its agent is silent for 60 s"), "node/b2/1")
    team.tick(2 * HOUR)
    team.say(NodeUp(at_us=team.now, node=replace(NODES[-1], epoch=2)), "node/b2/2")
    team.tick(HOUR)
    big = team.submit("llama-8b-pretrain", "ines", 16, "language", **saves)
    segment = team.submit("segment-vit", "yuki", 8, "vision", **saves)
    rank = team.submit("reranker-sft", "omar", 8, "product", **saves)
    for job_id in (big, segment, rank):
        team.start(job_id)
    team.train((big, 1_200, 6_000), (segment, 900, 4_000), (rank, 700, 2_000), lasts_us=16 * HOUR)
    team.train((big, 90, 6_000), (segment, 100, 4_000), save=False, lasts_us=HOUR)
    team.leave(big, "lost", Outcome.LOST)
    team.start(big)
    team.train((big, 1_000, 6_000), (segment, 800, 4_000), (rank, 600, 2_000), lasts_us=15 * HOUR)
    sleepy = team.submit("eval-nightly", "tomas", 4, "product")
    team.start(sleepy)
    team.tick(40 * MINUTE)
    team.submit("llama-8b-long-context", "ines", 16, "language", **saves)
    team.submit("diffusion-xl", "yuki", 8, "vision", **saves)
    team.submit("dpo-sweep-base", "omar", 8, "product", **saves)
    team.api.operations.cordon("b2", by="ada", why="ECC errors on GPU 5, to be swapped")
    team.tick(20 * MINUTE)
    return team


def publish(
    team: Team, name: str, by: str, kind: Kind = "model", base: str = "", key: Path | None = None, **wanted: Any
) -> VersionView:
    """Push a version of 200 kB of floats that differ little from those of every other name."""
    operations, artifacts = team.api.operations, team.api.artifacts
    access, folder = Access(Bearer(by, grants=ADMIN), operations), team.folder / "pushed" / name / str(team.now)
    folder.mkdir(parents=True)
    rng = random.Random(7)
    values = [rng.gauss(0, 0.02) for _ in range(50_000)]
    values[0] += len(name) + team.now / DAY
    (folder / "weights.f32").write_bytes(struct.pack(f"{len(values)}f", *values))
    (folder / "config.json").write_text("{}")
    store = ArtifactStore(open_blobs(artifacts.store_url))
    over = store.read(artifacts.show(base, access).digest) if base else None
    pushed = store.push(files_below(folder), kind, base=over)
    digest = pushed.manifest.digest
    signed = {} if key is None else {"key": public_key(key), "signature": sign(key, digest)}
    manifest = pushed.manifest.encode().decode()
    asked = PushCommit(name=name, manifest=manifest, stored_bytes=pushed.written_bytes, **signed, **wanted)
    made = artifacts.commit(artifacts.open().push, asked, access).version
    assert made is not None
    team.tick(MINUTE)
    return made


def with_artifacts(team: Team) -> Team:
    """Return the team with what its jobs have read and made: a dataset, two versions of a model, one tuned from it."""
    artifacts, ada = team.api.artifacts, Access(Bearer("ada", grants=ADMIN), team.api.operations)
    big, rank = team.ids["llama-8b-pretrain"], team.ids["reranker-sft"]
    publish(team, "corpus/web-2026", "tomas", "dataset", queue="language", note="deduplicated, without the test sets")
    artifacts.use(UseRequest(ref="corpus/web-2026", job=big), ada)
    publish(team, "llama-8b", "ines", job=big, note="after 1,200 steps")
    key = team.folder / "key.pem"
    make_key(key)
    publish(team, "llama-8b", "ines", base="llama-8b:1", job=big, note="after 2,200 steps", tag="best", key=key)
    artifacts.stage(StageRequest(ref="llama-8b:1", stage="staging"), ada)
    artifacts.use(UseRequest(ref="llama-8b:best", job=rank), ada)
    publish(team, "team/reranker", "omar", base="llama-8b:1", job=rank)
    artifacts.tag(TagRequest(ref="llama-8b:1", tag="first"), ada)
    artifacts.stage(StageRequest(ref="llama-8b:best", stage="production"), ada)
    artifacts.use(UseRequest(ref="llama-8b:best", job=team.ids["eval-nightly"]), ada)
    return team
