"""vLLM's engine and its stepping thread: requests in, finished ones back to their loops.

`Driver` is the engine as the thread sees it; `Stepper` is the one thread that builds an engine and
advances it step by step. Nothing else touches it.
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
"""Weights are forgotten. Level 1 would keep a copy in pinned memory of the host, for each GPU."""


@dataclass(slots=True)
class VllmStats:
    """Counters since the engine was built."""

    prompt_tokens: int = 0
    """Prompt tokens of all requests."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values the prefix cache held."""
    sampled_tokens: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Waiter:
    """The caller that waits for a request."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class VllmRequest:
    """One request, as `VllmEngine` passes it to the driver."""

    id: str
    token_ids: list[int]
    parameters: Any


def deliver(outcomes: Sequence[tuple[Waiter, Any]]) -> None:
    """Settle futures with their outcomes; each event loop is woken once."""

    def settle_all(settled: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
        for future, outcome in settled:
            settle(future, outcome)

    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for waiting, outcome in outcomes:
        by_loop.setdefault(waiting.loop, []).append((waiting.future, outcome))
    for loop, settled in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
            loop.call_soon_threadsafe(settle_all, settled)


@dataclass(slots=True)
class Driver:
    """The `Steppable` over vLLM's `LLMEngine`; only the stepper's thread calls it."""

    llm: Any
    version: int = 0
    """Version of the weights."""
    holding: bool = False
    """True: new requests wait until new weights are in."""
    adapter: Any = None
    """vLLM's `LoRARequest` of the policy's adapters, once there are some."""
    failure: EngineError | None = None
    """The reason why no request is served: the engine is dead, or half of its weights are new."""
    stats: VllmStats = field(default_factory=VllmStats)
    _waiting: dict[str, Waiter] = field(default_factory=dict)
    _held: list[VllmRequest] = field(default_factory=list)
    _asleep: list[str] = field(default_factory=list)
    """Parts of the memory that vLLM has given back, by its names, until `wake` takes them again."""
    _closed: bool = False

    def busy(self) -> bool:
        """Return True if vLLM has requests that are not finished."""
        return not self._closed and bool(self.llm.has_unfinished_requests())

    def step(self) -> None:
        """Do one step of vLLM."""
        self.stats.steps += 1
        done = []
        for output in self.llm.step():
            if output.finished and (waiting := self._waiting.pop(output.request_id, None)):
                self.stats.prompt_tokens += len(output.prompt_token_ids)
                self.stats.cached_tokens += output.num_cached_tokens or 0
                self.stats.sampled_tokens += len(output.outputs[0].token_ids)
                done.append((waiting, output))
        if done:
            deliver(done)

    def fail(self, error: BaseException) -> None:
        """Fail every waiting request and every later one: vLLM is dead."""
        if not isinstance(error, EngineDead):
            error = EngineDead(f"vLLM died: {type(error).__name__}: {error}")
        self.failure = error
        self.fail_requests(error)

    def fail_requests(self, error: EngineError) -> None:
        """Fail all requests."""
        waiting, self._waiting, self._held = self._waiting, {}, []
        if not isinstance(error, EngineDead):
            self.llm.abort_request([*waiting])
        # An exception of its own for each: a traceback grows where it is raised.
        deliver([(one, type(error)(str(error))) for one in waiting.values()])

    def add(self, request: VllmRequest, waiting: Waiter, *, held: bool = True) -> None:
        """Take a request, now or, if it may be `held`, when the new weights are in."""
        if self.failure is not None:
            deliver([(waiting, type(self.failure)(str(self.failure)))])
            return
        self._waiting[request.id] = waiting
        if self.holding and held:
            self._held.append(request)
        else:
            self._admit(request)

    def _admit(self, request: VllmRequest) -> None:
        # Salted: keys and values of other weights are never taken for those of these.
        prompt = {"prompt_token_ids": request.token_ids, "cache_salt": str(self.version)}
        try:
            self.llm.add_request(request.id, prompt, request.parameters, lora_request=self.adapter)
        except Exception as error:  # any error of vLLM's fails this request alone
            failure = EngineError(f"vLLM refuses a request: {type(error).__name__}: {error}")
            deliver([(self._waiting.pop(request.id), failure)])

    def abort(self, request_id: str) -> None:
        """Drop a request that nobody waits for; it may have ended, or not have begun."""
        if self._waiting.pop(request_id, None) is None:
            return
        held = [request for request in self._held if request.id != request_id]
        if len(held) == len(self._held):
            self.llm.abort_request([request_id])
        self._held = held

    def pause(self) -> None:
        """Schedule no further token, and deliver those that are being computed.

        With asynchronous scheduling a step starts a batch and returns the one before it. Batches
        that have started use the weights that are loaded now, and must carry their version. Raises
        EngineDead if such a step fails.
        """
        core = self.llm.engine_core.engine_core
        try:
            core.pause_scheduler("keep", clear_cache=False)
            while core.batch_queue:
                self.step()
        except Exception as error:
            self.fail(error)
            raise EngineDead(str(self.failure)) from error

    def resume(self) -> None:
        """Schedule again."""
        self.llm.engine_core.engine_core.resume_scheduler()

    def sleep(self) -> None:
        """Give the memory of weights and cache back; the next update fills both anew."""
        self.pause()
        self.llm.sleep(SLEEP_LEVEL)
        self._asleep = ["weights", "kv_cache"]

    def wake(self, memory: str) -> None:
        """Take memory again that was given back, by vLLM's name for it."""
        if memory in self._asleep:
            self.llm.wake_up([memory])
            self._asleep.remove(memory)

    def close(self) -> None:
        """Fail every waiting request and shut vLLM down; there is no further step."""
        self.fail(EngineDead("the engine was closed"))
        self._closed = True
        self.llm.engine_core.shutdown()

    def release_held(self) -> None:
        """Let requests in again."""
        self.holding = False
        held, self._held = self._held, []
        for request in held:
            self._admit(request)


