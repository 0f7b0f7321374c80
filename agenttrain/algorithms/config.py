"""The settings of the learning algorithm: axes that combine freely, presets in `conf/algorithm/`.

A part of the loss that a run may lack (KL, correction, adaptive bonus) is a section that is None
without it, and a choice that brings keys (objective, credit) is a group: a key without effect is
one that the settings do not have. A combination without a meaning is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from enum import StrEnum
from typing import Annotated, Any

from omegaconf import MISSING
from pydantic import Field, PlainValidator, model_validator
from pydantic.dataclasses import dataclass

from agenttrain.algorithms.objectives.config import Objective, ObjectiveChoice, Ratio
from agenttrain.training.config import Dtype
from agenttrain.types import ConfigError
from agenttrain.utils.data_fields import Data
from agenttrain.utils.role_names import role_named
from agenttrain.utils.sections import (
    SETTINGS,
    Flag,
    InvalidSettings,
    Number,
    OptionalSection,
    Quoted,
    Whole,
    choose,
    raise_problems,
    shown,
)


class Rewards(StrEnum):
    """Way in which several reward functions become one advantage."""

    sum = "sum"
    """The weighted sum of the functions is one reward."""
    normalize_each = "normalize_each"
    """Each function is normalised within its group, then weighted and added (GDPO)."""


class Advantage(StrEnum):
    """Baseline of a rollout's reward."""

    group = "group"
    """Its group's mean (GRPO)."""
    leave_one_out = "leave_one_out"
    """The mean of the group's others (RLOO)."""
    batch = "batch"
    """The mean of the step's rollouts (REINFORCE++)."""
    none = "none"
    """No baseline: the reward as it is."""


class Scale(StrEnum):
    """Divisor of an advantage."""

    group = "group"
    """The group's standard deviation."""
    batch = "batch"
    """The step's standard deviation."""
    none = "none"


class Credit(StrEnum):
    """Part of a rollout that gets an advantage of its own."""

    rollout = "rollout"
    """The rollout: all of its turns share one."""
    turn_reward = "turn_reward"
    """Each turn: its return, compared with the returns of all turns of the group."""
    turn_baseline = "turn_baseline"
    """Each turn: its return, compared with the returns of the same turn in the other rollouts."""
    gigpo = "gigpo"
    """Each turn: the rollout's advantage plus its own among turns from an equal state (GiGPO)."""


@dataclass(config=SETTINGS)
class CreditConfig:
    """Credit of whole rollouts."""

    name: Data[Credit] = Credit.rollout
    """Part of a rollout that gets an advantage of its own."""


@dataclass(config=SETTINGS)
class TurnCredit(CreditConfig):
    """Credit of turns: each has an advantage of its own."""

    name: Data[Credit] = Credit.turn_reward
    gamma: Number = Field(default=1.0, gt=0, le=1)
    """Discount of a later turn's reward; the reward of the whole rollout counts as its last
    turn's."""


@dataclass(config=SETTINGS)
class StepCredit(TurnCredit):
    """Credit of rollouts, and of turns among those that began in an equal state."""

    name: Data[Credit] = Credit.gigpo
    step_weight: Number = Field(default=1.0, ge=0)
    """Weight of a turn's own advantage beside the rollout's."""


CREDITS: Mapping[str, type[CreditConfig]] = {
    "rollout": CreditConfig,
    "turn_reward": TurnCredit,
    "turn_baseline": TurnCredit,
    "gigpo": StepCredit,
}


def credit_settings(section: Any) -> CreditConfig:
    """Return the section `algorithm.credit` as the settings of the credit that it names."""
    return choose("algorithm.credit", section, CREDITS)


class Aggregation(StrEnum):
    """Way in which token losses become one number per optimizer update."""

    token_mean = "token_mean"
    """Mean over all sampled tokens of the update, across processes and microbatches (DAPO)."""
    sequence_mean = "sequence_mean"
    """Mean over rollouts of each rollout's token mean (GRPO paper)."""
    sequence_sum = "sequence_sum"
    """Mean over rollouts of each rollout's token sum (LUSPO)."""
    fixed_length = "fixed_length"
    """Sum over tokens / (rollouts x max_completion_tokens) (Dr. GRPO)."""


