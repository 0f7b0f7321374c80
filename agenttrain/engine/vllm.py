"""`VllmEngine`: vLLM's continuous batching and prefix cache, in this process.

One thread steps vLLM's `LLMEngine`; every rollout is a coroutine that waits for its own completion
only. Written for vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from agenttrain.config.schema import EngineConfig, WeightSyncMode
from agenttrain.engine.base import EngineError
from agenttrain.engine.stepper import Stepper
from agenttrain.engine.vllm_setup import build_llm_engine
from agenttrain.types import Completion, Finish, Sampling

FINISHES = {"stop": Finish.stop, "length": Finish.length, "abort": Finish.abort}
"""By vLLM's name; its others (an error, a repetition) end the rollout as failed."""


@dataclass(slots=True)
class VllmStats:
    """Counters since the engine was built."""

    prompt_tokens: int = 0
    """Of all requests."""
    cached_tokens: int = 0
    """Of these, those whose keys and values the prefix cache held."""
    sampled_tokens: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class _Waiting:
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]

    def deliver(self, outcome: Any) -> None:
        self.loop.call_soon_threadsafe(_settle, self.future, outcome)


def _settle(future: asyncio.Future[Any], outcome: Any) -> None:
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


@dataclass(slots=True)
class _Driver:
    """vLLM's engine as the stepper sees it; only the stepper's thread comes here."""

    llm: Any
    waiting: dict[str, _Waiting] = field(default_factory=dict)
    held: list[tuple[str, Any, Any]] = field(default_factory=list)
    """Requests that wait until new weights are in."""
    holding: bool = False
    stats: VllmStats = field(default_factory=VllmStats)

    def busy(self) -> bool:
        return self.llm.has_unfinished_requests()

    def step(self) -> None:
        self.stats.steps += 1
        for output in self.llm.step():
            if output.finished and (waiting := self.waiting.pop(output.request_id, None)):
                self.stats.prompt_tokens += len(output.prompt_token_ids)
                self.stats.cached_tokens += output.num_cached_tokens or 0
                self.stats.sampled_tokens += len(output.outputs[0].token_ids)
                waiting.deliver(output)

    def fail(self, error: BaseException) -> None:
        waiting, self.waiting = self.waiting, {}
        for one in waiting.values():
            one.deliver(EngineError(f"vLLM died: {error}"))

    def add(self, request_id: str, prompt: Any, parameters: Any, waiting: _Waiting) -> None:
        self.waiting[request_id] = waiting
        if self.holding:
            self.held.append((request_id, prompt, parameters))
        else:
            self._admit(request_id, prompt, parameters)

    def _admit(self, request_id: str, prompt: Any, parameters: Any) -> None:
        try:
            self.llm.add_request(request_id, prompt, parameters)
        except Exception as error:  # whatever vLLM has against this request is its alone
            self.waiting.pop(request_id).deliver(EngineError(f"vLLM refuses a request: {error}"))

    def abort(self, request_id: str) -> None:
        self.waiting.pop(request_id, None)
        self.held = [held for held in self.held if held[0] != request_id]
        self.llm.abort_request([request_id])

    def release_held(self) -> None:
        self.holding = False
        held, self.held = self.held, []
        for request_id, prompt, parameters in held:
            self._admit(request_id, prompt, parameters)


