"""Labels of a node: facts that its operator, its node file or the cloud states, as texts by key."""

from collections.abc import Mapping

from cordee.errors import InputError, UnitError
from cordee.events import Capacity
from cordee.units import parse_micro_usd

KNOWN: Mapping[str, str] = {
    "block": "racks joined by one layer of the network",
    "rack": "nodes under one switch",
    "island": "GPUs of several nodes joined by NVLink",
    "island_gpus": "number of GPUs in an island",
    "capacity": "on-demand or spot",
    "price": "dollars per GPU-hour",
    "mig": "what the agent may do with MIG instances: off, fixed, dynamic or switched",
}
"""Keys, with what each states."""
MIG = ("off", "fixed", "dynamic", "switched")
"""The values of `mig`."""


def parse_label(text: str) -> tuple[str, str]:
    """Return key and value of `KEY=VALUE`.

    >>> parse_label("rack=r7")
    ('rack', 'r7')

    Raises:
        InputError: it is not a label of a node.
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not value:
        raise InputError(f"the label {text!r} is not KEY=VALUE", hint="write for instance rack=r7")
    check_labels({key: value})
    return key, value


def parse_node_file(text: str) -> dict[str, str]:
    """Return the labels in a file of lines `KEY=VALUE`; `#` starts a comment, and quotes around a value are dropped.

    >>> parse_node_file('rack="r7"  # the third row')
    {'rack': 'r7'}

    Raises:
        InputError: a line is not a label of a node.
    """
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return dict(parse_label(line.replace('"', "")) for line in lines if line)


def check_labels(labels: Mapping[str, str]) -> None:
    """Check that labels have known keys and values.

    Raises:
        InputError: a key is unknown, or its value cannot be read.
    """
    for key, value in labels.items():
        if key not in KNOWN:
            raise InputError(f"a node has no label {key!r}", hint=f"known labels: {', '.join(KNOWN)}")
        if key == "capacity" and value not in (Capacity.ON_DEMAND, Capacity.SPOT):
            raise InputError(f"the label capacity={value} is not known", hint="it is on-demand or spot")
        if key == "island_gpus" and not (value.isdecimal() and int(value)):
            raise InputError(f"the label island_gpus={value} is not a number of GPUs", hint="write island_gpus=8")
        if key == "mig" and value not in MIG:
            raise InputError(f"the label mig={value} is not known", hint=f"it is {', '.join(MIG[:-1])} or {MIG[-1]}")
        if key == "price":
            price_of(value)


def price_of(text: str) -> int:
    """Return the micro-dollars of a price per GPU-hour.

    >>> price_of("$2.50")
    2500000

    Raises:
        InputError: it is not an amount of dollars.
    """
    try:
        return parse_micro_usd(text)
    except UnitError as error:
        raise InputError(f"the label price={text}: {error.message}", hint="write price=$2.50, for a GPU-hour") from None


def domain_of(labels: Mapping[str, str], node: str) -> tuple[str, ...]:
    """Return the domain of a node, outermost first: block, rack, and its island if that spans nodes.

    A node whose block is known and whose rack is not has a rack of its own, since its neighbours are not known.

    >>> domain_of({"block": "b1", "rack": "r7"}, "gpu-3"), domain_of({"block": "b1"}, "gpu-3"), domain_of({}, "gpu-3")
    (('b1', 'r7'), ('b1', 'gpu-3'), ())
    >>> domain_of({"island": "nvl0"}, "gpu-3"), domain_of({"block": "b1", "island": "nvl0"}, "gpu-3")
    (('nvl0',), ('b1', 'nvl0', 'nvl0'))
    """
    block, rack, island = (labels.get(key) for key in ("block", "rack", "island"))
    if block is not None and rack is None:
        rack = island or node
    return tuple(part for part in (block, rack, island) if part is not None)
