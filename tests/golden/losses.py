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
ENGINE = OLD + torch.tensor(
    [
        [0.02, -0.05, 0.1, 0.0, 0.3],
        [0.2, 0.2, -9.0, 0.1, 0.0],
        [0.0, -0.6, 0.5, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0],
    ],
    dtype=torch.float64,
)
ENTROPY = torch.tensor(
    [
        [1.0, 2.0, 0.5, 3.0, 0.1],
        [0.2, 0.9, 1.5, 0.4, 2.5],
        [0.3, 0.6, 0.9, 1.2, 1.5],
        [1.0, 1.0, 1.0, 1.0, 1.0],
    ],
    dtype=torch.float32,
).double()
"""As a model gives them, in single precision: TRL's quantile is, and 0.6 is below its own."""
ADVANTAGES = torch.tensor([1.0, -0.5, 0.25, -2.0], dtype=torch.float64)
COMPLETION_MASK = torch.tensor([[1] * 5, [1] * 5, [1, 1, 1, 0, 0], [0] * 5])
TOOL_MASK = torch.tensor([[1] * 5, [1, 0, 0, 1, 1], [1] * 5, [1] * 5])


def _clipped(mean: float, most: float) -> dict[str, float]:
    return {
        "clip_ratio/low_mean": 0.0,
        "clip_ratio/high_mean": mean,
        "clip_ratio/region_mean": mean,
        "clip_ratio/low_min": 0.0,
        "clip_ratio/high_max": most,
    }


ON_TOKENS = _clipped(0.0909090936, 0.200000003)

# name -> loss, sum of |gradient|, metrics besides the entropy
TRL: dict[str, tuple[float, float, dict[str, float]]] = {
    "grpo": (-0.0829825703, 0.1968415277, ON_TOKENS),
    "bnpo": (-0.1814736703, 0.2838652602, ON_TOKENS),
    "dr_grpo": (-0.0623815742, 0.0975786832, ON_TOKENS),
    "dapo": (-0.1663508645, 0.2602098219, ON_TOKENS),
    "luspo": (-0.4990525935, 0.7806294656, ON_TOKENS),
    "sapo": (-0.1899051702, 0.2296133505, {}),
    "vespo": (0.0965242318, 0.2863916984, {"vespo/phi_seq_mean": 1.0553323896}),
    "cispo_epshigh5": (0.1603175118, 0.3223691843, {"cispo_clip_ratio": 0.0}),
    "cispo_epshigh1.2": (0.1398734047, 0.3053372339, {"cispo_clip_ratio": 0.0909090936}),
    "gspo(grpo,seq,3e-4/4e-4)": (-0.0840505442, 0.0994686424, _clipped(0.25, 1.0)),
    "luspo_seq": (-0.5210357163, 0.9424400109, _clipped(0.0, 0.0)),
    "dapo_beta.1_bc": (-0.1656886395, 0.2590567739, {"kl": 0.0144485448, **ON_TOKENS}),
    "dapo_beta.1_nobc": (-0.1657157319, 0.2592573481, {"kl": 0.0138574371, **ON_TOKENS}),
    "dapo_delta1.3": (-0.170722923, 0.2320877634, ON_TOKENS),
    "dapo_onpolicy(old=None)": (-0.1770833333, 0.3020833333, _clipped(0.0, 0.0)),
    "dapo_opsm-.2": (-0.2382803432, 0.1882803432, ON_TOKENS),
    "dapo_topent.5": (-0.1196086256, 0.1231096846, ON_TOKENS),
    "dapo_ent.01": (-0.1715781372, 0.2602098219, ON_TOKENS),
    "dapo_is_token_truncate_1.5": (-0.1620126994, 0.2443355419, ON_TOKENS),
    "dapo_is_token_truncate_1.05": (-0.1565273659, 0.2388502084, ON_TOKENS),
    "dapo_is_token_mask_1.5": (-0.1438590393, 0.2261818819, ON_TOKENS),
    "dapo_is_token_mask_1.05": (-0.1114090067, 0.1937318492, ON_TOKENS),
    "dapo_is_sequence_truncate_1.5": (-0.1236766588, 0.1957132791, ON_TOKENS),
    "dapo_is_sequence_truncate_1.05": (-0.1220292769, 0.1940658972, ON_TOKENS),
    "dapo_is_sequence_mask_1.5": (-0.1236766588, 0.1957132791, ON_TOKENS),
    "dapo_is_sequence_mask_1.05": (-0.0906766888, 0.1627133091, ON_TOKENS),
    "vespo_is_token_mask_1.05": (-0.0677222097, 0.0655376223, {"vespo/phi_seq_mean": 0.5121504892}),
    "rloo": (0.515577157, 3.3918367684, _clipped(0.0, 0.0)),
}
