"""`RolloutService`: the trainer's requests, answered by a run's collector, engine and evaluation.

The cursor, the curriculum and the costs of tasks live here, where tasks are drawn. The answer of
each step has their state, which the trainer saves with its checkpoint.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import traceback
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from agenttrain.engines.base import (
    EngineError,
    Metered,
    ModelNames,
    OwnNumberFormat,
    Quantized,
    ReadsFiles,
    Replicated,
    Separate,
)
from agenttrain.engines.broadcast import BroadcastResult, Broadcasts
from agenttrain.engines.weight_files import WeightFiles, WeightWriter, read_verified
from agenttrain.engines.weights_place import new_weights_folder, remove_weights_folder
from agenttrain.evaluation import Evaluation, evaluate
from agenttrain.rollout.asynchronous.journal import Journal, settings_digest
from agenttrain.rollout.asynchronous.queue import GroupQueue
from agenttrain.rollout.monitoring import LoopMonitor, Waiting, light_gc
from agenttrain.rollout.sharing import SingleProcess
from agenttrain.rollout.step_batch import StepBatch
from agenttrain.runs.channel import Channel, ChannelClosed
from agenttrain.runs.loading import make_standalone_engine
from agenttrain.runs.rollout_messages import (
    CODEC,
    Answered,
    Assemble,
    Begin,
    Complete,
    EngineMetrics,
    Evaluate,
    Failed,
    Ready,
    RolloutStatus,
    Settle,
    Stop,
    SyncBegin,
    SyncEnd,
    Verify,
    Want,
)
from agenttrain.runs.setup import Components
from agenttrain.runs.sources import make_rollout_source
from agenttrain.settings.compose import convert
from agenttrain.settings.engine_checks import admit_engine
from agenttrain.tracking.timeline import Timeline
from agenttrain.training.checkpoint import seed_random
from agenttrain.training.checkpoint_files import PREFIX, newest_first
from agenttrain.types import AgenttrainError
from agenttrain.utils.sections import plain
from agenttrain.utils.seeds import derive_seed

STATUS_S = 0.5
"""Seconds between two messages on the rollouts in flight."""
MADE_WITH = (
    *("rollout", "reward", "tools", "stop_tools", "environment", "agent", "user", "data", "seed"),
    *("chat_template", "response_schema", "tasks_per_step", "resume_changed"),
)
"""Settings on which the groups of the journal depend, beside algorithm.group_size."""
READ_ATTEMPTS = 100
"""Attempts to read the table of rollouts, which tools' threads may change meanwhile."""


async def serve(connection: socket.socket) -> None:
    """Answer the trainer's requests until it stops them, or has ended."""
    channel = await Channel.over(connection, CODEC)
    with suppress(ChannelClosed):
        async with AsyncExitStack() as stack:
            stack.callback(channel.close)
            begin: Begin = await channel.receive()
            try:
                service = RolloutService(begin, stack)
                await service.start(stack)
            except Exception as error:
                await channel.send(_failed(error))
                return
            await channel.send(Answered(value=service.ready))
            request = asyncio.create_task(channel.receive())
            while not isinstance(message := await request, Stop):
                request = asyncio.create_task(channel.receive())
                work = asyncio.create_task(service.answer(message))
                reporting = asyncio.create_task(_report(service, channel))
                await asyncio.wait((work, request), return_when=asyncio.FIRST_COMPLETED)
                for task in (reporting, *(() if work.done() else (work,))):
                    task.cancel()  # work, too: only Stop, or the trainer's end, comes that early
                    await asyncio.wait((task,))
                if work.cancelled():
                    continue
                await channel.send(service.status())
                await channel.send(_answer(work))


def _answer(work: asyncio.Task[Any]) -> Answered | Failed:
    """Return the message with a result, or an error; print the traceback of one that is a bug."""
    try:
        return Answered(value=work.result())
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> Failed:
    if not isinstance(error, AgenttrainError | ValueError | OSError):
        traceback.print_exception(error, file=sys.stderr)
    return Failed.of(error)


