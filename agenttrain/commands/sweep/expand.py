"""`-m`: the runs that a sweep consists of."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from itertools import product
from random import Random

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig

from agenttrain.settings.compose import Source, compose_raw, open_keys
from agenttrain.settings.messages import explained
from agenttrain.types import ConfigError

REPEATED = "seed"
"""Not drawn at random: every trial is run with each of its values."""
DIGITS = 4
"""Significant digits of a number that is drawn."""
ATTEMPTS = 1000
"""Attempts per trial at a configuration that was not drawn before."""


def expand(overrides: Sequence[str], source: Source) -> list[list[str]]:
    """Return the overrides of every run of the sweep, in the order in which they are run.

    Example: ``["seed=1,2", "steps=5"]`` -> ``[["seed=1", "steps=5"], ["seed=2", "steps=5"]]``. A
    sweeper that chooses as it goes gives one: what does not vary. Raises ConfigError. Needs a
    `hydra_session`.
    """
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None, "expand() outside of a hydra_session"
    parser = OverridesParser.create(config_loader=hydra.config_loader)
    with explained(overrides, source.groups):
        parsed = parser.parse_overrides(list(overrides))
        fixed = [o.input_line or "" for o in parsed if not o.is_sweep_override()]
        raw = compose_raw(fixed, source, with_hydra=True)
        for override in parsed:
            section = override.key_or_group.partition(".")[0].partition("/")[0]
            if override.is_sweep_override() and section in ("sweep", "hydra"):
                raise ConfigError(f"{override.input_line}: is the sweep's own and takes one value")
        if not is_listed(raw):
            for key in ("runs", "trials"):
                if value := raw.sweep[key]:
                    raise ConfigError(
                        f"sweep.{key}={value}: is for Hydra's basic sweeper; with "
                        f"{raw.hydra.sweeper['_target_']} use the settings of hydra.sweeper"
                    )
            return [fixed]
        params = [f"{key}={value}" for key, value in (raw.hydra.sweeper.params or {}).items()]
        swept = [*parser.parse_overrides(open_keys(params)), *parsed]
        combinations = _drawn(swept, raw) if raw.sweep.trials is not None else _all(swept)
        listed = []
        for run in raw.sweep.runs:
            try:
                listed.append(open_keys(shlex.split(run)))
            except ValueError as error:
                raise ConfigError(f"sweep.runs: {run}: {error}; quotes come in pairs") from error
    return [[*run, *values] for run, values in product(listed or [[]], combinations)]


def is_listed(raw: DictConfig) -> bool:
    """Return whether all runs are known before the first, by settings composed with Hydra's own."""
    return str(raw.hydra.sweeper["_target_"]).endswith(".BasicSweeper")


def _all(overrides: Sequence[Override]) -> list[list[str]]:
    """Return every combination of the values."""
    for override in overrides:
        if override.is_interval_sweep():
            raise ConfigError(
                f"{override.input_line}: a range has no end of values; add sweep.trials=… to draw "
                "so many configurations, or name the values"
            )
    (batch,) = BasicSweeper.split_arguments(list(overrides), max_batch_size=None)
    return [list(run) for run in batch]


def _drawn(overrides: Sequence[Override], raw: DictConfig) -> list[list[str]]:
    """Draw `sweep.trials` combinations, no two the same, each with all seeds."""
    last = {override.get_key_element(): override for override in overrides}
    axes = {
        key: override
        for key, override in last.items()
        if override.is_sweep_override() and override.key_or_group != REPEATED
    }
    trials = raw.sweep.trials
    sizes: list[float] = []
    for axis in axes.values():
        interval = axis.value()
        if isinstance(interval, IntervalSweep):
            start, end = _ends(interval)
            sizes.append(end - start + 1 if isinstance(start, int) else math.inf)
        else:
            sizes.append(len(list(axis.sweep_string_iterator())))
    most = math.prod(sizes)
    if trials < 1:
        raise ConfigError(f"sweep.trials={trials}: must be at least 1")
    if not axes or trials > most:
        reason = f"there are only {most} combinations" if axes else "nothing varies"
        raise ConfigError(f"sweep.trials={trials}: {reason}; leave it out, or add values or ranges")
    rng, configurations = Random(raw.sweep.trials_seed), dict[tuple[str, ...], None]()
    for _ in range(ATTEMPTS * trials):
        values = tuple(f"{key}={_value(axis, rng)}" for key, axis in axes.items())
        configurations[values] = None
        if len(configurations) == trials:
            break
    else:
        raise ConfigError(f"sweep.trials={trials}: the ranges are too narrow for so many")
    others = _all([override for key, override in last.items() if key not in axes])
    return [[*trial, *values] for trial in configurations for values in others]


def _value(axis: Override, rng: Random) -> str:
    """Draw one value, as an override has it; ranges of whole numbers hold both ends.

    Example: `tag(log, interval(1e-4, 1e-2))` -> ``"0.001382"``.
    """
    if not axis.is_interval_sweep():
        return rng.choice(list(axis.sweep_string_iterator()))
    interval = axis.value()
    assert isinstance(interval, IntervalSweep)
    start, end = _ends(interval)
    if "log" not in interval.tags:
        integers = isinstance(start, int) and isinstance(end, int)
        return str(rng.randint(start, end) if integers else _short(rng.uniform(start, end)))  # type: ignore[arg-type]
    number = math.exp(rng.uniform(math.log(start), math.log(end)))
    return str(round(number) if isinstance(start, int) else _short(number))


def _ends(interval: IntervalSweep) -> tuple[int, int] | tuple[float, float]:
    start, end = interval.start, interval.end
    assert start is not None and end is not None
    if start >= end or ("log" in interval.tags and start <= 0):
        raise ConfigError(f"interval({start}, {end}): must rise, and with log from above 0")
    return start, end


def _short(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")
