"""Layouts of one replica: the axes that are asked for, the rules that each layout must keep, and all that keep them."""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

from cordee.errors import LayoutError
from cordee.hardware.catalog import Gpu
from cordee.hardware.collectives import near_gpus
from cordee.plan.serving.case import ServingLayout
from cordee.units import plural
from cordee.workload.model import ModelShape


@dataclass(frozen=True, slots=True)
class ServingLayoutWanted:
    """The axes that are asked of a replica; None leaves one to the search."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: bool | None = None

    def allows(self, layout: ServingLayout) -> bool:
        """Return whether the layout has all axes that are asked for."""
        pairs = ((getattr(self, axis.name), getattr(layout, axis.name)) for axis in fields(self))
        return all(wanted is None or wanted == has for wanted, has in pairs)

    @property
    def plainest(self) -> ServingLayout:
        """The layout that is nearest to what was asked."""
        return ServingLayout(self.tp or 1, self.pp or 1, self.dp or 1, self.ep or False)


ANY_SERVING_LAYOUT = ServingLayoutWanted()


def parse_serving_layout(text: str) -> ServingLayoutWanted:
    """Read `tp=2`, `tp=8,ep` or `tp4 pp2 dp2 ep` as it is printed.

    >>> parse_serving_layout("tp=2,pp=2"), parse_serving_layout("tp8 ep").ep
    (ServingLayoutWanted(tp=2, pp=2, dp=None, ep=None), True)

    Raises:
        LayoutError: an unknown axis, or a size that is not a whole number from 1.
    """
    sizes: dict[str, int] = {}
    for part in re.split(r"[,\s]+", text.strip()):
        match = re.fullmatch(r"(tp|pp|dp|ep)(?:=?(\d+))?", part)
        if match is None or (match[2] is None and match[1] != "ep"):
            near = difflib.get_close_matches(re.split(r"[=\d]", part)[0], ("tp", "pp", "dp", "ep"), n=1, cutoff=0.5)
            hint = (f"did you mean {near[0]}? " if near else "") + "write it as tp=2,pp=1,dp=1 or tp=8,ep"
            raise LayoutError(f"layout {text!r} has a part that cannot be read: {part!r}", hint=hint)
        sizes[match[1]] = int(match[2] or 1)
    for axis, size in sizes.items():
        if size == 0 and axis != "ep":
            raise LayoutError(f"{axis}=0 is not a size", hint=f"{axis} must be a whole number from 1")
    ep = bool(sizes["ep"]) if "ep" in sizes else None
    return ServingLayoutWanted(sizes.get("tp"), sizes.get("pp"), sizes.get("dp"), ep)


def misfit(layout: ServingLayout, shape: ModelShape, gpu: Gpu, gpus: int) -> tuple[str, str] | None:
    """Return the first rule that a layout breaks as a message and a hint; None if it keeps all."""
    tp, ranks = layout.tp, layout.tp * layout.dp
    good = ", ".join(str(size) for size in _degrees(shape, gpu))
    rules = (
        (shape.heads % tp != 0,
         f"tp={tp} does not divide the {shape.heads} attention heads", f"use tp of {good}"),
        (shape.latent is None and shape.kv_heads % tp != 0 and tp % shape.kv_heads != 0,
         f"tp={tp} neither divides the {shape.kv_heads} KV heads nor is a multiple of them", f"use tp of {good}"),
        (shape.ffn % tp != 0, f"tp={tp} does not divide the feed-forward width of {shape.ffn}", f"use tp of {good}"),
        (tp > near_gpus(gpu),
         f"tp={tp} is more than the {near_gpus(gpu)} GPUs that {gpu.link} joins",
         "use pp between nodes, or more replicas"),
        (layout.pp > shape.layers, f"pp={layout.pp} is more than the {shape.layers} layers", "use fewer stages"),
        (layout.dp > 1 and shape.experts is None,
         f"dp={layout.dp} within a replica is for mixtures of experts; {shape.name} is dense",
         "leave dp out: each data-parallel copy is a replica of its own"),
        (layout.ep and shape.experts is None, f"{shape.name} has no experts to spread", "leave ep out"),
        (layout.ep and ranks == 1, "ep spreads experts over tp*dp = 1 GPU", "give tp or dp, or leave ep out"),
        (layout.ep and shape.experts is not None and shape.experts.routed % ranks != 0,
         f"tp*dp = {ranks} does not divide the {0 if shape.experts is None else shape.experts.routed} experts",
         "use fewer GPUs in a replica"),
        (layout.gpus > gpus,
         f"layout needs tp*pp*dp = {tp}*{layout.pp}*{layout.dp} = {plural(layout.gpus, 'GPU')}, but there are {gpus}",
         "use a smaller layout, or give more GPUs"),
    )  # fmt: skip
    return next(((message, hint) for broken, message, hint in rules if broken), None)


def layouts(shape: ModelShape, gpu: Gpu, gpus: int, wanted: ServingLayoutWanted) -> tuple[ServingLayout, ...]:
    """Return all layouts of a replica that keep the rules and have the axes that are asked for.

    Raises:
        LayoutError: none does; the message is that of the plainest layout.
    """
    found = tuple(
        each for each in _all(shape, gpu, wanted) if wanted.allows(each) and misfit(each, shape, gpu, gpus) is None
    )
    if not found:
        message, hint = misfit(wanted.plainest, shape, gpu, gpus) or (f"no such layout divides {shape.name}", "")
        raise LayoutError(message, hint=hint or "name fewer axes")
    return found


def _degrees(shape: ModelShape, gpu: Gpu) -> list[int]:
    """Return the degrees of tensor parallelism that divide heads, KV heads and feed-forward width."""
    return [
        tp
        for tp in range(1, near_gpus(gpu) + 1)
        if shape.heads % tp == 0
        and shape.ffn % tp == 0
        and (shape.latent is not None or shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0)
    ]


def _all(shape: ModelShape, gpu: Gpu, wanted: ServingLayoutWanted) -> Iterator[ServingLayout]:
    """Yield candidates: stages in powers of two, and attention copies only where a model has experts."""
    stages = (1, 2, 4, 8) if wanted.pp is None else (wanted.pp,)
    copies = (1,) if shape.experts is None and wanted.dp is None else (1, 2, 4, 8, 16, 32)
    for tp in _degrees(shape, gpu):
        for pp in stages:
            for dp in copies if wanted.dp is None else (wanted.dp,):
                for ep in (False, True) if shape.experts is not None and tp * dp > 1 else (False,):
                    yield ServingLayout(tp, pp, dp, ep)
