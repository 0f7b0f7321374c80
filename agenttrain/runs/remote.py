"""Source, engine and evaluation of a run whose rollouts have a process of their own.

They stand behind the interfaces that the trainer always uses, in each training process. The first
one speaks with the rollout process, and shares what it gets with the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agenttrain.engines.base import Engine, EngineError
from agenttrain.engines.broadcast import Regathered, WeightSender
from agenttrain.engines.config import Sampling
from agenttrain.engines.weight_files import BadWeights, WeightFiles, WeightWriter
from agenttrain.evaluation import Evaluation, Evaluator, HeldOutLoss, to_json
from agenttrain.rollout.collector import Collected, MetricNames
from agenttrain.rollout.sharing import assign_tasks
from agenttrain.rollout.source import STATE, merge_batches
from agenttrain.rollout.step_batch import StepBatch
from agenttrain.runs.rollout_messages import (
    Assemble,
    Begin,
    Complete,
    EngineMetrics,
    Evaluate,
    Ready,
    Settle,
    SyncBegin,
    SyncEnd,
    Verify,
    Want,
)
from agenttrain.runs.rollouts import RolloutProcess, Rollouts
from agenttrain.runs.setup import Components
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.weight_sync import ProbeCheck
from agenttrain.training.world import World
from agenttrain.types import Completion, Rollout
from agenttrain.utils.signals import StopRequest


async def start_rollouts(
    settings: Mapping[str, Any], verb: str, folder: Path, *, world: World, stop: StopRequest
) -> Rollouts:
    """Start the rollout process of the run in `folder`; `make_remote_engine` waits for it."""
    process = None
    if world.is_main:
        process = RolloutProcess(folder / "logs" / "rollouts.log")
        begin = Begin(
            settings=dict(settings),
            verb=verb,
            folder=str(folder.resolve()),
            on_gpu=torch.cuda.is_available(),
            trainers=int(os.environ.get("LOCAL_WORLD_SIZE", world.size)),
        )
        await process.send(begin)
    return Rollouts(process=process, world=world, stop=stop)


async def make_remote_engine(
    rollouts: Rollouts, dtype: str, make_sender: Callable[[], WeightSender] | None = None
) -> Engine:
    """Wait until the rollout process has built its engine. Raises its error."""
    ready, failure = None, None
    if rollouts.process is not None:
        try:
            ready = await rollouts.process.answer()
        except Exception as error:
            failure = error
    rollouts.world.exchange((), "the rollout process", failure, patient=True)
    ready = rollouts.world.broadcast(ready, "the rollout process")
    assert isinstance(ready, Ready)
    if not ready.own_weights:
        return RemoteEngine(rollouts, ready)
    number_format = getattr(torch, ready.dtype or dtype)
    if ready.broadcasts:
        assert make_sender is not None, "the EngineSpec has one"
        return RemoteBroadcast(rollouts, ready, number_format, make_sender())
    return RemoteCopy(rollouts, ready, number_format)


class RemoteEngine:
    """The engine of the rollout process, which the training processes sync together."""

    def __init__(self, rollouts: Rollouts, ready: Ready) -> None:
        self.max_context = ready.max_context
        self._rollouts = rollouts
        self._metrics: dict[str, float] = {}
        self._synced = False

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str,
        parent: str | None = None,
        images: Sequence[object] = (),
    ) -> Completion:
        """Return a completion of the probe's prompt."""
        request = Complete(token_ids=tuple(token_ids), sampling=sampling)
        completion: Completion = await self._rollouts.call(request, "the text of the probe")
        return completion

    async def release(self, session: str) -> None:
        """Do nothing: the rollout process releases its sessions."""

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Implement `Engine.update` for an engine that samples from no weights."""
        await self._rollouts.call(SyncEnd(version=version, files=None), "the weight sync")
        await self._end_sync()

    async def _end_sync(self) -> None:
        # As if they were read at the end of each step: the first one has those from the start on.
        if self._synced:
            self._metrics = await self._rollouts.call(EngineMetrics(), "the engine's metrics")
        self._synced = True

    def metrics(self) -> dict[str, float]:
        """Implement `Metered.metrics`; an engine without metrics has none."""
        return self._metrics

    async def aclose(self) -> None:
        """Do nothing: the engine ends with the rollout process."""


class RemoteReplica(RemoteEngine):
    """An engine of the rollout process with weights of its own, whichever way they are sent."""

    def __init__(self, rollouts: Rollouts, ready: Ready, dtype: torch.dtype) -> None:
        super().__init__(rollouts, ready)
        self.takes_adapters = ready.takes_adapters
        self.model_names = ready.model_names
        self.quantized = ready.quantized
        self.dtype = dtype

    async def verify(
        self, token_ids: Sequence[int], problem: Callable[[Sequence[float]], str | None]
    ) -> list[float]:
        """Implement `Replicated.verify`; `problem` is a ProbeCheck."""
        assert isinstance(problem, ProbeCheck), "a function cannot be sent"
        scores: list[float] = await self._rollouts.call(Verify(check=problem), "the probe")
        await self._end_sync()
        return scores

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Not used: `verify` scores."""
        raise EngineError("the engine of the rollout process is scored by verify")

    async def sleep(self) -> None:
        """Do nothing: the engine is on no device of the trainer."""


