"""Source, engine and evaluation of a run whose rollouts have a process of their own.

They implement the interfaces that the trainer always uses, in each training process. The first
training process talks to the rollout process, and shares the results with the others.
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
from agenttrain.evaluation import Evaluation, Evaluator, HeldOutLoss
from agenttrain.rollout.collector import Collected, MetricNames
from agenttrain.rollout.sharing import assign_tasks
from agenttrain.rollout.source import STATE, merge_batches
from agenttrain.rollout.step_batch import StepBatch
from agenttrain.runs.rollout_messages import (
    AudienceRequest,
    BroadcastEnd,
    CompletionRequest,
    EngineDescription,
    EvaluationRequest,
    GroupsRequest,
    LoadRequest,
    MetricsRequest,
    ProbeRequest,
    StartRequest,
    WriterRequest,
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
    """Start the rollout process of the run in `folder`. `make_remote_engine` waits for it."""
    process = None
    if world.is_main:
        process = RolloutProcess(folder / "logs" / "rollouts.log")
        request = StartRequest(
            settings=dict(settings),
            verb=verb,
            folder=str(folder.resolve()),
            on_gpu=torch.cuda.is_available(),
            # torchrun or a scheduler sets it: training processes of this machine.
            trainers=int(os.environ.get("LOCAL_WORLD_SIZE", world.size)),
        )
        await process.send(request)
    return Rollouts(process=process, world=world, stop=stop)


async def make_remote_engine(
    rollouts: Rollouts, dtype: str, make_sender: Callable[[], WeightSender] | None = None
) -> Engine:
    """Wait until the rollout process has built its engine; return that engine.

    `dtype` is the number format of the policy's weights. `make_sender` makes the sender of an
    engine that takes weights by broadcast. If the rollout process fails to build its components,
    the first training process raises its error, and the others PeerFailed.
    """
    description, failure = None, None
    if rollouts.process is not None:  # in the first training process
        try:
            description = await rollouts.process.answer()
        except Exception as error:
            failure = error
    # Nothing is exchanged but the failure, which this raises in all processes. Patient: an engine
    # may take minutes to start.
    rollouts.world.exchange((), "the rollout process", failure, patient=True)
    description = rollouts.world.broadcast(description, "the rollout process")
    assert isinstance(description, EngineDescription)
    if not description.own_weights:  # an engine that samples from no weights (scripted, an API)
        return RemoteEngine(rollouts, description)
    number_format = getattr(torch, description.dtype or dtype)
    if description.broadcasts:
        assert make_sender is not None, "the EngineSpec of an engine that broadcasts has a sender"
        return RemoteBroadcast(rollouts, description, number_format, make_sender())
    return RemoteCopy(rollouts, description, number_format)


class RemoteEngine:
    """The engine of the rollout process, for the training processes together.

    The training processes send weights to the engine. The only text that they sample is that of the
    probe, by which each weight sync is checked: rollouts are sampled in the rollout process.
    """

    def __init__(self, rollouts: Rollouts, description: EngineDescription) -> None:
        self.max_context = description.max_context
        self._rollouts = rollouts
        self._metrics: dict[str, float] = {}
        """The engine's metrics at the end of the last step."""
        self._synced = False
        """True after the first sync."""

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str,
        parent: str | None = None,
        images: Sequence[object] = (),
    ) -> Completion:
        """Return a completion of the probe's prompt, by which a weight sync is checked.

        The session, its parent and images are not sent: the prompt is text, which the rollout
        process completes in a session of its own.
        """
        request = CompletionRequest(token_ids=tuple(token_ids), sampling=sampling)
        completion: Completion = await self._rollouts.call(request, "the text of the probe")
        return completion

    async def release(self, session: str) -> None:
        """Do nothing: the rollout process releases its sessions."""

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Give an engine without weights of its own the number of the new version."""
        await self._rollouts.call(LoadRequest(version=version, files=None), "the weight sync")
        await self._end_sync()

    async def _end_sync(self) -> None:
        # Metrics belong to a step, which ends with a sync. The first sync comes before any step:
        # its metrics are not fetched, and count for the first step.
        if self._synced:
            self._metrics = await self._rollouts.call(MetricsRequest(), "the engine's metrics")
        self._synced = True

    def metrics(self) -> dict[str, float]:
        """Implement `Metered.metrics`; empty for an engine without metrics."""
        return self._metrics

    async def aclose(self) -> None:
        """Do nothing: the engine ends with the rollout process."""


class RemoteReplica(RemoteEngine):
    """An engine of the rollout process with weights of its own. Subclasses send them to it.

    `takes_adapters`, `model_names`, `quantized` and `dtype` are those of the protocols Separate,
    ModelNames, Quantized and OwnNumberFormat.
    """

    def __init__(
        self, rollouts: Rollouts, description: EngineDescription, dtype: torch.dtype
    ) -> None:
        super().__init__(rollouts, description)
        self.takes_adapters = description.takes_adapters
        self.model_names = description.model_names
        self.quantized = description.quantized
        self.dtype = dtype

    async def verify(
        self, token_ids: Sequence[int], find_problem: Callable[[Sequence[float]], str | None]
    ) -> list[float]:
        """Score the probe by every copy of the engine; only copies without a problem sample on.

        The probe is a short text whose log-probabilities show whether a weight sync has worked.
        The engine in the rollout process scores it, and calls `find_problem` with each copy's
        scores (`Replicated.verify`). `token_ids` are not sent: `find_problem`, a ProbeCheck, has
        them too.
        """
        assert isinstance(find_problem, ProbeCheck), "a closure cannot be sent to the process"
        request = ProbeRequest(check=find_problem)
        scores: list[float] = await self._rollouts.call(request, "the probe")
        # A sync sends weights, and ends with the probe of them: here.
        await self._end_sync()
        return scores

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Raise EngineError: `verify` scores this engine."""
        raise EngineError("the engine of the rollout process is scored by verify")

    async def sleep(self) -> None:
        """Do nothing: the engine is on no device of the trainer."""


