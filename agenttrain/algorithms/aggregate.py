"""How the losses of tokens become one number: the weight of a rollout's tokens.

The weights depend on the whole optimizer update, over all microbatches and processes, so that the
weighted sums of the parts add up to exactly the loss of the whole.
"""

from __future__ import annotations

from torch import Tensor

from agenttrain.config.algorithm import Aggregation


def token_weights(
    lengths_B: Tensor, aggregation: Aggregation, *, tokens: int, rollouts: int, fixed_length: int
) -> Tensor:
    """Weight of each token of rollout b in the loss, [B].

    lengths_B counts sampled tokens; `tokens` and `rollouts` count the whole update, with those that
    have no gradient; `fixed_length` is the limit on a completion's tokens.

    token_mean: 1 / tokens (DAPO, https://arxiv.org/abs/2503.14476). sequence_mean:
    1 / (rollouts x length): the mean over rollouts of each one's mean (GRPO,
    https://arxiv.org/abs/2402.03300). sequence_sum: 1 / rollouts, so that a long rollout weighs as
    much more as it is longer (LUSPO, https://arxiv.org/abs/2602.05261). fixed_length:
    1 / (rollouts x fixed_length) (Dr. GRPO, https://arxiv.org/abs/2503.20783).

    Example: lengths [3, 1] that are the whole update, with fixed_length 10, weigh [1/4, 1/4],
    [1/6, 1/2], [1/2, 1/2] or [1/20, 1/20].

    A loss on the level of sequences is the same number at each of a rollout's tokens, so that
    sequence_mean makes it the mean over rollouts, as in RLOO.
    """
    lengths_B = lengths_B.double()
    if aggregation is Aggregation.token_mean:
        return lengths_B.new_full(lengths_B.shape, 1 / tokens)
    if aggregation is Aggregation.sequence_mean:
        return 1 / (rollouts * lengths_B.clamp(min=1))
    of_each = 1 if aggregation is Aggregation.sequence_sum else fixed_length
    return lengths_B.new_full(lengths_B.shape, 1 / (rollouts * of_each))