class KlEstimator(StrEnum):
    """Schulman's estimators of KL(policy || reference) from one sample."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class KlPlace(StrEnum):
    """Place of the KL penalty."""

    loss = "loss"
    """KL of the policy that is trained."""
    reward = "reward"
    """KL of the probabilities that `behaviour` chooses: the engine's, or the trainer's own."""


@dataclass(config=SETTINGS)
class SyncedReference:
    """A reference that follows the trained policy (TR-DPO)."""

    sync_steps: Whole = Field(ge=1)
    """Steps between two mixings of the reference with the policy."""
    mixup: Number = Field(default=0.6, gt=0, le=1)
    """The policy's share of the new reference."""


@dataclass(config=SETTINGS)
class KlConfig:
    """Penalty on the KL to a reference policy."""

    beta: Number = Field(ge=0)
    """Weight of the penalty; 0: there is none, and no reference model is kept."""
    estimator: Data[KlEstimator] = KlEstimator.k3
    """Estimator of the KL from the sampled tokens (http://joschu.net/blog/kl-approx.html)."""
    place: Data[KlPlace] = KlPlace.loss
    bias_correction: Flag = False
    """Multiply the KL in the loss by the token's ratio, which makes its gradient that of the KL."""
    reference: OptionalSection[SyncedReference] = None
    """A reference that follows the policy; null: the policy at the start of the run."""

    @model_validator(mode="after")
    def _check(self) -> KlConfig:
        raise_problems(self._problems())
        return self

    def _problems(self) -> Iterator[str]:
        """Yield the settings of the penalty that do not go together."""
        key, in_loss = "algorithm.kl", self.place is KlPlace.loss
        if self.bias_correction and not in_loss:
            yield (
                f"{key}.bias_correction=true: corrects a KL in the loss; set {key}.place=loss, or "
                f"{key}.bias_correction=false"
            )
        elif self.bias_correction and self.estimator is KlEstimator.k2:
            yield (
                f"{key}.estimator=k2: has the KL's gradient without a correction, which would bias "
                f"it; set {key}.estimator=k3 or k1, or {key}.bias_correction=false"
            )
        elif self.estimator is KlEstimator.k1 and in_loss and not self.bias_correction:
            yield (
                f"{key}.estimator=k1: has a gradient of zero on average in the loss; set "
                f"{key}.estimator=k3, {key}.place=reward, or {key}.bias_correction=true"
            )


@dataclass(config=SETTINGS)
class AdaptiveBonus:
    """An entropy bonus that adapts to a target."""

    target: Number = Field(ge=0)
    """Target entropy in nats. The bonus acts while the entropy is at or below it, and adapts after
    every update: raised while entropy is at or below the target, lowered while it is above."""
    step: Number = Field(default=0.005, gt=0)
    """Size of each change of the bonus."""
    max: Number = Field(default=1.0, ge=0)
    """The bonus stays between 0 and this."""


@dataclass(config=SETTINGS)
class EntropyConfig:
    """Bonus for the entropy of the policy."""

    bonus: Number = Field(default=0.0, ge=0)
    """Weight of the mean token entropy, which is subtracted from the loss."""
    adaptive: OptionalSection[AdaptiveBonus] = None
    """A bonus that adapts to a target; null: it stays as it is."""

    @model_validator(mode="after")
    def _check(self) -> EntropyConfig:
        if self.adaptive is not None and self.bonus > self.adaptive.max:
            raise InvalidSettings(
                f"algorithm.entropy.bonus={self.bonus}: starts above "
                f"algorithm.entropy.adaptive.max={self.adaptive.max}; lower one or raise the other"
            )
        return self


