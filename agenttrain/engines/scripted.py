"""`ScriptedEngine`: an engine that answers from a script, to test tools, rewards and loops."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agenttrain.engines.base import EngineError, refuse_images
from agenttrain.engines.config import Sampling
from agenttrain.types import Completion, Finish, PlacedImage

if TYPE_CHECKING:
    from torch import Tensor


Answer = str | Sequence[int] | Completion
"""An answer of the script:

- text: it is encoded, and the request's first stop id is added;
- token ids: they are returned as they are;
- a completion, with its own logprobs. With finish `abort` it may end without a stop id.
"""
Script = (
    Sequence[Answer] | Mapping[str, Sequence[Answer]] | Callable[[Sequence[int], str, int], Answer]
)
"""Answers by turn, by session and turn, or computed from (token ids, session, turn)."""

LOGPROB = -0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request that the engine received."""

    session: str
    turn: int
    ids: array[int]
    """A copy of the request's ids: an array, so that a test over a long history stays quick."""
    sampling: Sampling
    images: tuple[PlacedImage, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids that were sent."""
        return tuple(self.ids)


class ScriptedEngine:
    """Answers from a script, e.g. two turns, of which the first is cut by a budget of 2::

    engine = ScriptedEngine([[41, 42, 2], "done"], encode=lambda text: [50])
    first = await engine.generate([1], Sampling(max_tokens=2), session="a")
    second = await engine.generate(
        [1, 41, 42], Sampling(max_tokens=9, stop_token_ids=(2,)), session="a"
    )
    assert (first.token_ids, first.finish) == ((41, 42), Finish.length)
    assert (second.token_ids, second.finish) == ((50, 2), Finish.stop)
    """

    def __init__(
        self,
        script: Script,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        delay: float = 0.0,
        max_context: int = 4096,
        keeps_sent: bool = True,
        reads_images: bool = False,
    ) -> None:
        """`delay`: seconds until an answer. `encode`: turns text answers into ids.

        With `keeps_sent`, `sent` collects every request with all of its ids. With `reads_images`,
        requests may have images, which change no answer.
        """
        self.reads_images = reads_images
        self.script = script
        self.encode = encode
        self.delay = delay
        self.keeps_sent = keeps_sent
        self.max_context = max_context
        self.sent: list[Sent] = []
        self.released: list[str] = []
        self.version = 0
        self.updates = 0
        self._turns: dict[str, int] = {}

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str,
        parent: str | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> Completion:
        """Return the session's next answer, cut at its first stop id and at the budget.

        Raises EngineError where a real engine would, when the script has no answer left, and when
        an answer ends with neither a stop id nor the budget. Raises ImagesRefused for images,
        unless `reads_images`.
        """
        if not self.reads_images:
            refuse_images(self, images, session)
        ids = array("q", token_ids)
        if not ids or len(ids) >= self.max_context or sampling.max_tokens < 1:
            raise EngineError(
                f"session={session!r}: {len(ids)} ids, max_tokens={sampling.max_tokens}, "
                f"max_context={self.max_context}: no room to sample. Send a shorter prompt."
            )
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        if self.keeps_sent:
            self.sent.append(
                Sent(session=session, turn=turn, ids=ids, sampling=sampling, images=tuple(images))
            )
        await asyncio.sleep(self.delay)
        script = self.script
        if callable(script):
            answer = script(ids, session, turn)
        else:
            answers = script.get(session, ()) if isinstance(script, Mapping) else script
            if turn >= len(answers):
                raise EngineError(f"session={session!r}: the script has no answer for turn {turn}.")
            answer = answers[turn]
        budget = min(sampling.max_tokens, self.max_context - len(ids))
        return self._complete(answer, sampling.stop_token_ids, budget, f"{session} turn {turn}")

    def _complete(
        self, answer: Answer, stop_ids: Sequence[int], budget: int, where: str
    ) -> Completion:
        """Return an answer as a completion, cut at a stop id and at the budget.

        An answer that is a completion may also be aborted: only such a one ends before both.
        `where` names session and turn in errors.
        """
        logprobs, aborted = None, False
        if isinstance(answer, Completion):
            ids, logprobs = list(answer.token_ids), answer.logprobs
            aborted = answer.finish is Finish.abort
        elif not isinstance(answer, str):
            ids = list(answer)
        elif self.encode is None:
            raise EngineError(
                f"script: {answer!r} is text. Give ScriptedEngine an encode function."
            )
        else:
            ids = [*self.encode(answer), *stop_ids[:1]]
        if not ids:
            raise EngineError(f"script, {where}: no token to answer with. Give at least one.")
        first_stop = next((i for i, token in enumerate(ids) if token in stop_ids), None)
        end = len(ids) if first_stop is None else first_stop + 1  # the stop id is included
        end = min(end, budget)
        if first_stop is not None and first_stop < budget:
            finish = Finish.stop
        elif end == budget:
            finish = Finish.length
        elif aborted:
            finish = Finish.abort
        else:  # a real engine would go on sampling here
            raise EngineError(
                f"script, {where}: {ids} ends with neither a stop id of {tuple(stop_ids)} nor "
                f"the budget of {budget}. End the answer with a stop id."
            )
        return Completion(
            token_ids=tuple(ids[:end]),
            logprobs=tuple(logprobs[:end]) if logprobs is not None else (LOGPROB,) * end,
            finish=finish,
            versions=((self.version, end),),
        )

    async def release(self, session: str) -> None:
        """Record the session in `released`."""
        self.released.append(session)

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Count the update; tokens sampled from now on carry `version`."""
        self.updates += 1
        self.version = version

    async def aclose(self) -> None:
        """Nothing to free."""
