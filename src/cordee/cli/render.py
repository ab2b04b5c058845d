"""The verb `render`: a job file, or Cordee itself, as objects of another system."""

import io
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from ruamel.yaml import YAML

from cordee.cli.job_file import job_from_file
from cordee.errors import InputError
from cordee.hardware.labels import KNOWN, parse_label
from cordee.workload.kubernetes import GPUS_PER_NODE, Cluster, Manifest, job_objects
from cordee.workload.kubernetes_cluster import (
    NAME,
    AgentPods,
    RayPods,
    ServerPods,
    agent_objects,
    ray_objects,
    server_objects,
)
from cordee.workload.slurm import SlurmCluster, sbatch_script

render = typer.Typer(no_args_is_help=True)

JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="A job's YAML, as `cordee run` reads it.")]
Image = Annotated[str, typer.Option(help="Container image with your code, torch and cordee.")]
GpusPerNode = Annotated[int, typer.Option(min=1, help="GPUs of one node; a pod gets at most as many.")]
NodeSelector = Annotated[list[str] | None, typer.Option(help="Label of the nodes, KEY=VALUE; may be repeated.")]
Claim = Annotated[str | None, typer.Option(help="PersistentVolumeClaim to mount at the job's checkpoint folder.")]
Queue = Annotated[str | None, typer.Option(help="LocalQueue of Kueue, which then starts the job.")]
Topology = Annotated[
    str | None, typer.Option(help="Level of Kueue's topology in which the pods lie, by its key: for `place.within`.")
]
PriorityClass = Annotated[
    str | None, typer.Option(help="PriorityClass of the pods; with --kueue-queue a WorkloadPriorityClass.")
]
Namespace = Annotated[str, typer.Option(help="Namespace of all objects.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="File to write.", show_default="standard output")]


@render.callback()
def _common() -> None:
    """Write a job file, or Cordee itself, as objects of another system."""


@render.command()
def kubernetes(
    job: JobFile,
    *,
    image: Image,
    gpus_per_node: GpusPerNode = GPUS_PER_NODE,
    node_selector: NodeSelector = None,
    claim: Claim = None,
    kueue_queue: Queue = None,
    topology: Topology = None,
    priority_class: PriorityClass = None,
    out: Out = None,
) -> None:
    """Write a job file as a Kubernetes Job, which needs no Cordee server."""
    spec = job_from_file(job)
    cluster = Cluster(
        image=image,
        gpus_per_node=gpus_per_node,
        node_selector=dict(_label(text) for text in node_selector or ()),
        claim=claim,
        kueue_queue=kueue_queue,
        topology=topology,
        priority_class=priority_class,
    )
    _write(job_objects(spec, cluster), out)


@render.command()
def kubernetes_server(
    *,
    image: Image,
    namespace: Namespace = NAME,
    replicas: Annotated[int, typer.Option(help="Servers: one leads, the others stand by.")] = 2,
    secret: Annotated[str, typer.Option(help="Secret with database, token and, if there are any, tokens.")] = NAME,
    tls: Annotated[str, typer.Option(help="Secret of type kubernetes.io/tls.")] = f"{NAME}-tls",
    storage: Annotated[str, typer.Option(help="Size of the volume for logs and files of jobs.")] = "50Gi",
    on: Annotated[
        str | None, typer.Option(help="Engine that gives machines, as for `cordee up`.", show_default="nodes that join")
    ] = None,
    out: Out = None,
) -> None:
    """Write the server, with a standby and PostgreSQL, for Kubernetes."""
    pods = ServerPods(
        image=image, namespace=namespace, replicas=replicas, secret=secret, tls=tls, storage=storage, on=on
    )
    _write(server_objects(pods), out)


@render.command()
def kubernetes_agents(
    *,
    image: Image,
    name: Annotated[
        str, typer.Option(help="Name of the DaemonSet: one for each pool of nodes of one kind.")
    ] = "cordee-agent",
    namespace: Namespace = NAME,
    url: Annotated[str, typer.Option(help="URL of a server.", show_default="the first server of the namespace")] = "",
    secret: Annotated[str, typer.Option(help="Secret with join-token, from `cordee nodes token`.")] = "cordee-join",
    devices: Annotated[
        str,
        typer.Option(
            help="plugin: the GPUs are requested by number; claim: all GPUs of a node are claimed (DRA); all: the "
            "pod is privileged and requests none."
        ),
    ] = "plugin",
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of each node, for --devices plugin.")] = GPUS_PER_NODE,
    runtime_class: Annotated[str | None, typer.Option(help="RuntimeClass of NVIDIA, for --devices all.")] = None,
    resource: Annotated[
        list[str] | None, typer.Option(help="Further device of each node, KEY=NUMBER, such as rdma/hca=1.")
    ] = None,
    label: Annotated[list[str] | None, typer.Option(help="Label of the nodes, such as rack=r7.")] = None,
    label_from: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL=KEY", help="Label whose value each node of Kubernetes has under this key."),
    ] = None,
    node_selector: NodeSelector = None,
    out: Out = None,
) -> None:
    """Write an agent for each node, for Kubernetes."""
    pods = AgentPods(
        image=image,
        name=name,
        namespace=namespace,
        url=url,
        secret=secret,
        devices=devices,
        gpus_per_node=gpus_per_node,
        runtime_class=runtime_class,
        resources={key: _number(key, count) for key, count in map(partial(_pair, "--resource"), resource or ())},
        labels=dict(map(parse_label, label or ())),
        labels_from=dict(map(_source, label_from or ())),
        node_selector=dict(map(_label, node_selector or ())),
    )
    _write(agent_objects(pods), out)


@render.command()
def kubernetes_ray(
    *,
    image: Annotated[str, typer.Option(help="Container image with Ray, cordee, torch and your code's packages.")],
    ray_version: Annotated[str, typer.Option(help="Version of Ray in the image.")],
    name: Annotated[str, typer.Option(help="Name of the RayCluster.")] = "cordee-ray",
    namespace: Namespace = NAME,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of each worker.")] = GPUS_PER_NODE,
    workers: Annotated[str, typer.Option(metavar="MIN[:MAX]", help="Workers; between two numbers they scale.")] = "1",
    node_selector: NodeSelector = None,
    kueue_queue: Annotated[str | None, typer.Option(help="LocalQueue of Kueue, which then admits the cluster.")] = None,
    out: Out = None,
) -> None:
    """Write KubeRay's RayCluster, on which `cordee up --on ray://...` starts agents."""
    least, _, most = workers.partition(":")
    pods = RayPods(
        image=image,
        ray_version=ray_version,
        name=name,
        namespace=namespace,
        gpus_per_node=gpus_per_node,
        workers=(_number("--workers", least), _number("--workers", most or least)),
        node_selector=dict(map(_label, node_selector or ())),
        kueue_queue=kueue_queue,
    )
    _write(ray_objects(pods), out)


@render.command()
def slurm(
    job: JobFile,
    *,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of one node.")] = GPUS_PER_NODE,
    gpu_type: Annotated[
        str | None, typer.Option(help="The cluster's name of the kind of GPU, as `sinfo -o %G` shows it; or any.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.", show_default="the cluster's")] = None,
    account: Annotated[str | None, typer.Option(help="Account.", show_default="the cluster's")] = None,
    qos: Annotated[str | None, typer.Option(help="QOS, which stands for tier and priority.")] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="Another option for sbatch, such as --exclusive; may be repeated."),
    ] = None,
    out: Out = None,
) -> None:
    """Write a job file as a batch script of Slurm, which needs no Cordee server."""
    cluster = SlurmCluster(
        gpus_per_node=gpus_per_node,
        gpu_type=gpu_type,
        partition=partition,
        account=account,
        qos=qos,
        options=tuple(sbatch or ()),
    )
    _write_text(sbatch_script(job_from_file(job), cluster), out)


def _write(objects: list[Manifest], out: Path | None) -> None:
    """Write objects to a file, or to standard output."""
    _write_text(as_yaml(objects), out)


def _write_text(text: str, out: Path | None) -> None:
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror}", hint="give another -o FILE") from None


def as_yaml(objects: list[Manifest]) -> str:
    """Return objects as one YAML stream."""
    yaml = YAML()
    yaml.width = 120
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.representer.ignore_aliases = lambda data: True
    text = io.StringIO()
    yaml.dump_all(objects, text)
    return text.getvalue()


def _label(text: str) -> tuple[str, str]:
    return _pair("--node-selector", text)


def _pair(option: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InputError(f"{option} {text} is not KEY=VALUE", hint=f"write {option} {key or 'KEY'}=...")
    return key, value


def _source(text: str) -> tuple[str, str]:
    label, key = _pair("--label-from", text)
    if label not in KNOWN:
        raise InputError(f"a node has no label {label!r}", hint=f"known labels: {', '.join(KNOWN)}")
    return label, key


def _number(what: str, text: str) -> int:
    if not text.isdecimal():
        raise InputError(f"{what}: {text!r} is not a number", hint=f"write {what}=1, for instance")
    return int(text)
