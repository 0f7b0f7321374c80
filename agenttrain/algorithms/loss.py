"""The loss of a microbatch: aggregate(correction * objective + beta * KL) - bonus * entropy.

Its metrics are parts that combine over microbatches, updates and processes (`MetricParts`).

Shapes: S sampled tokens of B sequences, one sequence after the other; sequence_S is the index of
each token's sequence. Tokens that the policy did not sample (prompt, template, tool) are not among
the S. A sequence is a trajectory: ratios, corrections and masks above token level are a
trajectory's, and so is each weight, whose lengths are those of the whole rollout.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from agenttrain.algorithms.config import AlgorithmConfig, CorrectionLevel, Credit, KlConfig
from agenttrain.algorithms.correction import bound_ratio, correction_ratio, off_policy_keep
from agenttrain.algorithms.credit import VARIANCES
from agenttrain.algorithms.losses import kl_estimate
from agenttrain.algorithms.objectives.base import ObjectiveInputs, ObjectiveOutput
from agenttrain.algorithms.objectives.config import Ratio

MetricParts = dict[str, Tensor]
"""Name -> part, [2]: (sum, count). Parts add up, and the total's sum / count is the metric. For a
name that ends in ``max`` or ``min``: (value, value), and the metric is the greatest or least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs(ObjectiveInputs):
    """Inputs of the loss of a microbatch: the objective's, and those of the terms around it.

    `policy_loss` sets `token_advantages`, `correction_S` and `correction_B` for the objective.
    """

    sequences: int = field(init=False)
    """B, as many as `weights_B` has. Set from it, and no argument."""
    weights_B: Tensor
    """Weight of each of the sequence's tokens, from `token_weights`."""
    engine_S: Tensor | None = None
    """The engine's logprobs, where a correction or a mask reads them."""
    ref_logprobs_S: Tensor | None = None
    """Logprobs under the reference, where the loss has a KL term."""
    entropy_S: Tensor | None = None
    """Entropies of the policy being trained, with a gradient, where there is a bonus for them."""
    kept_S: Tensor | None = None
    """True for the tokens of top entropy, which alone are trained. None: all are."""
    bonus: float = 0.0
    """Weight of a token's entropy: the coefficient divided by the update's number of tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sequences", self.weights_B.numel())


def policy_loss(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, MetricParts]:
    """Return the microbatch's part of the loss (a scalar), and its metrics.

    Raises ValueError when `inputs` lack a tensor that `config` needs.
    """
    correction, metrics = _correction_weight(inputs, config)  # [S] on token level, else [B]
    on_token_level = (
        config.correction is not None and config.correction.level is CorrectionLevel.token
    )
    # Some objectives multiply their ratio by the correction. The loss of others is multiplied here.
    in_objective = config.objective.registered.applies_correction
    objective_inputs = replace(
        inputs,
        token_advantages=config.token_advantages,
        correction_S=correction if in_objective and on_token_level else None,
        correction_B=correction if in_objective and not on_token_level else None,
    )
    output = config.objective(objective_inputs)
    _check_output(output, inputs, config)
    loss_S = output.loss_S
    metrics |= {name: _metric_part(name, values) for name, values in output.metrics.items()}
    if correction is not None and not in_objective:
        loss_S = loss_S * (correction if on_token_level else correction[inputs.sequence_S])
    if inputs.kept_S is not None:  # train the tokens of top entropy only
        loss_S = loss_S * inputs.kept_S
        metrics["mask/top_entropy"] = mean_parts(~inputs.kept_S)
    if config.off_policy_threshold is not None:
        threshold, engine_S = config.off_policy_threshold, inputs.engine_S
        if engine_S is None:
            raise ValueError(f"algorithm.off_policy_threshold={threshold}: the loss needs engine_S")
        keeps_gradient_B = off_policy_keep(
            inputs.logprobs_S,
            engine_S,
            objective_inputs.advantages_B,
            inputs.sequence_S,
            threshold,
        )
        loss_S = loss_S * keeps_gradient_B[inputs.sequence_S]
        metrics["mask/off_policy"] = mean_parts(~keeps_gradient_B)
    if (kl := config.kl_in_loss) is not None:
        # After the masks, as in TRL: tokens without an objective are held to the reference too.
        kl_S = _kl_term(objective_inputs, kl)
        loss_S = loss_S + kl.beta * kl_S
        metrics["kl"] = mean_parts(kl_S.detach())
    # Weights are 1 / (tokens of the whole update) and the like: parts of microbatches add up.
    loss = (loss_S * inputs.weights_B[inputs.sequence_S]).sum()
    if inputs.bonus:
        # `bonus` is divided by the update's tokens already, so this is not multiplied by weights_B.
        loss = loss - inputs.bonus * _trained_entropy(inputs).sum()
    return loss, metrics


def _kl_term(inputs: LossInputs, kl: KlConfig) -> Tensor:
    """Return the estimated KL to the reference of each token, [S], without its weight `kl.beta`."""
    if inputs.ref_logprobs_S is None:
        raise ValueError(f"algorithm.kl.beta={kl.beta}: the loss needs ref_logprobs_S")
    kl_S = kl_estimate(inputs.logprobs_S, inputs.ref_logprobs_S, kl.estimator)
    return kl_S * inputs.ratio(Ratio.token) if kl.bias_correction else kl_S


def _trained_entropy(inputs: LossInputs) -> Tensor:
    """Return the entropy of each token, [S], 0 for tokens that are not trained: they get no bonus.

    These are the tokens of sequences of weight 0, and those outside the top entropy (`kept_S`).
    """
    if inputs.entropy_S is None:
        raise ValueError(f"bonus={inputs.bonus}: the loss needs entropy_S")
    entropy_S = inputs.entropy_S * (inputs.weights_B > 0)[inputs.sequence_S]
    return entropy_S if inputs.kept_S is None else entropy_S * inputs.kept_S


def _check_output(output: object, inputs: LossInputs, config: AlgorithmConfig) -> None:
    """Raise ValueError unless an objective of the user's returned a loss for each token."""
    name, expected = config.objective.name, tuple(inputs.logprobs_S.shape)
    if not isinstance(output, ObjectiveOutput):
        raise ValueError(
            f"algorithm.objective: {name} returned a {type(output).__name__}; return "
            "ObjectiveOutput(loss_S=…)"
        )
    if tuple(output.loss_S.shape) != expected:
        raise ValueError(
            f"algorithm.objective: {name} returned a loss_S of shape {list(output.loss_S.shape)}; "
            f"return the loss of each sampled token, {list(expected)}; algorithm.aggregation "
            "divides it"
        )


