"""A job as objects of Kubernetes: they follow the published schemas, and what cannot be expressed is refused."""

import copy
from typing import Any

import kubernetes_validate
import pytest

from cordee.errors import SpecError
from cordee.workload.kubernetes import Cluster, Manifest, job_objects
from cordee.workload.spec import parse_spec

VERSIONS = ("1.29", "1.34")  # schemas before 1.29 wrongly ask for onPodConditions in each rule
JOB = """
name: llama
run: [python, train.py]
gpus: 16
checkpoint: {to: "s3://bucket/runs", every: 10m, keep: 3}
on_preempt: {grace: 100s}
"""
FULL = """
name: llama
run: python train.py --date "$(date)"
gpus: 16xH100
tier: production
priority: 5
capacity: spot
queue: research
cpus: 96
memory: 1TiB
cwd: /code
limit: {time: 47h}
place: {unit: 8}
checkpoint: {to: /checkpoints, base: "s3://bucket/base"}
on_hang: {restart_after: 30m}
model: {name: llama-3-8b, layout: "tp=8"}
env: {NCCL_DEBUG: WARN, OMP_NUM_THREADS: 4}
secrets: [HF_TOKEN]
"""
EVERYTHING = Cluster(
    image="registry/train:1",
    node_selector={"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
    claim="checkpoints",
    kueue_queue="research",
    priority_class="high",
)


def rendered(text: str, cluster: Cluster | None = None) -> list[Manifest]:
    return job_objects(parse_spec(text), cluster or Cluster(image="registry/train:1"))


def pod_of(objects: list[Manifest]) -> Any:
    return objects[-1]["spec"]["template"]["spec"]


def env_of(objects: list[Manifest]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in pod_of(objects)["containers"][0]["env"]}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("text", "cluster"), [(JOB, None), (FULL, EVERYTHING), ("run: a\ngpus: 1", None)])
def test_the_objects_follow_the_published_schemas_strictly(text: str, cluster: Cluster | None, version: str) -> None:
    for each in rendered(text, cluster):
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize(
    "path", [("spec",), ("spec", "podFailurePolicy", "rules", 0), ("spec", "template", "spec", "containers", 0)]
)
def test_a_field_that_kubernetes_does_not_know_fails_the_schema(path: tuple[str | int, ...]) -> None:
    job = copy.deepcopy(rendered(JOB)[-1])
    inner: Any = job
    for key in path:
        inner = inner[key]
    inner["gracePeriod"] = 30
    with pytest.raises(kubernetes_validate.ValidationError, match="gracePeriod"):
        kubernetes_validate.validate(job, VERSIONS[-1], strict=True)


