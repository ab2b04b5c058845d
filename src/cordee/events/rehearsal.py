"""The result of a rehearsal, an event of no attempt."""

from dataclasses import dataclass

from cordee.ids import JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalEnded:
    """A rehearsal has shown whether jobs of this code survive a notice, and what its steps, save and restart take."""

    at_us: int
    job_id: JobId  # of the rehearsal
    code: str  # digest of the files and the command
    passed: bool
    why: str  # one sentence with the numbers
    notes: tuple[str, ...] = ()
    gpus: int = 0  # that it ran on
    gpu_name: str = ""
    steps: int = 0  # that it ran before its notice
    peak_bytes: int | None = None  # as in `Measured`; None: not measured, as the following ones
    step_us: int | None = None
    save_us: int | None = None  # from the boundary to durable
    restart_us: int | None = None  # from placed to the first new step
