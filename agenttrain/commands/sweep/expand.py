"""`-m`: the runs that a sweep consists of."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, inf, isfinite, prod

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from omegaconf import DictConfig

from agenttrain.commands.sweep.config import LOWER_IS_BETTER, Direction, Sampler
from agenttrain.commands.sweep.record import TrialSearch
from agenttrain.commands.sweep.search import check_space, corners, draw_trials
from agenttrain.settings.compose import Source, compose_raw, open_keys
from agenttrain.settings.messages import REPLACED, explained
from agenttrain.settings.overrides import as_typed
from agenttrain.types import ConfigError

REPEATED = "seed"
"""Setting that is not part of a trial: every trial is run with each of its values."""
MOST = 10_000
"""Configurations of a sweep. Each is composed and checked before the first one runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """The runs of a sweep."""

    runs: list[list[str]]
    """Overrides of each run, in the order of the runs. With a `search` they are examples, which
    contain every choice and both ends of every range."""
    search: TrialSearch | None
    """None: `runs` are all runs."""
    fixed: list[str]
    """The overrides with one value, Hydra's own included, such as hydra.sweep.dir=…."""
    raw: DictConfig
    """Settings under `fixed`, with Hydra's own."""

    def with_overrides(self, *overrides: str) -> Expansion:
        """Return the expansion with further overrides in its `runs` and in `fixed`.

        `raw` stays, and so does `search`: `submit`, for which this is, refuses searches.
        """
        runs = [[*run, *overrides] for run in self.runs]
        return replace(self, runs=runs, fixed=[*self.fixed, *overrides])


def expand(overrides: Sequence[str], source: Source) -> Expansion:
    """Return the runs of a sweep with these overrides.

    There are three ways to choose the runs: every combination of the values; with sweep.trials a
    random choice of combinations; with sweep.sampler=tpe a search, whose later trials depend on the
    results of earlier ones. `sweep.runs` lists configurations one by one, ``["a=1 b=2", "a=3"]``,
    and each of these is combined with each of the chosen runs.

    Example: ``["seed=1,2", "steps=5"]`` -> ``Expansion(runs=[["seed=1", "steps=5"], ["seed=2",
    "steps=5"]], search=None, fixed=["steps=5"], raw=…)``. Raises ConfigError. Needs a
    `hydra_session`.
    """
    with explained(overrides, source.groups):
        parsed = parse(overrides)
        fixed = [o.input_line or "" for o in parsed if not o.is_sweep_override()]
        raw = compose_raw(fixed, source, with_hydra=True)
        _check_plugins(raw)
        for override in parsed:
            section = override.key_or_group.partition(".")[0].partition("/")[0]
            if override.is_sweep_override() and section in ("sweep", "hydra"):
                raise ConfigError(f"{override.input_line}: is the sweep's own and takes one value")
        params = [f"{key}={value}" for key, value in (raw.hydra.sweeper.params or {}).items()]
        # Typed overrides come last, so that they win over hydra.sweeper.params.
        all_overrides = [*parse(open_keys(params)), *parsed]
        last_by_key = {override.get_key_element(): override for override in all_overrides}
        for override in last_by_key.values():
            if override.is_sweep_override() and not override.is_interval_sweep():
                _check_number(_number_of_values(override), as_typed(override.input_line))
        if raw.sweep.sampler is Sampler.tpe:
            return _expand_search(all_overrides, fixed, raw)
        if raw.sweep.direction is not None:
            raise ConfigError(
                f"sweep.direction={raw.sweep.direction.value}: sweep.sampler="
                f"{raw.sweep.sampler.value} does not choose by the objective; leave it out, or "
                "add sweep.sampler=tpe"
            )
        if raw.sweep.trials is None:
            combinations = _all_combinations(all_overrides)
        else:  # no two trials are the same, and each is run with every seed
            axes, repeats = _split_trial_axes(all_overrides)
            _check_number(raw.sweep.trials * len(repeats), f"sweep.trials={raw.sweep.trials}")
            check_space(axes, raw.sweep.trials)
            trials = draw_trials(axes, raw.sweep.trials, raw.sweep.trials_seed)
            combinations = [
                [*trial_overrides(axes, values), *repeat] for values in trials for repeat in repeats
            ]
        # sweep.runs: ["a=1 b=2", "a=3"] -> [["a=1", "b=2"], ["a=3"]].
        listed_runs = list(map(_split_run, raw.sweep.runs))
    if not listed_runs:
        return Expansion(runs=combinations, search=None, fixed=fixed, raw=raw)
    _check_number(len(listed_runs) * len(combinations), "sweep.runs")
    runs = [[*run, *values] for run, values in product(listed_runs, combinations)]
    _check_distinct(runs)
    return Expansion(runs=runs, search=None, fixed=fixed, raw=raw)


def _check_plugins(raw: DictConfig) -> None:
    """Raise ConfigError for a launcher or sweeper of Hydra's other than the basic ones."""
    for part in ("launcher", "sweeper"):
        plugin = raw.hydra[part]  # a text after hydra.sweeper=optuna
        target = str(plugin["_target_"] if isinstance(plugin, Mapping) else plugin)
        if not target.endswith(f".Basic{part.capitalize()}"):
            raise ConfigError(f"hydra/{part}={target}: {REPLACED[part]}")


def _split_run(run: str) -> list[str]:
    """Return the overrides in an entry of sweep.runs, ``key=value key=value``."""
    try:
        return open_keys(shlex.split(run))
    except ValueError as error:
        raise ConfigError(f"sweep.runs: {run}: {error}; quotes come in pairs") from error


