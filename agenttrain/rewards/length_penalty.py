"""`length_penalty`: long rollouts cost reward; only what the model sampled is counted."""

from __future__ import annotations

from agenttrain.types import Rollout


class LengthPenalty:
    """0 up to `free_tokens` sampled tokens, then down in a straight line to -1 at `full_tokens`.

    Tool results and template glue are not counted. With ``free_tokens`` at 80 % of the limit it is
    DAPO's soft overlong punishment (https://arxiv.org/abs/2503.14476, equation 13). Example:
    ``LengthPenalty(full_tokens=100, free_tokens=60)`` gives -0.25 to 70 sampled tokens.
    """

    def __init__(self, *, full_tokens: int, free_tokens: int = 0) -> None:
        if not 0 <= free_tokens < full_tokens:
            raise ValueError(
                f"free_tokens={free_tokens}: must be 0 or more, and below full_tokens={full_tokens}"
            )
        self._free, self._full = free_tokens, full_tokens

    def __call__(self, rollout: Rollout) -> float:
        over = max(rollout.sampled_length - self._free, 0)
        return -min(over / (self._full - self._free), 1.0)
