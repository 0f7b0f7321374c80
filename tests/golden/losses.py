"""Inputs and results of TRL 1.16.0's losses, computed on CPU in float64 on fixed log-probabilities.

4 rollouts of 5 completion tokens, 2 accumulated batches, 2 steps per generation, 1 process,
24 tokens in the generation, at most 8 completion tokens, epsilon 0.2 where nothing else is said.
"""

import torch

NEW = torch.tensor(
    [
        [-0.5, -1.0, -0.2, -2.0, -0.7],
        [-1.2, -0.3, -0.9, -0.4, -1.5],
        [-0.1, -0.8, -1.1, -0.6, -0.3],
        [-0.9, -0.9, -0.9, -0.9, -0.9],
    ],
    dtype=torch.float64,
)
OLD = NEW - torch.tensor(
    [
        [0.1, -0.3, 0.05, 0.4, -0.1],
        [-0.2, 0.0, 0.7, 0.3, 0.25],
        [0.0, 0.15, -0.35, 0.2, 0.1],
        [0.1, 0.1, 0.1, 0.1, 0.1],
    ],
    dtype=torch.float64,
)
REF = NEW + torch.tensor(
    [
        [0.05, -0.1, 0.2, 0.0, -0.3],
        [0.1, 0.1, 0.1, 0.1, 0.1],
        [-0.2, 0.3, 0.0, 0.1, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0],
    ],
    dtype=torch.float64,
)
ADVANTAGES = torch.tensor([1.0, -0.5, 0.25, -2.0], dtype=torch.float64)
COMPLETION_MASK = torch.tensor([[1] * 5, [1] * 5, [1, 1, 1, 0, 0], [0] * 5])
TOOL_MASK = torch.tensor([[1] * 5, [1, 0, 0, 1, 1], [1] * 5, [1] * 5])


def _clipped(high: float) -> dict[str, float]:
    return {
        "clip_ratio/low_mean": 0.0,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": high,
    }


# name -> loss, sum of |gradient|, metrics
TRL: dict[str, tuple[float, float, dict[str, float]]] = {
    "grpo": (-0.0829825703, 0.1968415277, _clipped(0.0909090936)),
    "bnpo": (-0.1814736703, 0.2838652602, _clipped(0.0909090936)),
    "dr_grpo": (-0.0623815742, 0.0975786832, _clipped(0.0909090936)),
    "dapo": (-0.1663508645, 0.2602098219, _clipped(0.0909090936)),
    "dapo_onpolicy(old=None)": (-0.1770833333, 0.3020833333, _clipped(0.0)),
    "dapo_beta.1_nobc": (
        -0.1657157319,
        0.2592573481,
        {"kl": 0.0138574371, **_clipped(0.0909090936)},
    ),
    "gspo(grpo,seq,3e-4/4e-4)": (-0.0840505442, 0.0994686424, _clipped(0.25)),
    "rloo": (0.515577157, 3.3918367684, _clipped(0.0)),
}