class RemoteBroadcast(RemoteReplica):
    """Takes weights by a broadcast from the first training process to the inference servers."""

    def __init__(
        self,
        rollouts: Rollouts,
        description: EngineDescription,
        dtype: torch.dtype,
        sender: WeightSender,
    ) -> None:
        super().__init__(rollouts, description, dtype)
        self._sender = sender

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Broadcast the weights until at least one server has received them.

        Each try goes through the same three meetings of all training processes: the servers pause,
        the weights are gathered and sent, the rollout process reports whether they arrived. An
        error of the first process is raised in all of them at the next meeting (`meet`, `call`).
        The caller then calls `verify`.
        """
        assert isinstance(weights, Regathered), "each try iterates, and so gathers, once more"
        process = self._rollouts.process  # None in all training processes but the first
        arrived = False
        while not arrived:
            failure: Exception | None = None
            if process is not None:
                try:
                    # The servers that are to get the weights.
                    audience = await process.ask(AudienceRequest(version=version))
                    await self._sender.pause(audience)  # its servers end or hold their requests
                except Exception as error:
                    failure = error
            # Requests in flight may take minutes to end. The others wait for that here, as the
            # gathers below have a time limit.
            await self._rollouts.meet("the servers' pause", failure)
            broadcast_end: BroadcastEnd | None = None  # set in the first process, which sends it
            if process is None:
                for _ in weights:  # each weight is gathered by all processes together
                    pass
            else:
                try:
                    broadcast_end = BroadcastEnd(result=await self._sender.send(weights))
                except Exception as error:
                    failure = error
            # The answer to BroadcastEnd. False: no server received the weights, so that the next
            # try asks for servers anew.
            arrived = await self._rollouts.call(broadcast_end, "the weight sync", failure=failure)

    async def aclose(self) -> None:
        """Leave the process group of the servers."""
        await self._sender.aclose()


class RemoteCopy(RemoteReplica):
    """Takes weights by files that the first training process writes."""

    def __init__(
        self, rollouts: Rollouts, description: EngineDescription, dtype: torch.dtype
    ) -> None:
        super().__init__(rollouts, description, dtype)
        self._writer: WeightWriter | None = None

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write weights to files and have the engine load them. Raises EngineError."""
        files: WeightFiles | None = None
        failure: Exception | None = None
        iterator = iter(weights)
        if self._rollouts.process is not None:  # in the first training process
            try:
                files = await self._write(self._rollouts.process, iterator, version)
            except Exception as error:
                failure = error
        # All processes gather sharded weights together. So each process goes through all weights,
        # also after a failure, and if it writes none.
        for _ in iterator:
            pass
        await self._rollouts.call(
            LoadRequest(version=version, files=files), "the weight sync", failure=failure
        )

    async def _write(
        self, process: RolloutProcess, weights: Iterable[tuple[str, Tensor]], version: int
    ) -> WeightFiles:
        """Write the weights with the engine's writer; raise EngineError if that fails."""
        writer: WeightWriter = await process.ask(WriterRequest())
        # Keep the first writer, which knows the shapes of the first version and compares each later
        # one with them. The folder is a new one after a restart of the rollout process.
        if self._writer is None:
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
    """Gets a step's groups from the rollout process, and shares them among the training processes.

    Each training process has one. The shares have about as many tokens each.

    The rollout process draws the tasks, and so has the state of their source (cursor, curriculum,
    …). This object keeps the state after the last step, for checkpoints, and sends it to a process
    that has none: after the run is resumed, and after the process was started again.
    """

    phase = "rollout"
    """Name of the run's phase in which `batch` is called."""
    rollouts: Rollouts
    names: MetricNames
    """Tools and rewards that the step's metrics are named after."""
    minibatches: int
    """Optimizer updates of a step (algorithm.minibatches), each of which is shared evenly."""
    _state: dict[str, Any] = field(default_factory=dict)
    """State of the source in the rollout process after the last step."""
    _state_to_send: dict[str, Any] | None = None
    """State that the next request has to carry; None: the rollout process already has it."""
    _restarts_seen: int = 0
    """`rollouts.restarts` at the last step that the rollout process made."""

    async def batch(self, step: int) -> StepBatch:
        """Return this process's share of the rollouts of a step.

        Raises Preempted, and an error of the rollout process as `Rollouts.ask` does. After
        EngineRestarted (the process ended, and was started again) the trainer calls this anew.
        """
        if self._restarts_seen < self.rollouts.restarts:
            # The new process has no state. Before the first step there is none to send.
            self._state_to_send = self._state or None
        request = GroupsRequest(step=step, state=self._state_to_send)
        # The whole step in the first process, None in the others.
        batch = await self.rollouts.ask(request, "the rollouts of a step")
        self._state_to_send = None
        self._restarts_seen = self.rollouts.restarts
        # A restart forbids the next one until a step succeeds: a process that always ends in the
        # same step must not be started without end.
        self.rollouts.restartable = True
        world = self.rollouts.world
        shares = [] if batch is None else split_batch(batch, world.size, self.minibatches)
        return world.scatter(shares, "the groups of a step")

    def finish(self, batch: StepBatch) -> None:
        """Record the state of the rollout process after this step."""
        self._state = batch.state

    def summarise(
        self, batches: Sequence[StepBatch], training: dict[str, float], seconds: Mapping[str, float]
    ) -> tuple[dict[str, float], list[Rollout]]:
        """Merge the batches of all processes into the metrics and the rollouts of the step."""
        return merge_batches(self.names, batches, training, seconds)

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON state of the source in the rollout process after the last step."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()` of this source, or of a source in the training process."""
        self._state = self._state_to_send = {name: state[name] for name in STATE}


