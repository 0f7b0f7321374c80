"""`TransformersEngine`: samples in this process, on the very module that is trained.

Requests are asynchronous and share decode steps. Rows join and leave between steps. A session's
KV cache is kept between its turns. transformers' own continuous batching has no seeds per
request and attends densely over the whole batch on CPU (`scripts/bench/engine.py` measures both).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from agenttrain.engines.base import EngineError, refuse_images
from agenttrain.engines.config import Sampling
from agenttrain.engines.transformers import sampler
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.engines.transformers.decoder import AUTOCAST, Decoder
from agenttrain.engines.transformers.scheduler import Generation, Scheduler
from agenttrain.engines.transformers.worker import CLOSED, EngineStats, EngineWorker
from agenttrain.engines.vision import Layout, Vision
from agenttrain.types import Completion, PlacedImage
from agenttrain.utils.threads import current_gpu, settle

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersEngine:
    """An `Engine`, `Lockstep` and `Streaming` over a transformers causal language model, e.g.::

        engine = TransformersEngine(model, TransformersSettings(max_context=1024))
        completion = await engine.generate(
            [1, 41, 42], Sampling(max_tokens=16, stop_token_ids=(2,), seed=7), session="rollout-0"
        )

    The model's weights are read in place: while they change, nothing may be in flight, and
    `update` has to follow. Raises EngineError for a model whose cache it cannot keep.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TransformersSettings | None = None,
        vision: Vision | None = None,
        mixed_precision: str = "no",
        record_routes: bool = False,
    ) -> None:
        """`vision` reads the images of a model that sees; None: images are refused.

        With `record_routes` completions have `routes`. Raises UnknownRouters for a model whose
        experts cannot be recorded.

        With `mixed_precision` (bf16, fp16) forward passes run under autocast, as the trainer's do.
        Autocast rounds float32 weights to 16 bits before it multiplies. So an update that is too
        small to change a rounded weight has no effect in the trainer. In an engine without autocast
        it would have one, and its logprobs would drift from the trainer's.
        """
        config = config or TransformersSettings()
        self.max_context = max_context(model, config)
        for key in ("max_rows", "rejoin_steps"):
            if getattr(config, key) < 1:
                raise EngineError(f"engine.{key}={getattr(config, key)}: set at least 1.")
        self._model: Any = model
        self._vocabulary: int = model.get_input_embeddings().num_embeddings
        self._vision = vision
        autocast = AUTOCAST[mixed_precision]
        decoder = Decoder(model, config.max_rows, self.max_context, vision, autocast, record_routes)
        scheduler = Scheduler(
            config.max_rows,
            rejoin_steps=config.rejoin_steps,  # decode steps between two turns of a session
            share_prefix=config.share_prefix,
            # True for layers whose cache cannot be cut back to a shorter prefix.
            copies_exactly=decoder.cache.copies_exactly,
        )
        self._worker = EngineWorker(decoder, scheduler)
        self.stats: EngineStats = self._worker.stats
        self._thread: threading.Thread | None = None
        self._closed = False
        self._results: set[asyncio.Future[Any]] = set()
        """Results that callers of `_run_between_steps` wait for: `aclose` fails them."""
        self._listeners: dict[str, Callable[[int], None]] = {}
        """Called with each token that is sampled for a session."""

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str,
        parent: str | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> Completion:
        """Implement `Engine.generate`; prefill only the tokens that the session's cache lacks.

        The budget ends at `max_context`. In deterministic mode only the sessions of `expect` have a
        place in the batch. A sub-agent's session names its `parent`, and has the place of the
        expected session that its chain of parents leads to. Raises EngineError, and ImagesRefused
        without a `vision`.
        """
        if self._vision is None:
            refuse_images(self, images, session)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        # The decode thread calls these two, and they act in this event loop: the first settles the
        # future with a completion or an error, the other passes each token on.
        deliver = partial(_post_to_loop, loop, settle, future)
        request = self._make_generation(token_ids, sampling, session, parent, deliver)
        if images:
            self._add_images(request, images)
        if (listener := self._listeners.get(session)) is not None:
            request.report = partial(_post_to_loop, loop, listener)
        self._post(partial(self._worker.add, request))
        try:
            return await future
        except asyncio.CancelledError:
            self._listeners.pop(session, None)  # otherwise `release` removes it
            with suppress(EngineError):  # the engine is closed
                # `worker.release` would do the same and deliver an error, for which nobody waits.
                self._post(partial(self._worker.scheduler.release, session))
            raise

    def _make_generation(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        session: str,
        parent: str | None,
        deliver: Callable[[Completion | EngineError], None],
    ) -> Generation:
        """Return the request of a call of `generate`. Raises EngineError for bad arguments."""
        ids = np.array(token_ids, dtype=np.int64)
        if not len(ids):
            raise EngineError("token_ids=[]: nothing to continue. Send at least one id.")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._vocabulary:
            raise EngineError(
                f"token_ids: {low if low < 0 else high} is outside of the model's vocabulary of "
                f"{self._vocabulary}. Use the tokenizer that belongs to the model."
            )
        if len(ids) >= self.max_context:
            raise EngineError(
                f"token_ids: {len(ids)} ids leave no room in max_context={self.max_context}. "
                "Shorten the prompt, or raise engine.max_context."
            )
        if sampling.grammar is not None:
            raise EngineError(
                "sampling.grammar: engine=transformers has none. Leave rollout.structured_calls "
                "out."
            )
        bounds = {
            "max_tokens": (sampling.max_tokens >= 1, "at least 1"),
            "temperature": (sampling.temperature >= 0, "at least 0 (0 is greedy)"),
            "top_p": (0 < sampling.top_p <= 1, "more than 0 and at most 1"),
            "top_k": (sampling.top_k >= 0, "at least 0 (0 keeps all tokens)"),
            "min_p": (0 <= sampling.min_p <= 1, "between 0 and 1"),
        }
        for key, (is_in_range, bound) in bounds.items():
            if not is_in_range:
                raise EngineError(f"sampling.{key}={getattr(sampling, key)}: set {bound}.")
        budget = min(sampling.max_tokens, self.max_context - len(ids))
        return Generation(
            session=session,
            token_ids=ids,
            sampling=sampling,
            budget=budget,
            noise=sampler.draw_noise(sampling.seed, budget),
            deliver=deliver,
            parent=parent,
        )

    def _add_images(self, request: Generation, images: Sequence[PlacedImage]) -> None:
        """Add images to a request. Raises EngineError unless they stand at their placeholders."""
        assert self._vision is not None
        placeholders, ids = self._vision.placeholders, request.token_ids
        for placed in images:
            covered = ids[placed.start : placed.end]
            fits = len(covered) == placed.tokens and bool((covered == placeholders.token_id).all())
            if not fits or placed.grid != placeholders.grid(placed.image):
                raise EngineError(
                    f"session={request.session!r}: images: the {placed.image} has "
                    f"{placeholders.tokens(placed.image)} placeholders, and {placed.tokens} are "
                    f"said to stand at position {placed.start}, where the ids are "
                    f"{covered[:4].tolist()}."
                )
        request.layout = Layout(tuple(images))
        # The ids at an image's placeholders become its key: the cache tells images apart by them.
        request.token_ids = request.layout.keyed(ids)

    def expect(self, sessions: Sequence[str]) -> None:
        """Implement `Lockstep.expect`. Call it before the sessions' first `generate`.

        The engine stands still until all sessions that are due have called. So each session has to
        call `generate` or `release` without waiting for another one to end. Until all have been
        released, calls of sessions that were not expected fail.
        """
        self._post(partial(self._worker.scheduler.expect, tuple(sessions)))

    def watch(self, session: str, listener: Callable[[int], None]) -> None:
        """Call `listener` with each token of a session as it is sampled: `Streaming.watch`."""
        self._listeners[session] = listener

    async def release(self, session: str) -> None:
        """Implement `Engine.release`; an unknown session is ignored."""
        self._listeners.pop(session, None)
        if self._thread is not None and not self._closed:
            self._post(partial(self._worker.release, session))

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy weights in by name, between two steps, and drop every cache.

        Pass no weights if the trained module holds them already. All names and shapes are checked
        before the first weight is copied. Requests in flight go on under the new weights.
        """
        tensors = dict(weights)
        if tensors:
            state = self._model.state_dict()
            unknown = sorted(set(tensors) - set(state))
            shapes = [n for n in tensors if n in state and tensors[n].shape != state[n].shape]
            # Tied parameters share an address: either of their names will do.
            addresses = {state[name].data_ptr() for name in tensors if name in state}
            missing = [
                n for n, p in self._model.named_parameters() if p.data_ptr() not in addresses
            ]
            checks = (("unknown", unknown), ("of another shape", shapes), ("missing", missing))
            for problem, names in checks:
                if names:
                    raise EngineError(
                        f"update: {len(names)} weights are {problem}, e.g. {names[0]}. Send the "
                        f"state_dict of a {type(self._model).__name__} of the same configuration; "
                        "nothing was changed."
                    )
        load = partial(self._worker.update, tensors, version)
        await self._run_between_steps(load, f"update to version {version}")

    async def _run_between_steps(
        self, function: Callable[[], Any], name: str, *, drained: bool = False
    ) -> Any:
        """Return the result of a function that the decode thread runs between two steps.

        With `drained`, it waits until the requests that decode now have ended, and no other begins
        before it (weight_sync.mode=drain). An exception becomes EngineError ``<name> failed: …``.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                _post_to_loop(loop, settle, result, function())
            except Exception as error:
                _post_to_loop(loop, settle, result, EngineError(f"{name} failed: {error}"))

        self._post(partial(self._worker.drain, run) if drained else run)
        self._results.add(result)
        try:
            return await result
        finally:
            self._results.discard(result)

    async def aclose(self) -> None:
        """Stop the decode thread; calls still waiting fail with EngineError."""
        self._closed = True
        if self._thread is not None:
            self._worker.post(self._worker.stop)
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        for result in self._results:  # e.g. of an update that waited for the requests to end
            settle(result, EngineError(CLOSED))

    def _post(self, action: Callable[[], object]) -> None:
        """Run an action in the decode thread, which the first one starts."""
        if self._closed:
            raise EngineError("the engine is closed (aclose). Build a new one.")
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._worker.run,
                args=(current_gpu(),),
                name="agenttrain-decode",
                daemon=True,
            )
            self._thread.start()
        self._worker.post(action)


def _post_to_loop(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object
) -> None:
    """Call a function in the thread of an event loop, from the decode thread."""
    with suppress(RuntimeError):  # the loop was closed: nobody waits
        loop.call_soon_threadsafe(callback, *arguments)


def max_context(model: PreTrainedModel, config: TransformersSettings) -> int:
    """Return the most tokens of one sequence. Raises EngineError beyond the model's positions."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = config.max_context if config.max_context is not None else limit
    if length is None:
        raise EngineError(
            "engine.max_context=null: the model's config names no limit. Set engine.max_context."
        )
    if length < 2 or (limit is not None and length > limit):
        raise EngineError(
            f"engine.max_context={length}: must lie between 2 and the model's {limit} positions."
        )
    return length
