"""Which setting makes a run fit, found by estimating with each one turned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from agenttrain.commands.plan.estimate import MemoryEstimate, PlannedHardware, Sizes, estimate
from agenttrain.launch.config import DistributedName
from agenttrain.settings.engine_checks import engine_problems
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.config import Dtype, ModelConfig

Turn = tuple[str, Any]
"""A setting and its new value."""
Choices = list[tuple[Turn, ...]]
"""Values of a setting, the mildest first, each with what has to go with it."""
FSDP2: Turn = ("distributed.name", DistributedName.fsdp2)
LAST: list[Choices] = [[(("model.lora.rank", 16),)]]
"""Settings that change what is learnt, where nothing else is enough."""
FIRST_NODE: Turn = ("distributed.rendezvous", "first-node:29500")
"""Without which several nodes are refused."""
GPUS_PER_NODE, MOST = 8, 1024
"""GPUs that are proposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Settings that make the run smaller, and its peak with them."""

    turns: tuple[Turn, ...]
    peak: int
    fits: bool = True

    @property
    def overrides(self) -> str:
        """The settings as they are typed: ``training.token_budget=8192``."""
        texts = []
        for key, value in self.turns:
            text = str(value).lower() if isinstance(value, bool) else value
            texts.append(f"{key.removesuffix('.name')}={text}")  # .name: a group's choice
        return " ".join(texts)


class Planner:
    """Estimates of one configuration and of variations of it."""

    def __init__(self, config: RunConfig, machine: PlannedHardware, prompt_tokens: int) -> None:
        self.config, self.machine, self.prompt_tokens = config, machine, prompt_tokens
        self._sizes: dict[str, Sizes] = {}

    def sizes(self, model: ModelConfig) -> Sizes:
        """Return a model's sizes; each model is traced once."""
        if (key := repr(model)) not in self._sizes:
            self._sizes[key] = Sizes(model)
        return self._sizes[key]

    def estimate(self, turns: tuple[Turn, ...] = ()) -> MemoryEstimate:
        """Estimate the run with these settings turned."""
        config = deepcopy(self.config)
        for key, value in turns:
            *path, name = key.split(".")
            section: Any = config
            for part in path:
                section = getattr(section, part)
            setattr(section, name, value)
        return estimate(config, self.sizes(config.model), self.machine, self.prompt_tokens)

    def remedies(self) -> list[Remedy]:
        """Return settings of which each alone is enough; if none is, several together; more GPUs,
        too.

        The several may still be too large: then nothing that is known here helps.
        """
        settings = list(self._settings())
        alone = self._enough(settings) or [self._together([*settings, *LAST])]
        more: Choices = []
        if not list(engine_problems(self.config, several=True)):  # else in one process only
            now = self.estimate().load.devices
            counts = [count for power in range(1, 10) if (count := now * 2**power) <= MOST]
            more = [(FSDP2, *_gpus(count)) for count in counts]
        return [*alone, *self._enough([more])]

    def _enough(self, settings: list[Choices]) -> list[Remedy]:
        """Return the mildest value that is enough of each setting that has one."""
        remedies = []
        for choices in settings:
            estimates = ((turns, self.estimate(turns)) for turns in choices)
            enough = next((pair for pair in estimates if not pair[1].excess), None)
            if enough is not None:
                remedies.append(Remedy(turns=enough[0], peak=enough[1].peak))
        return remedies

    def _together(self, settings: list[Choices]) -> Remedy:
        """Turn one setting after the other until the run fits, then undo the needless ones."""
        chosen: dict[str, Any] = {}
        for choices in settings:
            for turns in choices:
                tried = {**chosen, **dict(turns)}
                if self._missing(tried) < self._missing(chosen):
                    chosen = tried
                if self._with(chosen).excess:
                    continue
                for key in list(chosen):
                    others = {k: v for k, v in chosen.items() if k != key}
                    if not self._with(others).excess:
                        chosen = others
                return self._remedy(chosen)
        return self._remedy(chosen)

    def _missing(self, turns: dict[str, Any]) -> tuple[int, int]:
        """Return the missing bytes, and those of all parts: fewer may help at another moment."""
        made = self._with(turns)
        return made.excess, sum(part.bytes for part in made.parts)

    def _with(self, turns: dict[str, Any]) -> MemoryEstimate:
        return self.estimate(tuple(turns.items()))

    def _remedy(self, turns: dict[str, Any]) -> Remedy:
        made = self._with(turns)
        return Remedy(turns=tuple(turns.items()), peak=made.peak, fits=not made.excess)

    def _settings(self) -> Iterator[Choices]:
        """Yield the values of each setting, from mild to strong."""
        now = self.estimate()
        config, load, training = self.config, now.load, self.config.training
        if not training.gradient_checkpointing:
            yield [(("training.gradient_checkpointing", True),)]
        yield _each("training.token_budget", _halves(training.token_budget, load.context))
        for key, values in now.engine.savings:
            yield _each(f"engine.{key}", values)
        yield _each("training.logits_budget_mb", _halves(training.logits_budget_mb, 64))
        if config.model.dtype is Dtype.float32:
            yield [(("model.dtype", Dtype.bfloat16), ("training.mixed_precision", "no"))]
        if config.distributed.name is DistributedName.ddp:
            yield [(FSDP2,)]
        if config.distributed.name is DistributedName.fsdp2:
            yield [(("distributed.cpu_offload", True),)]


def _gpus(count: int) -> tuple[Turn, ...]:
    if count <= GPUS_PER_NODE:
        return (("distributed.processes", count),)
    nodes = ("distributed.nodes", count // GPUS_PER_NODE)
    return ("distributed.processes", GPUS_PER_NODE), nodes, FIRST_NODE


def _each(key: str, values: Sequence[Any]) -> Choices:
    return [((key, value),) for value in values]


def _halves(value: int, least: int) -> list[int]:
    """``_halves(16384, 3000)`` -> [8192, 4096]"""
    values = []
    while value // 2 >= least:
        value //= 2
        values.append(value)
    return values
