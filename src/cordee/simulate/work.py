"""What a simulated job does with its time. The scheduler never sees it: only the world that plays the job does."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A training script, as the cluster sees it.

    Attributes:
        start_us: from start to the first new step: imports, process groups, loading the checkpoint.
        first_start_us: the same of a job's first attempt; None: as of any other. A trace's run time holds it already.
        every_us: useful time between two checkpoints; None if the script writes none.
        stall_us: how long a checkpoint holds the ranks.
        upload_us: from there until it is durable; training goes on meanwhile.
        saves_at_end: after its last step it writes a checkpoint and waits for it; a trace's run time holds that too.
        handles_notice: on SIGTERM it stops at a step, saves and leaves; else it goes on until it is killed.
        reports: it tells what it does with its time; a plain script does not.
        gpus: on how many it takes `step_us` for a step; on others in proportion. None: always `step_us`.
    """

    steps: int
    step_us: int
    start_us: int = 60_000_000
    first_start_us: int | None = None
    every_us: int | None = 1_800_000_000
    stall_us: int = 1_000_000
    upload_us: int = 0
    saves_at_end: bool = True
    checkpoint_bytes: int = 0
    tokens_per_step: int = 0
    handles_notice: bool = True
    reports: bool = True
    gpus: int | None = None

    def __post_init__(self) -> None:
        assert self.steps > 0 and self.step_us > 0, "a job has at least one step, and a step takes time"
        assert self.start_us >= 0 and self.stall_us >= 0 and self.upload_us >= 0, "durations are not negative"

    @property
    def durable(self) -> bool:
        """It can write a checkpoint, so a later attempt goes on from it."""
        return self.every_us is not None or self.handles_notice
