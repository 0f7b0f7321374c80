"""Trials of a sweep: values out of ranges and choices, drawn by Optuna's samplers.

No study is stored on disk. For each trial a new study is made from the trials so far, which are in
the sweep's record and its jobs' folders, with a seed of its own. A resumed sweep therefore gets the
same trials as one that was never stopped.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from agenttrain.commands.sweep.config import Direction, Sampler
from agenttrain.types import ConfigError
from agenttrain.utils.seeds import derive_seed

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

DIGITS = 4
"""Significant digits of a number out of a range of floats."""
ATTEMPTS = 1000
"""Draws per trial until its values are new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One configuration of a search, with its outcome.

    Example: ``Trial(values=("0.0003", "grpo"), result=0.5, failed=False)``.
    """

    values: tuple[str, ...]
    """Value of each axis, as in an override."""
    result: float | None = None
    """Mean of the objective over the seeds; None while the trial runs, and if it failed."""
    failed: bool = False
    """True if all of its jobs have ended, and not all have the objective."""


def check_space(axes: Mapping[str, Override], trials: int) -> None:
    """Raise ConfigError for invalid axes, and for axes with fewer than `trials` configurations."""
    if find_spec("optuna") is None:
        raise ConfigError(f"sweep.trials={trials}: needs Optuna; pip install 'agenttrain[sweep]'")
    if trials < 1:
        raise ConfigError(f"sweep.trials={trials}: must be at least 1")
    if not axes:
        raise ConfigError(
            f"sweep.trials={trials}: nothing varies; leave it out, or add values or ranges"
        )
    sizes: list[float] = []
    for axis in axes.values():
        line, sweep = axis.input_line, axis.value()
        tags: set[str] = getattr(sweep, "tags", set())
        if unknown := sorted(tags - {"log"}):
            raise ConfigError(
                f"{line}: the tag {unknown[0]!r} means nothing; the only one is log, "
                "tag(log, interval(…))"
            )
        if not isinstance(sweep, IntervalSweep):
            if tags:
                raise ConfigError(f"{line}: the tag log is for interval(…); leave it out")
            sizes.append(len(_choices(axis)))
            continue
        start, end = sweep.start, sweep.end
        assert start is not None and end is not None
        finite = math.isfinite(start) and math.isfinite(end)
        if not finite or start >= end or (tags and start <= 0):
            problem = "must rise between finite numbers, and with log from above 0"
            raise ConfigError(f"{line}: {problem}")
        sizes.append(end - start + 1 if isinstance(start, int) else math.inf)
    combinations = math.prod(sizes)
    if trials > combinations:
        raise ConfigError(
            f"sweep.trials={trials}: there are only {combinations} combinations; leave it out, or "
            "add values or ranges"
        )


def _choices(axis: Override) -> list[str]:
    """Return the values of an axis that is not an interval, each once."""
    return list(dict.fromkeys(axis.sweep_string_iterator()))


def draw_trials(axes: Mapping[str, Override], trials: int, seed: int) -> list[tuple[str, ...]]:
    """Draw the values of `trials` trials at random, no two the same. Raises ConfigError.

    Each tuple has the values of one trial as text, in the order of `axes`: ``("1e-4", "16")``.
    """
    # Random draws depend neither on a direction nor on past trials.
    draws = _new_values(axes, Sampler.random, seed, Direction.maximize, ())
    values = list(islice(draws, trials))
    if len(values) < trials:
        raise ConfigError(
            f"sweep.trials={trials}: the ranges are too narrow for so many, at {DIGITS} digits a "
            "number; lower it, or widen them"
        )
    return values


def next_trial(
    axes: Mapping[str, Override], seed: int, direction: Direction, trials: Sequence[Trial]
) -> tuple[str, ...] | None:
    """Return the values to try next, given all trials so far; None if no new ones are found."""
    trial_seed = derive_seed(seed, len(trials)) % 2**32
    return next(_new_values(axes, Sampler.tpe, trial_seed, direction, trials), None)


def _new_values(
    axes: Mapping[str, Override],
    sampler: Sampler,
    seed: int,
    direction: Direction,
    trials: Sequence[Trial],
) -> Iterator[tuple[str, ...]]:
    """Yield values of new trials, one text for each axis: ``("1e-4", "16")``.

    No trial repeats the values of another, or of the past `trials`, from which the sampler `tpe`
    learns. Ends after ATTEMPTS draws in a row of values that have been there.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    chooser: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed)
    if sampler is Sampler.tpe:
        with warnings.catch_warnings():  # Optuna 4 warns of the argument, the default in Optuna 5
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            # constant_liar: a running trial counts as a bad one, or parallel trials would be its
            # neighbours.
            chooser = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    study = optuna.create_study(sampler=chooser, direction=direction.value)
    distributions = {key: _distribution(axis) for key, axis in axes.items()}
    for trial in trials:
        study.add_trial(_to_optuna_trial(trial, distributions))
    seen, vain_draws = {trial.values for trial in trials}, 0
    while vain_draws < ATTEMPTS:
        # No result is told to the study: each draw stays in it as a running trial. With
        # constant_liar a vain draw thus leads the next one away from the same values.
        params = study.ask(distributions).params
        values = tuple(_write_value(params[key], distributions[key]) for key in axes)
        vain_draws += 1
        if values not in seen:
            seen.add(values)
            vain_draws = 0
            yield values