def _correction_weight(
    inputs: LossInputs, config: AlgorithmConfig
) -> tuple[Tensor | None, MetricParts]:
    """Return the bounded ratio trainer / engine that weighs the loss, and its metrics.

    A correction needs behaviour=recomputed, so that `behaviour_S` are the trainer's own logprobs.
    The weight is [S] on token level, [B] above it. Without a correction: None, and no metrics.
    """
    correction = config.correction
    if correction is None:
        return None, {}
    if inputs.engine_S is None:
        raise ValueError(f"algorithm.correction.level={correction.level}: the loss needs engine_S")
    ratio = correction_ratio(
        inputs.behaviour_S,
        inputs.engine_S,
        inputs.sequence_S,
        sequences=inputs.sequences,
        level=correction.level,
    )
    weight = bound_ratio(ratio, correction.mode, low=correction.min, high=correction.max)
    metrics = {
        "sampling/importance_sampling_ratio/mean": mean_parts(weight),
        **extremes("sampling/importance_sampling_ratio", weight),
        "mask/correction": mean_parts(weight == 0),
    }
    return weight, metrics


def mean_parts(values: Tensor) -> Tensor:
    """Return (sum, count) of `values`, [2], in float32: counts stay exact up to 16 million."""
    total = values.float().sum()
    return torch.stack((total, torch.full_like(total, values.numel())))


def extremes(name: str, values: Tensor) -> MetricParts:
    """Return the metrics `<name>/min` and `<name>/max` of values of any shape, NaN left out.

    Without values they are inf and -inf, which change no minimum and no maximum. Each is given
    twice, because every part of `MetricParts` has two numbers: those of a mean are (sum, count),
    and processes exchange all parts as one tensor.
    """
    # NaN is replaced, not left out: on a GPU a selection by mask waits for all queued work.
    is_nan, values = values.isnan().flatten(), values.float().flatten()
    infinity = values.new_full((1,), torch.inf)  # so that `min` and `max` have a value to return
    lowest = torch.cat((values.masked_fill(is_nan, torch.inf), infinity)).min()
    highest = torch.cat((values.masked_fill(is_nan, -torch.inf), -infinity)).max()
    return {f"{name}/min": torch.stack((lowest,) * 2), f"{name}/max": torch.stack((highest,) * 2)}