def test_a_gang_is_an_indexed_job_with_one_pod_for_each_node() -> None:
    service, job = rendered(JOB)
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 2, 2)
    pod = pod_of([job])
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] == 100
    container = pod["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert container["command"][-5:] == ["--gpus", "8", "--nodes", "2", "--"]
    assert container["args"] == ["python", "train.py"]
    assert service["spec"]["clusterIP"] == "None" and pod["subdomain"] == service["metadata"]["name"] == "llama"
    env = env_of([job])
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("llama-0.llama", "29500")
    assert env["CORDEE_CHECKPOINT_TO"] == "s3://bucket/runs/llama" and env["CORDEE_CHECKPOINT_EVERY"] == "600"
    assert env["CORDEE_GRACE_S"] == "100" and env["CORDEE_CHECKPOINT_KEEP"] == "3"


def test_one_node_needs_no_service() -> None:
    (job,) = rendered("run: python train.py\ngpus: 8")
    assert "subdomain" not in pod_of([job]) and env_of([job])["MASTER_ADDR"] == "127.0.0.1"


def test_preemptions_do_not_count_and_failures_do() -> None:
    job = rendered(JOB)[-1]["spec"]
    codes, disruption = job["podFailurePolicy"]["rules"]
    assert codes["action"] == disruption["action"] == "Ignore"
    assert codes["onExitCodes"] == {"containerName": "main", "operator": "In", "values": [60, 75]}
    assert disruption["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert job["backoffLimit"] == 4  # two failures of each of the two pods


def test_a_job_that_stops_on_preemption_is_not_started_again() -> None:
    rules = rendered("run: a\ngpus: 1\non_preempt: {then: stop}")[-1]["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["FailJob", "FailJob"]


def test_the_cluster_gives_its_own_names() -> None:
    objects = rendered(FULL, EVERYTHING)
    job, pod, env = objects[-1], pod_of(objects), env_of(objects)
    assert job["metadata"]["labels"] | {"kueue.x-k8s.io/queue-name": "research"} == job["metadata"]["labels"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/max-exec-time-seconds"] == str(47 * 3600 - 30)
    assert job["spec"]["suspend"] is True and "priorityClassName" not in pod
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    container = pod["containers"][0]
    assert container["resources"]["limits"]["memory"] == str(2**40 // 2)
    assert container["resources"]["requests"] == {"cpu": "48000m"}
    assert {"name": "checkpoints", "mountPath": "/checkpoints"} in container["volumeMounts"]
    assert {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints"}} in pod["volumes"]
    assert container["workingDir"] == "/code"
    assert container["args"] == [
        "/bin/sh",
        "-c",
        'trap : TERM; python train.py --date "$$(date)"',
    ]  # Kubernetes reads $$ as $
    assert env["HF_TOKEN"] == {"secretKeyRef": {"name": "llama", "key": "HF_TOKEN"}}
    assert env["OMP_NUM_THREADS"] == "4" and env["CORDEE_LAYOUT"] == "tp=8" and env["CORDEE_HANG_RESTART_S"] == "1800"


def test_without_kueue_a_limit_of_time_is_the_jobs_deadline() -> None:
    job = rendered("run: a\ngpus: 1\nlimit: {time: 1h}")[-1]
    assert job["spec"]["activeDeadlineSeconds"] == 3570 and "suspend" not in job["spec"]


@pytest.mark.parametrize(
    ("lines", "message", "hint"),
    [
        ("gpus: 12", "12 GPUs are not whole nodes of 8", "use 8 GPUs"),
        ("gpus: 0.5", "whole GPUs, not 0.5", "gpus: 1"),
        ("gpus: 8xH100", "8xH100", "--node-selector"),
        ("gpus: 8\ncapacity: spot", "capacity: spot", "--node-selector"),
        ("gpus: 8\ntier: production", "tier: production", "--priority-class"),
        ("gpus: 8\npriority: 3", "priority: 3", "--priority-class"),
        ("gpus: 8\nqueue: research", "queue: research", "--kueue-queue"),
        ("gpus: 8\nlaunch: node", "launch: node", "launch: rank"),
        ("gpus: 8\nelastic: {at_least: 2}", "on 8 GPUs and on 4, 2", "one file for each size"),
        ("gpus: 8\nlimit: {cost: $500}", "limit.cost", "limit.time"),
        ("gpus: 8\nlimit: {preemptions: 3}", "limit.preemptions: 3", "--priority-class"),
        ("gpus: 12\nplace: {unit: 6}", "12 GPUs are not whole nodes", "--gpus-per-node"),
        ("gpus: 16\nplace: {unit: 16}", "place.unit = 16 does not divide the 8", "a unit that divides 8"),
        ("gpus: 16\nplace: {within: node}", "16 GPUs on nodes of 8", "leave it out"),
        ("gpus: 16\nplace: {within: rack}", "place.within: rack", "Kueue"),
        ("gpus: 16\nname: 7b", "named 7b", "begins with a letter"),
        ("gpus: 8\ncwd: code", "cwd: code", "absolute"),
        ("gpus: 8\ncheckpoint: {to: /a}", "/a is lost with the pod", "--claim"),
        ("gpus: 8\ncheckpoint: {to: a}", "a is not a path of the pod", "s3://"),
        ("gpus: 8\ncheckpoint: {to: '/a, s3://b/c'}", "several storage levels", "only the last"),
        ("gpus: 8\ncheckpoint: {to: 's3://b/c', base: /a}", "checkpoint.base: /a", "s3://"),
    ],
)
def test_a_value_that_cannot_be_expressed_is_refused(lines: str, message: str, hint: str) -> None:
    with pytest.raises(SpecError) as refused:
        rendered(f"run: a\n{lines}")
    assert message in refused.value.message and hint in (refused.value.hint or "")


def test_a_launcher_in_the_command_is_refused() -> None:
    with pytest.raises(SpecError, match="torchrun starts the ranks and hides their exit code 75"):
        rendered("run: torchrun train.py\ngpus: 8")


@pytest.mark.parametrize(("place", "kind"), [("", "preferred"), ("place: {within: rack}", "required")])
def test_kueue_places_by_a_level_of_its_topology(place: str, kind: str) -> None:
    level = "cloud.google.com/gce-topology-subblock"
    cluster = Cluster(image="i", kueue_queue="research", topology=level)
    job = rendered(f"{JOB}{place}", cluster)[-1]
    annotations = job["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {f"kueue.x-k8s.io/podset-{kind}-topology": level}
    kubernetes_validate.validate(job, VERSIONS[-1], strict=True)
    with pytest.raises(SpecError, match="needs Kueue"):
        rendered(JOB, Cluster(image="i", topology=level))


@pytest.mark.parametrize("to", ["", "checkpoint: {to: 's3://b/c'}"])
def test_a_claim_without_a_folder_is_refused(to: str) -> None:
    with pytest.raises(SpecError, match="no folder to be mounted at"):
        rendered(f"run: a\ngpus: 1\n{to}", Cluster(image="i", claim="c"))
