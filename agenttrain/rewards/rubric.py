"""Reward functions and their weights, built from the `reward:` section: rollouts -> rewards."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from agenttrain.rewards.config import OnUnavailable, RewardSettings
from agenttrain.rewards.function import (
    MAX_REWARD,
    FunctionScorer,
    NoNumber,
    RewardError,
    RewardFunction,
    RewardUnavailable,
    Score,
    alarm_text,
    error_prefix,
    is_trl,
)
from agenttrain.types import Rollout
from agenttrain.utils.locate import about_argument, locate_section
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.redaction import hide_in_settings, hide_secrets
from agenttrain.utils.sections import split_section


class _Rewards(NamedTuple):
    """The rewards of one rollout, as `Rubric.score` sets them once all rollouts are scored."""

    rewards: dict[str, float | None]
    turn_scores: dict[str, tuple[float, ...]]
    total: float | None
    reason: str | None
    """Why the rollout has no reward although it should; None if it has one."""


class Rubric:
    """The reward functions of a run; a rollout's reward is the weighted sum of those that apply.

    Example with weights ``{"exact": 1.0, "short": 0.5}``: rewards ``{"exact": 1.0, "short": 0.2}``
    make 1.1, and ``{"exact": None, "short": 0.2}`` make 0.1. If both are None, so is the sum.

    The `check` methods are called before a run, `score` for its finished rollouts.
    """

    def __init__(
        self,
        functions: Mapping[str, RewardFunction | FunctionScorer],
        weights: Mapping[str, float] | None = None,
        *,
        on_unavailable: Mapping[str, OnUnavailable] | None = None,
    ) -> None:
        """Take functions by name; one without a weight has the weight 1.

        `on_unavailable` says what happens if a function cannot score: the run stops (the default),
        or the rollout is left out. Raises ValueError for wrong weights.
        """
        weights = weights or {}
        for name, weight in weights.items():
            if name not in functions:
                hint = did_you_mean(name, functions)
                raise ValueError(f"reward.{name}.weight={weight}: no such function{hint}")
            if not math.isfinite(weight):
                raise ValueError(f"reward.{name}.weight={weight}: expected a finite number")
        self.strict = True
        """True if NaN ends the run, as in training; False in evaluations."""
        self.names = tuple(functions)
        self.weights = {name: float(weights.get(name, 1.0)) for name in functions}
        self._on_unavailable = dict(on_unavailable or {})
        self._scorers = [
            function if isinstance(function, FunctionScorer) else FunctionScorer(name, function)
            for name, function in functions.items()
        ]
        self.columns = {scorer.name: scorer.columns for scorer in self._scorers}
        """Columns that every row must have, by function."""

    def alarms(self) -> list[str]:
        """Return a note for each function that sets alarms (SIGALRM), or whose code may set them.

        Such a function must run in the main thread, where all else waits for it.
        """
        texts = []
        for scorer in self._scorers:
            if scorer.sets_alarms:
                texts.append(alarm_text(scorer.name))
            elif setter := scorer.may_set_alarms():
                texts.append(f"{alarm_text(scorer.name)} (found in the code of {setter})")
        return texts

    def lenient(self) -> Rubric:
        """Return a copy for evaluation: NaN leaves its rollout unscored, and the run goes on."""
        rubric = copy.copy(self)
        rubric.strict = False
        rubric._scorers = [copy.copy(scorer) for scorer in self._scorers]
        for scorer in rubric._scorers:
            scorer.strict = False
        return rubric

    def check_tools(self, names: Collection[str]) -> None:
        """Raise ValueError if a function needs a tool that is not among the run's `names`."""
        for scorer in self._scorers:
            for tool in scorer.tools:
                if tool not in names:
                    raise ValueError(
                        f"reward.{scorer.name}.tool={tool}: is not a tool of this run"
                        f"{did_you_mean(tool, names)}, so the reward would always be 0; its tools "
                        f"are: {', '.join(names) or 'none'}; reward.{scorer.name}.tool=null reads "
                        "the last message instead"
                    )

    def check_group_size(self, group_size: int) -> None:
        """Raise ValueError if a function compares the rollouts of groups that have only one."""
        for scorer in self._scorers:
            if scorer.scores_groups and group_size == 1:
                raise ValueError(
                    f"reward.{scorer.name}: compares the rollouts of a group, and "
                    "algorithm.group_size=1 leaves nothing to compare; set it to 2 or more"
                )

    async def score(self, rollouts: Sequence[Rollout]) -> list[str]:
        """Set `rewards`, `turn_scores` and `reward` of every rollout.

        Return the reasons why rollouts that should have a reward have none; `error` of the rollout
        has the reason too. Raises RewardError, and leaves all rollouts unchanged, if a function
        raises, is unavailable and that stops the run, or returns no finite number in training. In
        an evaluation (`lenient`) such a number leaves only its rollout without a reward.
        """
        values: dict[str, list[Score]] = {}
        for scorer in self._scorers:
            # For no finite number this raises RewardError if `scorer.strict`, else it is NoNumber.
            values[scorer.name] = await scorer.score(rollouts)
            if self._on_unavailable.get(scorer.name, OnUnavailable.stop) is OnUnavailable.drop:
                continue
            for rollout, score in zip(rollouts, values[scorer.name], strict=True):
                if isinstance(score, RewardUnavailable) and not isinstance(score, NoNumber):
                    raise RewardError(
                        f"{error_prefix(scorer.name, rollout)}: {score} "
                        f"(reward.{scorer.name}.on_unavailable=drop leaves such rollouts out)",
                        culprits=[rollout.rollout_id],
                    ) from score
        # Compute all before setting any: an error must leave all rollouts unchanged.
        results = [
            self._weigh(rollout, {name: scores[index] for name, scores in values.items()})
            for index, rollout in enumerate(rollouts)
        ]
        for rollout, result in zip(rollouts, results, strict=True):
            rollout.rewards, rollout.turn_scores = result.rewards, result.turn_scores
            rollout.reward = result.total
            if result.reason:
                rollout.error = result.reason
        return [result.reason for result in results if result.reason]

    def _weigh(self, rollout: Rollout, scores: Mapping[str, Score]) -> _Rewards:
        """Return a rollout's rewards and their weighted sum, from its scores by function.

        The sum is None, with the reason, if a score is unavailable. A sum beyond MAX_REWARD is the
        functions' fault: RewardError if `strict`, else None with the reason.
        """
        rewards: dict[str, float | None] = {}
        turn_scores: dict[str, tuple[float, ...]] = {}
        reason: str | None = None
        for name, score in scores.items():
            if isinstance(score, tuple):
                turn_scores[name] = score
                score = math.fsum(score)
            rewards[name] = None if isinstance(score, RewardUnavailable) else score
            if isinstance(score, RewardUnavailable) and reason is None:
                reason = hide_secrets(f"{error_prefix(name, rollout)}: {score}")
        try:
            total = None if reason else self.weighted_sum(rewards)
        except ValueError as error:
            reason = f"rollout {rollout.rollout_id!r} of task {rollout.task.task_id!r}: {error}"
            if self.strict:
                raise RewardError(reason, culprits=[rollout.rollout_id]) from error
            total = None
        return _Rewards(rewards=rewards, turn_scores=turn_scores, total=total, reason=reason)

    def weighted_sum(self, rewards: Mapping[str, float | None]) -> float | None:
        """Return the weighted sum, or None if no function applies; ValueError if too large."""
        applicable = {n: value for n, value in rewards.items() if value is not None}
        if not applicable:
            return None
        terms = [self.weights[n] * value for n, value in applicable.items()]
        # The terms are checked first: fsum raises for infinite ones and for an infinite sum.
        terms_fit = all(abs(term) <= MAX_REWARD for term in terms)
        if terms_fit and abs(total := math.fsum(terms)) <= MAX_REWARD:
            return total
        text = ", ".join(f"{n} {v:g} (weight {self.weights[n]:g})" for n, v in applicable.items())
        raise ValueError(f"the weighted sum of its rewards is beyond {MAX_REWARD:g}: {text}")


