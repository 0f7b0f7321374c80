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
from agenttrain.evaluation import Evaluation, evaluate, question_count, source_columns
from agenttrain.rollout.asynchronous.journal import Journal, settings_digest
from agenttrain.rollout.asynchronous.queue import GroupQueue
from agenttrain.rollout.monitoring import LoopMonitor, Waiting, light_gc
from agenttrain.rollout.sharing import SingleProcess
from agenttrain.rollout.step_batch import StepBatch
from agenttrain.runs.channel import Channel, ChannelClosed
from agenttrain.runs.loading import make_standalone_engine
from agenttrain.runs.rollout_messages import (
    CODEC,
    AudienceRequest,
    BroadcastEnd,
    CompletionRequest,
    EndRequest,
    EngineDescription,
    EvaluationRequest,
    GroupsRequest,
    LoadRequest,
    MetricsRequest,
    ProbeRequest,
    RequestFailure,
    RequestResult,
    RolloutStatus,
    StartRequest,
    WriterRequest,
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
JOURNAL_SETTINGS = (
    *("rollout", "reward", "tools", "stop_tools", "environment", "agent", "user", "data", "seed"),
    *("chat_template", "response_schema", "tasks_per_step", "resume_changed"),
)
"""Settings on which the groups in the journal depend, besides algorithm.group_size."""
READ_ATTEMPTS = 100
"""Attempts to read the table of rollouts, which tools' threads may change meanwhile."""


async def serve(connection: socket.socket) -> None:
    """Answer the trainer's requests until it sends EndRequest, or has ended."""
    channel = await Channel.over(connection, CODEC)
    with suppress(ChannelClosed):
        async with AsyncExitStack() as stack:
            stack.callback(channel.close)
            start: StartRequest = await channel.receive()
            try:
                service = RolloutService(start, stack)
                await service.start(stack)
            except Exception as error:
                await channel.send(_failed(error))
                return
            await channel.send(RequestResult(value=service.engine_description))
            # The next message is awaited while the service works: EndRequest ends the work.
            next_message = asyncio.create_task(channel.receive())
            # If the trainer has ended, this raises ChannelClosed, which ends the service.
            while not isinstance(request := await next_message, EndRequest):
                next_message = asyncio.create_task(channel.receive())
                work = asyncio.create_task(service.answer(request))
                reporting = asyncio.create_task(_report_status(service, channel))
                await asyncio.wait((work, next_message), return_when=asyncio.FIRST_COMPLETED)
                # The trainer waits for each answer before it sends more. So a message that comes
                # before the work is done is EndRequest, or the trainer has ended.
                unfinished = [reporting] if work.done() else [reporting, work]
                for task in unfinished:
                    task.cancel()
                    await asyncio.wait((task,))
                if work.cancelled():
                    continue  # the loop's condition awaits the message that came early
                await channel.send(service.status())  # the last counts of this request
                await channel.send(_answer(work))


def _answer(work: asyncio.Task[Any]) -> RequestResult | RequestFailure:
    """Return the answer to a request whose work has ended."""
    try:
        return RequestResult(value=work.result())
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> RequestFailure:
    """Return the answer with an error; print the traceback of an error that is a bug."""
    if not isinstance(error, AgenttrainError | ValueError | OSError):
        traceback.print_exception(error, file=sys.stderr)
    return RequestFailure.of(error)


async def _report_status(service: RolloutService, channel: Channel) -> None:
    """Send the counts and states of the rollouts in flight twice a second, until cancelled."""
    with suppress(ChannelClosed):
        while True:
            await asyncio.sleep(STATUS_S)
            await channel.send(service.status())


class RolloutService:
    """Answers the trainer's requests, one after the other; `serve` makes it and receives them.

    It holds the engine and the source of rollouts. A run that samples ahead also has a queue of
    groups: `GroupQueue` starts groups of later steps as soon as the engine has weights that are new
    enough for them (`admit`), and records them in a journal, from which a resumed run takes them.
    """

    def __init__(self, start: StartRequest, stack: AsyncExitStack) -> None:
        """Build components, engine and source of the run; the stack closes them."""
        composed = convert(start.settings)
        admit_engine(composed, start.verb)  # imports an engine from outside the package
        self._config = config = composed.config
        if config.is_asynchronous:
            # Rollouts that begin at any time share decode batches: their bits do not repeat.
            config.rollout = replace(config.rollout, deterministic=False)
        self._folder = Path(start.folder)
        self._finished = self._total = 0  # rollouts of the request, set by `_count`
        self._weights_folder: Path | None = None
        """Folder of weight files, for an engine that has no folder of its own."""
        self._components = components = Components(config, start.verb, self._folder)
        stack.callback(self._remove_weights_folder)
        self._engine = make_standalone_engine(
            config, self._folder, start.verb, on_gpu=start.on_gpu, trainers=start.trainers
        )
        stack.push_async_callback(self._engine.aclose)
        stack.push_async_callback(components.aclose)
        timeline_folder = self._folder if config.tracker.timeline else None
        timeline = stack.enter_context(Timeline(timeline_folder, "rollouts"))
        collector = components.collector(self._engine, self._folder, timeline)
        collector = replace(collector, progress=self._count)
        self._source = make_rollout_source(config, components, collector, SingleProcess())
        self._queue: GroupQueue | None = None
        """Groups sampled ahead; None: each step's groups are sampled when the trainer asks."""

    async def start(self, stack: AsyncExitStack) -> None:
        """Prepare to sample groups ahead of the trainer, if the run does so; the stack ends it."""
        config, collector = self._config, self._source.collector
        if not config.is_asynchronous:
            return
        # The journal has groups that an earlier part of the run sampled ahead. A resumed run uses
        # only those that were made with the same settings.
        settings = {name: getattr(config, name) for name in JOURNAL_SETTINGS}
        settings["group_size"] = config.algorithm.group_size
        journal = Journal(self._folder / "rollouts", CODEC, settings_digest(plain(settings)))
        # Rollouts go on between the trainer's requests too, until the service ends. A full garbage
        # collection blocks the event loop: `light_gc` makes them rare. A tool that blocks it is
        # reported. The stack closes the queue first, whose rollouts run in the loop.
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
    def engine_description(self) -> EngineDescription:
        """The properties of the engine that the trainer has to know.

        Separate, OwnNumberFormat, … are protocols that an engine may have besides `Engine`.
        """
        engine = self._engine
        if not isinstance(engine, Separate):  # samples from no weights, or from the policy's own
            return EngineDescription(max_context=engine.max_context, own_weights=False)
        dtype = engine.dtype if isinstance(engine, OwnNumberFormat) else None
        return EngineDescription(
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
            case GroupsRequest():
                return await self._step_batch(request)
            case EvaluationRequest():
                return await self._evaluate()
            case WriterRequest():
                return self._weight_writer()
            case LoadRequest():
                return await self._sync(request.version, request.files)
            case AudienceRequest():
                # The servers that will receive the broadcast of new weights.
                assert isinstance(self._engine, Broadcasts), "sent only if the engine broadcasts"
                return await self._engine.assemble(request.version)
            case BroadcastEnd():
                return await self._end_broadcast(request.result)
            case ProbeRequest():
                return await self._verify(request)
            case CompletionRequest():
                session = "probe"
                completion = await self._engine.generate(
                    request.token_ids, request.sampling, session=session
                )
                await self._engine.release(session)
                return completion
            case MetricsRequest():
                return self._engine.metrics() if isinstance(self._engine, Metered) else {}
        raise EngineError(f"{type(request).__name__}: is no request")

    async def _step_batch(self, request: GroupsRequest) -> StepBatch:
        """Return the scored rollouts of a step, and move the source on to the next step."""
        if request.state is not None:
            self._source.load_state_dict(request.state)
        if self._queue is not None:
            return await self._queued_batch(self._queue, request.step)
        # Tools and rewards may draw from the process's generators: a resumed run draws the same.
        seed_random(derive_seed(self._config.seed, "rollouts", request.step) % 2**32)
        batch = await self._source.batch(request.step)
        return self._finish(batch)

    async def _queued_batch(self, queue: GroupQueue, step: int) -> StepBatch:
        """Return the groups of a step from the queue, which may have sampled them already."""
        if not queue.begun:
            # Only here: later steps' groups are sampled all the time, so no step has a beginning.
            seed_random(derive_seed(self._config.seed, "rollouts", step) % 2**32)
            await queue.begin(step)
        batch = self._finish(await queue.take(step))
        # Remove the journal's groups of the steps before this one, except those that a run resumed
        # at one of the saved checkpoints would need. The groups of this step stay: a signal may
        # still stop the run before they are trained.
        checkpoints = newest_first(self._folder / "checkpoints")
        saved_steps = [int(path.name.removeprefix(PREFIX)) for path in checkpoints]
        oldest_saved, newest_saved = min(saved_steps, default=0), max(saved_steps, default=0)
        queue.prune(step - 1, oldest=oldest_saved, newest=newest_saved)
        return batch

    def _finish(self, batch: StepBatch) -> StepBatch:
        """Move the source on to the next step; return the batch with the state after this one."""
        self._source.finish(batch)
        batch.state = self._source.state_dict()
        return batch

    async def _evaluate(self) -> list[Evaluation]:
        """Evaluate on the test tasks; no group is sampled ahead meanwhile."""
        config, tasks = self._config, self._components.tasks.test
        seed_random(derive_seed(config.seed, "evaluation") % 2**32)
        with nullcontext() if self._queue is None else self._queue.held():
            return await evaluate(
                self._source.collector,
                tasks.tasks(0, question_count(config, tasks)),
                config.eval,
                seed=config.seed,
                costs=self._source.costs.copy(),  # those of training stay as they are
                sources=source_columns(config),
            )

    async def _sync(self, version: int, files: WeightFiles | None) -> None:
        """Give the engine the weights of `version`, and start the groups that they allow."""
        if files is None:  # the engine samples from no weights
            await self._engine.update((), version)
        elif isinstance(self._engine, ReadsFiles):
            await self._engine.load(files)
        else:
            weights = await asyncio.to_thread(read_verified, files.folder, files.digest)
            await self._engine.update(weights, version)
        if self._queue is not None and self._queue.begun:  # before, it has no step to start at
            self._queue.admit(version)

    async def _end_broadcast(self, result: BroadcastResult) -> bool:
        """End a broadcast; return True if weights have arrived, so that more groups may start."""
        assert isinstance(self._engine, Broadcasts), "sent only if the engine broadcasts"
        arrived = await self._engine.settle(result)
        if arrived and self._queue is not None and self._queue.begun:
            self._queue.admit(result.version)
        return arrived

    async def _verify(self, request: ProbeRequest) -> list[float]:
        """Return the probe's log-probabilities; of several copies only the good ones sample on."""
        engine, token_ids = self._engine, request.check.token_ids
        if isinstance(engine, Replicated):
            return await engine.verify(token_ids, request.check)
        assert isinstance(engine, Separate)
        return await engine.score(token_ids)

    def _weight_writer(self) -> WeightWriter:
        """Return the writer of the engine's weight files; make their folder if there is none."""
        if isinstance(self._engine, ReadsFiles):
            return self._engine.writer
        if self._weights_folder is None:
            self._weights_folder = new_weights_folder(self._folder, self._folder)
        return WeightWriter(self._weights_folder)

    def _remove_weights_folder(self) -> None:
        if self._weights_folder is not None:
            remove_weights_folder(self._folder)

    def _count(self, finished: int, total: int) -> None:
        self._finished, self._total = finished, total

    def status(self) -> RolloutStatus:
        """Return the state of the rollouts in flight."""
        collector = self._source.collector
        waiting: list[Waiting] = []
        for _ in range(READ_ATTEMPTS):
            with suppress(RuntimeError):  # a thread changed the table while it was read
                waiting = collector.waiting()
                break
        finished, total = self._finished, self._total
        # Groups are sampled ahead: the trainer waits only for those of its step.
        if self._queue is not None and self._queue.taking:  # the trainer waits for a step
            finished, total = self._queue.progress
        return RolloutStatus(
            progress=collector.in_flight.progress,
            finished=finished,
            total=total,
            waiting=waiting,
        )
