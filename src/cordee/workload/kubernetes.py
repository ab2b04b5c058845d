"""A job as objects of Kubernetes: one Indexed Job, and a headless Service where it has more than one node.

Each pod is one node. `cordee.train.pod` starts its ranks, because torchrun hides the ranks' exit codes, by which the
Job tells a checkpointed rank from a failed one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cordee.errors import EXIT_CHECKPOINTED, SpecError, StopError
from cordee.workload.launcher import launcher_of
from cordee.workload.spec import JobSpec
from cordee.workload.telemetry import telemetry_env

Manifest = dict[str, Any]  # one object, as JSON

CONTAINER = "main"
MASTER_PORT = 29500  # each pod has a network of its own
GPUS_PER_NODE = 8
# A failure counts against backoffLimit in each pod in which it shows: so many failures of whole gangs may be retried.
GANG_RETRIES = 2
LEFT = sorted((EXIT_CHECKPOINTED, StopError.exit_code))  # exit codes of a rank that wants to start again


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The cluster's side of a job: names that a job file does not have.

    Attributes:
        image: the container image, with the code, torch and cordee.
        gpus_per_node: GPUs of one node, at most as many as a pod gets.
        node_selector: labels of the nodes, by key.
        claim: PersistentVolumeClaim that is mounted at the checkpoint folder.
        kueue_queue: Kueue's LocalQueue.
        topology: key of a level of Kueue's topology, in which the gang has to lie, or, without `place.within`, should.
        priority_class: Kueue's WorkloadPriorityClass with a queue, else a PriorityClass.
    """

    image: str
    gpus_per_node: int = GPUS_PER_NODE
    node_selector: dict[str, str] = field(default_factory=dict)
    claim: str | None = None
    kueue_queue: str | None = None
    topology: str | None = None
    priority_class: str | None = None


def job_objects(spec: JobSpec, cluster: Cluster) -> list[Manifest]:
    """Return the objects that run a job: its Service, if it has several nodes, and its Job.

    Args:
        spec: the job.
        cluster: the cluster's names.

    Raises:
        SpecError: a value that Kubernetes cannot express.
    """
    for message, hint in _misfits(spec, cluster):
        raise SpecError(message, hint=hint)
    gpus = min(spec.gpus, cluster.gpus_per_node)
    nodes = spec.gpus // gpus
    job: Manifest = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": spec.name, "labels": _labels(spec, cluster)},
        "spec": _job(spec, cluster, nodes) | {"template": _template(spec, cluster, nodes, gpus)},
    }
    service: Manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": spec.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # ranks look for each other before their pods are ready
            "selector": {"batch.kubernetes.io/job-name": spec.name},
        },
    }
    return [service, job] if nodes > 1 else [job]


