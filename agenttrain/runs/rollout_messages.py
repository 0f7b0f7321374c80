"""Messages between the trainer and the rollout process.

The trainer sends requests, and the rollout process answers them in order: each has one
RequestResult or RequestFailure. While the rollout process works on a request, it also sends
RolloutStatus. One step of synchronous training::

    trainer                         rollout process
    GroupsRequest(step=3)     -->   collects and scores the step's groups
                              <--   RolloutStatus …, RequestResult(StepBatch(…))
    (update)
    WriterRequest()           -->
                              <--   RequestResult(writer of weight files)
    LoadRequest(files)        -->   the engine loads them
                              <--   RequestResult(None)
    ProbeRequest(check)       -->   every copy of the weights is scored
                              <--   RequestResult(log-probabilities)

With weight_sync.transport=nccl no files cross: the trainer sends the weights to the servers::

    AudienceRequest(version=3) -->  the servers that answer get no more requests
                              <--   RequestResult(Audience)
    (broadcast)
    BroadcastEnd(result)      -->   servers that have the weights are scored next, others are killed
                              <--   RequestResult(True), or False: no server has them, and the
                                    trainer sends AudienceRequest again
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from agenttrain.engines.broadcast import Audience, BroadcastResult, Receipt, Receiver
from agenttrain.engines.config import Sampling
from agenttrain.engines.weight_files import WeightFiles, WeightWriter
from agenttrain.evaluation import Evaluation
from agenttrain.rollout.collector import Collected
from agenttrain.rollout.monitoring import Waiting
from agenttrain.rollout.sharing import Costs
from agenttrain.rollout.step_batch import StepBatch
from agenttrain.tracking.metrics import Estimate, Scores
from agenttrain.training.config import WeightSyncMode
from agenttrain.training.weight_sync import Gap, ProbeCheck
from agenttrain.types import (
    AgenttrainError,
    Completion,
    Delegation,
    Finish,
    Image,
    Origin,
    PlacedImage,
    Rollout,
    Routes,
    RowTool,
    Span,
    StopReason,
    Task,
    ToolCall,
    ToolError,
    ToolResult,
    Trajectory,
)
from agenttrain.utils.codec import Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """The first request: build the run's components and its engine.

    Its result is an EngineDescription.
    """

    settings: dict[str, Any]
    """The resolved settings, as config.yaml has them."""
    verb: str
    """`train` or `eval`."""
    folder: str
    """The run folder."""
    on_gpu: bool
    """The trainer's machine has a GPU."""
    trainers: int
    """Training processes of this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """The engine that the rollout process has built."""

    max_context: int
    """Maximum tokens of a sequence."""
    own_weights: bool
    """The engine samples from weights of its own, which the trainer sends (`Separate`). The fields
    below describe such an engine."""
    takes_adapters: bool = False
    """The engine takes only the model's adapters; False: all weights (`Separate`)."""
    model_names: bool = False
    """The engine takes weights by the names that parameters have in transformers' module in memory.
    False: by those in the model's safetensors files (`ModelNames`)."""
    quantized: bool = False
    """A small change of the policy's weights may not change the engine's (`Quantized`)."""
    broadcasts: bool = False
    """The engine takes weights by a broadcast, not by files."""
    dtype: str | None = None
    """Number format of the engine's weights; None: the policy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsRequest:
    """Request for the scored groups of a step. Its result is a StepBatch, with the new state."""

    step: int
    state: dict[str, Any] | None
    """State from which the source continues; None: from where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterRequest:
    """Request for the WeightWriter that writes the files of new weights for the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """Request to load new weights."""

    version: int
    files: WeightFiles | None
    """None: the engine samples from no weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AudienceRequest:
    """Request for the servers that a broadcast goes to. Its result is an Audience."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastEnd:
    """The end of a broadcast. Its result is False if the weights have to be sent again."""

    result: BroadcastResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """Request to score the probe with every copy of the weights; copies that fail stop serving."""

    check: ProbeCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """Request for one completion of the probe's prompt."""

    token_ids: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRequest:
    """Request for the engine's metrics since the last such request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """Request for an evaluation. Its result is a list of Evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRequest:
    """Request to end the process, also in the middle of another request. It has no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStatus:
    """State of the rollouts in flight."""

    progress: int
    """Counter that rises with every request to the engine and every finished rollout."""
    finished: int
    """Finished rollouts of the request, of `total`."""
    total: int
    waiting: list[Waiting]
    """The rollouts, each with the thing that it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """Answer to a request that succeeded."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """Answer to a request that raised an error."""

    name: str
    """Name of the error's class."""
    module: str
    message: str
    attributes: dict[str, Any]
    """Attributes of the error that the trainer needs (CARRIED)."""

    @classmethod
    def of(cls, error: Exception) -> RequestFailure:
        """Return the answer that carries `error`."""
        attributes = {}
        for name, value in vars(error).items():
            if name in CARRIED:
                attributes[name] = value
        kind = type(error)
        return cls(
            name=kind.__name__,
            module=kind.__module__,
            message=str(error),
            attributes=attributes,
        )

    def raised(self) -> Exception:
        """Return the error to raise in the trainer.

        An AgenttrainError, ValueError or OSError keeps its class, also a subclass of them. Any
        other error becomes a RolloutsFailed.
        """
        if self.module.startswith("agenttrain."):
            import_module(self.module)  # so that __subclasses__ below has the error's class
        kinds: list[type[Exception]] = [AgenttrainError, ValueError, OSError]
        while kinds:
            kind = kinds.pop()
            if kind.__name__ == self.name:
                error = kind.__new__(kind)  # without __init__, whose arguments are not sent
                error.args = (self.message,)
                for name, value in self.attributes.items():
                    setattr(error, name, value)
                # UnicodeError computes its text from other attributes: it cannot be raised again.
                if str(error) == self.message:
                    return error
            kinds += kind.__subclasses__()
        return RolloutsFailed(f"{self.name}: {self.message}")


class RolloutsFailed(AgenttrainError):
    """An error of other code in the rollout process, whose traceback was printed there."""


CARRIED = ("culprits", "rollouts")
"""Attributes of errors that crash bundles need."""
CODEC = Codec(
    (
        *(StartRequest, GroupsRequest, WriterRequest, LoadRequest, AudienceRequest, BroadcastEnd),
        *(ProbeRequest, CompletionRequest, MetricsRequest, EvaluationRequest, EndRequest),
        *(RequestResult, RequestFailure, RolloutStatus, EngineDescription, StepBatch, Costs),
        *(Waiting, WeightFiles, WeightWriter),
        *(ProbeCheck, Gap, Sampling, Completion, Finish, Collected, Evaluation, Estimate),
        *(Scores, Rollout),
        *(Trajectory, Span, Origin, StopReason, Task, RowTool, ToolCall, ToolError, ToolResult),
        *(Delegation, Image, PlacedImage, Audience, Receiver, WeightSyncMode),
        *(BroadcastResult, Receipt, Routes),
    ),
    other=str,  # values of a row's columns, as in rollout files
)
"""The classes that may cross between the processes."""
