"""Where the sampled tokens of rows stand in their trajectories.

Shapes: S sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agenttrain.algorithms.mismatch import THIRDS, Origins
from agenttrain.training.batch import Row


def origins(rows: Sequence[Row], version: int, device: torch.device) -> Origins:
    """The origins of the rows' sampled tokens, one row after the other.

    `version` is what the trainer holds. Example: of 4 sampled tokens the thirds are 0 0 1 2.
    """
    turns: list[int] = []
    thirds: list[int] = []
    stale: list[bool] = []
    for row in rows:
        for span in row.trajectory.sampled_spans():
            turns += [span.turn] * len(span.token_ids)
            stale += [span.policy_version != version] * len(span.token_ids)
        sampled = row.sampled_length
        thirds += [index * len(THIRDS) // sampled for index in range(sampled)]
    return Origins(
        turn_S=torch.tensor(turns, dtype=torch.long, device=device),
        third_S=torch.tensor(thirds, dtype=torch.long, device=device),
        stale_S=torch.tensor(stale, dtype=torch.bool, device=device),
    )
