"""A cluster as nodes in their domains, from a word, a list in YAML or a table.

Where a node stands is `Node.domain`: block, then rack, outermost first; where an island spans nodes (GB200 NVL72), it
is the innermost domain. The tree of these domains with what is free in it is `schedule/view.py`.
"""

import csv
import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from cordee.errors import InputError, UnitError
from cordee.events import Capacity, Node
from cordee.units import parse_bytes, parse_micro_usd

_WORD = re.compile(r"(\d+(?:x\d+){1,3})(?:x([A-Za-z][\w. -]*))?")
_TABLE = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
_NODES_MAX = 1_000_000
_MIB = 1 << 20


def parse_cluster(text: str, *, source: str | None = None) -> tuple[Node, ...]:
    """Return the nodes that a text describes.

    A word: `8x8` (nodes x GPUs), `2x4x8` (racks first) or `2x2x4x8` (blocks first), a GPU's name at the end, several
    joined by `+`. A table `sn,cpu_milli,memory_mib,gpu,model`, as Alibaba publishes its nodes. Or YAML: a list `nodes`
    of `name` (with `count`: the first part of names) and `gpus`, and what else is known: `gpu`, `capacity`, `block`,
    `rack`, `island`, `island_gpus`, `cpus`, `memory`, `price`.

    >>> nodes = parse_cluster("2x2x4x8xH100+1x4xL4")
    >>> len(nodes), nodes[4].name, nodes[4].domain, nodes[-1].gpu_name
    (17, 'node-0004', ('block0', 'rack1'), 'L4')
    >>> parse_cluster("nodes: [{name: a, gpus: 8, memory: 2TiB}]")[0].memory_bytes
    2199023255552

    Args:
        text: the word, or what stands in the file.
        source: the file's name, for messages.

    Raises:
        InputError: it is none of these, or two nodes have one name.
    """
    if _WORD.fullmatch(text.split("+", maxsplit=1)[0].strip()):
        nodes = _from_words(text)
    elif text.lstrip("\ufeff").startswith(_TABLE[0] + ","):
        nodes = _from_table(text, source or "the table")
    elif ":" in text:
        nodes = _from_yaml(text, source or "the list of nodes")
    elif source is None:
        raise _no_cluster(text)
    else:
        head = text.lstrip("\ufeff").partition("\n")[0].strip()
        raise InputError(
            f"{source} does not hold nodes: it begins with {head[:60]!r}",
            hint=f"a table has the columns {','.join(_TABLE)} in this order; YAML has a list `nodes` of name and gpus",
        )
    seen: set[str] = set()
    for node in nodes:
        if node.name in seen:
            raise InputError(f"two nodes have the name {node.name!r}", hint="every node needs a name of its own")
        seen.add(node.name)
    if not any(node.gpus for node in nodes):
        raise InputError(f"the cluster {source or text!r} has no GPU")
    return tuple(nodes)


def _no_cluster(text: str) -> InputError:
    shown = text if len(text) <= 60 else text[:57] + "..."
    return InputError(
        f"{shown!r} is not a cluster",
        hint="write nodes x GPUs: 8x8xH100, or racks first: 2x4x8xH100; or name a file of nodes (YAML or a table)",
    )


def _from_words(text: str) -> list[Node]:
    nodes: list[Node] = []
    at = {"block": 0, "rack": 0}
    for word in text.split("+"):
        match = _WORD.fullmatch(word.strip())
        counts = [int(part) for part in match[1].split("x")] if match else []
        if match is None or min(counts) < 1:
            raise _no_cluster(text)
        blocks, racks, each, gpus = [1] * (4 - len(counts)) + counts
        if blocks * racks * each + len(nodes) > _NODES_MAX:
            raise InputError(f"{text!r} has more than {_NODES_MAX:,} nodes")
        for _ in range(blocks):
            for rack in range(racks):
                inner = f"rack{rack if len(counts) > 3 else at['rack'] + rack}"
                domain = ((), (inner,), (f"block{at['block']}", inner))[len(counts) - 2]
                nodes += [
                    Node(name=f"node-{number:04}", epoch=1, gpu_name=match[2] or "GPU", gpus=gpus, domain=domain)
                    for number in range(len(nodes), len(nodes) + each)
                ]
            at["block"] += 1
        at["rack"] += racks if len(counts) == 3 else 0
    return nodes


