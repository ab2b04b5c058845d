"""The second act: traffic takes slots from an elastic training gang, a replica dies, and the training comes back."""

import http.client
import json
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psutil

from cordee.account.ledger import attempt_segments
from cordee.answers.services import UsageView
from cordee.demo import claims, serving_claims, tiny_model
from cordee.demo.costs import leased_gpu_us
from cordee.demo.live import step_lines
from cordee.demo.narrator import Narrator
from cordee.demo.stage import Stage
from cordee.demo.traffic import QUESTIONS, Traffic
from cordee.errors import ClaimError
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    JobEnded,
    JobSubmitted,
    NoticeGiven,
    RankLeft,
    ReplicaReady,
    ReplicaUnready,
    Reported,
    ServiceScaled,
)
from cordee.ids import JobId
from cordee.units import format_micro_usd, plural
from cordee.view.money import CLASSES, MoneyRow, money_html
from cordee.view.slots import SlotMark, slots_svg
from cordee.workload.spec import JobSpec

SERVICE = "chat"
USERS = 8
SEQUENCES = 4
"""Answers that a replica makes at a time."""
STEPS = 1_000_000
"""More than the training will run: it is stopped at the end."""
STEP_S = 0.1
PAUSE_S = 1.0
WINDOW = "10s"
GROW_AFTER = "25s"


@dataclass(frozen=True, slots=True)
class Served:
    """The figures of the act, for the head of the report."""

    streams: int
    answers: int
    micro_usd_per_million: int | None


@dataclass(slots=True)
class Cluster:
    """The second act while it runs.

    Attributes:
        training: the elastic job.
        whole: by question, the text that one replica answers undisturbed.
        marks: what happened when, for the figure.
    """

    narrator: Narrator
    stage: Stage
    traffic: Traffic
    training: JobId
    whole: dict[int, str] = field(default_factory=dict)
    marks: list[SlotMark] = field(default_factory=list)

    def mark(self, text: str) -> int:
        """Mark this moment in the figure, and return it in microseconds."""
        at_us = time.time_ns() // 1000
        self.marks.append(SlotMark(at_us, text))
        return at_us


def run_serving(narrator: Narrator, stage: Stage, gateway_url: str) -> Served:
    """Play the act on a stage with one slot more than its ranks, and check the claims about it."""
    most = 1 + stage.ranks // 2
    cluster = _begin(narrator, stage, Traffic(gateway_url, SERVICE), most)
    with cluster.traffic.users(USERS):
        _rise(cluster, most)
        streams = _kill(cluster)
    return _come_back(cluster, streams)


def _begin(narrator: Narrator, stage: Stage, traffic: Traffic, most: int) -> Cluster:
    lead = (
        f"One cluster of {stage.ranks + 1} slots. An elastic, preemptible job trains on {stage.ranks} of them. On the "
        "last one a service of production tier has a replica: llama.cpp with a tiny Llama, behind a gateway that "
        "speaks OpenAI's API. The model's weights are random, and its text is noise that does not repeat itself: a "
        "token that is lost, doubled or changed shows."
    )
    with narrator.part("One cluster for both", lead):
        cluster = Cluster(narrator, stage, traffic, stage.submit(_training(stage)))
        stage.declare(_service(stage, most))
        stage.wait(lambda: bool(_replicas(stage)), "the first replica loads")
        stage.wait(lambda: _trained(cluster, epoch=1), "the gang starts and trains")
        cluster.mark("one user")
        with narrator.screen.waiting("one user asks"):
            for question in range(len(QUESTIONS)):
                traffic.ask(question)
        cluster.whole |= {answer.question: answer.text for answer in traffic.answers}
        says = f"Undisturbed, one replica answers {len(QUESTIONS)} questions, each in its own way"
        distinct = len(set(cluster.whole.values()))
        measured = f"{distinct} different texts of {sum(map(len, cluster.whole.values())):,} characters"
        failed = [answer.error for answer in traffic.answers if answer.error]
        narrator.claim(claims.check(distinct == len(QUESTIONS) and not failed, says, "; ".join([measured, *failed])))
    return cluster


