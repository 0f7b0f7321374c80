"""The learning rate of a step: a pure function, so that a resumed run needs no saved schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from agenttrain.config.schema import OptimizerConfig, Schedule


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of step 1 … steps, by one of transformers' schedules.

    transformers gives the first step a rate of 0, which wastes its rollouts: step n has the rate
    that transformers gives the step after it. The warm-up rises from 1 / warmup_steps, and a decay
    reaches 0 after the last step.

    Example: lr 1, 2 steps of warm-up, linear over 6: .5, 1, .8, .6, .4, .2.
    """
    options = tuple(sorted(config.schedule_options.items()))
    factor = _factor(config.schedule, config.lr, config.warmup_steps, steps, options)
    return config.lr * factor(step)


@cache
def _factor(
    schedule: Schedule, lr: float, warmup: int, steps: int, options: tuple[tuple[str, object], ...]
) -> Callable[[int], float]:
    name = "constant_with_warmup" if schedule is Schedule.constant else str(schedule)
    # The schedules hang on an optimizer, of which they read the rate (for `min_lr`).
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    scheduler = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=max(warmup, 1),
        num_training_steps=steps + 1,
        scheduler_specific_kwargs=dict(options),
    )
    assert isinstance(scheduler, LambdaLR)
    return scheduler.lr_lambdas[0]