class VllmEngine:
    """An `Engine` over vLLM's `LLMEngine`, e.g.::

        engine = VllmEngine(Path("my_model"), EngineConfig(name="vllm", max_context=1024))
        completion = await engine.generate(
            [1, 41, 42], Sampling(max_tokens=16, stop_token_ids=(2,), seed=7), session="rollout-0"
        )

    It holds weights of its own, which `update` replaces.
    """

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        *,
        dtype: str = "float32",
        mode: WeightSyncMode = WeightSyncMode.drain,
    ) -> None:
        """Raises EngineError when vLLM is not installed, or refuses the model or a setting."""
        llm = build_llm_engine(folder, config, dtype=dtype)
        self.max_context: int = llm.model_config.max_model_len
        self._mode = mode
        self._sleeps = config.vllm.sleep
        self._vocabulary: int = llm.model_config.get_vocab_size()
        self._version = 0
        self._numbers = itertools.count()
        self._driver = _Driver(llm)
        llm.set_weight_version("0")
        self._stepper = Stepper(self._driver, name="vllm")

    @property
    def stats(self) -> VllmStats:
        """Counters since the engine was built."""
        return self._driver.stats

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, session: str
    ) -> Completion:
        """As `Engine.generate`; the prefix cache holds the session's earlier turns.

        Raises EngineError for a request that vLLM refuses, and for all requests once it died.
        """
        self._check(token_ids)
        budget = min(sampling.max_tokens, self.max_context - len(token_ids))
        parameters = _parameters(sampling, budget)
        return _completion(await self._ask(session, list(token_ids), parameters))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of every id after the first, given those before it, at temperature 1."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            max_tokens=1,
            temperature=1.0,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._ask("score", list(token_ids), parameters)
        pairs = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return [found[token].logprob for token, found in pairs]

    async def _ask(self, session: str, token_ids: list[int], parameters: Any) -> Any:
        if self._stepper.dead is not None:
            raise EngineError(f"vLLM died: {self._stepper.dead}")
        loop = asyncio.get_running_loop()
        waiting = _Waiting(loop, loop.create_future())
        request_id = f"{session}/{next(self._numbers)}"
        # Salted: keys and values of other weights are never taken for those of these.
        prompt = {"prompt_token_ids": token_ids, "cache_salt": str(self._version)}
        self._stepper.post(partial(self._driver.add, request_id, prompt, parameters, waiting))
        try:
            return await waiting.future
        except asyncio.CancelledError:
            self._stepper.post(partial(self._driver.abort, request_id))
            raise

    async def rest(self) -> None:
        """With engine.vllm.sleep: the GPU's memory is free until the next `update`."""
        if self._sleeps:
            await asyncio.wrap_future(self._stepper.call(partial(self._driver.llm.sleep, 2)))

    def _check(self, token_ids: Sequence[int]) -> None:
        # vLLM would die of what it does not know, and take every other rollout along.
        known = bool(token_ids) and 0 <= min(token_ids) <= max(token_ids) < self._vocabulary
        if not known:
            raise EngineError(
                f"token_ids: {len(token_ids)} ids, not all from 0 to {self._vocabulary - 1}. Send "
                "at least one, of the tokenizer that belongs to the model."
            )
        if len(token_ids) >= self.max_context:
            raise EngineError(
                f"token_ids: {len(token_ids)} ids leave no room in max_context={self.max_context}. "
                "Shorten the prompt, or raise engine.max_context."
            )

    async def release(self, session: str) -> None:
        """Nothing to do: the prefix cache forgets what has not been asked for the longest."""

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights, as `weight_sync.mode` says with requests in flight.

        drain: they end first, new ones wait; abort_resume: they go on under the new weights, which
        read all their tokens again; in_flight: they go on with the keys and values that they have.
        Raises EngineError when weights do not fit the model.
        """
        if self._mode is WeightSyncMode.drain:
            await self._drain()
        await asyncio.wrap_future(self._stepper.call(partial(self._load, weights, version)))

    async def _drain(self) -> None:
        def hold() -> bool:
            self._driver.holding = True
            return self._driver.busy()

        while await asyncio.wrap_future(self._stepper.call(hold)):
            await asyncio.sleep(0.005)

    def _load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        llm = self._driver.llm
        try:
            if self._sleeps:
                llm.wake_up()
            worker = llm.model_executor.driver_worker.worker
            worker.reload_weights(weights_iterator=iter(weights))
        except Exception as error:
            raise EngineError(
                f"vLLM cannot take the weights of version {version}: {error}"
            ) from error
        finally:
            self._driver.release_held()
        again = self._mode is WeightSyncMode.abort_resume
        llm.reset_prefix_cache(reset_running_requests=again)
        llm.set_weight_version(str(version))
        self._version = version

    async def aclose(self) -> None:
        """Shut vLLM down; calls still waiting fail with EngineError."""
        self._stepper.post(partial(self._driver.fail, EngineError("the engine was closed")))
        await asyncio.to_thread(self._stepper.close)
        # Now, and not when memory is collected: it would tear down the groups of the next engine.
        self._driver.llm.engine_core.shutdown()


def _parameters(sampling: Sampling, budget: int) -> Any:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind

    try:
        return SamplingParams(
            max_tokens=budget,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # the stop tokens are named
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except VLLMValidationError as error:
        raise EngineError(f"vLLM refuses a request: {error}") from error


def _completion(output: Any) -> Completion:
    sampled = output.outputs[0]
    finish = FINISHES.get(sampled.finish_reason)
    if finish is None:
        raise EngineError(f"vLLM ended a request with {sampled.finish_reason!r}")
    token_ids = tuple(sampled.token_ids)
    logprobs = zip(token_ids, sampled.logprobs, strict=True)
    spans = sampled.weight_versions or []
    return Completion(
        token_ids=token_ids,
        logprobs=tuple(found[token].logprob for token, found in logprobs),
        finish=finish,
        versions=tuple((int(span.version), span.end - span.start) for span in spans),
    )