def _number_of_values(override: Override) -> int:
    """Return the number of values of an override, without listing those of a range."""
    sweep = override.value()
    if isinstance(sweep, ChoiceSweep):
        return len(sweep.list)
    if not isinstance(sweep, RangeSweep):
        return len(list(override.sweep_string_iterator()))
    assert sweep.start is not None and sweep.stop is not None
    number = (sweep.stop - sweep.start) / sweep.step if sweep.step else inf
    if not isfinite(number):
        raise ConfigError(
            f"{as_typed(override.input_line)}: has no end; change the last value or the step"
        )
    return max(0, ceil(number))


def _check_number(number: int, setting: str) -> None:
    """Raise ConfigError for no configurations, and for more than MOST."""
    if number == 0:
        raise ConfigError(f"{setting}: has no values; name some, e.g. seed=1,2 or seed=range(1,3)")
    if number > MOST:
        raise ConfigError(
            f"{setting}: {number} configurations; a sweep takes at most {MOST}; name fewer values, "
            "or use sweep=optuna with sweep.trials=…, and int(interval(…)) for a range"
        )


def _check_distinct(runs: Sequence[Sequence[str]]) -> None:
    """Raise ConfigError if two runs have the same settings."""
    seen = set()
    for run in runs:
        # The last override of a key counts.
        by_key = {text.lstrip("+").partition("=")[0]: text.lstrip("+") for text in run}
        if (settings := frozenset(by_key.values())) in seen:
            typed = " ".join(as_typed(text) for text in run)
            raise ConfigError(f"{typed}: the sweep has this run twice; name each value once")
        seen.add(settings)


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides, `glob(…)` over the options of a group included. Needs a `hydra_session`."""
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None, "parse() outside of a hydra_session"
    return OverridesParser.create(config_loader=hydra.config_loader).parse_overrides(
        list(overrides)
    )


def _all_combinations(overrides: Sequence[Override]) -> list[list[str]]:
    """Return the overrides of a run for every combination of the values. Raises ConfigError."""
    for override in overrides:
        if override.is_interval_sweep():
            raise ConfigError(
                f"{override.input_line}: a range has infinitely many values; add sweep.trials=… to "
                "draw some configurations, or name the values"
            )
    # Count the combinations before Hydra lists them. It keeps earlier overrides of a key in each
    # run, of which the last one wins.
    last_by_key = {override.get_key_element(): override for override in overrides}
    swept = [override for override in last_by_key.values() if override.is_sweep_override()]
    _check_number(  # none, or more than a sweep may have
        prod(map(_number_of_values, swept)),
        " ".join(as_typed(override.input_line) for override in swept),
    )
    # Without a batch size Hydra puts all runs into one batch.
    (batch,) = BasicSweeper.split_arguments(list(overrides), max_batch_size=None)
    _check_distinct(batch)
    return [list(run) for run in batch]


def _expand_search(overrides: Sequence[Override], fixed: list[str], raw: DictConfig) -> Expansion:
    """Return the search that the overrides ask for, with examples of its runs (`corners`)."""
    settings, key = raw.sweep, "sweep.sampler=tpe"
    if settings.trials is None:
        raise ConfigError(f"{key}: needs a number of trials; add sweep.trials=…")
    if settings.objective is None:
        raise ConfigError(
            f"sweep.objective=null: {key} chooses by it; name a figure, e.g. eval/pass@1"
        )
    if settings.runs:
        raise ConfigError(
            f"sweep.runs={settings.runs}: cannot be combined with {key}; write choices, e.g. "
            "algorithm=grpo,rloo"
        )
    axes, repeats = _split_trial_axes(overrides)
    check_space(axes, settings.trials)
    low = settings.objective in LOWER_IS_BETTER
    direction = settings.direction or (Direction.minimize if low else Direction.maximize)
    # Examples are checked before the first run, instead of trials that are not chosen yet. Each
    # repeat and each corner occurs once, not every pair of them.
    first_corner, *other_corners = [trial_overrides(axes, values) for values in corners(axes)]
    runs = [[*first_corner, *repeat] for repeat in repeats]
    runs += [[*corner, *repeats[0]] for corner in other_corners]
    search = TrialSearch(
        trials=settings.trials,
        seed=settings.trials_seed,
        direction=direction.value,
        space=[axis.input_line or "" for axis in axes.values()],
        repeats=repeats,
    )
    return Expansion(runs=runs, search=search, fixed=fixed, raw=raw)


def _split_trial_axes(overrides: Sequence[Override]) -> tuple[dict[str, Override], list[list[str]]]:
    """Return the axes that a search varies, and the other overrides of each job of a trial.

    The seed (REPEATED) is never an axis: a trial has one job for each seed, and its result is the
    mean of theirs.

    Example: ``optimizer.lr=1e-4,1e-3 seed=0,1 steps=6`` -> one axis, ``[["seed=0", "steps=6"],
    ["seed=1", "steps=6"]]``.
    """
    last_by_key = {override.get_key_element(): override for override in overrides}
    axes = {
        key: override
        for key, override in last_by_key.items()
        if override.is_sweep_override() and override.key_or_group != REPEATED
    }
    outside_axes = [override for key, override in last_by_key.items() if key not in axes]
    return axes, _all_combinations(outside_axes)


def trial_overrides(axes: dict[str, Override], values: Sequence[str]) -> list[str]:
    """Write the values of a trial as overrides."""
    return [f"{key}={value}" for key, value in zip(axes, values, strict=True)]
