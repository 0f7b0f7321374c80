"""Settings that make a run fit, by estimates with each of them changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any

from agenttrain.commands.plan.estimate import MemoryEstimate, PlannedHardware, Sizes, estimate
from agenttrain.launch.config import DistributedName
from agenttrain.settings.engine_checks import engine_problems
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.config import Dtype, ModelConfig

Change = tuple[str, Any]
"""A setting and its new value."""
Choices = list[tuple[Change, ...]]
"""Values of a setting, the mildest first, each with the changes that it needs beside it."""
FSDP2: Change = ("distributed.name", DistributedName.fsdp2)
LAST: list[Choices] = [[(("model.lora.rank", 16),)]]
"""Settings that change the training itself: proposed only if nothing else is enough."""
FIRST_NODE: Change = ("distributed.rendezvous", "first-node:29500")
"""Required by settings with several nodes."""
GPUS_PER_NODE, MOST = 8, 1024
"""GPUs of a proposed node, and most GPUs that are proposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Settings that make the run smaller, and its peak with them."""

    changes: tuple[Change, ...]
    peak: int
    fits: bool = True

    @property
    def overrides(self) -> str:
        """The settings as typed on a command line: ``training.token_budget=8192``."""
        texts = []
        for key, value in self.changes:
            text = str(value).lower() if isinstance(value, bool) else value
            texts.append(f"{key.removesuffix('.name')}={text}")  # .name: a group's choice
        return " ".join(texts)


class Planner:
    """Estimates of one configuration and of variations of it."""

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
        config = deepcopy(self.config)
        for key, value in changes:
            *path, name = key.split(".")
            section: Any = config
            for part in path:
                section = getattr(section, part)
            setattr(section, name, value)
        return estimate(config, self.sizes(config.model), self.machine, self.prompt_tokens)

    def remedies(self) -> list[Remedy]:
        """Return settings of which each alone is enough, or else several together; then more GPUs.

        Several together may still be too much: then no known setting helps.
        """
        settings = list(self._settings())
        alone = self._enough(settings) or [self._together([*settings, *LAST])]
        more: Choices = []
        if not list(engine_problems(self.config, several=True)):  # else in one process only
            devices = self.estimate().load.devices
            for count in (devices * 2**power for power in range(1, 10)):
                if count > MOST:
                    break
                if count <= GPUS_PER_NODE:
                    more.append((FSDP2, ("distributed.processes", count)))
                    continue
                nodes = ("distributed.nodes", count // GPUS_PER_NODE)
                more.append((FSDP2, ("distributed.processes", GPUS_PER_NODE), nodes, FIRST_NODE))
        return [*alone, *self._enough([more])]

    def _enough(self, settings: list[Choices]) -> list[Remedy]:
        """Return, for each setting with a value that is enough, the mildest such value."""
        remedies = []
        for choices in settings:
            estimates = ((changes, self.estimate(changes)) for changes in choices)
            enough = next((pair for pair in estimates if not pair[1].excess), None)
            if enough is not None:
                remedies.append(Remedy(changes=enough[0], peak=enough[1].peak))
        return remedies

    def _together(self, settings: list[Choices]) -> Remedy:
        """Change one setting after the other until the run fits, then undo the needless changes."""
        chosen: dict[str, Any] = {}
        for changes in chain.from_iterable(settings):
            chosen = min(chosen, {**chosen, **dict(changes)}, key=self._missing)
            if self.estimate(chosen.items()).excess:
                continue
            for key in list(chosen):
                others = {k: v for k, v in chosen.items() if k != key}
                if not self.estimate(others.items()).excess:
                    chosen = others
            break
        memory = self.estimate(chosen.items())
        return Remedy(changes=tuple(chosen.items()), peak=memory.peak, fits=not memory.excess)

    def _missing(self, changes: dict[str, Any]) -> tuple[int, int]:
        """Return the missing bytes, and those of all parts: fewer may help at another moment."""
        memory = self.estimate(changes.items())
        return memory.excess, sum(part.bytes for part in memory.parts)

    def _settings(self) -> Iterator[Choices]:
        """Yield the values of each setting, from mild to strong."""
        now = self.estimate()
        config, load, training = self.config, now.load, self.config.training
        if not training.gradient_checkpointing:
            yield [(("training.gradient_checkpointing", True),)]
        single = [
            ("training.token_budget", _halves(training.token_budget, load.context)),
            *((f"engine.{key}", values) for key, values in now.engine.savings),
            ("training.logits_budget_mb", _halves(training.logits_budget_mb, 64)),
        ]
        for key, values in single:
            yield [((key, value),) for value in values]
        if config.model.dtype is Dtype.float32:
            yield [(("model.dtype", Dtype.bfloat16), ("training.mixed_precision", "no"))]
        if config.distributed.name is DistributedName.ddp:
            yield [(FSDP2,)]
        if config.distributed.name is DistributedName.fsdp2:
            yield [(("distributed.cpu_offload", True),)]


def _halves(value: int, least: int) -> list[int]:
    """Halve a value as long as it is at least `least`: ``_halves(16384, 3000)`` -> [8192, 4096]."""
    values = []
    while value // 2 >= least:
        value //= 2
        values.append(value)
    return values