def _misfits(spec: JobSpec, cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield what Kubernetes cannot express, each with a hint."""
    if not spec.gpus:
        yield "a job without GPUs is a plain Job, of which Cordee adds nothing", "write its manifest"
        return
    yield from _shape_misfits(spec, cluster)
    launcher = launcher_of(spec.run)
    if launcher is not None or spec.launch == "node":
        says = f"{launcher} starts" if launcher else "launch: node lets the command start"
        yield (
            f"{says} the ranks and hides their exit code {EXIT_CHECKPOINTED}, so that a preempted pod counts as failed",
            "write run: python train.py and launch: rank; the pod starts a process per GPU, as torchrun would",
        )
    if spec.gpu is not None and not cluster.node_selector:
        yield (
            f"gpus: {spec.gpus}x{spec.gpu} names a kind of GPU, for which each cluster has its own label",
            "name the label: --node-selector nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3",
        )
    if spec.capacity != "any" and not cluster.node_selector:
        yield (
            f"capacity: {spec.capacity} has another label in each cloud",
            "name the label: --node-selector karpenter.sh/capacity-type=spot",
        )
    if (spec.tier, spec.priority) != ("standard", 0) and cluster.priority_class is None:
        yield (
            f"tier: {spec.tier} and priority: {spec.priority} have no number in Kubernetes",
            "name the cluster's class: --priority-class NAME",
        )
    if spec.queue != "default" and cluster.kueue_queue is None:
        yield f"queue: {spec.queue} needs a queueing system", "name Kueue's LocalQueue: --kueue-queue NAME"
    if spec.limit.cost_micro_usd is not None:
        yield "Kubernetes knows no prices: limit.cost cannot be kept", "use limit.time"
    if spec.limit.preemptions is not None:
        yield (
            f"limit.preemptions: {spec.limit.preemptions} cannot be kept: Kubernetes does not count preemptions",
            "leave it out, and name a class of higher priority: --priority-class NAME",
        )
    if spec.cwd is not None and not spec.cwd.startswith("/"):
        yield f"cwd: {spec.cwd} is not a path of the image", "write an absolute path, or leave it to the image"
    yield from _storage_misfits(spec, cluster)


def _shape_misfits(spec: JobSpec, cluster: Cluster) -> Iterator[tuple[str, str]]:
    per_node = cluster.gpus_per_node
    if spec.gpu_milli < 1000:
        yield f"nvidia.com/gpu counts whole GPUs, not {spec.gpu_milli / 1000:g} of one", "write gpus: 1"
    if spec.gpus > per_node and spec.gpus % per_node:
        yield (
            f"{spec.gpus} GPUs are not whole nodes of {per_node}",
            f"use {spec.gpus - spec.gpus % per_node} GPUs, or another --gpus-per-node that divides {spec.gpus}",
        )
    if spec.sizes:
        sizes = ", ".join(map(str, spec.sizes))
        yield (
            f"a Job cannot run on {spec.gpus} GPUs and on {sizes}",
            "leave elastic out, or render one file for each size",
        )
    unit, within = spec.place.unit or 1, spec.place.within
    pod = min(spec.gpus, per_node)
    if pod % unit:
        yield f"place.unit = {unit} does not divide the {pod} GPUs of a pod", f"use a unit that divides {pod}"
    if within == "node" and spec.gpus > per_node:
        yield f"place.within: node cannot hold {spec.gpus} GPUs on nodes of {per_node}", "leave it out"
    if within in ("island", "rack", "block") and cluster.topology is None:
        yield (
            f"place.within: {within} cannot be asked for with {spec.gpus} GPUs on nodes of {per_node}",
            "leave it out, or name the level of Kueue's topology: --topology cloud.google.com/gce-topology-subblock",
        )
    if cluster.topology is not None and cluster.kueue_queue is None:
        yield (
            f"--topology {cluster.topology} needs Kueue, which places by it",
            "name its LocalQueue: --kueue-queue NAME",
        )
    if spec.gpus > per_node and not spec.name[0].isalpha():
        yield f"a Service cannot be named {spec.name}", "use a name that begins with a letter"


def _storage_misfits(spec: JobSpec, cluster: Cluster) -> Iterator[tuple[str, str]]:
    to, base = spec.checkpoint.to, spec.checkpoint.base
    if to is None:
        if cluster.claim is not None:
            yield f"--claim {cluster.claim} has no folder to be mounted at", "set checkpoint.to: /checkpoints"
        return
    if "," in to:
        yield (
            f"checkpoint.to: {to} has several storage levels, of which the pod's own disk is lost with the pod",
            "name only the last one",
        )
    elif "://" not in to:
        if not to.startswith("/"):
            yield f"checkpoint.to: {to} is not a path of the pod", "write an absolute path, or s3://bucket/prefix"
        elif cluster.claim is None:
            yield (
                f"checkpoint.to: {to} is lost with the pod",
                "mount a PersistentVolumeClaim there: --claim NAME; or write to s3://bucket/prefix",
            )
    elif cluster.claim is not None:
        yield f"--claim {cluster.claim} has no folder to be mounted at: checkpoint.to is {to}", "leave --claim out"
    if base is not None and "://" not in base:
        yield f"checkpoint.base: {base} is not in the pod", "copy it to an object store: s3://bucket/prefix"


def _labels(spec: JobSpec, cluster: Cluster) -> dict[str, str]:
    labels = {"app.kubernetes.io/name": spec.name, "app.kubernetes.io/managed-by": "cordee"}
    if cluster.kueue_queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = cluster.kueue_queue
        if cluster.priority_class is not None:
            labels["kueue.x-k8s.io/priority-class"] = cluster.priority_class
        if spec.limit.time_s is not None:
            labels["kueue.x-k8s.io/max-exec-time-seconds"] = str(_seconds_to_notice(spec, spec.limit.time_s))
    return labels


def _job(spec: JobSpec, cluster: Cluster, nodes: int) -> Manifest:
    action = "Ignore" if spec.on_preempt.then == "requeue" else "FailJob"
    job: Manifest = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": GANG_RETRIES * nodes,
        "podFailurePolicy": {
            "rules": [
                {"action": action, "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": LEFT}},
                {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
    }
    if cluster.kueue_queue is not None:
        job["suspend"] = True  # Kueue starts it
    elif spec.limit.time_s is not None:
        job["activeDeadlineSeconds"] = _seconds_to_notice(spec, spec.limit.time_s)
    return job


def _template(spec: JobSpec, cluster: Cluster, nodes: int, gpus: int) -> Manifest:
    template: Manifest = {"spec": _pod(spec, cluster, nodes, gpus)}
    if cluster.topology is not None:
        kind = "preferred" if spec.place.within is None else "required"
        template["metadata"] = {"annotations": {f"kueue.x-k8s.io/podset-{kind}-topology": cluster.topology}}
    return template


def _seconds_to_notice(spec: JobSpec, limit_s: float) -> int:
    """Return the part of a limit that may pass before notice, since the grace period lies inside the limit."""
    return max(1, math.floor(max(limit_s - spec.on_preempt.notice_s, limit_s / 2)))


def _pod(spec: JobSpec, cluster: Cluster, nodes: int, gpus: int) -> Manifest:
    # With a trap a shell waits for its command after SIGTERM, and leaves with its exit code.
    command = ["/bin/sh", "-c", f"trap : TERM; {spec.run}"] if isinstance(spec.run, str) else list(spec.run)
    resource = (
        f"nvidia.com/mig-{spec.mig}" if spec.mig else "nvidia.com/gpu"
    )  # of the device plugin, MIG strategy mixed
    resources: Manifest = {"limits": {resource: gpus}}
    if spec.memory_bytes is not None:
        resources["limits"]["memory"] = str(math.ceil(spec.memory_bytes / nodes))
    if spec.cpus is not None:
        resources["requests"] = {"cpu": f"{math.ceil(spec.cpus * 1000 / nodes)}m"}
    # NCCL and data loaders need more than the 64 MB of a container's /dev/shm.
    volumes: list[Manifest] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if cluster.claim is not None:
        volumes.append({"name": "checkpoints", "persistentVolumeClaim": {"claimName": cluster.claim}})
        mounts.append({"name": "checkpoints", "mountPath": str(spec.checkpoint.to)})
    container: Manifest = {
        "name": CONTAINER,
        "image": cluster.image,
        "command": ["python3", "-m", "cordee.train.pod", "--gpus", str(gpus), "--nodes", str(nodes), "--"],
        "args": [literal(word) for word in command],
        "env": list(_env(spec, nodes)),
        "resources": resources,
        "volumeMounts": mounts,
    }
    if spec.cwd is not None:
        container["workingDir"] = spec.cwd
    pod: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(spec.on_preempt.notice_s),
        "containers": [container],
        "volumes": volumes,
    }
    if nodes > 1:
        pod["subdomain"] = spec.name
    if cluster.node_selector:
        pod["nodeSelector"] = cluster.node_selector
    if cluster.priority_class is not None and cluster.kueue_queue is None:
        pod["priorityClassName"] = cluster.priority_class
    return pod


def literal(word: str) -> str:
    """Return a text in which Kubernetes expands no variable: it reads $(NAME) in args and env, and $$ as $.

    >>> literal("echo $(date) $HOME")
    'echo $$(date) $$HOME'
    """
    return word.replace("$", "$$")


def _env(spec: JobSpec, nodes: int) -> Iterator[Manifest]:
    """Yield the environment of all ranks; `cordee.train.pod` adds what differs between them."""
    threads = 1 if spec.cpus is None else max(1, int(spec.cpus // spec.gpus))
    values = {
        "MASTER_ADDR": f"{spec.name}-0.{spec.name}" if nodes > 1 else "127.0.0.1",
        "MASTER_PORT": str(MASTER_PORT),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",  # keeps the last lines of a killed rank
        "CORDEE_GRACE_S": f"{spec.on_preempt.notice_s:g}",
        "CORDEE_HANG_REPORT_S": f"{spec.on_hang.report_after_s:g}",
    }
    if spec.on_hang.restart_after_s is not None:
        values["CORDEE_HANG_RESTART_S"] = f"{spec.on_hang.restart_after_s:g}"
    values |= telemetry_env(spec.model_dump(include={"on_spike", "track"}))
    if spec.model is not None and spec.model.layout is not None:
        values["CORDEE_LAYOUT"] = spec.model.layout
    checkpoint = spec.checkpoint
    if checkpoint.to is not None:
        values["CORDEE_CHECKPOINT_TO"] = f"{checkpoint.to.rstrip('/')}/{spec.name}"
        values["CORDEE_CHECKPOINT_EVERY"] = _seconds(checkpoint.every_s)
        values["CORDEE_CHECKPOINT_RAM"] = _seconds(checkpoint.ram_s)
        values["CORDEE_CHECKPOINT_KEEP"] = str(checkpoint.keep)
        if checkpoint.base is not None:
            values["CORDEE_CHECKPOINT_BASE"] = checkpoint.base
    for name, value in (values | spec.env).items():
        yield {"name": name, "value": literal(value)}
    for name in spec.secrets:
        yield {"name": name, "valueFrom": {"secretKeyRef": {"name": spec.name, "key": name}}}


def _seconds(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
