"""One iteration of GRPO as a value: `rollouts.py` computes it, the answer and its documents carry it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RolloutPlan:
    """One iteration of GRPO.

    Attributes:
        engine: the engine's layout, as it is printed.
        gpus: GPUs that generate; `trainers` those that update. On the same GPUs both are all.
        completions: of one iteration, over all updates.
        kv_tokens: what the cache of one replica of the engine holds, of which there are `replicas`.
        concurrent: completions that one replica runs at the same time.
        engine_bytes: of one GPU while it generates: the engine's and, on the same GPUs, the training's standing state.
        generate_s: seconds of all completions; `weights_s` of the new weights to the engine.
        reference_s: seconds of passes without gradients, `update_s` of all updates without them.
        overlap: generation and updates run at the same time.
    """

    engine: str
    gpus: int
    trainers: int
    apart: bool
    completions: int
    kv_tokens: int
    replicas: int
    concurrent: int
    engine_bytes: int
    generate_s: float
    weights_s: float
    reference_s: float
    update_s: float
    overlap: bool

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration: the sum of its parts, or the longer side and the weights where both overlap."""
        learn_s = self.reference_s + self.update_s
        if self.overlap:
            return max(self.generate_s, learn_s) + self.weights_s
        return self.generate_s + learn_s + self.weights_s

    @property
    def all_gpus(self) -> int:
        """GPUs of the job."""
        return self.gpus + self.trainers if self.apart else self.gpus

    @property
    def idle_fraction(self) -> float:
        """The part of the GPUs' time in which they wait for the other side."""
        if not self.apart:
            return 0.0
        learn_s = self.reference_s + self.update_s
        waits = self.gpus * (self.iteration_s - self.generate_s) + self.trainers * (self.iteration_s - learn_s)
        return waits / (self.all_gpus * self.iteration_s)