def build_rubric(reward: Mapping[str, Any]) -> Rubric:
    """Build every declared reward function.

    Example: ``{"exact": {"_target_": "agenttrain.rewards.builtin.answers.ExactMatch",
    "weight": 1.0, "ignore_case": True}}``. `_target_` names a function, to which the
    other settings are bound, or a class whose instances are callable. The fields of
    `RewardSettings` are settings of their own. Raises ValueError with key, value and remedy.
    """
    if not reward:
        raise ValueError("reward={}: there is no reward function; choose one, e.g. exact_match")
    scorers: dict[str, FunctionScorer] = {}
    settings: dict[str, RewardSettings] = {}
    for name, section in reward.items():
        key = f"reward.{name}"
        located = locate_section(section, key=key)
        settings[name], bound = split_section(RewardSettings, located.bound, key)
        scorers[name] = _build_scorer(located.target, name, bound, located.where, settings[name])
    return Rubric(
        scorers,
        {name: reward_settings.weight for name, reward_settings in settings.items()},
        on_unavailable={
            name: reward_settings.on_unavailable for name, reward_settings in settings.items()
        },
    )


def _build_scorer(
    target: Any, name: str, bound: dict[str, Any], where: str, settings: RewardSettings
) -> FunctionScorer:
    """Build the scorer of a function or class; `bound` are its arguments from the configuration.

    A class is instantiated with `bound`, and the instance is the function. `where` begins errors:
    it names the setting.
    """
    if not callable(target):
        raise ValueError(f"{where}: {target!r} is not a function or a class")
    try:
        inspect.signature(target).bind_partial(**bound)  # TypeError for an unknown argument
        is_class = inspect.isclass(target)
        unbound = target(**bound) if is_class else target  # a constructor may refuse a value
    except ValueError as error:
        raise ValueError(about_argument(error, f"reward.{name}", bound)) from error
    except TypeError as error:
        raise ValueError(f"{where} with {hide_in_settings(bound)}: {error}") from error
    if not callable(unbound):
        raise ValueError(f"{where}: its instances cannot be called; give the class a __call__")
    function_arguments = {} if is_class else bound  # an instance has taken its own
    function = functools.partial(unbound, **function_arguments) if function_arguments else unbound
    try:
        if not is_trl(function):
            inspect.signature(function).bind_partial(None)  # None stands for the rollout
    except TypeError as error:
        raise ValueError(
            f"{where}: its first parameter cannot be the rollout ({error}); a reward gets it "
            "there, and the columns that it names: def mine(rollout, answer)"
        ) from error
    return FunctionScorer(
        name,
        function,
        bound=function_arguments,  # only the names are used: these parameters get no column
        timeout_s=settings.timeout_s,
        concurrency=settings.concurrency,
    )