Value = TypeVar("Value")
WAKE_S = 0.5
"""Seconds between two chances of the interpreter to handle signals while an engine is built."""
INTERRUPT_S = 5.0
"""Seconds that an interrupted build has to end."""


class Steppable(Protocol):
    """An engine that a `Stepper` drives."""

    def busy(self) -> bool:
        """Return True if a step would do anything."""
        ...

    def step(self) -> None:
        """Advance every request, and deliver those that are done."""
        ...

    def fail(self, error: BaseException) -> None:
        """Fail every waiting request: a step raised, and it was the last one."""
        ...


Engine = TypeVar("Engine", bound=Steppable)


class Stepper(Generic[Engine]):
    """Builds an engine, and runs commands between its steps in the order of their arrival.

    All of it in one thread, on the GPU of the thread that made the Stepper. CUDA's current device
    and stream belong to a thread: an engine that is built in one thread and stepped in another
    launches kernels on two devices, in two orders.
    """

    engine: Engine
    """The engine that was built; use it in commands only."""

    def __init__(self, build: Callable[[], Engine], *, name: str) -> None:
        """Run `build` in the new thread and wait for it; its errors are raised."""
        self._wake = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._closed = False
        self.dead: BaseException | None = None
        """The error that a step raised; nothing runs any more."""
        built: Future[None] = Future()
        arguments = (build, built, current_gpu())
        self._thread = threading.Thread(target=self._live, args=arguments, name=name, daemon=True)
        try:
            self._thread.start()
            # A signal just before a wait does not end it, so no wait may last for ever.
            while not wait((built,), WAKE_S).done:
                pass
            built.result()
        except BaseException as error:
            if not built.done():  # Ctrl-C or a signal, which only the main thread gets
                # Raise it in the thread too, as if this one had built the engine.
                ident = ctypes.c_ulong(self._thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(type(error)))
                self._thread.join(INTERRUPT_S)
            raise

    def post(self, command: Callable[[], None]) -> None:
        """Run `command` before the next step; an error in it ends the engine, as in a step."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def call(self, function: Callable[[], Value]) -> Future[Value]:
        """Run `function` before the next step; the future gets its result or its exception.

        If the future is cancelled first, `function` does not run.
        """
        future: Future[Value] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
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

    def _live(self, build: Callable[[], Engine], built: Future[None], gpu: int | None) -> None:
        """Build the engine and drive it: the thread's body."""
        try:
            use_gpu(gpu)
            self.engine = build()
        except BaseException as error:
            built.set_exception(error)
            return
        built.set_result(None)
        while True:
            with self._wake:
                while not (self._commands or self._closed or self._moving()):
                    self._wake.wait()
                commands, self._commands = self._commands, []
                if self._closed and not commands:
                    return
            try:
                while commands:
                    commands.pop(0)()
                if self._moving():
                    self.engine.step()
            except BaseException as error:
                self.dead = error
                self.engine.fail(error)
                with self._wake:  # the other commands still run: callers wait for them
                    self._commands[:0] = commands

    def _moving(self) -> bool:
        return self.dead is None and self.engine.busy()
