"""Settings that make a launcher run the layout that was chosen.

The answer lists what a launcher cannot do. Each library's settings have a module of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cordee.errors import LayoutError
from cordee.near import did_you_mean
from cordee.plan.launch_cordee import cordee
from cordee.plan.launch_deepspeed import deepspeed
from cordee.plan.launch_megatron import megatron
from cordee.plan.launch_parts import (
    LEFT_OUT,
    Limit,
    Planned,
    Written,
    any_launchers_limits,
    any_launchers_notes,
)
from cordee.plan.launch_torchtitan import torchtitan
from cordee.plan.launch_trainers import accelerate, lightning, trainer
from cordee.plan.layout import Layout
from cordee.plan.space import Choices
from cordee.plan.training import Training
from cordee.plan.wanted import LayoutWanted
from cordee.workload.model import ModelShape


@dataclass(frozen=True, slots=True)
class Launch:
    """The settings of a layout as text (flags, TOML, JSON or YAML).

    `cannot` is what this launcher does not do of the layout, `notes` what has to stand in the script.
    """

    launcher: str
    layout: str
    text: str
    cannot: tuple[str, ...]
    notes: tuple[str, ...]


_CALLED = dict.fromkeys(("trainingarguments", "transformers", "huggingface", "trl", "sfttrainer"), "trainer")


def check_launcher(launcher: str) -> None:
    """Refuse what is no launcher.

    Raises:
        LayoutError: with the nearest name, or all of them.
    """
    if launcher not in LAUNCHERS:
        raise LayoutError(f"unknown launcher {launcher!r}", hint=did_you_mean(launcher, LAUNCHERS, also=_CALLED))


def launch_settings(
    launcher: str, shape: ModelShape, layout: Layout, training: Training, *, node_gpus: int = 8
) -> Launch:
    """Return the settings for this launcher, on nodes of so many GPUs.

    Raises:
        LayoutError: no such launcher.
    """
    return _written(launcher, Planned(shape, layout, training, node_gpus))[0]


def _written(launcher: str, planned: Planned) -> tuple[Launch, list[Limit]]:
    """Return the settings with the limits in them, and those limits with their hints."""
    check_launcher(launcher)
    text, limits, notes = LAUNCHERS[launcher](planned)
    limits = limits + any_launchers_limits(launcher, planned)
    notes = notes + any_launchers_notes(launcher, planned)
    cannot = tuple(limit.says for limit in limits)
    return Launch(launcher, str(planned.layout), text, cannot, tuple(notes)), limits


def first_to_launch(
    launcher: str, shape: ModelShape, layouts: Sequence[Layout], training: Training, *, node_gpus: int = 8
) -> Launch:
    """Return the first of these layouts that the launcher runs as planned; else the best with its limits.

    Raises:
        LayoutError: no such launcher, or one of a library's loop that runs none of them.
    """
    assert layouts, "something fits"
    every = [launch_settings(launcher, shape, layout, training, node_gpus=node_gpus) for layout in layouts]
    index = next((index for index, launch in enumerate(every) if not launch.cannot), 0)
    if every[index].cannot and launcher in LEFT_OUT:
        limit = _written(launcher, Planned(shape, layouts[index], training, node_gpus))[1][0]
        raise LayoutError(f"{launcher} does not run {layouts[index]} as planned: {limit.says}", hint=limit.hint)
    return every[index]


def expressible(launcher: str | None, wanted: LayoutWanted, choices: Choices) -> tuple[LayoutWanted, Choices]:
    """Return what to search for a launcher: without the axes that it has no settings of, unless they are asked for."""
    if launcher not in LEFT_OUT:
        return wanted, choices
    alone: dict[str, Any] = {axis: 1 for axis in LEFT_OUT[launcher] if getattr(wanted, axis) is None}
    recomputes = tuple(each for each in choices.recomputes if each != "selective")
    return replace(wanted, **alone), replace(choices, recomputes=recomputes, sp=(False,))


LAUNCHERS: dict[str, Callable[[Planned], Written]] = {
    "torchtitan": torchtitan,
    "megatron": megatron,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
    "trainer": trainer,
    "lightning": lightning,
    "cordee": cordee,
}
