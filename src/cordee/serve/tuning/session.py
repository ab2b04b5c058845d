"""One tuning: the replica beside the service, started with one setting after the other, under the same load."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cordee.answers.services import ReplicaView
from cordee.serve.policy.tuning import Measured
from cordee.serve.tuning.load import Lengths, MadeUp, Prompt, Target, rounds_of
from cordee.serve.tuning.replica import TuningReplica
from cordee.workload.service import Flag

OPEN_MAX, OPEN_UNKNOWN = 32, 8
COMPARED = 8
"""Greedy answers that are compared, each of them asked alone and among others."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The load that is asked for.

    Attributes:
        lengths: of prompts that are made up, and of answers.
        prompts: requests of a file; none: they are made up.
        concurrency: requests that are open at a time; None: twice the slots of the replica.
        requests: of one round; None: four times as many as are open at a time.
        rounds: rounds that count; one more warms up.
    """

    lengths: Lengths
    prompts: tuple[Prompt, ...] = ()
    concurrency: int | None = None
    requests: int | None = None
    rounds: int = 5


class Session:
    """Measures one setting of the engine after the other; the load is that of the first one.

    Attributes:
        first: the replica with the unchanged settings, once it was measured.
        concurrency: requests that are open at a time.
    """

    def __init__(
        self,
        replica: TuningReplica,
        options: LoadOptions,
        usd_per_hour: Callable[[ReplicaView], float | None],
    ) -> None:
        """Prepare to measure."""
        self._replica, self._options, self._usd_per_hour = replica, options, usd_per_hour
        self._rounds: list[list[Prompt]] = []
        self.first: ReplicaView | None = None
        self.concurrency = 0

    def measure(self, name: str, flags: Mapping[str, Flag], look: Callable[[str], None]) -> Measured:
        """Return what a setting of the engine does under the load; `look` gets texts about the progress.

        Raises:
            ReplicaError: the engine does not start, or answers nothing.
        """
        found = self._replica.start(flags, lambda why: look(f"{name}: {why}"))
        assert found.address is not None and found.engine is not None, "a ready replica has both"
        target = Target(found.address, found.engine, self._replica.name)
        if self.first is None:
            self._begin(found, target)
        warm_up, *rounds = self._rounds
        look(f"{name}: warm-up")
        _, under_load = target.run(warm_up, self.concurrency)
        measured = []
        for number, prompts in enumerate(rounds, start=1):
            look(f"{name}: round {number} of {len(rounds)}")
            measured.append(target.run(prompts, self.concurrency)[0])
        compared = warm_up[:COMPARED]
        return Measured(
            tuple(measured),
            tuple(target.ask(each).text for each in compared),
            tuple(each.text for each in under_load[: len(compared)]),
            found.slots,
            found.kv_tokens,
            self._usd_per_hour(found),
        )

    def _begin(self, found: ReplicaView, target: Target) -> None:
        """Fix the load: all settings get the same."""
        options = self._options
        self.first = found
        self.concurrency = options.concurrency or min(OPEN_MAX, 2 * (found.slots or OPEN_UNKNOWN))
        number, rounds = options.requests or 4 * self.concurrency, options.rounds + 1
        if options.prompts:
            self._rounds = rounds_of(options.prompts, number, rounds)
        else:
            made_up = MadeUp(options.lengths, target.tokens_per_word())
            self._rounds = [made_up.take(number) for _ in range(rounds)]