class Behaviour(StrEnum):
    """Probabilities in the denominator of the ratio and in a KL in the reward."""

    engine = "engine"
    """The probabilities that the engine sampled with."""
    recomputed = "recomputed"
    """The trainer's own probabilities, before the step's first update."""


class RouterReplay(StrEnum):
    """Experts of mixture-of-experts layers in the trainer's forward passes."""

    off = "off"
    """The experts that the trainer's routers choose."""
    rollout = "rollout"
    """The experts by which the engine sampled, at the positions from which it sampled (R3)."""


class CorrectionLevel(StrEnum):
    """Level on which the trainer's probabilities are compared with the engine's."""

    token = "token"
    sequence = "sequence"
    """The product of the trajectory's token ratios."""
    geometric = "geometric"
    """The geometric mean of the trajectory's token ratios."""


class CorrectionMode(StrEnum):
    """Treatment of a ratio outside its bounds."""

    truncate = "truncate"
    """The ratio becomes the bound."""
    mask = "mask"
    """The ratio becomes zero: no gradient."""


@dataclass(config=SETTINGS)
class CorrectionConfig:
    """Weight of sampled tokens by their ratio trainer / engine; needs behaviour=recomputed."""

    level: Data[CorrectionLevel]
    mode: Data[CorrectionMode] = CorrectionMode.truncate
    max: Number | None = Field(default=2.0, gt=0)
    """Upper bound of the ratio; null: none."""
    min: Number | None = Field(default=None, gt=0)
    """Lower bound of the ratio; null: none."""

    @model_validator(mode="after")
    def _check(self) -> CorrectionConfig:
        raise_problems(self._problems())
        return self

    def _problems(self) -> Iterator[str]:
        """Yield the bounds that do not go together."""
        key, low, high = "algorithm.correction", self.min, self.max
        if low is None and high is None:
            yield (
                f"{key}.max=null: without a bound one token can outweigh the batch; set {key}.max "
                f"or {key}.min"
            )
        elif low is not None and high is not None and low >= high:
            yield f"{key}.min={low}: must be below {key}.max={high}"
        equal_ratio = "1, the ratio of tokens that trainer and engine find equally likely"
        if high is not None and high < 1:
            yield f"{key}.max={high}: must be at least {equal_ratio}"
        if low is not None and low > 1:
            yield f"{key}.min={low}: must be at most {equal_ratio}"


class Gate(StrEnum):
    """Rollouts whose tokens get the teacher's part of the advantage."""

    all = "all"
    failed = "failed"
    """Rollouts with a reward below `success`."""
    succeeded = "succeeded"
    """Rollouts with a reward of at least `success`."""


@dataclass(config=SETTINGS)
class TeacherConfig:
    """On-policy distillation: a second model scores the tokens that the policy sampled.

    Advantage of a token: reward_weight * (that of the rewards)
    + weight * (log p_teacher - log p_policy).
    """

    path: Data[str]
    """Folder of the teacher, `bundled:<name>` or `org/name`, with the policy's tokenizer, or
    role:teacher, whose servers score."""
    revision: Quoted = None
    """Branch, tag or commit of a model of the hub; null: main. config.yaml has its commit."""
    dtype: Data[Dtype] = Dtype.float32
    """Number format of its weights."""
    weight: Number = Field(default=1.0, gt=0)
    """Weight of its part of the advantage."""
    reward_weight: Number = Field(default=1.0, ge=0)
    """Weight of the rewards' part; 0: the policy learns from the teacher alone."""
    gate: Data[Gate] = Gate.all
    """Rollouts whose tokens get the teacher's part."""
    success: Number = 1.0
    """With gate=failed or succeeded: least reward of a rollout that succeeded."""
    prompt: Data[str | None] = None
    """Text that only the teacher sees, at the end of its last user message, with columns of the
    row in double braces: `The answer is {{ answer }}.`"""

    @property
    def role(self) -> str | None:
        """Role whose servers score; None: the training processes load the teacher."""
        return role_named(self.path)


UNGROUPED = (Advantage.batch, Advantage.none)
"""Baselines that do not depend on the rollout's group."""