class RemoteBroadcast(RemoteReplica):
    """Takes weights by a broadcast of the first training process, which speaks with the servers."""

    def __init__(
        self, rollouts: Rollouts, ready: Ready, dtype: torch.dtype, sender: WeightSender
    ) -> None:
        super().__init__(rollouts, ready, dtype)
        self._sender = sender

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Broadcast the weights, again as long as no server has got them; `verify` comes next."""
        assert isinstance(weights, Regathered), "a failed broadcast has to begin anew"
        process, arrived = self._rollouts.process, False
        while not arrived:
            failure: Exception | None = None
            if process is not None:
                try:
                    await self._sender.pause(await process.ask(Assemble(version=version)))
                except Exception as error:
                    failure = error
            # Requests in flight may take minutes to end, and gathers have a time limit.
            await self._rollouts.meet("the servers' pause", failure)
            settle: Settle | None = None
            if process is None:
                for _ in weights:  # gathered by all processes together
                    pass
            else:
                try:
                    settle = Settle(result=await self._sender.send(weights))
                except Exception as error:
                    failure = error
            arrived = await self._rollouts.call(settle, "the weight sync", failure=failure)

    async def aclose(self) -> None:
        """Leave the group of the servers."""
        await self._sender.aclose()


class RemoteCopy(RemoteReplica):
    """Takes weights by files."""

    def __init__(self, rollouts: Rollouts, ready: Ready, dtype: torch.dtype) -> None:
        super().__init__(rollouts, ready, dtype)
        self._writer: WeightWriter | None = None

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write weights to files and have the engine load them. Raises EngineError."""
        files: WeightFiles | None = None
        failure: Exception | None = None
        iterator = iter(weights)
        if self._rollouts.process is not None:
            try:
                files = await self._write(self._rollouts.process, iterator, version)
            except Exception as error:
                failure = error
        # Sharded weights are gathered one by one, by all processes together.
        for _ in iterator:
            pass
        await self._rollouts.call(
            SyncEnd(version=version, files=files), "the weight sync", failure=failure
        )

    async def _write(
        self, process: RolloutProcess, weights: Iterable[tuple[str, Tensor]], version: int
    ) -> WeightFiles:
        writer: WeightWriter = await process.ask(SyncBegin(version=version))
        if self._writer is None:  # it compares each version with the first
            self._writer = writer
        self._writer.folder = writer.folder
        try:
            return self._writer.write(weights, version)
        except (BadWeights, OSError) as error:
            raise EngineError(
                f"weight update {version}: {error}; the files of the weights are in "
                f"{writer.folder} (weight_sync.folder)"
            ) from error