def split_batch(batch: StepBatch, processes: int, minibatches: int) -> list[StepBatch]:
    """Split a step into one share per training process, with about as many tokens in each.

    A place is a group's number in the step. `batch.collected` has all sampled groups with their
    places. `batch.groups` are those that are trained on, and `batch.trained` their places. The
    first share also has the groups that are not trained on, the counts and the source's state.
    """
    collected = batch.collected
    group_at = dict(zip(collected.places, collected.groups, strict=True))
    tokens = [float(sum(rollout.length for rollout in group)) for group in batch.groups]
    ranks = assign_tasks(tokens, processes, minibatches)
    rank_of_place = dict(zip(batch.trained, ranks, strict=True))
    shares = []
    for rank in range(processes):
        # A group that is not trained on has no rank: it goes to the first process.
        places = [place for place in collected.places if rank_of_place.get(place, 0) == rank]
        groups = [group_at[place] for place in places]
        # Metrics add up the shares' counts, so that only the first may have them.
        with_counts = collected if rank == 0 else Collected()
        share = replace(batch, collected=replace(with_counts, groups=groups, places=places))
        shares.append(share if rank == 0 else replace(share, stuck=0, idle_s=None, state={}))
    return shares


@dataclass(slots=True, kw_only=True)
class RemoteEvaluator(Evaluator):
    """Evaluates in the rollout process."""

    rollouts: Rollouts

    async def evaluate(self) -> Sequence[Evaluation | HeldOutLoss]:
        """Return the sampled evaluation and, if `eval.greedy`, a greedy one.

        The first process, which writes the rollouts, has them. The others get the evaluations
        without rollouts.
        """
        evaluations = await self.rollouts.ask(EvaluationRequest(), "an evaluation")
        scores_only = None
        if evaluations is not None:  # in the first process
            scores_only = [replace(evaluation, rollouts=[]) for evaluation in evaluations]
        received = self.world.broadcast(scores_only, "the results of an evaluation")
        if evaluations is not None:
            return evaluations
        return received or []


def make_remote_source(
    config: RunConfig, components: Components, rollouts: Rollouts
) -> tuple[RemoteSource, RemoteEvaluator]:
    """Return the source and the evaluation of a run whose rollouts have a process of their own.

    Call it after the first weight sync: from now on a rollout process that ends is restarted.
    """
    rollouts.restartable = True
    source = RemoteSource(
        rollouts=rollouts,
        names=components.metric_names,
        minibatches=config.algorithm.minibatches,
    )
    evaluator = RemoteEvaluator(
        config=config, rollouts=rollouts, tasks=components.tasks.test, world=rollouts.world
    )
    return source, evaluator