def _rise(cluster: Cluster, most: int) -> None:
    stage, narrator = cluster.stage, cluster.narrator
    lead = (
        f"{USERS} users ask at once, one question after the other; a replica answers {SEQUENCES} at a time. Nobody "
        "gives an order: the gateway reports its open requests, the service wants more replicas, and as a production "
        "job each takes the slot of a preemptible one. The training saves, leaves, and goes on smaller."
    )
    with narrator.part("Traffic rises", lead):
        cluster.mark(f"{USERS} users")
        stage.wait(lambda: _wanted(stage) == most and len(_replicas(stage)) == most, "the service grows")
        narrator.claim(serving_claims.scaled_by_traffic(stage.events, SERVICE, most))
        narrator.claim(
            serving_claims.shrank_for(stage.events, cluster.training, SERVICE, stage.ranks // 2, stage.names)
        )


def _kill(cluster: Cluster) -> int:
    """Kill the busiest replica, and return the number of streams that were open."""
    stage, narrator, traffic = cluster.stage, cluster.narrator, cluster.traffic
    lead = (
        f"All {USERS} users have an open stream. The replica with most of them is killed, by SIGKILL to its engine and "
        "to the wrapper beside it. The gateway has the prompt and the tokens of each stream; another replica goes on."
    )
    with narrator.part("A replica dies", lead):
        before = traffic.moved()
        stage.wait(lambda: traffic.streaming == USERS and max(_open_by_replica(stage).values()) > 0, "streams open")
        victim = max(_open_by_replica(stage).items(), key=lambda each: each[1])[0]
        killed = _sigkill(victim)
        killed_us = cluster.mark(f"{stage.names[victim]} killed")
        narrator.screen.line(None, f"{stage.names[victim]}: SIGKILL to {plural(killed, 'process', 'processes')}")
        stage.wait(lambda: _is_back(stage, victim, killed_us), "its next attempt starts")
        stage.wait(lambda: not traffic.has_open_since(killed_us), "the streams come to their end")
        cut = [answer for answer in traffic.answers if answer.was_open(killed_us)]
        moved = traffic.moved() - before
        narrator.claim(serving_claims.survived(stage.events, victim, killed_us, cut, moved, cluster.whole))
        narrator.claim(serving_claims.replaced(stage.events, victim, killed_us))
    return len(cut)


def _come_back(cluster: Cluster, streams: int) -> Served:
    stage, narrator, traffic = cluster.stage, cluster.narrator, cluster.traffic
    lead = (
        f"One user is left. The service keeps its replicas for {WINDOW.removesuffix('s')} seconds, in case the others "
        "come back, then lets them drain; the training takes their slots again. By default a service waits five "
        "minutes, and a job grows back when that pays for its restart. At the end both stop, and one ledger has both."
    )
    with narrator.part("Traffic falls", lead):
        cluster.mark("one user")
        with traffic.users(1, pause_s=PAUSE_S):
            stage.wait(lambda: _is_whole_again(cluster), "replicas leave, and training grows")
        stage.client.stop(cluster.training)
        stage.client.end_service(SERVICE)
        stage.wait(lambda: _all_ended(stage), "both stop")
        narrator.claim(serving_claims.came_back(stage.events, cluster.training, stage.ranks))
        lines = step_lines(stage.out / "gpt")
        narrator.claim(serving_claims.no_step_lost(stage.events, cluster.training, lines))
        narrator.claim(serving_claims.all_whole(traffic.answers, cluster.whole))
        narrator.figure(_figure(cluster))
        usage = _show_costs(cluster)
    row = next(row for row in usage.rows if row.key == SERVICE)
    return Served(streams, len(traffic.answers), row.micro_usd_per_million.blended)


def _show_costs(cluster: Cluster) -> UsageView:
    """Show what the tokens and the steps cost, and check that the ledger adds up."""
    stage, narrator, traffic = cluster.stage, cluster.narrator, cluster.traffic
    stage.wait(lambda: _billed(stage) >= len(traffic.answers), "the gateway reports the last tokens")
    usage, cost = stage.client.usage("service"), stage.client.cost("job")
    narrator.screen.usage(usage)
    gpu_us = {row.key: row.gpu_us for row in usage.rows if row.gpu_us is not None} | {"training": usage.training_gpu_us}
    dollars = {row.key: row.micro_usd.total for row in usage.rows} | {"training": usage.training_micro_usd.held}
    rows = {key: {cls: getattr(split, cls) for cls in CLASSES} for key, split in gpu_us.items()}
    for key, classes in rows.items():
        narrator.figure(money_html([MoneyRow(key, classes, dollars[key])]))
    total = {cls: sum(classes[cls] for classes in rows.values()) for cls in CLASSES}
    narrator.claim(claims.adds_up(total, cost.gpu_us.held, leased_gpu_us(stage.events)))
    narrator.claim(serving_claims.billed(usage, SERVICE, traffic.answers))
    narrator.claim(serving_claims.dollars_add_up(usage, cost.micro_usd.held))
    steps = max(event.step for event in stage.events if isinstance(event, RankLeft))
    row = next(row for row in usage.rows if row.key == SERVICE)
    blended = row.micro_usd_per_million.blended
    a_token = "no token" if blended is None else f"{format_micro_usd(blended)} for a million tokens"
    a_step = format_micro_usd(dollars["training"] // max(1, steps))
    narrator.note(
        f"{SERVICE}: {a_token}, input and output. Training: {a_step} a step. Idle and loading time is paid for in both."
    )
    for source in sorted({source for each in cost.rows for source in each.price_sources}):
        narrator.note(f"Price: {source}.")
    return usage


def _figure(cluster: Cluster) -> str:
    stage = cluster.stage
    requests = [(answer.begun_us, answer.ended_us) for answer in cluster.traffic.answers]
    title = "Each slot by its holder, and the requests a second"
    return slots_svg(stage.events, attempt_segments(stage.events), stage.names, requests, cluster.marks, title=title)


# -- the jobs --------------------------------------------------------------------------------------------------


def _training(stage: Stage) -> JobSpec:
    out = stage.out / "gpt"
    out.mkdir(parents=True)
    run = [sys.executable, "-m", "cordee.train.demo", "--steps", str(STEPS), "--out", str(out)]
    return JobSpec.from_flags(
        run=[*run, "--step-seconds", str(STEP_S)],
        gpus=str(stage.ranks),
        name="gpt",
        tier="preemptible",
        launch="rank",
        elastic_at_least=stage.ranks // 2,
        elastic_grow_after=GROW_AFTER,
        checkpoint_to=str(stage.home / "checkpoints"),
        checkpoint_every="10s",
        cwd=str(out),
    )


def _service(stage: Stage, most: int) -> JobSpec:
    model = tiny_model.build(stage.home / "model")
    service = {
        "engine": "llama.cpp",
        "model": str(model),
        "replicas": f"1..{most}",
        "context": 2048,
        "window": WINDOW,
        "drain": "10s",
        "flags": {"parallel": SEQUENCES}
        | {name.removeprefix("--"): value or True for name, value in tiny_model.FLAGS.items()},
    }
    return JobSpec.from_flags(run=(), gpus="1", name=SERVICE, service=service, cwd=str(stage.home))


# -- questions about the log -------------------------------------------------------------------------------------


def _replicas(stage: Stage) -> dict[JobId, ReplicaReady]:
    """Return the replicas that are ready, each with its newest report."""
    ready: dict[JobId, ReplicaReady] = {}
    for event in stage.events:
        if isinstance(event, ReplicaReady):
            ready[event.job_id] = event
        elif isinstance(event, AttemptEnded | ReplicaUnready | NoticeGiven):
            ready.pop(event.job_id, None)
    return ready


def _wanted(stage: Stage) -> int:
    return next((event.replicas for event in reversed(stage.events) if isinstance(event, ServiceScaled)), 1)


def _trained(cluster: Cluster, epoch: int) -> bool:
    """Return whether the training has made steps in this attempt or a later one."""
    return any(
        isinstance(event, Reported) and event.job_id == cluster.training and event.epoch >= epoch and event.steps
        for event in cluster.stage.events
    )


def _is_whole_again(cluster: Cluster) -> bool:
    """Return whether the training has made steps on all ranks after it was shrunk."""
    placed = [e for e in cluster.stage.events if isinstance(e, AttemptPlaced) and e.job_id == cluster.training]
    is_full = sum(len(lease.gpus) for lease in placed[-1].leases) == cluster.stage.ranks
    return len(placed) > 1 and is_full and _trained(cluster, placed[-1].epoch)


def _is_back(stage: Stage, victim: JobId, killed_us: int) -> bool:
    return any(isinstance(e, ReplicaReady) and e.job_id == victim and e.at_us > killed_us for e in stage.events)


def _all_ended(stage: Stage) -> bool:
    submitted = {event.job.job_id for event in stage.events if isinstance(event, JobSubmitted)}
    return submitted == {event.job_id for event in stage.events if isinstance(event, JobEnded)}


def _billed(stage: Stage) -> int:
    """Return the number of requests on the bill."""
    return sum(row.tokens.requests for row in stage.client.usage("service").rows)


# -- the replicas' processes -------------------------------------------------------------------------------------


def _open_by_replica(stage: Stage) -> Mapping[JobId, int]:
    """Return the requests that each ready replica's engine is computing, as it says itself."""
    return {job_id: _busy_slots(event.address) for job_id, event in _replicas(stage).items()}


def _busy_slots(address: str) -> int:
    url = urlsplit(address)
    assert url.hostname is not None, "an engine's address has a host"
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=10)
    try:
        connection.request("GET", "/slots")
        return sum(bool(slot["is_processing"]) for slot in json.loads(connection.getresponse().read()))
    except (OSError, http.client.HTTPException, ValueError):
        return 0
    finally:
        connection.close()


def _sigkill(job_id: JobId) -> int:
    """Kill every process of a replica, and return their number."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("CORDEE_JOB") == job_id:
                found.append(process)
    for process in found:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    if not found:
        raise ClaimError(f"no process of {job_id} runs", hint="run `cordee demo --keep` and read the server's log")
    return len(found)
