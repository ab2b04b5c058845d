"""Cordee itself as objects of Kubernetes: the server with its standby, an agent on each node, and a Ray cluster.

The server is a StatefulSet, since its pods need names that stay: agents and clients know the address of each. Agents
are a DaemonSet that requests its GPUs, so that no pod of Kubernetes gets the same ones. Ranks run in the agent's
container; its image has their code's interpreter, and they end with it.
"""

from dataclasses import dataclass, field

from cordee.errors import InputError
from cordee.workload.kubernetes import GPUS_PER_NODE, Manifest, literal

NAME, PORT = "cordee", 8470
HOME, SECRETS, TLS, FOLDER, LABELS = "/home/cordee", "/run/cordee", "/run/tls", "/var/lib/cordee", "/etc/cordee"
RAY_CLIENT_PORT, RAY_STATE = 10001, "/var/lib/ray"
TOLERATIONS = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
DEVICES = ("plugin", "claim", "all")
"""How an agent gets its GPUs: a number from the device plugin, all of a node by a ResourceClaim, or past both."""

_SERVER = f"""\
umask 077
for name in token tokens; do
  if [ -e "$CORDEE_SECRETS/$name" ]; then cp -f "$CORDEE_SECRETS/$name" "$CORDEE_HOME/$name"; fi
done
exec cordee up --foreground --listen "$(hostname -f):{PORT}" --certificate "$CORDEE_TLS/tls.crt" \\
  --key "$CORDEE_TLS/tls.key" --database "$CORDEE_DATABASE"\
"""
_AGENT = """\
if [ -e "$CORDEE_FOLDER/agent.json" ]; then exec python3 -m cordee.agent --folder "$CORDEE_FOLDER"; fi
exec cordee nodes join "$CORDEE_URL" "$CORDEE_JOIN_TOKEN" --name "$CORDEE_NODE" --folder "$CORDEE_FOLDER" --foreground\
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPods:
    """The server's side of a cluster.

    Attributes:
        image: the container image, with `cordee[server,postgres]`.
        namespace: of all objects.
        replicas: servers; all but one stand by.
        secret: Secret with `database`, `token` and, if there are several users, `tokens`.
        tls: Secret of type kubernetes.io/tls.
        storage: size of the volume for logs and files of the jobs, as Kubernetes writes it.
        on: engine that gives machines, as `cordee up --on` takes it; None: nodes that join.
        cpu, memory: of one server, as Kubernetes writes them.
    """

    image: str
    namespace: str = NAME
    replicas: int = 2
    secret: str = NAME
    tls: str = "cordee-tls"
    storage: str = "50Gi"
    on: str | None = None
    cpu: str = "2"
    memory: str = "4Gi"


def server_objects(pods: ServerPods) -> list[Manifest]:
    """Return the server's Service, PodDisruptionBudget and StatefulSet.

    Raises:
        InputError: there is no server.
    """
    if pods.replicas < 1:
        raise InputError(f"{pods.replicas} servers serve nobody", hint="write --replicas 2: one leads, one stands by")
    meta = {"name": NAME, "namespace": pods.namespace, "labels": _labels("server")}
    service: Manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # a server binds to its own name before it is ready
            "selector": _labels("server"),
            "ports": [{"name": "https", "port": PORT, "targetPort": "https"}],
        },
    }
    stateful: Manifest = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": meta,
        "spec": {
            "serviceName": NAME,
            "replicas": pods.replicas,
            "podManagementPolicy": "Parallel",  # whichever is first leads
            "selector": {"matchLabels": _labels("server")},
            "template": {"metadata": {"labels": _labels("server")}, "spec": _server_pod(pods)},
            "volumeClaimTemplates": [
                {
                    "metadata": {"name": "home"},
                    "spec": {
                        "accessModes": ["ReadWriteOnce"],
                        "resources": {"requests": {"storage": pods.storage}},
                    },
                }
            ],
        },
    }
    budget: Manifest = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": meta,
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": _labels("server")}},
    }
    return [service, *([budget] if pods.replicas > 1 else []), stateful]


def _server_pod(pods: ServerPods) -> Manifest:
    script = _SERVER + (" --standby" if pods.replicas > 1 else "")
    script += f" --on {pods.on}" if pods.on is not None else ""
    values = {"HOME": HOME, "CORDEE_HOME": HOME, "CORDEE_SECRETS": SECRETS, "CORDEE_TLS": TLS, "USER": "operator"}
    probe: Manifest = {"tcpSocket": {"port": "https"}}
    container: Manifest = {
        "name": "server",
        "image": pods.image,
        "command": ["/bin/sh", "-c"],
        "args": [literal(script)],
        "env": [
            *_env(values),
            {"name": "CORDEE_DATABASE", "valueFrom": {"secretKeyRef": {"name": pods.secret, "key": "database"}}},
        ],
        "ports": [{"name": "https", "containerPort": PORT}],
        # The API asks for a token, which a probe over HTTP cannot take from a Secret.
        "startupProbe": probe | {"periodSeconds": 5, "failureThreshold": 120},
        "readinessProbe": probe | {"periodSeconds": 5},
        "livenessProbe": probe | {"periodSeconds": 10, "failureThreshold": 6},
        "resources": {"requests": {"cpu": pods.cpu, "memory": pods.memory}, "limits": {"memory": pods.memory}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "home", "mountPath": HOME},
            {"name": "secrets", "mountPath": SECRETS, "readOnly": True},
            {"name": "tls", "mountPath": TLS, "readOnly": True},
        ],
    }
    apart: Manifest = {
        "weight": 100,
        "podAffinityTerm": {
            "topologyKey": "kubernetes.io/hostname",
            "labelSelector": {"matchLabels": _labels("server")},
        },
    }
    return {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "fsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [apart]}},
        "containers": [container],
        "volumes": [
            {"name": "secrets", "secret": {"secretName": pods.secret}},
            {"name": "tls", "secret": {"secretName": pods.tls}},
        ],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPods:
    """The agents of one pool of like nodes.

    Attributes:
        image: the container image, with cordee, torch and what the jobs' code needs.
        name: of the DaemonSet.
        namespace: of all objects.
        url: of a server.
        secret: Secret with `join-token`, as `cordee nodes token` prints it.
        devices: one of `DEVICES`.
        gpus_per_node: GPUs of each node, for the device plugin.
        runtime_class: RuntimeClass of NVIDIA's container runtime, for devices that are not requested; None: the
            default runtime is NVIDIA's.
        resources: further devices of each node, such as `rdma/hca: 1`.
        labels: of the nodes, as `cordee nodes join --label` takes them.
        labels_from: labels of Cordee, with the key under which each node of Kubernetes has the value.
        node_selector: labels of the nodes in Kubernetes, by key.
        grace_s: from the end of a pod to SIGKILL; the ranks save in this time.
    """

    image: str
    name: str = "cordee-agent"
    namespace: str = NAME
    url: str = ""
    secret: str = "cordee-join"
    devices: str = "plugin"
    gpus_per_node: int = GPUS_PER_NODE
    runtime_class: str | None = None
    resources: dict[str, int] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    labels_from: dict[str, str] = field(default_factory=dict)
    node_selector: dict[str, str] = field(default_factory=dict)
    grace_s: int = 600


def agent_objects(pods: AgentPods) -> list[Manifest]:
    """Return the DaemonSet of agents, after what it needs: the template of its claims, the right to read its node.

    Raises:
        InputError: the way to the GPUs is unknown.
    """
    if pods.devices not in DEVICES:
        raise InputError(f"unknown --devices {pods.devices}", hint=f"use one of: {', '.join(DEVICES)}")
    meta = {"name": pods.name, "namespace": pods.namespace, "labels": _labels("agent", pods.name)}
    daemons: Manifest = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": meta,
        "spec": {
            "selector": {"matchLabels": _labels("agent", pods.name)},
            "updateStrategy": {"type": "OnDelete"},  # a new agent would end the ranks of the old one
            "template": {"metadata": {"labels": _labels("agent", pods.name)}, "spec": _agent_pod(pods)},
        },
    }
    claim: Manifest = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": meta,
        "spec": {
            "spec": {
                "devices": {
                    "requests": [
                        {"name": "gpus", "exactly": {"deviceClassName": "gpu.nvidia.com", "allocationMode": "All"}}
                    ]
                }
            }
        },
    }
    reader = _node_reader(pods, meta) if pods.labels_from else []
    return [*reader, *([claim] if pods.devices == "claim" else []), daemons]


def _node_reader(pods: AgentPods, meta: Manifest) -> list[Manifest]:
    """Return a service account that may read nodes."""
    everywhere = {"name": f"{pods.namespace}-{pods.name}", "labels": meta["labels"]}
    group = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRole",
            "metadata": everywhere,
            "rules": [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}],
        },
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": everywhere,
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": everywhere["name"]},
            "subjects": [{"kind": "ServiceAccount", "name": pods.name, "namespace": pods.namespace}],
        },
    ]


def _agent_pod(pods: AgentPods) -> Manifest:
    values = {
        "HOME": FOLDER,
        "USER": NAME,
        "CORDEE_FOLDER": f"{FOLDER}/{pods.name}",
        "CORDEE_URL": pods.url or f"https://{NAME}-0.{NAME}.{pods.namespace}.svc:{PORT}",
    }
    script = _AGENT + "".join(f" --label {key}={value}" for key, value in sorted(pods.labels.items()))
    if pods.labels_from:
        values["CORDEE_NODE_FILE"] = f"{FOLDER}/{pods.name}/node.labels"
        keys = " ".join(f"{label}={key}" for label, key in sorted(pods.labels_from.items()))
        script = f'python3 -m cordee.telemetry.kube_labels --out "$CORDEE_NODE_FILE" {keys} || exit 1\n{script}'
    limits: dict[str, int] = dict(pods.resources)
    container: Manifest = {
        "name": "agent",
        "image": pods.image,
        "command": ["/bin/sh", "-c"],
        "args": [literal(script)],
        "env": [
            *_env(values),
            {"name": "CORDEE_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "CORDEE_JOIN_TOKEN", "valueFrom": {"secretKeyRef": {"name": pods.secret, "key": "join-token"}}},
        ],
        "resources": {"limits": limits} if limits else {},
        "volumeMounts": [
            {"name": "folder", "mountPath": FOLDER},
            {"name": "labels", "mountPath": LABELS, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    pod: Manifest = {
        "automountServiceAccountToken": bool(pods.labels_from),
        # NCCL uses the node's own network, and the cloud's metadata service answers there.
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        # NVML names processes by the host's pids: in a namespace of its own the agent would take its ranks for others'.
        "hostPID": True,
        "terminationGracePeriodSeconds": pods.grace_s,
        "tolerations": TOLERATIONS,
        "nodeSelector": pods.node_selector or {"nvidia.com/gpu.present": "true"},
        "containers": [container],
        "volumes": [
            {"name": "folder", "hostPath": {"path": FOLDER, "type": "DirectoryOrCreate"}},
            {"name": "labels", "hostPath": {"path": LABELS, "type": "DirectoryOrCreate"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if pods.labels_from:
        pod["serviceAccountName"] = pods.name
    if pods.devices == "plugin":
        container["resources"] = {"limits": limits | {"nvidia.com/gpu": pods.gpus_per_node}}
    elif pods.devices == "claim":
        container["resources"] |= {"claims": [{"name": "gpus"}]}
        pod["resourceClaims"] = [{"name": "gpus", "resourceClaimTemplateName": pods.name}]
    else:
        container["env"] += _env({"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"})
        # NVIDIA's runtime obeys the variable of a pod without privileges only where it is configured to.
        container["securityContext"] = {"privileged": True}
        if pods.runtime_class is not None:
            pod["runtimeClassName"] = pods.runtime_class
    return pod


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPods:
    """A Ray cluster for `cordee up --on ray://...`.

    Attributes:
        image: the container image, with Ray, cordee, torch and what the jobs' code needs.
        ray_version: of Ray in the image.
        name: of the RayCluster.
        namespace: of all objects.
        gpus_per_node: GPUs of each worker.
        workers: the fewest and the most workers; they scale with the demand of waiting jobs if the two differ.
        node_selector: labels of the workers' nodes, by key.
        kueue_queue: Kueue's LocalQueue, which then admits the cluster.
        storage: size of the volume on which the head keeps its state, as Kubernetes writes it.
    """

    image: str
    ray_version: str
    name: str = "cordee-ray"
    namespace: str = NAME
    gpus_per_node: int = GPUS_PER_NODE
    workers: tuple[int, int] = (1, 1)
    node_selector: dict[str, str] = field(default_factory=dict)
    kueue_queue: str | None = None
    storage: str = "10Gi"

    @property
    def address(self) -> str:
        """The address of the head, as `cordee up --on` takes it."""
        return f"ray://{self.name}-head-svc.{self.namespace}.svc:{RAY_CLIENT_PORT}"


def ray_objects(pods: RayPods) -> list[Manifest]:
    """Return the volume of the head's state and KubeRay's RayCluster.

    Raises:
        InputError: the workers cannot be counted.
    """
    least, most = pods.workers
    if not 0 <= least <= most or most == 0:
        raise InputError(
            f"between {least} and {most} workers there is none", hint="write --workers 2:8, or --workers 4"
        )
    meta: Manifest = {"namespace": pods.namespace, "labels": _labels("ray", pods.name)}
    if pods.kueue_queue is not None:
        meta["labels"] |= {"kueue.x-k8s.io/queue-name": pods.kueue_queue}
    head, worker = _ray_pod(pods, "ray-head"), _ray_pod(pods, "ray-worker")
    head["volumes"].append({"name": "state", "persistentVolumeClaim": {"claimName": f"{pods.name}-state"}})
    first = head["containers"][0]
    first["env"] += _env({"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": RAY_STATE})
    first["volumeMounts"].append({"name": "state", "mountPath": RAY_STATE})
    worker["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": pods.gpus_per_node}}
    worker |= {"tolerations": TOLERATIONS} | ({"nodeSelector": pods.node_selector} if pods.node_selector else {})
    state: Manifest = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": f"{pods.name}-state", "namespace": pods.namespace},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": pods.storage}}},
    }
    cluster: Manifest = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": meta | {"name": pods.name},
        "spec": {
            "rayVersion": pods.ray_version,
            "enableInTreeAutoscaling": least < most,
            # Kueue admits a suspended cluster.
            **({"suspend": True} if pods.kueue_queue is not None else {}),
            "headGroupSpec": {
                # The head runs no ranks, so that its node may be small.
                "rayStartParams": {"num-gpus": "0", "num-cpus": "0", "dashboard-host": "0.0.0.0"},
                "template": {"spec": head},
            },
            "workerGroupSpecs": [
                {
                    "groupName": "gpus",
                    "replicas": least,
                    "minReplicas": least,
                    "maxReplicas": most,
                    "rayStartParams": {"num-gpus": str(pods.gpus_per_node)},
                    "template": {"spec": worker},
                }
            ],
        },
    }
    return [state, cluster]


def _ray_pod(pods: RayPods, name: str) -> Manifest:
    # Ranks inherit the niceness of actors (15); the memory monitor would kill the agent, not what uses the memory.
    # A head that moves takes its volume along, which takes longer than the minute that workers would wait for it.
    settings = {
        "RAY_worker_niceness": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    }
    container: Manifest = {
        "name": name,
        "image": pods.image,
        "env": _env(settings),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    return {"containers": [container], "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]}


def _env(values: dict[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _labels(component: str, instance: str = NAME) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": NAME,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/instance": instance,
    }
