"""The verb `render`: a job file as objects of another system."""

import io
from pathlib import Path
from typing import Annotated

import typer
from ruamel.yaml import YAML

from cordee.cli.run import job_from_file
from cordee.errors import InputError
from cordee.workload.kubernetes import GPUS_PER_NODE, Cluster, Manifest, job_objects

render = typer.Typer(no_args_is_help=True)

JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="A job's YAML, as `cordee run` reads it.")]
Image = Annotated[str, typer.Option(help="Container image with your code, torch and cordee.")]
GpusPerNode = Annotated[int, typer.Option(min=1, help="GPUs of one node; a pod gets at most as many.")]
NodeSelector = Annotated[list[str] | None, typer.Option(help="Label of the nodes, KEY=VALUE; may be repeated.")]
Claim = Annotated[str | None, typer.Option(help="PersistentVolumeClaim to mount at the job's checkpoint folder.")]
Queue = Annotated[str | None, typer.Option(help="LocalQueue of Kueue, which then starts the job.")]
PriorityClass = Annotated[
    str | None, typer.Option(help="PriorityClass of the pods; with --kueue-queue a WorkloadPriorityClass.")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="File to write.", show_default="standard output")]


@render.callback()
def _common() -> None:
    """Write a job file as objects of another system."""


@render.command()
def kubernetes(
    job: JobFile,
    *,
    image: Image,
    gpus_per_node: GpusPerNode = GPUS_PER_NODE,
    node_selector: NodeSelector = None,
    claim: Claim = None,
    kueue_queue: Queue = None,
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
        priority_class=priority_class,
    )
    text = as_yaml(job_objects(spec, cluster))
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
    text = io.StringIO()
    yaml.dump_all(objects, text)
    return text.getvalue()


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InputError(f"--node-selector {text} is not KEY=VALUE", hint=f"write --node-selector {key or 'KEY'}=...")
    return key, value
