"""Learning from a teacher: the part of a token's advantage that comes from its probabilities.

On-policy distillation (https://thinkingmachines.ai/blog/on-policy-distillation): the policy
samples, and a second model, the teacher, says how likely it finds each token. The expected gradient
of these advantages is that of KL(policy || teacher) at the sampled contexts.

Shapes: S sampled tokens of a sequence.
"""

from __future__ import annotations

from torch import Tensor

from agenttrain.algorithms.config import Gate, TeacherConfig


def is_gated_in(reward: float, config: TeacherConfig) -> bool:
    """Return True if the tokens of a rollout of this reward get the teacher's part.

    Over several turns the plain KL can undo what the reward teaches (SDAR,
    https://arxiv.org/abs/2605.15155): a teacher with privileged knowledge may reject the way to an
    answer that the policy found by itself. Departures from SDAR: (1) its gate is a sigmoid of each
    token's difference, and this one is the rollout's reward, for all of its tokens. (2) Its gated
    term is a separate loss beside GRPO's, and here it is added to the advantage.
    """
    if config.gate is Gate.all:
        return True
    succeeded = reward >= config.success
    return succeeded if config.gate is Gate.succeeded else not succeeded


def mixed_advantages(
    advantages_S: Tensor,
    policy_S: Tensor,
    teacher_S: Tensor,
    config: TeacherConfig,
    *,
    gated_in: bool = True,
) -> Tensor:
    """Return reward_weight * A + weight * (log p_teacher - log p_policy) of each token, [S].

    `gated_in` says that the rollout gets the second term (`is_gated_in`). `policy_S` are logprobs
    from before the update. Each token gets its own difference and none of later tokens (a discount
    of 0). Example: A 0.5, weights 1, probabilities 0.2 and 0.4: 0.5 + ln 2 = 1.193.
    """
    # float64, in which a trajectory keeps its advantages.
    from_reward_S = config.reward_weight * advantages_S.double()
    if not gated_in:
        return from_reward_S
    return from_reward_S + config.weight * (teacher_S.double() - policy_S.double())
