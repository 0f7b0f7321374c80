"""vLLM's engine and the thread that steps it.

`Stepper` is the thread: it builds an engine, advances it step by step, and runs commands between
steps. `Driver`, which only the thread calls, holds vLLM's engine and its requests, and returns
finished ones to their event loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from agenttrain.engines.base import EngineDead, EngineError
from agenttrain.utils.threads import current_gpu, settle, use_gpu

SLEEP_LEVEL = 2
"""Drop the weights. Level 1 would keep a copy in pinned host memory, for each GPU."""


@dataclass(slots=True)
class VllmStats:
    """Counters since the engine was built."""

    prompt_tokens: int = 0
    """Prompt tokens of all requests."""
    cached_tokens: int = 0
    """Prompt tokens that were in the prefix cache."""
    sampled_tokens: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Waiter:
    """The caller of a request: its event loop, and the future that it awaits."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class VllmRequest:
    """One request to vLLM; `parameters` are its `SamplingParams`."""

    id: str
    token_ids: list[int]
    parameters: Any


def deliver(outcomes: Sequence[tuple[Waiter, Any]]) -> None:
    """Give futures their results or errors. Each event loop is woken once."""

    def settle_all(pairs: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
        for future, outcome in pairs:
            settle(future, outcome)

    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for waiter, outcome in outcomes:
        by_loop.setdefault(waiter.loop, []).append((waiter.future, outcome))
    for loop, pairs in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
            loop.call_soon_threadsafe(settle_all, pairs)


@dataclass(slots=True)
class Driver:
    """The `Steppable` over vLLM's `LLMEngine`. Only the stepper's thread calls it.

    Requests come by `add`. They go to vLLM at once or, while `holding`, wait here until
    `release_held`. They leave in `step`, by `abort` or with an error. An update calls `pause`,
    `wake` for memory that `sleep` has freed, `resume` and `release_held`.
    """

    llm: Any
    version: int = 0
    """Version of the weights."""
    holding: bool = False
    """True: new requests wait until `release_held`. `VllmEngine` sets it, to let vLLM run empty."""
    adapter: Any = None
    """vLLM's `LoRARequest` of the policy's adapters, once there are some."""
    failure: EngineError | None = None
    """Why no request is served: the engine is dead, or only some of its weights are new."""
    stats: VllmStats = field(default_factory=VllmStats)
    _waiting: dict[str, Waiter] = field(default_factory=dict)
    """Callers of all requests that have not ended, held ones included, by the request's id."""
    _held: list[VllmRequest] = field(default_factory=list)
    """Requests that wait for `release_held`, and that vLLM does not know yet."""
    _asleep: list[str] = field(default_factory=list)
    """Parts of the memory that vLLM has freed, by its names, until `wake` allocates them again."""
    _closed: bool = False

    def busy(self) -> bool:
        """Return True if vLLM has requests that are not finished."""
        return not self._closed and bool(self.llm.has_unfinished_requests())

    def step(self) -> None:
        """Do one step of vLLM, and deliver the requests that have finished."""
        self.stats.steps += 1
        finished = []
        for output in self.llm.step():
            if output.finished and (waiter := self._waiting.pop(output.request_id, None)):
                self.stats.prompt_tokens += len(output.prompt_token_ids)
                self.stats.cached_tokens += output.num_cached_tokens or 0
                self.stats.sampled_tokens += len(output.outputs[0].token_ids)
                finished.append((waiter, output))
        if finished:
            deliver(finished)

    def fail(self, error: BaseException) -> None:
        """Fail every waiting request and every later one: vLLM is dead."""
        if not isinstance(error, EngineDead):
            error = EngineDead(f"vLLM died: {type(error).__name__}: {error}")
        self.failure = error
        self.fail_requests(error)

    def fail_requests(self, error: EngineError) -> None:
        """Fail the requests of now, in vLLM or held back. Later ones are not affected."""
        waiters, self._waiting, self._held = self._waiting, {}, []
        if not isinstance(error, EngineDead):  # a dead vLLM cannot abort anything
            # vLLM ignores the ids of held requests, which it does not know.
            self.llm.abort_request([*waiters])
        # A new exception for each caller: every raise adds to an exception's traceback.
        deliver([(waiter, type(error)(str(error))) for waiter in waiters.values()])

    def add(self, request: VllmRequest, waiter: Waiter, *, may_hold: bool = True) -> None:
        """Pass a request to vLLM, or keep it until `release_held` if requests are held back.

        `may_hold=False`: pass it to vLLM in any case. The caller has held back all others for it.
        """
        if self.failure is not None:
            deliver([(waiter, type(self.failure)(str(self.failure)))])
            return
        self._waiting[request.id] = waiter
        if self.holding and may_hold:
            self._held.append(request)
        else:
            self._admit(request)

    def _admit(self, request: VllmRequest) -> None:
        """Pass a request to vLLM, with the newest adapters. One that it refuses fails alone."""
        # The salt keeps a prefix cache entry of older weights from being used.
        prompt = {"prompt_token_ids": request.token_ids, "cache_salt": str(self.version)}
        try:
            self.llm.add_request(request.id, prompt, request.parameters, lora_request=self.adapter)
        except Exception as error:  # any error of vLLM's fails this request alone
            failure = EngineError(f"vLLM refuses a request: {type(error).__name__}: {error}")
            deliver([(self._waiting.pop(request.id), failure)])

    def abort(self, request_id: str) -> None:
        """Drop a request that nobody waits for. It may have ended, or be held back."""
        if self._waiting.pop(request_id, None) is None:
            return
        is_held = any(request.id == request_id for request in self._held)
        if is_held:
            self._held = [request for request in self._held if request.id != request_id]
        else:
            self.llm.abort_request([request_id])

    def pause(self) -> None:
        """Stop scheduling, and finish the batches that have started. Raises EngineDead.

        With asynchronous scheduling a step starts a batch and returns the one before it. A batch
        that has started uses the weights of now: its tokens must not get the next version's label.
        """
        core = self.llm.engine_core.engine_core
        try:
            core.pause_scheduler("keep", clear_cache=False)  # requests stay, and go on later
            while core.batch_queue:  # batches that have started
                self.step()
        except Exception as error:
            self.fail(error)
            raise EngineDead(str(self.failure)) from error

    def resume(self) -> None:
        self.llm.engine_core.engine_core.resume_scheduler()

    def sleep(self) -> None:
        """Free the memory of weights and cache, until the next update fills both and resumes."""
        self.pause()
        self.llm.sleep(SLEEP_LEVEL)
        self._asleep = ["weights", "kv_cache"]

    def wake(self, memory: str) -> None:
        """Allocate memory that `sleep` has freed, by vLLM's name for it."""
        if memory in self._asleep:
            self.llm.wake_up([memory])
            self._asleep.remove(memory)

    def close(self) -> None:
        """Fail every waiting request and shut vLLM down. There is no further step."""
        self.fail(EngineDead("the engine was closed"))
        self._closed = True
        self.llm.engine_core.shutdown()

    def release_held(self) -> None:
        """Pass the held requests to vLLM, and hold no more back."""
        self.holding = False
        requests, self._held = self._held, []
        for request in requests:
            self._admit(request)


Value = TypeVar("Value")
WAKE_S = 0.5
"""Seconds after which Python handles a signal at the latest, while an engine is built."""
INTERRUPT_S = 5.0
"""Seconds in which an interrupted build has to end."""


class Steppable(Protocol):
    """An engine that a `Stepper` drives."""

    def busy(self) -> bool:
        """Return True if a step would do anything."""

    def step(self) -> None:
        """Advance every request, and deliver those that are done."""

    def fail(self, error: BaseException) -> None:
        """Fail every waiting request: a step or a command raised, and no step follows."""


Engine = TypeVar("Engine", bound=Steppable)


class Stepper(Generic[Engine]):
    """Builds an engine, and runs commands between its steps in the order of their arrival.

    All of it happens in one thread, on the GPU of the thread that made the Stepper. CUDA's current
    device and stream belong to a thread: an engine that is built in one thread and stepped in
    another launches kernels on two devices, in two orders.
    """

    engine: Engine
    """Call its methods in commands only: they have to run in the stepper's thread."""

    def __init__(self, build: Callable[[], Engine], *, name: str) -> None:
        """Run `build` in the new thread and wait for it. Raises its errors."""
        self._wake = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._closed = False
        self.dead: BaseException | None = None
        """Error of the step after which no further one runs."""
        built: Future[None] = Future()
        arguments = (build, built, current_gpu())
        self._thread = threading.Thread(target=self._run, args=arguments, name=name, daemon=True)
        try:
            self._thread.start()
            # A signal that comes just before a wait does not end it: wait in short pieces.
            while not wait((built,), WAKE_S).done:
                pass
            built.result()
        except BaseException as error:
            if not built.done():  # Ctrl-C or a signal, which only the main thread gets
                # Raise it in the new thread too, to end the build there.
                ident = ctypes.c_ulong(self._thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(type(error)))
                self._thread.join(INTERRUPT_S)
            raise

    def post(self, command: Callable[[], None]) -> None:
        """Run `command` before the next step. An error in it ends the engine, as one in a step."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def call(self, function: Callable[[], Value]) -> Future[Value]:
        """Run `function` before the next step, and return a future of its result."""
        future: Future[Value] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():  # the caller has cancelled it
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.post(run)
        return future

    def close(self) -> None:
        """End the thread after the commands posted so far."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _run(self, build: Callable[[], Engine], built: Future[None], gpu: int | None) -> None:
        """Build the engine and step it: the thread's body."""
        try:
            use_gpu(gpu)
            self.engine = build()
        except BaseException as error:
            built.set_exception(error)
            return
        built.set_result(None)
        while True:
            with self._wake:
                while not (self._commands or self._closed or self._has_step()):
                    self._wake.wait()
                commands, self._commands = self._commands, []
                if self._closed and not commands:
                    return
            try:
                while commands:  # popped one by one, so that after an error the others are left
                    commands.pop(0)()
                if self._has_step():
                    self.engine.step()
            except BaseException as error:
                # No step follows: `_has_step` is False from now on. Commands still run, because
                # their callers wait for them, and because one of them shuts the engine down.
                self.dead = error
                self.engine.fail(error)
                with self._wake:
                    # The remaining commands come before those that were posted meanwhile.
                    self._commands = [*commands, *self._commands]

    def _has_step(self) -> bool:
        return self.dead is None and self.engine.busy()
