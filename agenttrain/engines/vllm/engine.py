"""`VllmEngine`: vLLM's continuous batching and prefix cache, in this process.

One thread builds, steps, updates and shuts down vLLM's `LLMEngine`; every rollout is a coroutine
that waits for its own completion only. Written for vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from agenttrain.engines.base import EngineDead, EngineError, refuse_images
from agenttrain.engines.config import Sampling
from agenttrain.engines.routed_experts import read_routes
from agenttrain.engines.vllm.config import VllmSettings
from agenttrain.engines.vllm.driver import Driver, Stepper, VllmRequest, VllmStats, Waiter
from agenttrain.engines.vllm.setup import build_llm_engine, check_device, settings_restored
from agenttrain.engines.vllm.weights import Manifest, load_adapters, split_adapters
from agenttrain.training.config import LoraSettings, WeightSyncMode
from agenttrain.types import Completion, Finish

Value = TypeVar("Value")

FINISHES = {"stop": Finish.stop, "length": Finish.length, "abort": Finish.abort}
"""By vLLM's name. Any other reason (an error, a repetition) fails the rollout."""
DRAIN_S = 600.0
"""Seconds that a drain waits for requests in flight."""


class VllmEngine:
    """An `Engine` over vLLM's `LLMEngine`, e.g.::

        engine = VllmEngine(Path("my_model"), VllmSettings(max_context=1024))
        completion = await engine.generate(
            [1, 41, 42], Sampling(max_tokens=16, stop_token_ids=(2,), seed=7), session="rollout-0"
        )

    It holds weights of its own, which `update` replaces. All of vLLM runs in one thread, the
    stepper's: the methods post calls of the `Driver` to it. `_drain` holds new requests back, and
    lets those in flight end. Whoever has called it lets them in again by `Driver.release_held`.
    """

    def __init__(
        self,
        folder: Path,
        config: VllmSettings,
        *,
        dtype: str = "float32",
        adapters: LoraSettings | None = None,
        mode: WeightSyncMode = WeightSyncMode.drain,
        drain_s: float = DRAIN_S,
        tokenizer: Path | None = None,
        seed: int = 0,
        log: Path | None = None,
        record_routes: bool = False,
    ) -> None:
        """Build vLLM with the weights of `folder`.

        `dtype` is the policy's number format, `config.dtype` the engine's. With `adapters`,
        `update` takes adapters only, and the weights under them stay those of `folder`. `mode` is
        what `update` does with requests in flight: with drain it waits `drain_s` seconds for them.
        `tokenizer`: a folder, which requests with a grammar need. `log`: the file that vLLM's log
        is appended to. `record_routes`: completions have `routes`.

        Raises EngineError if vLLM is not installed, or refuses the model or a setting.
        """

        def build() -> Driver:
            llm = build_llm_engine(
                folder,
                config,
                dtype=dtype,
                lora_rank=adapters.rank if adapters else 0,
                tokenizer=tokenizer,
                seed=seed,
                log=log,
                record_routes=record_routes,
            )
            check_device(llm)
            llm.set_weight_version("0")
            return Driver(llm)

        with settings_restored():
            self._stepper = Stepper(build, name="vllm")
        # Read here only for facts that do not change; later calls go through the stepper's thread.
        self._driver = self._stepper.engine
        self.stats: VllmStats = self._driver.stats
        llm = self._driver.llm
        self.dtype: torch.dtype = llm.model_config.dtype
        self.quantized = config.quantization is not None
        self._takes_grammars = tokenizer is not None
        self._record_routes = record_routes
        self._adapters = adapters
        self.takes_adapters = adapters is not None
        self.lacks_base = False
        """Implements `Forgetful`. `sleep` sets it, as it drops the base weights under the adapters,
        and an update that brings them resets it."""
        self.max_context: int = llm.model_config.max_model_len
        self._mode = mode
        self._drain_s = drain_s
        self._sleeps = config.sleep
        self._manifest = Manifest()
        """Names, forms and checksums of the weights, with which each update is compared."""
        self._vocabulary: int = llm.model_config.get_vocab_size()
        self._closed = False
        self._numbers = itertools.count()
        """Numbers of the requests."""

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str,
        parent: str | None = None,
        images: Sequence[object] = (),
    ) -> Completion:
        """Implement `Engine.generate`. Raises EngineError, ImagesRefused and EngineDead."""
        refuse_images(self, images, session)
        # An unknown id would kill vLLM, and with it every other rollout.
        ids = np.asarray(token_ids)  # a ledger gives an array, which is not copied
        is_valid = ids.size > 0 and 0 <= ids.min() <= ids.max() < self._vocabulary
        if not is_valid:
            raise EngineError(
                f"token_ids: {len(token_ids)} ids, not all from 0 to {self._vocabulary - 1}. Send "
                "at least one, of the tokenizer that belongs to the model."
            )
        if len(token_ids) >= self.max_context:
            raise EngineError(
                f"token_ids: {len(token_ids)} ids leave no room in max_context={self.max_context}. "
                "Shorten the prompt, or raise engine.max_context."
            )
        if sampling.grammar is not None and not self._takes_grammars:
            raise EngineError(
                "sampling.grammar: this engine was built without a tokenizer, which grammars need."
            )
        budget = min(sampling.max_tokens, self.max_context - len(token_ids))
        parameters = _make_parameters(sampling, budget)
        if self._record_routes:  # the last prompt token is the first that is sampled from
            parameters.routed_experts_prompt_start = len(token_ids) - 1
        output = await self._request(session, list(token_ids), parameters)
        sampled = output.outputs[0]
        finish = FINISHES.get(sampled.finish_reason)
        if finish is None:
            raise EngineError(f"vLLM ended a request with {sampled.finish_reason!r}")
        spans = sampled.weight_versions or []
        return Completion(
            token_ids=tuple(sampled.token_ids),
            logprobs=tuple(sampled.logprobs.logprobs),  # flat, the sampled token's alone
            finish=finish,
            versions=tuple((int(span.version), span.end - span.start) for span in spans),
            routes=(
                read_routes(sampled.routed_experts, len(sampled.token_ids))
                if self._record_routes and sampling.routes
                else None
            ),
        )

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Implement `Separate.score`. With adapters, requests in flight have to end before it."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            max_tokens=1,  # the least that vLLM accepts
            temperature=1.0,
            prompt_logprobs=0,  # of the prompt's own tokens alone
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        if self.takes_adapters:
            # In a batch with other requests vLLM 0.32 applies the adapters of the language-model
            # head to the wrong rows, and dies.
            await self._drain()
        try:
            # Not held back: `_drain` holds the requests of others until this one is done.
            output = await self._request("score", list(token_ids), parameters, may_hold=False)
        finally:
            if self.takes_adapters:
                self._stepper.post(self._driver.release_held)
        # The first token has no log-probability: nothing comes before it.
        pairs = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return [candidates[token].logprob for token, candidates in pairs]

    async def _request(
        self, session: str, token_ids: list[int], parameters: Any, *, may_hold: bool = True
    ) -> Any:
        """Return vLLM's output for a request. Cancelling it aborts the request.

        With `may_hold=False` it is sent even while requests are held back, as `score` holds them.
        """
        self._check_alive()
        loop = asyncio.get_running_loop()
        waiter = Waiter(loop, loop.create_future())
        request = VllmRequest(f"{session}/{next(self._numbers)}", token_ids, parameters)
        self._stepper.post(partial(self._driver.add, request, waiter, may_hold=may_hold))
        try:
            return await waiter.future
        except asyncio.CancelledError:
            self._stepper.post(partial(self._driver.abort, request.id))
            raise

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineDead("the engine was closed")
        if self._stepper.dead is not None:
            raise EngineDead(str(self._driver.failure))

    async def _run_between_steps(self, function: Callable[[], Value]) -> Value:
        """Return the result of a function that the stepping thread runs between two steps."""
        self._check_alive()
        return await asyncio.wrap_future(self._stepper.call(function))

    async def sleep(self) -> None:
        """With engine.sleep, free the GPU's memory until the next `update`."""
        if self._sleeps:
            await self._run_between_steps(self._driver.sleep)
            self.lacks_base = self.takes_adapters

    def metrics(self) -> dict[str, float]:
        """Implement `Metered.metrics`: the seconds of the last update's comparison of bytes."""
        if self.takes_adapters:  # most updates bring no weights to compare
            return {}
        return {"time/sync_check_s": self._manifest.check_s}

    async def release(self, session: str) -> None:
        """Do nothing: the prefix cache evicts its least recently used entries."""

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights, as version `version`.

        `weight_sync.mode` decides about requests in flight:

        - drain: they end first, and new ones wait;
        - abort_resume: they go on under the new weights, which read all their tokens again;
        - in_flight: they go on with their KV cache.

        Only drain needs anything here: `_load` does what the others need.

        Raises EngineError if the engine is dead, if requests do not end in time, or if the weights
        do not fit the model. In the last case some weights may be new: the engine serves nothing
        until an update that fits.
        """
        if self._mode is WeightSyncMode.drain:
            await self._drain()
        await self._run_between_steps(partial(self._load, weights, version))

    async def _drain(self) -> None:
        """Hold new requests back until `release_held`, and wait until none is in flight."""

        def hold() -> bool:
            self._driver.holding = True
            return self._driver.busy()

        try:
            async with asyncio.timeout(self._drain_s):
                while await self._run_between_steps(hold):
                    await asyncio.sleep(0.005)
        except BaseException as error:
            self._stepper.post(self._driver.release_held)
            if isinstance(error, TimeoutError):
                raise EngineError(
                    f"weight sync: requests in flight did not end within {self._drain_s:g} s. Set "
                    "weight_sync.mode=abort_resume, or lower rollout.max_turn_tokens."
                ) from error
            raise

    def _load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load weights, in the stepping thread. After an error the engine serves nothing.

        `driver.failure` then fails all requests, those in flight and later ones, until an update
        succeeds. In both cases scheduling is resumed, and no request is held back any longer.
        """
        llm, driver = self._driver.llm, self._driver
        driver.pause()  # requests in flight stay, and wait
        try:
            driver.wake("weights")
            if self._adapters is None:
                self._manifest.load(llm, weights)
            else:
                if self.lacks_base:  # `sleep` has dropped them: the trainer sends them first
                    base, weights = split_adapters(weights)
                    self._manifest.load(llm, base)
                    self.lacks_base = False
                driver.adapter = load_adapters(llm, weights, alpha=self._adapters.alpha)
            # After the weights: loading them takes memory that the cache gets afterwards.
            driver.wake("kv_cache")
        except Exception as error:
            driver.failure = EngineError(
                f"vLLM cannot take the weights of version {version}: {type(error).__name__}: "
                f"{error}"
            )
            driver.resume()
            driver.fail_requests(driver.failure)  # also those that `_drain` has held back
            driver.release_held()  # none is left: this ends the holding of later ones
            raise driver.failure from error
        driver.failure = None
        # Cached prefixes are of the old weights, and no new request uses them. With abort_resume
        # vLLM also drops the cache of requests in flight, and computes it again from their tokens.
        # With in_flight they keep it.
        restarts_requests = self._mode is WeightSyncMode.abort_resume
        llm.reset_prefix_cache(reset_running_requests=restarts_requests)
        llm.set_weight_version(str(version))
        driver.version = version
        driver.resume()
        driver.release_held()  # requests that `_drain` has held back

    async def aclose(self) -> None:
        """Shut vLLM down. Calls still waiting fail with EngineDead. A second call does nothing.

        `Driver.close` fails the calls and shuts vLLM down now. vLLM would do so itself when it is
        garbage collected: after the next engine was built, whose process groups it would tear down.
        """
        if self._closed:
            return
        self._closed = True
        closed = self._stepper.call(self._driver.close)
        await asyncio.to_thread(self._stepper.close)  # ends the thread after that call
        closed.result()  # raises what the call has raised


def _make_parameters(sampling: Sampling, budget: int) -> Any:
    """Return vLLM's `SamplingParams`. Raises EngineError for values that it refuses."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    grammar = sampling.grammar
    try:
        return SamplingParams(
            max_tokens=budget,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            stop_token_ids=list(sampling.stop_token_ids),
            structured_outputs=StructuredOutputsParams(structural_tag=grammar) if grammar else None,
            ignore_eos=True,  # stop_token_ids names the end-of-turn tokens that count
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # no other request shares this object
        )
    except VLLMValidationError as error:
        raise EngineError(f"vLLM refuses a request: {error}") from error
