"""Every setting of agenttrain, typed. Hydra checks names and types, `validate.py` combinations.

Sections become constructor arguments of the components that they configure: a component gets its
own section and never the whole. OmegaConf takes enum members by name, so names equal values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from agenttrain.config.algorithm import Advantage as Advantage
from agenttrain.config.algorithm import Aggregation as Aggregation
from agenttrain.config.algorithm import AlgorithmConfig as AlgorithmConfig
from agenttrain.config.algorithm import KlEstimator as KlEstimator
from agenttrain.config.algorithm import KlIn as KlIn
from agenttrain.config.algorithm import Ratio as Ratio
from agenttrain.config.algorithm import Scale as Scale
from agenttrain.config.component_settings import EnvironmentSettings as EnvironmentSettings
from agenttrain.config.component_settings import Isolation as Isolation
from agenttrain.config.component_settings import OnUnavailable as OnUnavailable
from agenttrain.config.component_settings import RewardSettings as RewardSettings
from agenttrain.config.component_settings import ToolLimits as ToolLimits
from agenttrain.config.component_settings import ToolSettings as ToolSettings
from agenttrain.config.curriculum import CurriculumConfig as CurriculumConfig
from agenttrain.config.distributed import DistributedConfig as DistributedConfig
from agenttrain.config.distributed import DistributedName as DistributedName
from agenttrain.config.guards import GuardsConfig as GuardsConfig
from agenttrain.config.model import ChatTemplateConfig as ChatTemplateConfig
from agenttrain.config.model import Dtype as Dtype
from agenttrain.config.model import Init as Init
from agenttrain.config.model import LoraSettings as LoraSettings
from agenttrain.config.model import ModelConfig as ModelConfig
from agenttrain.config.model import ResponseSchemaConfig as ResponseSchemaConfig
from agenttrain.config.slurm import SlurmConfig as SlurmConfig
from agenttrain.config.sweep_settings import OnFailedJob as OnFailedJob
from agenttrain.config.sweep_settings import SweepConfig as SweepConfig
from agenttrain.config.training import OptimizerConfig as OptimizerConfig
from agenttrain.config.training import OptimizerName as OptimizerName
from agenttrain.config.training import Schedule as Schedule
from agenttrain.config.training import SharePrefix as SharePrefix
from agenttrain.config.training import TrainingConfig as TrainingConfig
from agenttrain.config.watchdog import WatchdogConfig as WatchdogConfig


class OnBreak(StrEnum):
    """What a broken ledger invariant does."""

    error = "error"
    """Stop the run."""
    drop = "drop"
    """Drop the rollout's group, count it (`rollout/dropped`), go on."""


class OnMalformedCall(StrEnum):
    """What a call that cannot be parsed does."""

    reply = "reply"
    """The model reads what was wrong."""
    stop = "stop"
    """The rollout ends (`max_invalid_calls`)."""
    ignore = "ignore"
    """As if it had not been written."""


class OnBadRow(StrEnum):
    """What a row that cannot become a task does."""

    error = "error"
    """Stop the run before it begins, naming the first such rows."""
    skip = "skip"
    """Leave it out; how many were is told."""


class OnParallelCalls(StrEnum):
    """What several calls in a turn do where the chat template renders only one."""

    error_reply = "error_reply"
    """The first is run; the reply to it says so of the others."""
    stop = "stop"
    """The rollout ends (`max_tool_calls`)."""


class WeightSyncMode(StrEnum):
    """What happens to rollouts in flight when weights change."""

    drain = "drain"
    """They end first."""
    abort_resume = "abort_resume"
    """They go on, and the new weights read all their tokens again."""
    in_flight = "in_flight"
    """They go on with the keys and values that they have, of both weights."""


class RunPart(StrEnum):
    """What a run is made of besides its settings."""

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
    """The tokenizer; the weights in model.path, where a reference or adapters need them."""


class OnToolFailure(StrEnum):
    """What a fault of a tool's infrastructure does, once it has been retried in vain."""

    drop = "drop"
    """The rollout ends as `error`, is not scored and counted (`rollout/dropped`)."""
    error = "error"
    """Stop the run."""


