"""Settings that make a run fit: each is changed, and the run's memory estimated again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any

from agenttrain.launch.config import DistributedName
from agenttrain.runs.memory_plan import MemoryEstimate, PlannedHardware, Sizes, estimate
from agenttrain.settings.checks import distributed_problems
from agenttrain.settings.engine_checks import engine_problems
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.config import (
    LEVELS,
    Dtype,
    MixedPrecision,
    ModelConfig,
    Quantization,
    VisionTower,
)
from agenttrain.training.recomputation import possible_levels

Change = tuple[str, Any]
"""A setting and its new value."""
Choices = list[tuple[Change, ...]]
"""Values of one setting, the mildest first, each with further changes that it requires."""
FSDP2: Change = ("distributed.name", DistributedName.fsdp2)
ADAPTERS: Change = ("model.lora.rank", 16)
IN_4_BITS: Change = ("model.quantization", Quantization.nf4)
CONTEXT_PARALLEL = "distributed.context_parallel"
"""Number of processes that divide the tokens of each rollout among them."""
FIRST_NODE: Change = ("distributed.rendezvous", "first-node:29500")
"""Required by settings with several nodes."""
LEAST_LOGITS = 64
"""Smallest `training.logits_budget_mb` that is proposed."""
GPUS_PER_NODE, MOST_GPUS = 8, 1024
"""GPUs of a proposed node, and most GPUs that are proposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Settings that reduce the run's memory."""

    changes: tuple[Change, ...]
    """Pairs (setting, value), applied together."""
    peak: int
    """Bytes per GPU at the run's peak with these settings."""
    fits: bool = True
    """True if the run fits with these settings."""

    @property
    def overrides(self) -> str:
        """The settings as overrides: ``training.token_budget=8192 distributed=fsdp2``."""
        texts = []
        for key, value in self.changes:
            text = str(value).lower() if isinstance(value, bool) else value
            # A group's choice is stored in `name`, but chosen by the group: distributed=fsdp2.
            texts.append(f"{key.removesuffix('.name')}={text}")
        return " ".join(texts)


