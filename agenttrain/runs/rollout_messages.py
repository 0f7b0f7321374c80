"""Messages between the trainer and the rollout process.

The trainer asks, the rollout process answers in order: each request has one Answered or Failed.
While it works on a request it also sends RolloutStatus. One step of synchronous training::

    trainer                      rollout process
    Want(step=3)           -->   collect, score
                           <--   RolloutStatus …, Answered(StepBatch(…))
    (update)
    SyncBegin(version=3)   -->
                           <--   Answered(writer of weight files)
    SyncEnd(files)         -->   the engine loads them
                           <--   Answered(None)
    Verify(check)          -->   every copy of the weights is scored
                           <--   Answered(log-probabilities)

With weight_sync.transport=nccl no files cross: the trainer sends the weights to the servers::

    Assemble(version=3)    -->   the servers that answer get no more requests
                           <--   Answered(Audience)
    (broadcast)
    Settle(result)         -->   servers that have the weights are scored next, others are killed
                           <--   Answered(True), or False: none has them, Assemble comes again
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
from agenttrain.tracking.metrics import Estimate
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
class Begin:
    """The first request: build the run's components and its engine. Its answer is Ready."""

    settings: dict[str, Any]
    """The resolved settings, as config.yaml has them."""
    verb: str
    folder: str
    """The run folder."""
    on_gpu: bool
    trainers: int
    """Training processes of this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The engine that the rollout process has built."""

    max_context: int
    own_weights: bool
    """It is a `Separate` engine; the others are the fields of the further protocols."""
    takes_adapters: bool = False
    model_names: bool = False
    quantized: bool = False
    broadcasts: bool = False
    dtype: str | None = None
    """Number format of its weights; None: the policy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """Request for the scored groups of a step. Its answer is a StepBatch, with the new state."""

    step: int
    state: dict[str, Any] | None
    """State of the source to continue from; None: that after the last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncBegin:
    """Announces new weights. Its answer is the WeightWriter that writes them for the engine."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncEnd:
    """Request to load new weights."""

    version: int
    files: WeightFiles | None
    """None: the engine samples from no weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assemble:
    """Request for the servers that a broadcast goes to. Its answer is an Audience."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """The end of a broadcast. Its answer is False if the weights have to be sent again."""

    result: BroadcastResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """Request to score the probe by every copy of the weights, and to sample from the good ones."""

    check: ProbeCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """Request for one completion, of the probe's text."""

    token_ids: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """Request for the engine's metrics since the last such request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Request for an evaluation. Its answer is a list of Evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Request to end, also in the middle of another one. It has no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStatus:
    """State of the rollouts in flight."""

    progress: int
    """Counter that rises with every request to the engine and every finished rollout."""
    finished: int
    total: int
    waiting: list[Waiting]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Answer to a request."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The error that a request has led to."""

    name: str
    """Its class: `raised` makes one of ours again."""
    module: str
    message: str
    attributes: dict[str, Any]

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """Return the message with an error."""
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
        """Return the error to raise in the trainer."""
        if self.module.startswith("agenttrain."):
            import_module(self.module)  # the classes below are those of imported modules
        kinds: list[type[Exception]] = [AgenttrainError, ValueError, OSError]
        while kinds:
            kind = kinds.pop()
            if kind.__name__ == self.name:
                error = kind.__new__(kind)  # not its __init__, whose arguments are its own
                error.args = (self.message,)
                for name, value in self.attributes.items():
                    setattr(error, name, value)
                if str(error) == self.message:  # not so for UnicodeError, which keeps no text
                    return error
            kinds += kind.__subclasses__()
        return RolloutsFailed(f"{self.name}: {self.message}")


class RolloutsFailed(AgenttrainError):
    """An error of other code in the rollout process, whose traceback was printed there."""


CARRIED = ("culprits", "rollouts")
"""Attributes of errors that crash bundles need."""
CODEC = Codec(
    (
        *(Begin, Ready, Want, StepBatch, Costs, SyncBegin, SyncEnd, Verify, Complete),
        *(EngineMetrics, Evaluate, Stop, RolloutStatus, Answered, Failed, Waiting),
        *(WeightFiles, WeightWriter),
        *(ProbeCheck, Gap, Sampling, Completion, Finish, Collected, Evaluation, Estimate, Rollout),
        *(Trajectory, Span, Origin, StopReason, Task, RowTool, ToolCall, ToolError, ToolResult),
        *(Delegation, Image, PlacedImage, Assemble, Audience, Receiver, WeightSyncMode),
        *(Settle, BroadcastResult, Receipt),
    ),
    other=str,  # values of a row's columns, as in rollout files
)
"""The classes that may cross."""