@dataclass(slots=True, kw_only=True)
class RemoteSource:
    """Gets the groups of a step from the rollout process, and shares them by their tokens."""

    phase = "rollout"
    rollouts: Rollouts
    names: MetricNames
    minibatches: int
    """algorithm.minibatches."""
    _state: dict[str, Any] = field(default_factory=dict)
    _restored: dict[str, Any] | None = None
    """State of a checkpoint that the rollout process has not been sent yet."""
    _restarts: int = 0
    """Starts of the rollout process, after the first, that have the state of the run."""

    async def batch(self, step: int) -> StepBatch:
        """Return this process's share of a step's rollouts. Raises in all processes."""
        if self._restarts < self.rollouts.restarts:
            self._restored = self._state or None  # None: the run has no finished step
        want = Want(step=step, state=self._restored)
        batch = await self.rollouts.ask(want, "the rollouts of a step")
        self._restored = None
        self._restarts, self.rollouts.restartable = self.rollouts.restarts, True
        world = self.rollouts.world
        shares = [] if batch is None else split_batch(batch, world.size, self.minibatches)
        return world.scatter(shares, "the groups of a step")

    def finish(self, batch: StepBatch) -> None:
        """Record the state that the rollout process had after this step."""
        self._state = batch.state

    def summarise(
        self, batches: Sequence[StepBatch], training: dict[str, float], seconds: Mapping[str, float]
    ) -> tuple[dict[str, float], list[Rollout]]:
        """Merge the batches of all processes: return the metrics and the rollouts of the step."""
        return merge_batches(self.names, batches, training, seconds)

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON state of the source in the rollout process after the last step."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, or from that of a source in the training process."""
        self._state = self._restored = {name: state[name] for name in STATE}


def split_batch(batch: StepBatch, processes: int, minibatches: int) -> list[StepBatch]:
    """Return each process's share. The first also has what is not trained on."""
    collected = batch.collected
    group_at = dict(zip(collected.places, collected.groups, strict=True))
    tokens = [float(sum(rollout.length for rollout in group)) for group in batch.groups]
    owners = assign_tasks(tokens, processes, minibatches)
    owner_of = dict(zip(batch.trained, owners, strict=True))
    shares = []
    for rank in range(processes):
        places = [place for place in collected.places if owner_of.get(place, 0) == rank]
        groups = [group_at[place] for place in places]
        counts = collected if rank == 0 else Collected()
        share = replace(batch, collected=replace(counts, groups=groups, places=places))
        shares.append(share if rank == 0 else replace(share, stuck=0, state={}))
    return shares


@dataclass(slots=True, kw_only=True)
class RemoteEvaluator(Evaluator):
    """Has the rollout process evaluate."""

    rollouts: Rollouts

    async def evaluate(self) -> Sequence[Evaluation | HeldOutLoss]:
        """Return the sampled evaluation and, if `eval.greedy`, a greedy one."""
        evaluations = await self.rollouts.ask(Evaluate(), "an evaluation")
        results = evaluations and [replace(one, rollouts=[]) for one in evaluations]
        results = self.world.broadcast(results, "the results of an evaluation")
        return evaluations or results or []

    def summary(self, evaluations: Sequence[Evaluation | HeldOutLoss]) -> dict[str, Any]:
        """Return an evaluation for summary.json."""
        return to_json([one for one in evaluations if isinstance(one, Evaluation)])


def make_remote_source(
    config: RunConfig, components: Components, rollouts: Rollouts
) -> tuple[RemoteSource, RemoteEvaluator]:
    """Return source and evaluation. From now on the rollout process is restarted."""
    rollouts.restartable = True
    source = RemoteSource(
        rollouts=rollouts,
        names=MetricNames(
            tools=(*components.toolbox.names, *components.environments.tool_names),
            rewards=components.rubric.names,
            outside_agents=config.agent.outside,
        ),
        minibatches=config.algorithm.minibatches,
    )
    evaluator = RemoteEvaluator(
        config=config, rollouts=rollouts, tasks=components.test_tasks, world=rollouts.world
    )
    return source, evaluator
