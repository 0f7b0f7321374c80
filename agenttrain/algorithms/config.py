"""The settings of the learning algorithm: axes that combine freely, presets in `conf/algorithm/`.

What does not combine is refused in `settings/algorithm_checks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from omegaconf import MISSING


class Rewards(StrEnum):
    """How several reward functions become one advantage."""

    sum = "sum"
    """Their weighted sum is one reward."""
    normalize_each = "normalize_each"
    """Each is normalised within its group, then weighted and added (GDPO)."""


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


class Surrogate(StrEnum):
    """The objective that a token's gradient comes from."""

    clip = "clip"
    """min(r A, clamp(r) A), as in PPO."""
    cispo = "cispo"
    """The clamped ratio, without gradient, times A log p."""
    sapo = "sapo"
    """A sigmoid gate of the ratio in place of the clip."""
    vespo = "vespo"
    """A smooth weight of the whole rollout's ratio, without gradient, times A log p."""
    geometric_mean = "geometric_mean"
    """The geometric mean over the rollout of clipped token ratios (GMPO)."""
    reinforce = "reinforce"
    """A log p: no ratio, for one update per step."""


class Ratio(StrEnum):
    """On which level policy and behaviour probabilities are compared."""

    token = "token"
    sequence_mean = "sequence_mean"
    """Geometric mean over a rollout's tokens (GSPO)."""
    sequence_sum = "sequence_sum"
    """Whole rollout (RLOO)."""


class Aggregation(StrEnum):
    """How token losses become one number per optimizer update."""

    token_mean = "token_mean"
    """Over all sampled tokens of the update, across processes and microbatches (DAPO)."""
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


class KlIn(StrEnum):
    """Where the KL penalty acts."""

    loss = "loss"
    """KL of the policy as it is trained."""
    reward = "reward"
    """KL of the probabilities that `behaviour` names: the engine's, or the trainer's own."""


class Reference(StrEnum):
    """Policy that the KL penalty pulls to."""

    frozen = "frozen"
    """The policy at the start of the run."""
    synced = "synced"
    """The same, mixed with the policy every `ref_sync_steps` (TR-DPO)."""


class Behaviour(StrEnum):
    """Probabilities that the ratio is divided by, and that a KL in the reward is taken of."""

    engine = "engine"
    """Those that the engine sampled with."""
    recomputed = "recomputed"
    """The trainer's own, before the step's first update."""


class Correction(StrEnum):
    """On which level the trainer's probabilities are compared with the engine's."""

    none = "none"
    token = "token"
    sequence = "sequence"
    """Their ratio over the whole rollout."""
    geometric = "geometric"
    """The geometric mean of the rollout's token ratios."""


class CorrectionMode(StrEnum):
    """Treatment of a ratio outside its bounds."""

    truncate = "truncate"
    """It becomes the bound."""
    mask = "mask"
    """It becomes zero: no gradient."""


