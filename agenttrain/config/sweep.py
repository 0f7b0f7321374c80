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

from agenttrain.config.compose import Source, compose_raw, open_keys
from agenttrain.config.errors import ConfigError, explained

REPEATED = "seed"
"""Not drawn at random: every trial is run with each of its values."""
DIGITS = 4
"""Of a number that is drawn."""
ATTEMPTS = 1000
"""At a configuration that was not drawn before."""


def expand(overrides: Sequence[str], source: Source) -> list[list[str]]:
    """The overrides of every run of the sweep, in the order in which they are run.

    Example: ``["seed=1,2", "steps=5"]`` -> ``[["seed=1", "steps=5"], ["seed=2", "steps=5"]]``. A
    sweeper that chooses as it goes gives one: what does not vary. Raises ConfigError. Needs a
    `hydra_session`.
    """
    parser = _parser()
    with explained(overrides, source.groups):
        parsed = parser.parse_overrides(list(overrides))
        fixed = [o.input_line or "" for o in parsed if not o.is_sweep_override()]
        raw = compose_raw(fixed, source, with_hydra=True)
        _refuse_swept_settings(parsed)
        if not is_listed(raw):
            _refuse_plan(raw)
            return [fixed]
        params = [f"{key}={value}" for key, value in (raw.hydra.sweeper.params or {}).items()]
        found = [*parser.parse_overrides(open_keys(params)), *parsed]
        combinations = _drawn(found, raw) if raw.sweep.trials is not None else _all(found)
        listed = [open_keys(_words(text)) for text in raw.sweep.runs] or [[]]
    return [[*first, *rest] for first, rest in product(listed, combinations)]


def is_listed(raw: DictConfig) -> bool:
    """Whether all runs are known before the first, by settings composed with Hydra's own."""
    return str(raw.hydra.sweeper["_target_"]).endswith(".BasicSweeper")


def _words(run: str) -> list[str]:
    try:
        return shlex.split(run)
    except ValueError as error:
        raise ConfigError(f"sweep.runs: {run}: {error}; quotes come in pairs") from error


def _parser() -> OverridesParser:
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None, "expand() outside of a hydra_session"
    return OverridesParser.create(config_loader=hydra.config_loader)


def _refuse_swept_settings(parsed: Sequence[Override]) -> None:
    for override in parsed:
        section = override.key_or_group.partition(".")[0].partition("/")[0]
        if override.is_sweep_override() and section in ("sweep", "hydra"):
            raise ConfigError(f"{override.input_line}: is the sweep's own and takes one value")


def _refuse_plan(raw: DictConfig) -> None:
    for key in ("runs", "trials"):
        if value := raw.sweep[key]:
            raise ConfigError(
                f"sweep.{key}={value}: is for Hydra's basic sweeper; with "
                f"{raw.hydra.sweeper['_target_']} use the settings of hydra.sweeper"
            )


def _all(found: Sequence[Override]) -> list[list[str]]:
    """Every combination of the values."""
    for override in found:
        if override.is_interval_sweep():
            raise ConfigError(
                f"{override.input_line}: a range has no end of values; add sweep.trials=… to draw "
                "so many configurations, or name the values"
            )
    (batch,) = BasicSweeper.split_arguments(list(found), max_batch_size=None)
    return [list(run) for run in batch]


def _drawn(found: Sequence[Override], raw: DictConfig) -> list[list[str]]:
    """`sweep.trials` combinations, no two the same, each with all seeds."""
    last = {override.get_key_element(): override for override in found}
    axes = {
        key: override
        for key, override in last.items()
        if override.is_sweep_override() and override.key_or_group != REPEATED
    }
    trials, most = raw.sweep.trials, math.prod(map(_size, axes.values()))
    if trials < 1:
        raise ConfigError(f"sweep.trials={trials}: must be at least 1")
    if not axes or trials > most:
        there = f"there are only {most} combinations" if axes else "nothing varies"
        raise ConfigError(f"sweep.trials={trials}: {there}; leave it out, or add values or ranges")
    random, drawn = Random(raw.sweep.trials_seed), dict[tuple[str, ...], None]()
    for _ in range(ATTEMPTS * trials):
        drawn[tuple(f"{key}={_value(axis, random)}" for key, axis in axes.items())] = None
        if len(drawn) == trials:
            break
    else:
        raise ConfigError(f"sweep.trials={trials}: the ranges are too narrow for so many")
    others = _all([override for key, override in last.items() if key not in axes])
    return [[*trial, *rest] for trial in drawn for rest in others]


def _size(axis: Override) -> float:
    """How many values there are."""
    if not axis.is_interval_sweep():
        return len(list(axis.sweep_string_iterator()))
    interval = axis.value()
    assert isinstance(interval, IntervalSweep)
    start, end = _ends(interval)
    return end - start + 1 if isinstance(start, int) else math.inf


def _value(axis: Override, random: Random) -> str:
    """One value as an override has it; ranges of whole numbers hold both ends.

    Example: `tag(log, interval(1e-4, 1e-2))` -> ``"0.001382"``.
    """
    if not axis.is_interval_sweep():
        return random.choice(list(axis.sweep_string_iterator()))
    interval = axis.value()
    assert isinstance(interval, IntervalSweep)
    start, end = _ends(interval)
    if "log" not in interval.tags:
        whole = isinstance(start, int) and isinstance(end, int)
        return str(random.randint(start, end) if whole else _short(random.uniform(start, end)))  # type: ignore[arg-type]
    drawn = math.exp(random.uniform(math.log(start), math.log(end)))
    return str(round(drawn) if isinstance(start, int) else _short(drawn))


def _ends(interval: IntervalSweep) -> tuple[int, int] | tuple[float, float]:
    start, end = interval.start, interval.end
    assert start is not None and end is not None
    if start >= end or ("log" in interval.tags and start <= 0):
        raise ConfigError(f"interval({start}, {end}): must rise, and with log from above 0")
    return start, end


def _short(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")