@dataclass(config=SETTINGS)
class AlgorithmConfig:
    """loss = aggregate(correction * objective(ratio, advantage) + beta * KL) - bonus * entropy.

    The functions are in `agenttrain/algorithms`.
    """

    name: Data[str] = MISSING
    """Name of the preset, for people."""
    group_size: Whole = 8
    """Rollouts per task (G); at least 2, or 1 with advantage=batch or none."""
    num_epochs: Whole = Field(default=1, ge=1)
    """Passes over a step's rollouts."""
    minibatches: Whole = Field(default=1, ge=1)
    """Optimizer updates per pass; divides tasks_per_step."""
    dynamic_sampling: Whole = Field(default=0, ge=0)
    """Extra rounds of tasks that may replace groups whose rewards are all equal; 0: none."""
    oversample: Number = Field(default=1.0, ge=1)
    """Tasks sampled per task that is trained on. The surplus is left out: first groups whose
    rewards are all equal, then the last in task order."""
    # Settings without a line here are explained by their enum, whose members the reference lists.
    rewards: Data[Rewards] = Rewards.sum
    advantage: Data[Advantage] = Advantage.group  # baseline of a rollout's reward
    scale: Data[Scale] = Scale.group  # divisor of an advantage
    credit: Annotated[CreditConfig, PlainValidator(credit_settings)] = field(
        default_factory=CreditConfig
    )
    """Part of a rollout that gets an advantage of its own: algorithm/credit=turn_reward, …"""
    objective: ObjectiveChoice = Field(default_factory=dict, validate_default=True)
    """Loss of a token: algorithm/objective=clip, … with settings of its own, or a function of
    yours: algorithm/objective=own algorithm.objective._target_=my_pkg.my_objective."""
    aggregation: Data[Aggregation] = Aggregation.token_mean
    kl: OptionalSection[KlConfig] = None
    """Penalty on the KL to a reference policy; null: none."""
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    top_entropy: Number = Field(default=1.0, gt=0, le=1)
    """Share of an update's tokens that are trained: those with the highest entropy before the
    step's first update."""
    mask_truncated: Data[bool] = False
    """Rollouts cut by a token limit get no gradient; they still count in their group's baseline."""
    off_policy_threshold: Number | None = None
    """Nats per token. Trajectories of negative advantage get no gradient if the log-probability of
    their tokens has fallen by more than this, on average, since they were sampled."""
    behaviour: Data[Behaviour] = Behaviour.engine  # denominator of the ratio
    correction: OptionalSection[CorrectionConfig] = None
    """Weight of sampled tokens by their ratio trainer / engine; null: none."""
    router_replay: Data[RouterReplay] = RouterReplay.off
    """Experts of mixture-of-experts layers in the policy's forward passes."""
    teacher: OptionalSection[TeacherConfig] = None
    """Learning from a teacher's probabilities, beside the rewards or in their place; null: none."""

    @model_validator(mode="after")
    def _check(self) -> AlgorithmConfig:
        """Check the axes against each other. Raises InvalidSettings with all problems."""
        if self.kl is not None and self.kl.beta == 0:
            self.kl = None  # a sweep over beta may begin at 0
        problems = [*_advantage_problems(self), *_credit_problems(self), *_teacher_problems(self)]
        # `behaviour` names the logprobs from before the update. The correction divides the
        # trainer's by the engine's, and behaviour=engine has none of the trainer's.
        if self.correction is not None and self.behaviour is Behaviour.engine:
            problems.append(
                f"algorithm.correction.level={self.correction.level}: compares the trainer's "
                "probabilities with the engine's; set algorithm.behaviour=recomputed"
            )
        # A function of the user's is not imported yet. `load_objective` checks it once it is.
        if not self.objective.is_own:
            problems += _objective_problems(self)
        raise_problems(problems)
        return self

    @property
    def updates(self) -> int:
        """Optimizer updates per step."""
        return self.num_epochs * self.minibatches

    @property
    def resamples(self) -> bool:
        """Return True if a step may sample other groups than it trains on."""
        return self.dynamic_sampling > 0 or self.oversample > 1

    @property
    def kl_in_loss(self) -> KlConfig | None:
        """Return the KL penalty if it is a term of the loss."""
        return self.kl if self.kl is not None and self.kl.place is KlPlace.loss else None

    @property
    def kl_in_reward(self) -> KlConfig | None:
        """Return the KL penalty if it is subtracted from the rewards."""
        return self.kl if self.kl is not None and self.kl.place is KlPlace.reward else None

    @property
    def replays_routes(self) -> bool:
        """Return True if the trainer uses the experts by which the rollouts were sampled."""
        return self.router_replay is RouterReplay.rollout

    @property
    def turn_credit(self) -> TurnCredit | None:
        """Return the credit if each turn has an advantage of its own."""
        return self.credit if isinstance(self.credit, TurnCredit) else None

    @property
    def loaded_teacher(self) -> TeacherConfig | None:
        """Return the teacher if the training processes load it, and no servers have it."""
        return self.teacher if self.teacher is not None and self.teacher.role is None else None

    @property
    def token_advantages(self) -> bool:
        """Return True if the advantages of a rollout's tokens may differ."""
        return self.turn_credit is not None or self.teacher is not None

    @property
    def has_bonus(self) -> bool:
        """Return True if the loss has an entropy bonus, even one whose weight is 0 at times."""
        return self.entropy.bonus > 0 or self.entropy.adaptive is not None