@dataclass
class AlgorithmConfig:
    """loss = aggregate(correction * surrogate(ratio, advantage) + beta * KL) - bonus * entropy.

    The functions are in `agenttrain/algorithms`.
    """

    name: str = MISSING
    """Name of the preset, for people."""
    group_size: int = 8
    """Rollouts per task (G); at least 2, or 1 with advantage=batch or none."""
    num_epochs: int = 1
    """Passes over a step's rollouts."""
    minibatches: int = 1
    """Optimizer updates per pass; divides tasks_per_step."""
    dynamic_sampling: int = 0
    """Extra rounds of tasks that may replace groups whose rewards are all equal; 0: none."""
    oversample: float = 1.0
    """Tasks sampled for each that is wanted; the surplus, the last in task order, is not trained
    on, and groups whose rewards are all equal go first."""
    rewards: Rewards = Rewards.sum
    advantage: Advantage = Advantage.group
    scale: Scale = Scale.group
    surrogate: Surrogate = Surrogate.clip
    ratio: Ratio = Ratio.token
    aggregation: Aggregation = Aggregation.token_mean
    clip_low: float = 0.2
    """The ratio is clipped at 1 - clip_low; with surrogate=geometric_mean at exp(-clip_low)."""
    clip_high: float = 0.2
    """The ratio is clipped at 1 + clip_high; with surrogate=geometric_mean at exp(clip_high)."""
    clip_dual: float | None = None
    """With surrogate=clip: the ratio is at most this, also where the advantage is negative."""
    tau_pos: float = 1.0
    """Steepness of sapo's gate where the advantage is positive."""
    tau_neg: float = 1.05
    """The same where it is not."""
    vespo_k_pos: float = 2.0
    """Vespo's weight is e^l w^k e^(-l w) of the ratio w: its k where the advantage is not
    negative."""
    vespo_lambda_pos: float = 3.0
    """Its l there."""
    vespo_k_neg: float = 3.0
    """Its k where the advantage is negative."""
    vespo_lambda_neg: float = 2.0
    """Its l there."""
    beta: float = 0.0
    """Weight of the KL penalty to the reference; 0: no reference model is kept."""
    kl: KlEstimator = KlEstimator.k3
    kl_in: KlIn = KlIn.loss
    kl_bias_correction: bool = False
    """Multiply the KL in the loss by the ratio, which makes its gradient that of the KL."""
    reference: Reference = Reference.frozen
    ref_sync_steps: int = 512
    """With reference=synced: steps between two mixings."""
    ref_mixup: float = 0.6
    """With reference=synced: the policy's share of the new reference."""
    entropy_bonus: float = 0.0
    """Weight of the mean token entropy, taken off the loss."""
    entropy_target: float | None = None
    """Target entropy in nats. If set, the bonus acts while the entropy is at or below it, and
    adapts after every update: raised while entropy is at or below the target, lowered while it is
    above."""
    entropy_bonus_step: float = 0.005
    """With entropy_target: the size of each change of the bonus."""
    entropy_bonus_max: float = 1.0
    """With entropy_target: the bonus stays between 0 and this."""
    top_entropy: float = 1.0
    """Share of an update's tokens that are trained, those with the highest entropy before the
    step's first update."""
    mask_truncated: bool = False
    """Rollouts cut by a token limit get no gradient; they still count in their group's baseline."""
    off_policy_threshold: float | None = None
    """Nats per token. Rollouts of negative advantage whose tokens became less likely than that
    since they were sampled, on average, get no gradient."""
    behaviour: Behaviour = Behaviour.engine
    correction: Correction = Correction.none
    """Weigh what was sampled by its ratio trainer / engine; needs behaviour=recomputed."""
    correction_mode: CorrectionMode = CorrectionMode.truncate
    correction_max: float | None = 2.0
    """Upper bound of the ratio trainer / engine; null: none."""
    correction_min: float | None = None
    """Lower bound of it; null: none."""

    @property
    def updates(self) -> int:
        """Optimizer updates per step."""
        return self.num_epochs * self.minibatches

    @property
    def resamples(self) -> bool:
        """Return whether a step may sample other groups than it trains on."""
        return self.dynamic_sampling > 0 or self.oversample > 1

    @property
    def kl_in_loss(self) -> bool:
        """Return whether the loss has a KL term."""
        return self.beta > 0 and self.kl_in is KlIn.loss

    @property
    def kl_in_reward(self) -> bool:
        """Return whether rewards have a KL penalty taken off."""
        return self.beta > 0 and self.kl_in is KlIn.reward

    @property
    def has_clip(self) -> bool:
        """Return whether the surrogate clips ratios on both sides."""
        return self.surrogate in (Surrogate.clip, Surrogate.geometric_mean)

    @property
    def has_bonus(self) -> bool:
        """Return whether the loss has an entropy bonus, if at times of weight 0."""
        return self.entropy_bonus > 0 or self.entropy_target is not None