def _from_table(text: str, source: str) -> list[Node]:
    nodes = []
    for number, row in enumerate(csv.DictReader(text.lstrip("\ufeff").splitlines()), start=2):
        try:
            nodes.append(
                Node(
                    name=row["sn"],
                    epoch=1,
                    gpu_name=row.get("model") or "GPU",
                    gpus=int(float(row["gpu"])),
                    cpu_milli=int(float(row["cpu_milli"])),
                    memory_bytes=int(float(row["memory_mib"])) * _MIB,
                )
            )
        except (KeyError, ValueError, TypeError) as error:
            hint = f"a table of nodes has the columns {','.join(_TABLE)}"
            what = f"no {error.args[0]}" if isinstance(error, KeyError) else error
            raise InputError(f"{source}, line {number}: {what}", hint=hint) from error
    return [node for node in nodes if node.gpus]


class _Group(BaseModel):
    """Nodes of the list that differ by their names alone."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    gpus: Annotated[int, Field(ge=0, le=64)]
    count: Annotated[int, Field(ge=1, le=_NODES_MAX)] | None = None
    gpu: str = "GPU"
    capacity: Capacity = Capacity.ON_DEMAND
    block: str | None = None
    rack: str | None = None
    island: str | None = None
    island_gpus: Annotated[int, Field(ge=0)] = 0
    cpus: Annotated[float, Field(gt=0)] | None = None
    memory: str | None = None
    price: str | None = None

    def nodes(self) -> list[Node]:
        """Return each node of the group."""
        if self.capacity is Capacity.ANY:
            raise ValueError("a node is on-demand or spot")
        if self.island is not None and self.island_gpus <= self.gpus:
            raise ValueError("an island that spans nodes has more GPUs than a node: give island_gpus")
        names = [self.name] if self.count is None else [f"{self.name}{number}" for number in range(self.count)]
        prices = {} if self.price is None else {"micro_usd_per_gpu_hour": parse_micro_usd(self.price)}
        more: dict[str, Any] = {**prices, "price_source": "the list of nodes"} if prices else {}
        return [
            Node(
                name=name,
                epoch=1,
                gpu_name=self.gpu,
                gpus=self.gpus,
                capacity=self.capacity,
                domain=tuple(part for part in (self.block, self.rack, self.island) if part is not None),
                island_gpus=self.island_gpus,
                cpu_milli=None if self.cpus is None else round(1000 * self.cpus),
                memory_bytes=None if self.memory is None else parse_bytes(self.memory),
                **more,
            )
            for name in names
        ]


def _from_yaml(text: str, source: str) -> list[Node]:
    try:
        document = YAML(typ="safe").load(text)
    except YAMLError as error:
        raise InputError(f"{source} is not YAML: {error}") from error
    groups = document.get("nodes") if isinstance(document, dict) and set(document) == {"nodes"} else None
    if not isinstance(groups, list) or not groups:
        raise InputError(
            f"{source} has no list of nodes", hint="write: nodes: [{name: n, count: 8, gpus: 8, gpu: H100}]"
        )
    nodes: list[Node] = []
    for number, group in enumerate(groups, start=1):
        try:
            nodes += _Group.model_validate(group).nodes()
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            hint = "known are " + ", ".join(_Group.model_fields)
            raise InputError(f"{source}, node {number}: {key}: {first['msg']}", hint=hint) from error
        except (ValueError, UnitError) as error:
            raise InputError(f"{source}, node {number}: {error}", hint=getattr(error, "hint", None)) from error
    return nodes
