"""The learning rate of a step: a pure function, so that a resumed run needs no saved schedule."""

from __future__ import annotations

import math

from agenttrain.config.schema import OptimizerConfig, Schedule


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of step 1 … steps.

    Unlike transformers' schedules, which start at a rate of 0 and waste a step's rollouts, the
    warm-up rises from 1 / warmup_steps in the first step, and the decay reaches 0 after the last.

    Example: lr 1, 2 steps of warm-up, linear over 6: .5, 1, .8, .6, .4, .2.
    """
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    left = (steps + 1 - step) / max(steps + 1 - max(config.warmup_steps, 1), 1)
    left = min(left, 1.0)
    if config.schedule is Schedule.linear:
        return config.lr * left
    if config.schedule is Schedule.cosine:
        return config.lr * (1 - math.cos(math.pi * left)) / 2
    return config.lr
