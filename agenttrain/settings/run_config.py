"""The settings of a run, typed: a table of contents of every `<capability>/config.py`.

Hydra checks names and types, pydantic the bounds and checks of a section, `checks.py` what spans
two. Sections become constructor arguments of the components that they configure: a component gets
its own section and never the whole. OmegaConf takes enum members by name, so names equal values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PlainValidator
from pydantic.dataclasses import dataclass

from agenttrain.agents.config import AgentConfig
from agenttrain.algorithms.config import CREDITS, AlgorithmConfig, CreditConfig
from agenttrain.algorithms.objectives.config import DEFAULT, all_objectives
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.commands.slurm.config import SlurmConfig
from agenttrain.commands.sweep.config import SweepConfig
from agenttrain.data.config import DataConfig
from agenttrain.engines.config import DEFAULT_ENGINE, EngineSettings, ServersConfig
from agenttrain.engines.registry import read_engine, specs
from agenttrain.engines.vllm_server.config import RolesConfig
from agenttrain.health.config import GuardsConfig, StopWhenConfig, WatchdogConfig
from agenttrain.launch.config import DistributedConfig
from agenttrain.rollout.asynchronous.config import AsyncConfig
from agenttrain.rollout.config import EvalConfig, RolloutConfig
from agenttrain.runtimes.config import RuntimeConfig
from agenttrain.tracking.config import CostConfig, TrackerConfig
from agenttrain.training.config import (
    OPTIMIZERS,
    AdamWSettings,
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
    WeightSyncConfig,
    optimizer_settings,
)
from agenttrain.utils.data_fields import Data
from agenttrain.utils.sections import SETTINGS, Whole, choice

if TYPE_CHECKING:
    EngineSection = EngineSettings
else:
    EngineSection = choice(read_engine)


class RunPart(StrEnum):
    """Parts of a run besides its settings. A resumed run refuses changes in them.

    `resume_changed` names the parts that may have changed.
    """

    data = "data"
    """The rows of data.train and data.test."""
    template = "template"
    """The chat template, as it was fixed."""
    tools = "tools"
    """Their schemas, the code of the user's own, the files that bundled ones read."""
    environment = "environment"
    """The code of the user's classes."""
    reward = "reward"
    """The code of the user's functions."""
    model = "model"
    """The tokenizer; the weights in model.path, where a reference or adapters need them, and the
    teacher's."""


@dataclass(config=SETTINGS)
class SftConfig:
    """Supervised learning from conversations, `agenttrain sft`; no other verb reads it."""

    batch_size: Whole = Field(default=32, ge=1)
    """Conversations of one optimizer update, taken in the order of the rows."""
    max_tokens: Whole | None = Field(default=None, ge=1)
    """A longer conversation is left out and counted (`data/overlong`); None: the model's context
    decides."""


@dataclass(config=SETTINGS)
class RunConfig:
    """One run, complete."""

    model: ModelConfig = field(default_factory=ModelConfig)
    chat_template: ChatTemplateConfig = field(default_factory=ChatTemplateConfig)
    response_schema: ResponseSchemaConfig = field(default_factory=ResponseSchemaConfig)
    tools: dict[str, Any] = field(default_factory=dict)
    """Name -> `_target_`, settings (ToolSettings) and bound arguments."""
    stop_tools: Data[list[str]] = field(default_factory=list)
    """A call to one of these ends the rollout, as does one to a tool with `stop: true`."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Name -> `_target_` (a class), settings (EnvironmentSettings) and bound arguments; the column
    `environment` picks one per row."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    user: dict[str, Any] = field(default_factory=dict)
    """`_target_` of a simulated user, settings (UserSettings) and bound arguments."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: dict[str, Any] = field(default_factory=dict)
    """Name -> `_target_`, settings (RewardSettings) and bound arguments."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    async_training: AsyncConfig = field(default_factory=AsyncConfig)
    engine: EngineSection = field(default_factory=partial(read_engine, {"name": DEFAULT_ENGINE}))
    """Name of the engine, and its own settings."""
    servers: ServersConfig = field(default_factory=ServersConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    optimizer: Annotated[OptimizerConfig, PlainValidator(optimizer_settings)] = field(
        default_factory=AdamWSettings
    )
    """Name of the optimizer, and its own settings."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    stop_when: StopWhenConfig = field(default_factory=StopWhenConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    seed: Whole = Field(default=0, ge=0)
    """Seed of everything random; below 2**63, as torch takes no more."""
    steps: Whole = Field(default=100, ge=1)
    """Steps of the run, the most if `stop_when` ends it."""
    tasks_per_step: Whole = Field(default=8, ge=1)
    """Tasks (P) of a step; P x group_size rollouts."""
    resume: str | None = None
    """Folder of a run to continue; auto: hydra.run.dir, if there is a run in it."""
    resume_changed: Data[list[RunPart]] = field(default_factory=list)
    """Parts that may have changed since a resumed run was stopped; all others are compared."""

    @property
    def is_asynchronous(self) -> bool:
        """True if rollouts of later steps are sampled while the trainer updates."""
        return self.async_training.max_staleness > 0

    @property
    def may_run_in_lockstep(self) -> bool:
        """True if an engine that can repeat a run bit for bit does so."""
        # `deterministic` may also be None, which is true where the engine can.
        return self.rollout.deterministic is not False and not self.is_asynchronous

    @property
    def rollouts_in_lockstep(self) -> int:
        """Number of rollouts that the engine waits for before it samples; 0: it waits for none.

        To repeat a run bit for bit it samples only once all rollouts that fit into a batch have
        asked: else the clock would decide which of them share a batch.
        """
        if not self.may_run_in_lockstep:
            return 0
        return min(self.engine.max_rows, self.tasks_per_step * self.algorithm.group_size)


CHOICES: Mapping[str, tuple[type, Mapping[str, type]]] = {
    "optimizer": (OptimizerConfig, OPTIMIZERS),
    "algorithm.credit": (CreditConfig, CREDITS),
}
"""Section whose keys depend on its `name` -> the settings of all choices, and of each."""


def choices() -> Mapping[str, Mapping[str, type]]:
    """Return every section whose keys depend on a choice, with the bundled choices' settings.

    The first choice of a section is its default.
    """
    objectives = {name: objective.settings for name, objective in all_objectives().items()}
    return {
        **{section: options for section, (_, options) in CHOICES.items()},
        "engine": {name: spec.settings for name, spec in specs().items()},
        "algorithm.objective": {DEFAULT: objectives.pop(DEFAULT), **objectives},
    }
