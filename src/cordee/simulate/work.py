"""What a simulated job does with its time. It travels as the job's spec, which the scheduler never reads."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A training script, as the cluster sees it.

    Attributes:
        start_us: from start to the first new step: imports, process groups, loading the checkpoint.
        every_us: useful time between two checkpoints; None if the script writes none.
        stall_us: how long a checkpoint holds the ranks.
        drain_us: from there until it is durable; training goes on meanwhile.
        handles_notice: on SIGTERM it stops at a step, saves and leaves; else it goes on until it is killed.
        reports: it tells what it does with its time; a plain script does not.
    """

    steps: int
    step_us: int
    start_us: int = 60_000_000
    every_us: int | None = 1_800_000_000
    stall_us: int = 1_000_000
    drain_us: int = 0
    checkpoint_bytes: int = 0
    tokens_per_step: int = 0
    handles_notice: bool = True
    reports: bool = True

    def __post_init__(self) -> None:
        assert self.steps > 0 and self.step_us > 0, "a job has at least one step, and a step takes time"
        assert self.start_us >= 0 and self.stall_us >= 0 and self.drain_us >= 0, "durations are not negative"

    @property
    def durable(self) -> bool:
        """It can write a checkpoint, so a later attempt goes on from it."""
        return self.every_us is not None or self.handles_notice

    @property
    def steps_between(self) -> int:
        """Whole steps from one checkpoint to the next; all of them without checkpoints."""
        return self.steps if self.every_us is None else max(1, round(self.every_us / self.step_us))

    def to_json(self) -> str:
        """As it travels in `JobSubmitted.spec`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Work":
        """The inverse of `to_json`."""
        return cls(**json.loads(text))
