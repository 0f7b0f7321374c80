"""Checks of the algorithm's settings: which have a meaning together.

A setting that nothing reads is refused unless it has its default, so that nobody believes that it
acts. `USES` is the whole list: a setting that is not in it is always read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, fields
from typing import Any

from agenttrain.algorithms.config import (
    Advantage,
    AlgorithmConfig,
    Behaviour,
    Correction,
    KlEstimator,
    Ratio,
    Reference,
    Rewards,
    Scale,
    Surrogate,
)
from agenttrain.settings.run_config import RunConfig

UNGROUPED = (Advantage.batch, Advantage.none)
"""Baselines that do not look at the rollout's group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Settings, and when they are read."""

    keys: tuple[str, ...]
    when: Callable[[AlgorithmConfig], bool]
    """Return whether they are read."""
    needs: str
    """Setting that makes `when` true, for the message."""


def _surrogate(*kinds: Surrogate) -> Callable[[AlgorithmConfig], bool]:
    return lambda a: a.surrogate in kinds


USES = (
    Use(
        keys=("clip_low",),
        when=_surrogate(Surrogate.clip, Surrogate.geometric_mean),
        needs="algorithm.surrogate=clip or geometric_mean",
    ),
    Use(
        keys=("clip_high",),
        when=_surrogate(Surrogate.clip, Surrogate.cispo, Surrogate.geometric_mean),
        needs="algorithm.surrogate=clip, cispo or geometric_mean",
    ),
    Use(keys=("clip_dual",), when=_surrogate(Surrogate.clip), needs="algorithm.surrogate=clip"),
    Use(
        keys=("tau_pos", "tau_neg"),
        when=_surrogate(Surrogate.sapo),
        needs="algorithm.surrogate=sapo",
    ),
    Use(
        keys=("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        when=_surrogate(Surrogate.vespo),
        needs="algorithm.surrogate=vespo",
    ),
    Use(
        keys=("ratio",),
        when=_surrogate(Surrogate.clip, Surrogate.cispo, Surrogate.sapo),
        needs="algorithm.surrogate=clip, cispo or sapo",
    ),
    Use(
        keys=("kl", "kl_in", "reference"), when=lambda a: a.beta > 0, needs="algorithm.beta above 0"
    ),
    Use(
        keys=("kl_bias_correction",),
        when=lambda a: a.kl_in_loss,
        needs="algorithm.beta above 0 and algorithm.kl_in=loss",
    ),
    Use(
        keys=("ref_sync_steps", "ref_mixup"),
        when=lambda a: a.beta > 0 and a.reference is Reference.synced,
        needs="algorithm.beta above 0 and algorithm.reference=synced",
    ),
    Use(
        keys=("entropy_bonus_step", "entropy_bonus_max"),
        when=lambda a: a.entropy_target is not None,
        needs="algorithm.entropy_target",
    ),
    Use(
        keys=("behaviour",),
        when=lambda a: (
            a.surrogate is not Surrogate.reinforce
            or a.correction is not Correction.none
            or a.kl_in_reward
            or (a.kl_in_loss and a.kl_bias_correction)
        ),
        needs="algorithm.surrogate=clip, algorithm.correction or algorithm.kl_bias_correction",
    ),
    Use(
        keys=("correction_mode", "correction_max", "correction_min"),
        when=lambda a: a.correction is not Correction.none,
        needs="algorithm.correction=token, sequence or geometric",
    ),
    Use(
        keys=("dynamic_sampling", "oversample"),
        when=lambda a: a.advantage not in UNGROUPED,
        needs="algorithm.advantage=group or leave_one_out: compared with the whole batch, or with "
        "nothing, a group of equal rewards teaches as much as any",
    ),
)


def unused(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield a problem for each setting that is set and that nothing reads."""
    defaults = {f.name: f.default for f in fields(AlgorithmConfig) if f.default is not NO_DEFAULT}
    for use in USES:
        for key in use.keys:
            value = getattr(algorithm, key)
            if value != defaults[key] and not use.when(algorithm):
                yield (
                    f"algorithm.{key}={shown(value)}: has no effect here; it needs {use.needs}. "
                    f"Set that, or algorithm.{key}={shown(defaults[key])}, the default"
                )


def shown(value: Any) -> str:
    """Return a value as it is typed."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def algorithm_problems(config: RunConfig) -> Iterator[str]:
    """Yield everything wrong with `config.algorithm`, one line each."""
    for check in (unused, _ranges, _advantage, _loss, _correction):
        yield from check(config.algorithm)
    if config.algorithm.reference is Reference.synced and config.model.lora.rank:
        yield (
            f"algorithm.reference=synced: the reference of a model with adapters (model.lora.rank="
            f"{config.model.lora.rank}) is the model without them; set algorithm.reference=frozen"
        )


def _ranges(a: AlgorithmConfig) -> Iterator[str]:
    for key in ("num_epochs", "minibatches", "ref_sync_steps", "oversample"):
        if getattr(a, key) < 1:
            yield f"algorithm.{key}={getattr(a, key)}: must be at least 1"
    not_negative = ("dynamic_sampling", "beta", "clip_low", "clip_high", "entropy_bonus")
    for key in (*not_negative, "entropy_target", "entropy_bonus_max"):
        value = getattr(a, key)
        if value is not None and value < 0:
            yield f"algorithm.{key}={value}: must be 0 or more"
    positive = ("tau_pos", "tau_neg", "entropy_bonus_step", "correction_max", "correction_min")
    vespo = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
    for key in (*positive, *vespo):
        value = getattr(a, key)
        if value is not None and value <= 0:
            yield f"algorithm.{key}={value}: must be more than 0"
    for key in ("ref_mixup", "top_entropy"):
        if not 0 < getattr(a, key) <= 1:
            yield f"algorithm.{key}={getattr(a, key)}: must be above 0 and at most 1"


def _advantage(a: AlgorithmConfig) -> Iterator[str]:
    least = 1 if a.advantage in UNGROUPED else 2
    if a.group_size < least:
        yield (
            f"algorithm.group_size={a.group_size}: a rollout is compared with the others of its "
            f"group, so it takes at least {least}"
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
                "algorithm.kl_in=reward: with algorithm.rewards=normalize_each there is no one "
                "reward to take the penalty off; set algorithm.kl_in=loss"
            )
    if a.resamples and a.kl_in_reward:
        key = "dynamic_sampling" if a.dynamic_sampling else "oversample"
        yield (
            f"algorithm.{key}={getattr(a, key)}: groups are replaced by their rewards before the "
            "KL is known, and with algorithm.kl_in=reward a group of equal rewards teaches its KL; "
            f"set algorithm.kl_in=loss, or algorithm.{key}={0 if a.dynamic_sampling else 1}"
        )


def _loss(a: AlgorithmConfig) -> Iterator[str]:
    """Check the terms of the loss: surrogate, KL penalty, entropy."""
    if a.surrogate is Surrogate.clip and a.clip_low >= 1:
        yield f"algorithm.clip_low={a.clip_low}: must be below 1: ratios are positive"
    if a.clip_dual is not None and a.clip_dual <= 1 + a.clip_high:
        yield (
            f"algorithm.clip_dual={a.clip_dual}: must be above 1 + algorithm.clip_high="
            f"{1 + a.clip_high:g}: it bounds what the other clip leaves; 3 is usual"
        )
    if a.surrogate is Surrogate.reinforce and a.updates > 1:
        key = "num_epochs" if a.num_epochs > 1 else "minibatches"
        yield (
            f"algorithm.{key}={getattr(a, key)}: algorithm.surrogate=reinforce has no ratio, so "
            "only the first update of a step would be right; set it to 1, or "
            "algorithm.surrogate=clip or cispo"
        )
    if a.kl_in_loss and a.kl is KlEstimator.k1 and not a.kl_bias_correction:
        yield (
            "algorithm.kl=k1: has a gradient of zero on average in the loss; set algorithm.kl=k3, "
            "algorithm.kl_in=reward, or algorithm.kl_bias_correction=true"
        )
    if a.kl_bias_correction and a.kl is KlEstimator.k2:
        yield (
            "algorithm.kl=k2: has the KL's gradient without a correction, which would bias it; set "
            "algorithm.kl=k3 or k1, or algorithm.kl_bias_correction=false"
        )
    if a.kl_bias_correction and a.ratio is not Ratio.token:
        yield (
            f"algorithm.kl_bias_correction=true: the KL is of tokens, and the ratio of "
            f"algorithm.ratio={a.ratio} is not; set algorithm.ratio=token, or leave it false"
        )
    if a.entropy_target is not None and a.entropy_bonus > a.entropy_bonus_max:
        yield (
            f"algorithm.entropy_bonus={a.entropy_bonus}: starts above "
            f"algorithm.entropy_bonus_max={a.entropy_bonus_max}; lower one or raise the other"
        )
    if a.top_entropy == 1:
        return
    if a.surrogate is Surrogate.geometric_mean:
        yield (
            f"algorithm.top_entropy={a.top_entropy}: algorithm.surrogate=geometric_mean has one "
            "loss for all tokens of a rollout, so that none can be left out; set "
            "algorithm.top_entropy=1, or algorithm.surrogate=clip"
        )
    if a.surrogate in (Surrogate.clip, Surrogate.sapo) and a.ratio is not Ratio.token:
        yield (
            f"algorithm.top_entropy={a.top_entropy}: the gradient of algorithm.ratio={a.ratio} "
            "reaches all tokens of a rollout, so that none can be left out; set "
            "algorithm.top_entropy=1, or algorithm.ratio=token"
        )


def _correction(a: AlgorithmConfig) -> Iterator[str]:
    if a.correction is Correction.none:
        return
    if a.behaviour is Behaviour.engine:
        yield (
            f"algorithm.correction={a.correction}: compares the trainer's probabilities with the "
            "engine's; set algorithm.behaviour=recomputed"
        )
    low, high = a.correction_min, a.correction_max
    if low is None and high is None:
        yield (
            "algorithm.correction_max=null: without a bound one token can outweigh the batch; set "
            "algorithm.correction_max or algorithm.correction_min"
        )
    elif low is not None and high is not None and low >= high:
        yield (f"algorithm.correction_min={low}: must be below algorithm.correction_max={high}")
    for key, bound, beyond, wanted in (
        ("max", high, high is not None and high < 1, "at least"),
        ("min", low, low is not None and low > 1, "at most"),
    ):
        if beyond:
            yield (
                f"algorithm.correction_{key}={bound}: must be {wanted} 1, the ratio of tokens that "
                "trainer and engine find equally likely"
            )
    if a.surrogate is Surrogate.vespo and a.correction is Correction.geometric:
        yield (
            "algorithm.correction=geometric: algorithm.surrogate=vespo multiplies the rollout's "
            "ratio by its correction, which a mean is none of; set algorithm.correction=token or "
            "sequence"
        )