async def _report(service: RolloutService, channel: Channel) -> None:
    """Send the state of the rollouts in flight until it is cancelled."""
    with suppress(ChannelClosed):
        while True:
            await asyncio.sleep(STATUS_S)
            await channel.send(service.status())


class RolloutService:
    """Answers requests one after the other."""

    def __init__(self, begin: Begin, stack: AsyncExitStack) -> None:
        """Build what samples and scores; the stack closes it."""
        composed = convert(begin.settings)
        admit_engine(composed)
        self._config = config = composed.config
        if config.async_training.max_staleness:
            # Bits depend on which rollouts share a batch, and that on when each of them began.
            config.rollout = replace(config.rollout, deterministic=False)
        self._folder = Path(begin.folder)
        self._finished = self._total = 0
        self._written: Path | None = None
        """Folder of weight files for an engine that has none."""
        self._components = components = Components(config, begin.verb, self._folder)
        stack.callback(self._remove_written)
        self._engine = make_standalone_engine(
            config, self._folder, begin.verb, on_gpu=begin.on_gpu, trainers=begin.trainers
        )
        stack.push_async_callback(self._engine.aclose)
        stack.push_async_callback(components.aclose)
        times = self._folder if config.tracker.timeline else None
        timeline = stack.enter_context(Timeline(times, "rollouts"))
        collector = components.collector(self._engine, self._folder, timeline)
        counted = replace(collector, progress=self._count)
        self._source = make_rollout_source(config, components, counted, SingleProcess())
        self._queue: GroupQueue | None = None
        """Groups sampled ahead; None: each step's are sampled when it wants them."""

    async def start(self, stack: AsyncExitStack) -> None:
        """Prepare what runs beside the requests; the stack ends it."""
        config, collector = self._config, self._source.collector
        if config.async_training.max_staleness == 0:
            return
        settings = {name: getattr(config, name) for name in MADE_WITH}
        settings["group_size"] = config.algorithm.group_size
        journal = Journal(self._folder / "rollouts", CODEC, settings_digest(plain(settings)))
        stack.enter_context(light_gc())
        monitor = LoopMonitor(collector.limits.max_loop_lag_s, collector.blocking)
        await stack.enter_async_context(monitor)
        self._queue = GroupQueue(
            self._source,
            journal,
            monitor,
            max_staleness=config.async_training.max_staleness,
            steps=config.steps,
        )
        stack.push_async_callback(self._queue.aclose)

    @property
    def ready(self) -> Ready:
        """The engine, as the trainer has to know it."""
        engine = self._engine
        if not isinstance(engine, Separate):
            return Ready(max_context=engine.max_context, own_weights=False)
        dtype = engine.dtype if isinstance(engine, OwnNumberFormat) else None
        return Ready(
            max_context=engine.max_context,
            own_weights=True,
            takes_adapters=engine.takes_adapters,
            model_names=isinstance(engine, ModelNames) and engine.model_names,
            quantized=isinstance(engine, Quantized) and engine.quantized,
            broadcasts=isinstance(engine, Broadcasts),
            dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        )

    async def answer(self, request: Any) -> Any:
        """Return the answer to a request."""
        match request:
            case Want():
                return await self._groups(request)
            case Evaluate():
                return await self._evaluate()
            case SyncBegin():
                return self._weight_writer()
            case SyncEnd():
                return await self._sync(request.version, request.files)
            case Assemble():
                assert isinstance(self._engine, Broadcasts), "Ready says so"
                return await self._engine.assemble(request.version)
            case Settle():
                return await self._settle(request.result)
            case Verify():
                return await self._verify(request)
            case Complete():
                session = "probe"
                completion = await self._engine.generate(
                    request.token_ids, request.sampling, session=session
                )
                await self._engine.release(session)
                return completion
            case EngineMetrics():
                return self._engine.metrics() if isinstance(self._engine, Metered) else {}
        raise EngineError(f"{type(request).__name__}: is no request")

    async def _groups(self, request: Want) -> StepBatch:
        """Collect and score the rollouts of a step, and move on to the next one."""
        if request.state is not None:
            self._source.load_state_dict(request.state)
        if self._queue is not None:
            return await self._groups_ahead(self._queue, request.step)
        # Tools and rewards may draw from the process's generators: a resumed run draws the same.
        seed_random(derive_seed(self._config.seed, "rollouts", request.step) % 2**32)
        batch = await self._source.batch(request.step)
        return self._finish(batch)

    async def _groups_ahead(self, queue: GroupQueue, step: int) -> StepBatch:
        """Return the groups of a step, which may have been sampled already."""
        if not queue.begun:
            seed_random(derive_seed(self._config.seed, "rollouts", step) % 2**32)
            await queue.begin(step)
        batch = self._finish(await queue.take(step))
        saved = [int(path.name.removeprefix(PREFIX)) for path in newest_first(self._checkpoints)]
        # Not those of this step: a signal may still stop the run before it is trained.
        queue.prune(step - 1, oldest=min(saved, default=0), newest=max(saved, default=0))
        return batch

    def _finish(self, batch: StepBatch) -> StepBatch:
        """Move the source on to the next step; return the batch with the state after this one."""
        self._source.finish(batch)
        batch.state = self._source.state_dict()
        return batch

    @property
    def _checkpoints(self) -> Path:
        return self._folder / "checkpoints"

    async def _evaluate(self) -> list[Evaluation]:
        config, tasks = self._config, self._components.test_tasks
        seed_random(derive_seed(config.seed, "evaluation") % 2**32)
        with nullcontext() if self._queue is None else self._queue.held():
            return await evaluate(
                self._source.collector,
                tasks.tasks(0, min(config.eval.questions, len(tasks))),
                config.eval,
                seed=config.seed,
                costs=self._source.costs.copy(),
            )

    async def _sync(self, version: int, files: WeightFiles | None) -> None:
        """Give the engine new weights."""
        if files is None:
            await self._engine.update((), version)
        elif isinstance(self._engine, ReadsFiles):
            await self._engine.load(files)
        else:
            weights = await asyncio.to_thread(read_verified, files.folder, files.digest)
            await self._engine.update(weights, version)
        if self._queue is not None and self._queue.begun:
            self._queue.admit(version)

    async def _settle(self, result: BroadcastResult) -> bool:
        """End a broadcast; with weights that have arrived, more groups may be sampled."""
        assert isinstance(self._engine, Broadcasts), "Ready says so"
        arrived = await self._engine.settle(result)
        if arrived and self._queue is not None and self._queue.begun:
            self._queue.admit(result.version)
        return arrived

    async def _verify(self, request: Verify) -> list[float]:
        """Score the probe by every copy of the weights; the good ones serve from now on."""
        engine, token_ids = self._engine, request.check.token_ids
        if isinstance(engine, Replicated):
            return await engine.verify(token_ids, request.check)
        assert isinstance(engine, Separate)
        return await engine.score(token_ids)

    def _weight_writer(self) -> WeightWriter:
        if isinstance(self._engine, ReadsFiles):
            return self._engine.writer
        if self._written is None:
            self._written = new_weights_folder(self._folder, self._folder)
        return WeightWriter(self._written)

    def _remove_written(self) -> None:
        if self._written is not None:
            remove_weights_folder(self._folder)

    def _count(self, finished: int, total: int) -> None:
        self._finished, self._total = finished, total

    def status(self) -> RolloutStatus:
        """Return the state of the rollouts in flight."""
        collector = self._source.collector
        waiting: list[Waiting] = []
        for _ in range(READ_ATTEMPTS):
            with suppress(RuntimeError):  # a thread changed what was being read
                waiting = collector.waiting()
                break
        finished, total = self._finished, self._total
        if self._queue is not None and self._queue.taking:
            finished, total = self._queue.progress
        return RolloutStatus(
            progress=collector.in_flight.progress,
            finished=finished,
            total=total,
            waiting=waiting,
        )
