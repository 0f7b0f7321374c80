"""Trial call of an objective of the user's, before anything expensive starts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from agenttrain.algorithms.config import AlgorithmConfig, CorrectionLevel
from agenttrain.algorithms.objectives.base import ObjectiveInputs, ObjectiveOutput
from agenttrain.types import ConfigError
from agenttrain.utils.locate import error_with_line
from agenttrain.utils.sections import shown


def try_objective(config: AlgorithmConfig) -> None:
    """Call the objective with three made-up tokens. Raise ConfigError if a run could not use it.

    The tokens lie on the CPU, in two sequences. Their log ratios are 0, 0.1 and -0.1, and their
    advantages 0.5, 0.5 and -0.5.
    """
    objective = config.objective
    where = f"algorithm.objective._target_={objective.name}: called with three made-up tokens it"
    correction = config.correction
    applies_correction = objective.registered.applies_correction and correction is not None
    on_token_level = correction is not None and correction.level is CorrectionLevel.token
    logprobs_S = torch.tensor([-1.0, -0.5, -2.0], requires_grad=True)
    inputs = ObjectiveInputs(
        logprobs_S=logprobs_S,
        behaviour_S=torch.tensor([-1.0, -0.6, -1.9]),
        advantages_S=torch.tensor([0.5, 0.5, -0.5]),
        sequence_S=torch.tensor([0, 0, 1]),
        sequences=2,
        correction_S=torch.tensor([1.0, 1.1, 0.9])
        if applies_correction and on_token_level
        else None,
        correction_B=torch.tensor([1.1, 0.9])
        if applies_correction and not on_token_level
        else None,
    )
    try:
        output = objective(inputs)
        problems = list(_output_problems(output, logprobs_S, objective.registered.metrics))
    except Exception as error:
        raise ConfigError(f"{where} raised {error_with_line(error)}") from error
    if problems:
        raise ConfigError("\n".join(f"{where} {problem}" for problem in problems))


def _output_problems(output: Any, logprobs_S: Tensor, declared: Collection[str]) -> Iterator[str]:
    """Yield the problems of an objective's output for the three tokens of `try_objective`.

    Each is a sentence without its subject, the objective. `logprobs_S` are the objective's input,
    and `declared` the names of its metrics.
    """
    if not isinstance(output, ObjectiveOutput):
        yield f"returned a {type(output).__name__}; return ObjectiveOutput(loss_S=…)"
        return
    loss_S: Any = output.loss_S
    if not isinstance(loss_S, Tensor) or loss_S.shape != logprobs_S.shape:
        is_tensor = isinstance(loss_S, Tensor)
        kind = f"shape {list(loss_S.shape)}" if is_tensor else f"type {type(loss_S).__name__}"
        yield (
            f"returned a loss_S of {kind}; return the loss of each sampled token, a tensor of "
            "shape [3]; algorithm.aggregation divides it"
        )
    elif not loss_S.requires_grad:
        yield (
            "returned a loss_S without a gradient; compute it from inputs.logprobs_S, "
            "inputs.log_ratio_S or inputs.ratio(…), without detach() of all of them"
        )
    else:
        (gradient_S,) = torch.autograd.grad(loss_S.sum(), logprobs_S, allow_unused=True)
        if gradient_S is None:
            yield "returned a loss_S that does not depend on inputs.logprobs_S"
        elif not (loss_S.isfinite() & gradient_S.isfinite()).all():
            yield (
                f"returned loss_S={shown(loss_S.tolist())} with the gradient "
                f"{shown(gradient_S.tolist())}; both must be finite"
            )
    metrics: Mapping[str, Any] = output.metrics
    if set(metrics) != set(declared):
        yield (
            f"returned the metrics {shown(sorted(metrics))}, and its decorator declares "
            f"{shown(sorted(declared))}; each update has all of them: return those of "
            "@objective(metrics={name: meaning})"
        )
    for name, values in metrics.items():
        if not isinstance(values, Tensor):
            yield (
                f"returned metrics[{name!r}] as {type(values).__name__}; return a tensor: one "
                "value for each token or sequence, whose mean is the metric"
            )
        elif values.requires_grad:
            yield f"returned metrics[{name!r}] with a gradient; add .detach()"