def load_objective(algorithm: AlgorithmConfig) -> None:
    """Import an objective of the user's, add its defaults, and check it against `algorithm`.

    Without this call the first update would be the first to import it. Raises ConfigError.
    """
    if algorithm.objective.is_own:
        # As plain data a section is complete: its function was imported, its settings checked.
        complete_section = algorithm.objective.plain()
        algorithm.objective = Objective(complete_section)
        if problems := list(_objective_problems(algorithm)):
            raise ConfigError("\n".join(problems))


def _without_effect(
    section: Any,
    *keys: str,
    has_effect: bool,
    needed: str,
    prefix: str = "algorithm",
) -> Iterator[str]:
    """Yield a problem for each of the section's keys that differs from its default without effect.

    `has_effect` is True if the run has the setting that gives the keys an effect. `needed` names
    this setting for the message.
    """
    for key in keys:
        value, default = getattr(section, key), type(section).__pydantic_fields__[key].default
        if not has_effect and value != default:
            yield (
                f"{prefix}.{key}={shown(value)}: has no effect here; it needs {needed}. "
                f"Set that, or {prefix}.{key}={shown(default)}, the default"
            )


def _teacher_problems(a: AlgorithmConfig) -> Iterator[str]:
    """Yield the problems of the teacher's keys, alone and with settings that exclude a teacher.

    Messages name `algorithm.teacher.path`, because every teacher has one: a model that the training
    processes load, or ``role:teacher``, whose servers score.
    """
    teacher, key = a.teacher, "algorithm.teacher"
    if teacher is None:
        return
    is_loaded, is_gated = teacher.role is None, teacher.gate is not Gate.all
    yield from _without_effect(
        teacher,
        *("revision", "dtype"),
        has_effect=is_loaded,
        needed=f"a model in {key}.path",
        prefix=key,
    )
    yield from _without_effect(
        teacher,
        "success",
        has_effect=is_gated,
        needed=f"{key}.gate=failed or succeeded",
        prefix=key,
    )
    if a.resamples:  # a teacher's advantages differ by token, also where all rewards are equal
        resampling = "dynamic_sampling" if a.dynamic_sampling else "oversample"
        yield (
            f"algorithm.{resampling}={getattr(a, resampling)}: replaces groups of equal rewards, "
            f"and with {key}.path these teach as much as any; set "
            f"algorithm.{resampling}={0 if a.dynamic_sampling else 1}"
        )
    if a.off_policy_threshold is not None:
        yield (
            f"algorithm.off_policy_threshold={a.off_policy_threshold}: leaves out rollouts of "
            f"negative advantage, and with {key}.path their tokens differ; set it to null"
        )