@dataclass
class DataConfig:
    """Where tasks come from: a bundled task generator (`_target_`), a file of rows, the hub."""

    train: dict[str, Any] = MISSING
    """`_target_` of a callable returning rows, with its arguments."""
    test: dict[str, Any] = field(default_factory=dict)
    """Rows of the evaluation, likewise; none: evaluations are left out."""
    shuffle: bool = False
    """Draw rows in an order seeded by (seed, epoch)."""
    path: str | None = None
    """data=file: a file or a `save_to_disk` folder; data=hub: a dataset's id. For both splits."""
    subset: str | None = None
    """data=hub: the dataset's configuration, where it has several (gsm8k: main)."""
    revision: str | None = None
    """data=hub: a commit, branch or tag; None: the newest."""
    test_fraction: float | None = None
    """Share of data.train held out for evaluation, where data.test has no rows of its own."""
    test_seed: int = 0
    """Chooses which rows are held out; not `seed`, so that runs are compared on the same ones."""
    map: dict[str, str] = field(default_factory=dict)
    """Column -> JMESPath expression over the row, e.g. {prompt: question}; others stay."""
    prompt: str | None = None
    """The user's message as a Jinja text over the columns: "{{ question }} Give a number."."""
    system: str | None = None
    """A system message, put before every prompt that has none."""
    on_bad_row: OnBadRow = OnBadRow.error
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)


@dataclass
class RolloutConfig:
    """Limits and behaviour of a rollout."""

    max_turns: int = 8
    """Sampled completions."""
    max_turn_tokens: int = 512
    """Sampled tokens of one turn."""
    max_completion_tokens: int = 2048
    """Sampled and tool tokens after the prompt."""
    max_result_tokens: int = 512
    """Tokens of one tool result; a longer one is clipped with a visible marker."""
    max_tool_calls: int | None = None
    """Calls of a rollout; None: no limit."""
    max_invalid_calls: int | None = None
    """Malformed, unknown or badly typed calls of a rollout; None: no limit."""
    max_repeated_calls: int | None = None
    """Times in a row the same call with the same arguments may be made; None: no limit."""
    timeout_s: float | None = None
    """Wall-clock seconds of one rollout; None: no limit."""
    max_stuck_calls: int = 32
    """Calls of blocking tools that still run past their time limit; more stop the run."""
    max_loop_lag_s: float = 1.0
    """Seconds the event loop may stand still before a warning names the tool that holds it."""
    concurrency: int = 512
    """Rollouts in flight; no effect with engine=transformers and rollout.deterministic."""
    deterministic: bool | None = None
    """The same batch at every decode step, so that a run repeats; None: where the engine can
    (transformers)."""
    temperature: float = 1.0
    structured_calls: bool = False
    """A call that the model opens can only become one that fits its tool's schema: a grammar rules
    the other tokens out. Needs engine=vllm, and for training algorithm.correction."""
    on_break: OnBreak = OnBreak.error
    on_tool_failure: OnToolFailure = OnToolFailure.drop
    on_malformed_call: OnMalformedCall = OnMalformedCall.reply
    on_parallel_calls: OnParallelCalls = OnParallelCalls.error_reply
    """Only where the chat template renders one call per turn (`agenttrain templates` says so)."""


@dataclass
class VllmSettings:
    """What only vLLM knows."""

    memory_share: float = 0.5
    """Of a GPU's memory, or the machine's on vLLM's build for CPUs, for weights and cache; the rest
    is the trainer's."""
    kv_cache_mb: int | None = None
    """Size of the cache of keys and values; None: what memory_share leaves."""
    tensor_parallel_size: int = 1
    """GPUs that share the engine's weights, each with a process of its own if there are several;
    weights reach these through memory."""
    quantization: str | None = None
    """Of the engine's weights, by vLLM's names, e.g. fp8."""
    merge_adapters: bool = False
    """Send all weights with the adapters of model.lora merged into them, instead of the adapters
    alone: samples a little faster, but rounds in bfloat16."""
    enforce_eager: bool = False
    """No CUDA graphs: starts faster, samples slower."""
    sleep: bool = False
    """Give the GPU's memory back while the policy is updated, once per step."""


