"""Cordee as objects of Kubernetes: they follow the published schemas strictly, and say how an agent gets its GPUs.

KubeRay's CustomResourceDefinition is not on a registry that tests reach. Its RayCluster is held here against a schema
of the fields that are used, written from KubeRay's types (ray.io/v1), with the pods checked strictly; not against the
CRD.
"""

from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from cordee.errors import InputError
from cordee.workload.kubernetes import Manifest
from cordee.workload.kubernetes_cluster import (
    AgentPods,
    RayPods,
    ServerPods,
    agent_objects,
    ray_objects,
    server_objects,
)

OLDEST, NEWEST = "1.29", "1.34"
IMAGE = "registry/cordee:1"
FULL = AgentPods(
    image=IMAGE,
    name="pool-b",
    namespace="team",
    url="https://cordee.example:8470",
    gpus_per_node=4,
    resources={"rdma/hca": 2},
    labels={"rack": "r7", "block": "b1"},
    labels_from={"capacity": "karpenter.sh/capacity-type"},
    node_selector={"pool": "b"},
)


def pod_of(objects: list[Manifest]) -> Any:
    return objects[-1]["spec"]["template"]["spec"]


def env_of(pod: Any) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in pod["containers"][0]["env"]}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize(
    "objects",
    [
        server_objects(ServerPods(image=IMAGE)),
        server_objects(ServerPods(image=IMAGE, replicas=1, on="ray://head:10001")),
        agent_objects(AgentPods(image=IMAGE)),
        agent_objects(FULL),
        agent_objects(AgentPods(image=IMAGE, devices="all", runtime_class="nvidia")),
    ],
    ids=["server", "alone", "agents", "pool", "privileged"],
)
def test_the_objects_follow_the_published_schemas_strictly(objects: list[Manifest], version: str) -> None:
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)


def test_claims_follow_the_schema_of_the_version_that_has_them() -> None:
    objects = agent_objects(AgentPods(image=IMAGE, devices="claim"))
    assert [each["kind"] for each in objects] == ["ResourceClaimTemplate", "DaemonSet"]
    for each in objects:
        kubernetes_validate.validate(each, NEWEST, strict=True)
    (request,) = objects[0]["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["allocationMode"] == "All"
    pod = pod_of(objects)
    assert pod["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": "cordee-agent"}]
    assert pod["containers"][0]["resources"] == {"claims": [{"name": "gpus"}]}


def test_two_servers_have_names_that_stay_and_share_their_secrets() -> None:
    service, budget, stateful = server_objects(ServerPods(image=IMAGE))
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert budget["spec"]["maxUnavailable"] == 1
    spec = stateful["spec"]
    assert (spec["replicas"], spec["podManagementPolicy"], spec["serviceName"]) == (2, "Parallel", "cordee")
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"] == service["spec"]["selector"]
    pod = pod_of([stateful])
    (script,) = pod["containers"][0]["args"]
    assert "--standby" in script and '--listen "$$(hostname -f):8470"' in script, "Kubernetes reads $$ as $"
    assert env_of(pod)["CORDEE_DATABASE"] == {"secretKeyRef": {"name": "cordee", "key": "database"}}
    assert {each["name"] for each in pod["volumes"]} == {"secrets", "tls"}
    (alone,) = [each for each in server_objects(ServerPods(image=IMAGE, replicas=1)) if each["kind"] == "StatefulSet"]
    assert "--standby" not in pod_of([alone])["containers"][0]["args"][0]


def test_an_agent_requests_its_gpus_and_sees_its_own_pids() -> None:
    *reader, daemons = agent_objects(FULL)
    assert [each["kind"] for each in reader] == ["ServiceAccount", "ClusterRole", "ClusterRoleBinding"]
    pod = pod_of([daemons])
    container = pod["containers"][0]
    assert container["resources"] == {"limits": {"rdma/hca": 2, "nvidia.com/gpu": 4}}
    assert "securityContext" not in container and pod["hostPID"] and pod["hostNetwork"]
    assert daemons["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert pod["nodeSelector"] == {"pool": "b"}
    assert container["args"][0].endswith("--foreground --label block=b1 --label rack=r7")
    assert container["args"][0].startswith("python3 -m cordee.telemetry.kube_labels --out ")
    assert pod["serviceAccountName"] == "pool-b" and pod["automountServiceAccountToken"]
    env = env_of(pod)
    assert env["CORDEE_NODE"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert env["CORDEE_URL"] == "https://cordee.example:8470" and env["CORDEE_FOLDER"].endswith("/pool-b")


def test_an_agent_that_requests_none_is_privileged() -> None:
    pod = pod_of(agent_objects(AgentPods(image=IMAGE, devices="all", runtime_class="nvidia")))
    container = pod["containers"][0]
    assert container["securityContext"] == {"privileged": True} and container["resources"] == {}
    assert env_of(pod)["NVIDIA_VISIBLE_DEVICES"] == "all" and pod["runtimeClassName"] == "nvidia"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="0 servers"):
        server_objects(ServerPods(image=IMAGE, replicas=0))
    with pytest.raises(InputError, match="unknown --devices mig"):
        agent_objects(AgentPods(image=IMAGE, devices="mig"))
    for workers in ((0, 0), (3, 2)):
        with pytest.raises(InputError, match="there is none"):
            ray_objects(RayPods(image=IMAGE, ray_version="2.60.0", workers=workers))


# -- KubeRay -------------------------------------------------------------------------------------------------

GROUP = {
    "rayStartParams": {"type": "object", "additionalProperties": {"type": "string"}},
    "template": {"type": "object"},
}
COUNT = {"type": "integer", "minimum": 0}


def closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


RAY_CLUSTER = closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayCluster"},
    metadata={"type": "object"},
    spec=closed(
        ["headGroupSpec"],
        rayVersion={"type": "string"},
        enableInTreeAutoscaling={"type": "boolean"},
        suspend={"type": "boolean"},
        headGroupSpec=closed(["rayStartParams", "template"], **GROUP),
        workerGroupSpecs={
            "type": "array",
            "items": closed(
                ["groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"],
                groupName={"type": "string"},
                replicas=COUNT,
                minReplicas=COUNT,
                maxReplicas=COUNT,
                **GROUP,
            ),
        },
    ),
)


@pytest.mark.parametrize("queue", [None, "research"])
def test_a_ray_cluster_has_kuberays_fields_and_strict_pods(queue: str | None) -> None:
    pods = RayPods(image=IMAGE, ray_version="2.60.0", workers=(2, 8), node_selector={"pool": "a"}, kueue_queue=queue)
    state, cluster = ray_objects(pods)
    kubernetes_validate.validate(state, NEWEST, strict=True)
    jsonschema.validate(cluster, RAY_CLUSTER)
    head, (workers,) = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"]
    for group in (head, workers):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, **group["template"]}
        kubernetes_validate.validate(pod, NEWEST, strict=True)
    assert (workers["minReplicas"], workers["maxReplicas"], cluster["spec"]["enableInTreeAutoscaling"]) == (2, 8, True)
    worker = workers["template"]["spec"]
    assert worker["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert (
        env_of(worker)["RAY_worker_niceness"] == "0"
        and env_of(head["template"]["spec"])["RAY_gcs_storage"] == "rocksdb"
    )
    labels = cluster["metadata"]["labels"]
    assert labels.get("kueue.x-k8s.io/queue-name") == queue and cluster["spec"].get("suspend", False) == bool(queue)
    assert pods.address == "ray://cordee-ray-head-svc.cordee.svc:10001"
