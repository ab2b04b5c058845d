"""Layouts of one replica: the axes that are asked for, the rules that each layout must keep, and all that keep them."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from cordee.errors import LayoutError
from cordee.hardware.catalog import Gpu
from cordee.hardware.collectives import near_gpus
from cordee.near import meant
from cordee.plan.serving.case import ServingLayout
from cordee.plan.serving.engine import ENGINES, Engine
from cordee.plan.serving.formats import Format
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
            near = meant(re.split(r"[=\d]", part)[0], ("tp", "pp", "dp", "ep"))
            hint = near + "write it as tp=2,pp=1,dp=1 or tp=8,ep"
            raise LayoutError(f"layout {text!r} has a part that cannot be read: {part!r}", hint=hint)
        sizes[match[1]] = int(match[2] or 1)
    for axis, size in sizes.items():
        if size == 0 and axis != "ep":
            raise LayoutError(f"{axis}=0 is not a size", hint=f"{axis} must be a whole number from 1")
    ep = bool(sizes["ep"]) if "ep" in sizes else None
    return ServingLayoutWanted(sizes.get("tp"), sizes.get("pp"), sizes.get("dp"), ep)


def undivided(layout: ServingLayout, shape: ModelShape, tp_max: int = 64) -> tuple[str, str] | None:
    """Return what of a model a layout does not divide as a message and a hint; None if it divides all.

    `tp_max` is the largest degree of tensor parallelism that the hint may name.
    """
    tp, good = layout.tp, ", ".join(str(size) for size in _degrees(shape, tp_max))
    rules = (
        (shape.heads % tp != 0,
         f"tp={tp} does not divide the {shape.heads} attention heads", f"use tp of {good}"),
        (shape.latent is None and shape.kv_heads % tp != 0 and tp % shape.kv_heads != 0,
         f"tp={tp} neither divides the {shape.kv_heads} KV heads nor is a multiple of them", f"use tp of {good}"),
        (shape.ffn % tp != 0, f"tp={tp} does not divide the feed-forward width of {shape.ffn}", f"use tp of {good}"),
        (layout.pp > shape.layers, f"pp={layout.pp} is more than the {shape.layers} layers", "use fewer stages"),
    )  # fmt: skip
    return next(((message, hint) for broken, message, hint in rules if broken), None)


def misfit(layout: ServingLayout, shape: ModelShape, gpu: Gpu, gpus: int) -> tuple[str, str] | None:
    """Return the first rule that a layout breaks as a message and a hint; None if it keeps all."""
    tp, ranks = layout.tp, layout.tp * layout.dp
    rules = (
        (tp > near_gpus(gpu),
         f"tp={tp} is more than the {near_gpus(gpu)} GPUs that {gpu.link} joins",
         "use pp between nodes, or more replicas"),
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
    broken = next(((message, hint) for broken, message, hint in rules if broken), None)
    return undivided(layout, shape, near_gpus(gpu)) or broken


AXES = {
    "tp": "tensor parallelism", "pp": "pipeline stages", "dp": "data-parallel attention", "ep": "expert parallelism"
}  # fmt: skip


def missing_axes(layout: ServingLayout, engine: Engine) -> list[str]:
    """Return what an engine lacks for a layout, one phrase for each axis or pair of axes."""
    used = {"tp": layout.tp > 1, "pp": layout.pp > 1, "dp": layout.dp > 1, "ep": layout.ep}
    sizes = {"pp": f" (pp{layout.pp})", "dp": f" (dp{layout.dp})"}
    lacks = [AXES[axis] + sizes.get(axis, "") for axis in ("pp", "dp", "ep") if used[axis] and axis not in engine.axes]
    return lacks + [f"{one} and {other} together" for one, other in engine.apart if used[one] and used[other]]


def misfit_of_engine(layout: ServingLayout, engine: Engine) -> tuple[str, str] | None:
    """Return what an engine lacks for a layout as a message and a hint; None if it has all."""
    lacks = missing_axes(layout, engine)
    if not lacks:
        return None
    able = sorted({each.name for each in _latest() if not missing_axes(layout, each)})
    hint = f"leave it out, or use --engine {' or '.join(able)}" if able else "name fewer axes"
    return f"{engine.full_name} has no {' and no '.join(lacks)}", hint


def check_formats(engine: Engine, weights: Iterable[Format], kv: Iterable[Format]) -> None:
    """Refuse formats that an engine does not serve.

    Raises:
        LayoutError: it lacks one; the hint names those that it has.
    """
    for option, part, known, wanted in (
        ("--weights", "weights", engine.weights, weights), ("--kv", "a KV cache", engine.kv, kv)
    ):  # fmt: skip
        for each in wanted:
            if each.name not in known:
                able = sorted({other.name for other in _latest() if each.name in (*other.weights, *other.kv)})
                others = f", or --engine {' or '.join(able)}" if able else ""
                raise LayoutError(
                    f"{engine.full_name} does not serve {part} in {each.name}",
                    hint=f"use {option} {', '.join(known)}{others}",
                )


def _latest() -> Iterable[Engine]:
    """Return the latest record of each engine."""
    return {engine.name: engine for engine in ENGINES}.values()


def layouts(
    shape: ModelShape, gpu: Gpu, gpus: int, wanted: ServingLayoutWanted, engine: Engine | None = None
) -> tuple[ServingLayout, ...]:
    """Return all layouts of a replica that keep the rules, that the engine has, and that have the axes asked for.

    Raises:
        LayoutError: none does; the message is that of the plainest layout.
    """
    dividing = [
        each for each in _all(shape, gpu, wanted) if wanted.allows(each) and misfit(each, shape, gpu, gpus) is None
    ]
    found = tuple(each for each in dividing if engine is None or not missing_axes(each, engine))
    if not found:
        plainest = wanted.plainest
        broken = misfit(plainest, shape, gpu, gpus) if not dividing else None
        lacking = None if engine is None else misfit_of_engine(plainest, engine)
        message, hint = lacking or broken or (f"no such layout divides {shape.name}", "")
        raise LayoutError(message, hint=hint or "name fewer axes")
    return found


def _degrees(shape: ModelShape, most: int) -> list[int]:
    """Return the degrees of tensor parallelism that divide heads, KV heads and feed-forward width."""
    return [
        tp
        for tp in range(1, most + 1)
        if shape.heads % tp == 0
        and shape.ffn % tp == 0
        and (shape.latent is not None or shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0)
    ]


def _all(shape: ModelShape, gpu: Gpu, wanted: ServingLayoutWanted) -> Iterator[ServingLayout]:
    """Yield candidates: stages in powers of two, and attention copies only where a model has experts."""
    stages = (1, 2, 4, 8) if wanted.pp is None else (wanted.pp,)
    copies = (1,) if shape.experts is None and wanted.dp is None else (1, 2, 4, 8, 16, 32)
    for tp in _degrees(shape, near_gpus(gpu)):
        for pp in stages:
            for dp in copies if wanted.dp is None else (wanted.dp,):
                for ep in (False, True) if shape.experts is not None and tp * dp > 1 else (False,):
                    yield ServingLayout(tp, pp, dp, ep)