class EngineDtype(StrEnum):
    """Number format of the weights of an engine that has its own, and of its cache."""

    auto = "auto"
    """bfloat16 on a GPU that has it, else the policy's."""
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


@dataclass
class EngineConfig:
    """What samples. `transformers` runs in this process on the policy's own weights."""

    name: str = "transformers"
    dtype: EngineDtype = EngineDtype.auto
    """Number format of the engine's weights, for engine=vllm: the policy's are cast to it when they
    are sent."""
    max_context: int | None = None
    """Tokens of one sequence; None: what the model's config allows."""
    max_rows: int = 128
    """Sequences decoded together, waiting for tools included (bounds the KV cache)."""
    rejoin_steps: int = 2
    """Decode steps between a completion and its rollout's return; no effect with
    rollout.deterministic=false."""
    vllm: VllmSettings = field(default_factory=VllmSettings)


@dataclass
class WeightSyncConfig:
    """How the engine gets new weights."""

    mode: WeightSyncMode = WeightSyncMode.drain
    tolerance: float | None = None
    """Gap of log-probabilities, in nats, up to which engine and policy agree after a sync, for an
    engine with weights of its own; None: 0.1, for both the mean and the 90 % quantile over a text
    that the engine sampled; in float32 on a CPU 1e-3, for the largest."""


@dataclass
class EvalConfig:
    """Evaluation on the test rows."""

    every: int | None = None
    """Steps between evaluations while training; None: before and after only."""
    questions: int = 200
    """Rows of one evaluation; 0: no evaluation."""
    samples: int = 1
    """Sampled rollouts per row (k of pass@k)."""
    greedy: bool = True
    """Also evaluate at temperature 0."""
    group_by: str | None = None
    """Column by whose values the reward is broken down, e.g. `family`."""
    tools: list[str] | None = None
    """Those of the run's tools that evaluated rollouts have, e.g. [search]; None: all."""
    max_turns: int | None = None
    """None: as rollout.max_turns; the two below likewise."""
    max_turn_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass
class SftConfig:
    """Supervised learning from conversations, `agenttrain sft`; no other verb reads it."""

    batch_size: int = 32
    """Conversations of one optimizer update, taken in the order of the rows."""
    max_tokens: int | None = None
    """A longer conversation is left out and counted (`data/overlong`); None: the model's context
    decides."""


@dataclass
class CheckpointConfig:
    """Checkpoints under <run>/checkpoints."""

    every: int | None = 20
    """Steps between checkpoints; None: only at the end."""
    keep: int = 2
    """Newest checkpoints kept."""
    keep_best: bool = False
    """Also keep the best by the sampled reward of the evaluations while training (`eval.every`) and
    after it, under checkpoints/best; of equals the earlier one."""


@dataclass
class TrackerConfig:
    """Where metrics go besides metrics.jsonl."""

    name: str = "trackio"
    """`trackio` (local dashboard) or `none`."""
    rollouts: str = "all"
    """Rollouts written per step: all, none, or a number."""
    console: bool = True
    """Live progress in the terminal."""


@dataclass
class RunConfig:
    """One run, complete."""

    model: ModelConfig = field(default_factory=ModelConfig)
    chat_template: ChatTemplateConfig = field(default_factory=ChatTemplateConfig)
    response_schema: ResponseSchemaConfig = field(default_factory=ResponseSchemaConfig)
    tools: dict[str, Any] = field(default_factory=dict)
    """Name -> `_target_`, settings (ToolSettings) and bound arguments."""
    stop_tools: list[str] = field(default_factory=list)
    """A call to one of these ends the rollout, as does one to a tool with `stop: true`."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Name -> `_target_` (a class), settings (EnvironmentSettings) and bound arguments; the column
    `environment` picks one per row."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: dict[str, Any] = field(default_factory=dict)
    """Name -> `_target_`, settings (RewardSettings) and bound arguments."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    seed: int = 0
    steps: int = 100
    """Steps of the run."""
    tasks_per_step: int = 8
    """Tasks (P) of a step; P x group_size rollouts."""
    resume: str | None = None
    """Folder of a run to continue; auto: hydra.run.dir, if there is a run in it."""
    resume_changed: list[RunPart] = field(default_factory=list)
    """What may have changed since a resumed run was stopped; the rest is compared."""
