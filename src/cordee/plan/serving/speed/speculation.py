"""Speculative decoding: a draft of a few tokens, checked in one step of the model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Speculation:
    """A way to guess tokens.

    Attributes:
        draft_tokens: tokens that are guessed for each step.
        acceptance: probability that a guessed token is right, if those before it were.
        draft_s: seconds to guess one token of the whole batch; 0 for a look-up in the prompt.
    """

    draft_tokens: int
    acceptance: float
    draft_s: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that one step gives on average (Leviathan et al. 2023, arXiv:2211.17192, equation 1).

        >>> Speculation(3, 0.5).tokens_per_step, Speculation(4, 1.0).tokens_per_step
        (1.875, 5.0)
        """
        if self.acceptance >= 1:
            return self.draft_tokens + 1.0
        return (1 - self.acceptance ** (self.draft_tokens + 1)) / (1 - self.acceptance)
