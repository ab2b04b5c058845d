"""The answers of `cordee experts` as values, which the terminal, the page and the JSON document show."""

from dataclasses import dataclass

from cordee.errors import InputError
from cordee.hardware.arrays import Floats
from cordee.plan.experts.control import ControllerState, Observation, RebalancePolicy, observe
from cordee.plan.experts.moves import Rebalance, aligned
from cordee.plan.experts.shape import ExpertPlacement, Fleet


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsAnswer:
    """The answer for one window: `fresh` is a placement from scratch, `found` the result of `--from`."""

    name: str
    loads: Floats
    fleet: Fleet
    before: ExpertPlacement
    placement: ExpertPlacement
    fresh: ExpertPlacement
    bound: Floats
    found: Rebalance | None

    @property
    def rows(self) -> list[tuple[str, Floats, int | None]]:
        """Rows of (name, balance of each layer, slots that differ from the present placement)."""
        loads, rows = self.loads, list[tuple[str, Floats, int | None]]()
        if self.found is None:
            rows.append(("experts in order", self.before.balance(loads), None))
            rows.append(("this placement", self.placement.balance(loads), None))
        else:
            rows.append(("at present", self.before.balance(loads), 0))
            rows.append(("few moves", self.found.balance_found, self.found.moved_slots))
            fresh = int((aligned(self.before.slots, self.fresh.slots) != self.before.slots).sum())
            rows.append(("from scratch", self.fresh.balance(loads), fresh))
        return [*rows, ("upper bound", self.bound, None)]

    @property
    def drawn(self) -> ExpertPlacement:
        """The placement to draw beside the present one."""
        return self.placement if self.found is None else self.found.found

    @property
    def worst_layer(self) -> int:
        """The layer with the least balance before."""
        return int(self.before.balance(self.loads).argmin())


@dataclass(frozen=True, slots=True, eq=False)
class ControllerWindow:
    """One window: its balance under the placement in use, and the action after it."""

    name: str
    balance: float
    observation: Observation

    @property
    def moved_slots(self) -> int:
        """Slots that change after this window."""
        found = self.observation.rebalance
        return found.moved_slots if found is not None and self.observation.action == "move" else 0


def follow(
    names: list[str], loads: list[Floats], placement: ExpertPlacement, policy: RebalancePolicy
) -> tuple[list[ControllerWindow], ExpertPlacement]:
    """Run the controller over the windows; return them with the placement after the last.

    Raises:
        InputError: a window has other layers or experts than the first.
    """
    state, windows = ControllerState(placement), list[ControllerWindow]()
    for name, counted in zip(names, loads, strict=True):
        if counted.shape != loads[0].shape:
            sizes = [f"{shape[0]} layers x {shape[1]} experts" for shape in (counted.shape, loads[0].shape)]
            raise InputError(f"{name} has {sizes[0]}, {names[0]} {sizes[1]}", hint="name windows of one model")
        balance = float(state.placement.balance(counted).mean())
        state, observation = observe(state, counted, policy)
        windows.append(ControllerWindow(name, balance, observation))
    return windows, state.placement