def _metric_part(name: str, values: Tensor) -> Tensor:
    """Return a microbatch's part of an objective's metric: an extreme if its name ends so."""
    for extreme in ("min", "max"):
        if name.endswith(extreme):
            return extremes("", values)[f"/{extreme}"]
    return mean_parts(values)


def metric_names(config: AlgorithmConfig) -> list[str]:
    """Return the metrics of an update under this configuration, besides loss and gradient."""
    ratio = "sampling/importance_sampling_ratio"
    optional: list[tuple[bool, list[str]]] = [
        (
            config.correction is not None,
            [f"{ratio}/min", f"{ratio}/mean", f"{ratio}/max", "mask/correction"],
        ),
        (config.off_policy_threshold is not None, ["mask/off_policy"]),
        (config.top_entropy < 1, ["mask/top_entropy"]),
        (config.mask_truncated, ["mask/truncated"]),
        (config.kl is not None, ["kl"]),
        (config.has_bonus, ["entropy_coef"]),
        (config.teacher is not None, ["teacher/kl", "teacher/gated_in", "teacher/too_long"]),
        (config.credit.name is Credit.gigpo, ["credit/step_groups"]),
        (
            config.turn_credit is not None,
            ["credit/turn_reward", *(f"credit/variance/turn_{n + 1}" for n in range(VARIANCES))],
        ),
    ]
    optional_names = [name for has_metrics, names in optional if has_metrics for name in names]
    return ["entropy", *config.objective.registered.metrics, *optional_names]


class Averages:
    """Combines parts (sum, count) of the same name over microbatches, updates and processes.

    `add` is called for each microbatch, and `means` once at the end, in all processes together.

    Example: parts (6., 3.) and (2., 1.) of ``kl`` make the mean 2.0. Parts (6., 6.) and (2., 2.) of
    ``kl_max`` make 6.0, as for every name that ends in ``max``. Names in ``min`` take the least.
    """

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}
        """Name -> the part of all that was added, [2]: (sum, count), or twice the extreme if the
        name ends in ``max`` or ``min``."""

    def add(self, parts: MetricParts, *, counted: bool = True) -> None:
        """Add parts, or, if not `counted`, only their names with values that change nothing.

        Every process needs the same names, because `means` combines them over all processes. So a
        process without a sampled token runs a stand-in, an empty sequence, and adds its names.
        """
        for name, part in parts.items():
            if not counted:
                part = torch.full_like(part, _neutral_value(name))
            total = self._parts.get(name)
            self._parts[name] = (
                part if total is None else _combine(name, torch.stack((total, part)))
            )

    def means(self, accelerator: Any) -> dict[str, float]:
        """Return each name's value over all processes, which need the same names. NaN: no value."""
        if not self._parts:
            return {}
        names = sorted(self._parts)
        local_parts = torch.stack([self._parts[name] for name in names])  # [names, 2]
        parts = accelerator.gather(local_parts[None])  # [processes, names, 2]
        values = {}
        for index, name in enumerate(names):
            # As everywhere here, the name says how parts combine and what they hold.
            part = _combine(name, parts[:, index])
            if name.endswith(("max", "min")):
                extreme = part[0]  # infinite if no process had a value
                values[name] = extreme.item() if extreme.isfinite() else torch.nan
            else:
                total, count = part
                values[name] = (total / count).item()
        return values


def _neutral_value(name: str) -> float:
    """Return the number whose part changes no other part of this name when they are combined."""
    if name.endswith("max"):
        return -torch.inf
    return torch.inf if name.endswith("min") else 0.0


def _combine(name: str, parts: Tensor) -> Tensor:
    """Combine parts of one name, [N, 2], into one part."""
    if name.endswith("max"):
        return parts.amax(0)
    return parts.amin(0) if name.endswith("min") else parts.sum(0)
