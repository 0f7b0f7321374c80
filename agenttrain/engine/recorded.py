"""`RecordedEngine`: says again what was sampled once, token for token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from agenttrain.engine.base import EngineError, refuse_images
from agenttrain.types import Completion, Sampling

if TYPE_CHECKING:
    from torch import Tensor


class RecordedEngine:
    """Answers turn n of its one rollout with the n-th completion: ids, logprobs, versions, finish.

    What it is asked to continue is not looked at: the caller compares the ledgers afterwards.
    """

    def __init__(self, completions: Sequence[Completion], *, max_context: int) -> None:
        """`max_context` is that of the engine which sampled them."""
        self.max_context = max_context
        self._left = list(completions)

    @property
    def exhausted(self) -> bool:
        """Whether the last completion has been given."""
        return not self._left

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str,
        parent: str | None = None,
        images: Sequence[object] = (),
    ) -> Completion:
        """The next completion. Raises EngineError when none is left, or it is over the budget."""
        refuse_images(self, images, session)
        if not self._left:
            raise EngineError(f"{session}: another completion is asked for; no more were recorded")
        completion = self._left.pop(0)
        if len(completion.token_ids) > sampling.max_tokens:
            raise EngineError(
                f"{session}: {len(completion.token_ids)} tokens were recorded where the budget is "
                f"{sampling.max_tokens} now"
            )
        return completion

    async def release(self, session: str) -> None:
        """Nothing is kept."""

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """What was recorded stays what it was."""

    async def aclose(self) -> None:
        """Nothing to free."""