def _advantage_problems(a: AlgorithmConfig) -> Iterator[str]:
    """Yield the settings of baseline, scale, rewards and resampling that do not go together."""
    compares_within_group = a.advantage not in UNGROUPED
    yield from _without_effect(
        a,
        *("dynamic_sampling", "oversample"),
        has_effect=compares_within_group,
        needed="algorithm.advantage=group or leave_one_out: compared with the whole batch, or with "
        "nothing, a group of equal rewards teaches as much as any",
    )
    min_size = 2 if compares_within_group else 1
    if a.group_size < min_size:
        yield (
            f"algorithm.group_size={a.group_size}: a rollout is compared with the others of its "
            f"group, so it takes at least {min_size}"
        )
    if a.advantage is Advantage.leave_one_out and a.scale is Scale.group:
        yield (
            "algorithm.scale=group: after the division a leave-one-out advantage is the group's "
            "times G / (G - 1); set algorithm.scale=none or batch, or algorithm.advantage=group"
        )
    if a.advantage is Advantage.batch and a.scale is Scale.group:
        yield (
            "algorithm.scale=group: advantages over the mean of the batch are not comparable after "
            "each group's own division; set algorithm.scale=batch or none"
        )
    if a.advantage is Advantage.none and a.scale is not Scale.none:
        yield (
            f"algorithm.scale={a.scale}: without a baseline there is no deviation from it; set "
            "algorithm.scale=none, or algorithm.advantage=batch"
        )
    if a.rewards is Rewards.normalize_each:
        if a.scale is Scale.group:
            yield (
                "algorithm.rewards=normalize_each: every function is divided by its group's "
                "deviation already; set algorithm.scale=batch, as the paper does, or none"
            )
        if a.advantage is not Advantage.group:
            yield (
                f"algorithm.advantage={a.advantage}: with algorithm.rewards=normalize_each every "
                "function's baseline is its group's mean; set algorithm.advantage=group"
            )
        if a.kl_in_reward:
            yield (
                "algorithm.kl.place=reward: with algorithm.rewards=normalize_each there is no one "
                "reward to take the penalty off; set algorithm.kl.place=loss"
            )
    if a.resamples and a.kl_in_reward:
        # Resampling drops a group as soon as its rewards are equal. A penalty that is subtracted
        # later would make them differ, so that the group would have had advantages.
        key = "dynamic_sampling" if a.dynamic_sampling else "oversample"
        yield (
            f"algorithm.{key}={getattr(a, key)}: groups are replaced by their rewards before the "
            "KL is known, and with algorithm.kl.place=reward a group of equal rewards teaches its "
            f"KL; set algorithm.kl.place=loss, or algorithm.{key}={0 if a.dynamic_sampling else 1}"
        )


def _credit_problems(a: AlgorithmConfig) -> Iterator[str]:
    """Yield the settings that do not go with credit per turn."""
    credit = a.turn_credit
    if credit is None:
        return
    if a.rewards is Rewards.normalize_each:
        yield (
            f"algorithm/credit={credit.name}: returns add the rewards of all functions, and "
            "algorithm.rewards=normalize_each compares each by itself; set algorithm.rewards=sum"
        )
    if credit.name is Credit.gigpo and a.advantage in UNGROUPED:
        yield (
            f"algorithm.advantage={a.advantage}: algorithm/credit=gigpo compares the turns of a "
            "group; set algorithm.advantage=group or leave_one_out"
        )
    if credit.name is Credit.gigpo and a.scale is Scale.batch:
        yield (
            "algorithm.scale=batch: with algorithm/credit=gigpo each state's turns are divided by "
            "their own deviation or by nothing; set algorithm.scale=group or none"
        )
    if a.off_policy_threshold is not None:
        yield (
            f"algorithm.off_policy_threshold={a.off_policy_threshold}: leaves out rollouts of "
            f"negative advantage, and with algorithm/credit={credit.name} their turns differ; set "
            "it to null, or algorithm/credit=rollout"
        )