class Planner:
    """Estimates of one configuration and of variations of it, to find remedies if it does not fit.

    `Choices` has the values of one setting, from mild to strong. Each is a tuple of changes
    (setting, value), because a value may require other settings::

        [(("training.token_budget", 8192),), (("training.token_budget", 4096),)]
        [(("model.dtype", "bfloat16"), ("training.mixed_precision", "no"))]

    An estimate's `peak` is the most bytes that a GPU needs at once, `excess` the bytes by which the
    peak is more than the GPU has, and `load.context` the tokens of the longest training rollout.
    """

    def __init__(self, config: RunConfig, machine: PlannedHardware, prompt_tokens: int) -> None:
        self.config, self.machine, self.prompt_tokens = config, machine, prompt_tokens
        self._sizes: dict[str, Sizes] = {}

    def sizes(self, model: ModelConfig, key: str = "model.path") -> Sizes:
        """Return the sizes of the model that `key` names; each model is traced once."""
        if (settings := repr(model)) not in self._sizes:
            self._sizes[settings] = Sizes(model, key)
        return self._sizes[settings]

    def estimate(self, changes: Iterable[Change] = ()) -> MemoryEstimate:
        """Estimate the run with these settings changed."""
        config = self._changed(changes)
        return estimate(config, self.sizes(config.model), self.machine, self.prompt_tokens)

    def _changed(self, changes: Iterable[Change]) -> RunConfig:
        """Return the run's settings with some of them changed."""
        config = deepcopy(self.config)
        for key, value in changes:
            *path, name = key.split(".")
            section: Any = config
            for part in path:
                section = getattr(section, part)
            setattr(section, name, value)
        return config

    def _allowed(self, choices: Choices) -> Choices:
        """Return the choices that the run's other settings, e.g. training.compile, allow."""
        if self.config.model.vision is VisionTower.trained:
            # Neither way to divide a model over processes is made for images. FSDP2 is one change,
            # setting and value; CONTEXT_PARALLEL is a setting, refused with any value.
            choices = [c for c in choices if FSDP2 not in c and CONTEXT_PARALLEL not in dict(c)]
        return [c for c in choices if not list(distributed_problems(self._changed(c)))]

    def remedies(self) -> list[Remedy]:
        """Return each setting that alone makes the run fit, then the fewest GPUs that do.

        If no setting alone is enough, the first remedy combines several. If even these are too
        little (`fits` is False), no known setting helps.
        """
        # An item of `settings` is one setting with its values (`Choices`), the mildest first. The
        # numbers of GPUs are one such item, hence the lists with a single element below.
        settings = list(self._settings())
        remedies = self._sufficient_alone(settings)
        if not remedies:
            remedies = [self._combine([*settings, *self._last_resorts()])]
        more_gpus = self._sufficient_alone([self._more_gpus()])
        if not more_gpus and self._rollout_exceeds_microbatch:
            # One rollout is too much for a GPU, however many GPUs hold the weights: divide the
            # tokens of each rollout over the GPUs of a node (context parallel).
            more_gpus = self._sufficient_alone([list(map(_in_one_group, self._more_gpus()))])
        return [*remedies, *more_gpus]

    @property
    def _rollout_exceeds_microbatch(self) -> bool:
        """True if a single rollout may be longer than a microbatch of training.token_budget."""
        return self.estimate().load.context > self.config.training.token_budget

    def _last_resorts(self) -> Iterator[Choices]:
        """Yield settings that change what is trained, proposed only if nothing else is enough."""
        if not self.config.model.lora.rank:
            yield [(ADAPTERS,)]
        elif (
            self.config.model.quantization is None
            # Layers in 4 bits do not go with autocast.
            and self.config.training.mixed_precision is MixedPrecision.no
            # Nor with weights in host memory, which are proposed for fsdp2 (`_settings`): the two
            # would be combined.
            and self.config.distributed.name is not DistributedName.fsdp2
        ):
            yield [(IN_4_BITS,)]

    def _more_gpus(self) -> Choices:
        """Return growing numbers of GPUs, first in one node, then in several.

        Each is a tuple of changes, (setting, value). All have the change FSDP2: more GPUs help only
        if the weights are sharded over them. Those with several nodes have FIRST_NODE too, the
        address at which the nodes meet.
        """
        choices: Choices = []
        # The problems that the engine would have in a run of several training processes.
        if list(engine_problems(self.config, several=True)):
            return choices
        devices = self.estimate().load.devices
        for count in (devices * 2**power for power in range(1, 10)):
            if count > MOST_GPUS:
                break
            if count <= GPUS_PER_NODE:
                choices.append((FSDP2, ("distributed.processes", count)))
                continue
            # Whole nodes only: what `count` has beyond a multiple of 8 is not proposed.
            nodes = ("distributed.nodes", count // GPUS_PER_NODE)
            choices.append((FSDP2, ("distributed.processes", GPUS_PER_NODE), nodes, FIRST_NODE))
        return choices

    def _sufficient_alone(self, settings: list[Choices]) -> list[Remedy]:
        """Return, for each setting with a value that is enough, the mildest such value.

        Each of `settings` has the values of one setting, the mildest first.
        """
        remedies = []
        for choices in map(self._allowed, settings):
            estimates = ((changes, self.estimate(changes)) for changes in choices)
            for changes, memory in estimates:
                if not memory.excess:
                    remedies.append(Remedy(changes=changes, peak=memory.peak))
                    break
        return remedies

    def _combine(self, settings: list[Choices]) -> Remedy:
        """Return a remedy of several settings: add them until the run fits, drop needless ones.

        Settings are added in their order, each with its values from mild to strong. If all of them
        are too little, all that save memory are returned, with `fits` False.
        """
        chosen: dict[str, Any] = {}  # setting -> value
        for changes in chain.from_iterable(map(self._allowed, settings)):
            # A stronger value of a setting takes the place of a milder one, if it saves memory.
            candidate = {**chosen, **dict(changes)}
            if self._missing_bytes(candidate) < self._missing_bytes(chosen):
                chosen = candidate
            if not self.estimate(chosen.items()).excess:
                chosen = self._without_needless(chosen)
                break
        memory = self.estimate(chosen.items())
        return Remedy(changes=tuple(chosen.items()), peak=memory.peak, fits=not memory.excess)

    def _without_needless(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Return the changes without those that the run does not need to fit."""
        for key in list(changes):
            without_key = {k: v for k, v in changes.items() if k != key}
            if not self.estimate(without_key.items()).excess:
                changes = without_key
        return changes

    def _missing_bytes(self, changes: dict[str, Any]) -> tuple[int, int]:
        """Return the missing bytes, then the bytes of all parts.

        A change that saves nothing at the peak may help once another one has lowered the peak.
        """
        memory = self.estimate(changes.items())
        return memory.excess, sum(part.bytes for part in memory.parts)

    def _settings(self) -> Iterator[Choices]:
        """Yield the values of each setting that may help, from mild to strong.

        The settings come in the order in which to try them: first those that only cost time, then
        the weights' format, then those that divide the run over its GPUs or use host memory.
        """
        yield from self._settings_of_microbatches()
        config = self.config
        if config.model.dtype is Dtype.float32:
            # Weights in bfloat16 leave nothing to autocast.
            yield [(("model.dtype", Dtype.bfloat16), ("training.mixed_precision", "no"))]
        # Context parallel divides a rollout over processes. It helps only if a microbatch cannot be
        # made small enough, as it holds at least one rollout.
        is_single = config.distributed.name is DistributedName.single
        if not is_single and self._rollout_exceeds_microbatch:
            devices = self.estimate().load.devices
            sizes = [n for n in range(2, devices + 1) if devices % n == 0]
            present = config.distributed.context_parallel
            yield [((CONTEXT_PARALLEL, size),) for size in sizes if size > present]
        if config.distributed.name is DistributedName.ddp:
            yield [(FSDP2,)]
        # Weights in host memory are refused for a base in 4 bits.
        if config.distributed.name is DistributedName.fsdp2 and config.model.quantization is None:
            yield [(("distributed.cpu_offload", True),)]

    def _settings_of_microbatches(self) -> Iterator[Choices]:
        """Yield settings of recomputation, microbatches, engine and logits."""
        memory, training = self.estimate(), self.config.training
        # With `auto` the plan has the level that is needed.
        if training.activation_checkpointing in LEVELS:
            stronger = LEVELS[LEVELS.index(training.activation_checkpointing) + 1 :]
            model = self.sizes(self.config.model).model
            possible = possible_levels(model, compiled=training.compile)
            yield [
                (("training.activation_checkpointing", level),)
                for level in stronger
                if level in possible
            ]
        # A microbatch holds at least one rollout.
        longest_rollout = memory.load.context
        yield _values("training.token_budget", _halves(training.token_budget, longest_rollout))
        # Settings of the engine that lower its memory, with values from mild to strong.
        for key, values in memory.engine.savings:
            yield _values(f"engine.{key}", values)
        yield _values("training.logits_budget_mb", _halves(training.logits_budget_mb, LEAST_LOGITS))


def _values(key: str, values: Iterable[Any]) -> Choices:
    """Return the values of a setting that require no other setting."""
    return [((key, value),) for value in values]


def _in_one_group(changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """Return changes with all processes of a node in one group of context parallel."""
    return (*changes, (CONTEXT_PARALLEL, dict(changes)["distributed.processes"]))


def _halves(value: int, least: int) -> list[int]:
    """Return a value's halves down to `least`: ``_halves(16384, 3000) == [8192, 4096]``."""
    values = []
    while value // 2 >= least:
        value //= 2
        values.append(value)
    return values
