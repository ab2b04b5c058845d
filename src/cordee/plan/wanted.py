"""Requests for a layout: `tp=8,pp=2` read into the axes that it fixes; the search fills in the rest."""

import re
from dataclasses import dataclass, replace
from typing import Literal

from cordee.errors import LayoutError
from cordee.near import meant
from cordee.plan.layout import (
    CONTEXT_KINDS,
    OFFLOADS,
    RECOMPUTES,
    SCHEDULES,
    ContextKind,
    Layout,
    Offload,
    Recompute,
)
from cordee.plan.split import Split, read_split


@dataclass(frozen=True, slots=True)
class LayoutWanted:
    """The axes that are asked of a layout; None leaves one to the search.

    Where pp is asked for, stages are uneven only if `split` names them, or allows it.
    """

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    zero: int | None = None
    sp: bool | None = None
    micro_batch: int | None = None
    recompute: Recompute | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    shard: int | None = None
    vpp: int | None = None
    schedule: str | None = None
    cp_kind: ContextKind | None = None
    offload: Offload | None = None
    split: Split | Literal["even", "uneven"] | None = None

    def plainest(self, gpus: int) -> Layout:
        """Return the layout that is nearest to what was asked, to say why it cannot be."""
        tp, cp, vpp = self.tp or 1, self.cp or 1, self.vpp or 1
        pp = self.pp or (len(self.split) // vpp if isinstance(self.split, tuple) else 1)
        return Layout(
            dp=self.dp or max(1, gpus // (tp * pp * cp)),
            tp=tp,
            pp=pp,
            zero=self.zero or 0,
            sp=self.sp or False,
            micro_batch=self.micro_batch or 1,
            recompute=self.recompute or "none",
            cp=cp,
            ep=self.ep or 1,
            etp=self.etp,
            shard=self.shard,
            vpp=vpp,
            schedule=self.schedule or ("interleaved" if vpp > 1 else "1f1b"),
            cp_kind=self.cp_kind or "ring",
            offload=self.offload or "none",
            split=self.split if isinstance(self.split, tuple) else None,
        )


ANY_LAYOUT = LayoutWanted()


def layout_wanted(text: str | None, recompute: Recompute | None, micro_batch: int | None) -> LayoutWanted:
    """Return what a text such as `tp=8,pp=2` asks for, with recomputation and micro-batch where it leaves them open.

    Raises:
        LayoutError: the text cannot be read, or the micro-batch is empty.
    """
    if micro_batch is not None and micro_batch < 1:
        raise LayoutError(f"a micro-batch of {micro_batch} sequences is empty", hint="use at least 1")
    wanted = LayoutWanted() if text is None else parse_layout(text)
    return replace(wanted, recompute=wanted.recompute or recompute, micro_batch=wanted.micro_batch or micro_batch)


def near_ranks(wanted: LayoutWanted, island_gpus: int) -> int:
    """Return the ranks that talk in every layer and stay together: experts and tp x cp, else tp x cp, else tp.

    The most that an island of so many GPUs holds; 1 if it holds no group of tp. pp and dp go outward.

    >>> wanted = LayoutWanted(tp=2, cp=2, ep=8, etp=1)
    >>> [near_ranks(wanted, gpus) for gpus in (8, 4, 2, 1)]
    [8, 4, 2, 1]
    """
    tp, cp = wanted.tp or 1, wanted.cp or 1
    experts = (wanted.ep or 1) * (tp if wanted.etp is None else wanted.etp)
    sizes = {tp, tp * cp, *([experts] if experts % (tp * cp) == 0 else [])}
    return max((size for size in sizes if size <= island_gpus), default=1)


def parse_layout(text: str) -> LayoutWanted:
    """Read `tp=8,pp=2`, or `tp8 pp2 dp4 zero1 mb2 full` as it is printed. `fsdp` means dp with ZeRO-3.

    >>> parse_layout("tp=8,pp=2") == LayoutWanted(tp=8, pp=2)
    True
    >>> parse_layout("fsdp64 full") == LayoutWanted(dp=64, zero=3, recompute="full")
    True

    Raises:
        LayoutError: an unknown axis, one that is given twice, or a value that it cannot have.
    """
    wanted: dict[str, str] = {}
    for part in re.split(r"[,\s]+", text.strip()):
        axis, value = _read_part(part, text)
        if axis in wanted:
            raise LayoutError(f"layout {text!r} gives {axis} twice", hint="give each axis once")
        wanted[axis] = value
    if "fsdp" in wanted:
        if "dp" in wanted or "zero" in wanted:
            raise LayoutError(f"layout {text!r} gives fsdp and dp or zero", hint="fsdp=N means dp=N,zero=3")
        wanted |= {"dp": wanted.pop("fsdp"), "zero": "3"}
    numbers = {axis: _size(axis, value) for axis, value in wanted.items() if axis not in (*_WORDS, "split")}
    return LayoutWanted(
        dp=numbers.get("dp"),
        tp=numbers.get("tp"),
        pp=numbers.get("pp"),
        zero=numbers.get("zero"),
        sp=bool(numbers["sp"]) if "sp" in numbers else None,
        micro_batch=numbers.get("mb"),
        recompute=next((how for how in RECOMPUTES if how == wanted.get("recompute")), None),
        cp=numbers.get("cp"),
        ep=numbers.get("ep"),
        etp=numbers.get("etp"),
        shard=numbers.get("shard"),
        vpp=numbers.get("vpp"),
        schedule=next((how for how in SCHEDULES if how == wanted.get("schedule")), None),
        cp_kind=next((how for how in CONTEXT_KINDS if how == wanted.get("cp_kind")), None),
        offload=next((what for what in OFFLOADS if what == wanted.get("offload")), None),
        split=_split_wanted(wanted.get("split")),
    )


def _split_wanted(text: str | None) -> Split | Literal["even", "uneven"] | None:
    words: dict[str | None, Literal["even", "uneven"] | None] = {None: None, "even": "even", "uneven": "uneven"}
    return words[text] if text in words else read_split(str(text))


_WORDS: dict[str, tuple[str, ...]] = {
    "recompute": RECOMPUTES, "schedule": SCHEDULES, "cp_kind": CONTEXT_KINDS, "offload": OFFLOADS
}  # fmt: skip
_AXES = ("dp", "fsdp", "tp", "pp", "zero", "sp", "mb", "cp", "ep", "etp", "shard", "vpp")


def _read_part(part: str, text: str) -> tuple[str, str]:
    for axis, words in _WORDS.items():
        # Offload has words in common with recomputation and is therefore always written out.
        if part in words and axis != "offload":
            return axis, part
        if part.startswith(f"{axis}=") and part.removeprefix(f"{axis}=") in words:
            return axis, part.removeprefix(f"{axis}=")
    if part.startswith("split="):
        return "split", part.removeprefix("split=")
    match = re.fullmatch(r"([a-z_]+?)=?([0-9]+)", part)
    if match and match[1] in _AXES:
        return match[1], match[2]
    near = meant(re.split(r"[=0-9]", part)[0], (*_AXES, *_WORDS, "split"))
    hint = near + "write it as tp=8,pp=2,dp=4,zero=1,mb=1,recompute=full"
    raise LayoutError(f"layout {text!r} has a part that cannot be read: {part!r}", hint=hint)


def _size(axis: str, value: str) -> int:
    if int(value) == 0 and axis not in ("zero", "sp"):
        raise LayoutError(f"{axis}=0 is not a size", hint=f"{axis} must be a whole number from 1")
    return int(value)