def _to_optuna_trial(trial: Trial, distributions: Mapping[str, BaseDistribution]) -> FrozenTrial:
    """Return a trial in Optuna's form: complete, failed, or running."""
    from optuna.trial import TrialState, create_trial

    state_without_result = TrialState.FAIL if trial.failed else TrialState.RUNNING
    return create_trial(
        params={
            key: _read_value(text, distribution)
            for text, (key, distribution) in zip(trial.values, distributions.items(), strict=True)
        },
        distributions=dict(distributions),
        value=trial.result,
        state=state_without_result if trial.result is None else TrialState.COMPLETE,
    )


def _distribution(axis: Override) -> BaseDistribution:
    """Return Optuna's form of an axis. An interval of whole numbers includes both ends.

    Example: `tag(log, interval(1e-4, 1e-2))` -> ``FloatDistribution(1e-4, 1e-2, log=True)``.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    sweep = axis.value()
    if isinstance(sweep, IntervalSweep):
        start, end, log = sweep.start, sweep.end, "log" in sweep.tags
        assert start is not None and end is not None
        if isinstance(start, int) and isinstance(end, int):
            return IntDistribution(start, end, log=log)
        return FloatDistribution(start, end, log=log)
    texts = _choices(axis)
    if isinstance(sweep, RangeSweep) and isinstance(sweep.step, int) and len(texts) > 1:
        numbers = sorted(map(int, texts))
        return IntDistribution(numbers[0], numbers[-1], step=abs(sweep.step))
    return CategoricalDistribution(texts)


def _write_value(value: Any, distribution: BaseDistribution) -> str:
    """Return a value as in an override; a float of an interval is rounded to DIGITS within it."""
    from optuna.distributions import FloatDistribution

    if isinstance(distribution, FloatDistribution):
        value = min(max(float(f"{value:.{DIGITS}g}"), distribution.low), distribution.high)
    return str(value)


def _read_value(text: str, distribution: BaseDistribution) -> Any:
    """Read a value that `_write_value` wrote, as its distribution has it: a number or a text."""
    from optuna.distributions import FloatDistribution, IntDistribution

    if isinstance(distribution, IntDistribution):
        return int(text)
    return float(text) if isinstance(distribution, FloatDistribution) else text


def corners(axes: Mapping[str, Override]) -> list[tuple[str, ...]]:
    """Return trials that together have every choice and both ends of every range.

    The first trial has the first value of each axis, every other one differs from it in one axis.

    Example: `seed=interval(1, 9)` and `algorithm=grpo,rloo` -> ``[("1.0", "grpo"), ("9.0", "grpo"),
    ("1.0", "rloo")]``.
    """
    axis_values = list[list[str]]()
    for axis in axes.values():
        sweep = axis.value()
        if isinstance(sweep, IntervalSweep):
            axis_values.append([str(sweep.start), str(sweep.end)])
        else:
            axis_values.append(_choices(axis))
    first = tuple(values[0] for values in axis_values)
    variations = [
        (*first[:position], value, *first[position + 1 :])
        for position, values in enumerate(axis_values)
        for value in values[1:]
    ]
    return [first, *variations]