def _objective_problems(a: AlgorithmConfig) -> Iterator[str]:
    """Yield the settings that do not go with the objective, by the properties that it declares."""
    objective, name = a.objective.registered, a.objective.name
    bias_corrected = a.kl is not None and a.kl.bias_correction
    reads_behaviour = (
        not objective.single_update  # it has a ratio to the behaviour policy
        or a.correction is not None
        or a.kl_in_reward is not None
        or a.teacher is not None
        or bias_corrected
    )
    yield from _without_effect(
        a,
        "behaviour",
        has_effect=reads_behaviour,
        needed="another algorithm.objective, one with a ratio, algorithm.correction, "
        "algorithm.teacher or algorithm.kl.bias_correction",
    )
    if objective.single_update and a.updates > 1:
        key = "num_epochs" if a.num_epochs > 1 else "minibatches"
        yield (
            f"algorithm.{key}={getattr(a, key)}: algorithm.objective={name} has no ratio, so that "
            "only the first update of a step would be right; set it to 1, or "
            "algorithm/objective=clip or cispo"
        )
    # This objective multiplies the ratio of a trajectory's probabilities by the correction. So the
    # correction has to be a ratio of the same kind; a geometric mean over tokens is none.
    geometric = a.correction is not None and a.correction.level is CorrectionLevel.geometric
    if objective.applies_correction and geometric:
        yield (
            f"algorithm.correction.level=geometric: algorithm.objective={name} multiplies a "
            "trajectory's ratio by its correction, which a mean is none of; set "
            "algorithm.correction.level=token or sequence"
        )
    if a.turn_credit is not None and objective.whole_sequence:
        yield (
            f"algorithm/credit={a.credit.name}: algorithm.objective={name} has one advantage "
            "for all tokens of a rollout; set algorithm/credit=rollout, or algorithm/objective="
            "clip, cispo or reinforce"
        )
    if a.teacher is not None and objective.whole_sequence:
        yield (
            f"algorithm.teacher.path={a.teacher.path}: algorithm.objective={name} has one "
            "advantage for all tokens of a rollout, and a teacher gives each its own; set "
            "algorithm/objective=clip, cispo or reinforce"
        )
    yield from _sequence_ratio_problems(a)


def _sequence_ratio_problems(a: AlgorithmConfig) -> Iterator[str]:
    """Yield the settings per token that do not go with a ratio or a loss of whole trajectories."""
    objective, name = a.objective.registered, a.objective.name
    ratio = getattr(a.objective.settings, "ratio", Ratio.token)
    # Compared by value: in a settings class of the user's, `ratio` may be a plain text.
    is_sequence_ratio = ratio in (Ratio.sequence_mean, Ratio.sequence_sum)
    if a.kl is not None and a.kl.bias_correction and is_sequence_ratio:
        yield (
            "algorithm.kl.bias_correction=true: the KL is of tokens, and the ratio of "
            f"algorithm.objective.ratio={ratio} is not; set algorithm.objective.ratio=token, or "
            "leave it false"
        )
    # Leaving tokens out needs a loss whose gradient reaches its own token only. An objective whose
    # ratio carries no gradient always has such a loss.
    if a.top_entropy == 1 or objective.stopped_ratio:
        return
    if objective.whole_sequence:
        yield (
            f"algorithm.top_entropy={a.top_entropy}: algorithm.objective={name} has one loss for "
            "all tokens of a rollout, so that none can be left out; set algorithm.top_entropy=1, "
            "or algorithm/objective=clip"
        )
    elif is_sequence_ratio and not a.token_advantages:
        yield (
            f"algorithm.top_entropy={a.top_entropy}: the gradient of algorithm.objective.ratio="
            f"{ratio} reaches all tokens of a trajectory, so that none can be left out; set "
            "algorithm.top_entropy=1, or algorithm.objective.ratio=token"
        )
