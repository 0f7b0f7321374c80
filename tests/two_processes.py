"""Run by torchrun in each process: updates of a policy on this process's share of the rollouts.

Prints, from the first process, ``RESULT {case: {"metrics": …, "weights": …, "advantages": …}}``.
Without torchrun the one process has all rollouts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from accelerate import Accelerator
from accelerate.utils import gather_object
from training_cases import policy, random_groups, weights

from agenttrain.config.algorithm import (
    Advantage,
    Aggregation,
    Behaviour,
    Correction,
    CorrectionMode,
    KlEstimator,
    KlIn,
    Ratio,
    Rewards,
    Scale,
    Surrogate,
)
from agenttrain.types import Rollout, StopReason

GROUPS = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """One policy with two updates in a row."""

    algorithm: dict = field(default_factory=dict)
    shares: tuple[tuple[int, ...], ...] = ((0, 1, 2), (3,))
    """Groups of each process, in an order that makes the same minibatches as one process does."""
    training: dict = field(default_factory=lambda: {"token_budget": 100})


NONE_LEFT = ((0, 1, 2, 3), ())
IN_TURN = ((0, 2), (1, 3))
KL_IN_REWARD = {"beta": 0.1, "kl": KlEstimator.k1, "kl_in": KlIn.reward}

CASES = {
    **{str(kind): Case(algorithm={"aggregation": kind}) for kind in Aggregation},
    "none left": Case(shares=NONE_LEFT),
    "none left, kl in reward": Case(algorithm=KL_IN_REWARD, shares=NONE_LEFT),
    "none left, every mask": Case(
        algorithm={
            "top_entropy": 0.5,
            "entropy_bonus": 0.1,
            "entropy_target": 1.0,
            "beta": 0.1,
            "mask_truncated": True,
            "off_policy_threshold": 0.1,
        },
        shares=NONE_LEFT,
    ),
    "none left, sequences": Case(
        algorithm={
            "surrogate": Surrogate.vespo,
            "behaviour": Behaviour.recomputed,
            "correction": Correction.sequence,
            "correction_mode": CorrectionMode.mask,
            "correction_max": 1e9,
        },
        shares=NONE_LEFT,
    ),
    "none left, clip": Case(
        algorithm={"ratio": Ratio.sequence_mean, "clip_low": 1e-3, "clip_high": 1e-3},
        shares=NONE_LEFT,
    ),
    "every mask": Case(
        algorithm={"top_entropy": 0.5, "entropy_bonus": 0.1, "mask_truncated": True}
    ),
    "over the batch": Case(
        algorithm={"advantage": Advantage.batch, "scale": Scale.batch, **KL_IN_REWARD}
    ),
    "each reward": Case(algorithm={"rewards": Rewards.normalize_each, "scale": Scale.batch}),
    "sequences": Case(
        algorithm={
            "ratio": Ratio.sequence_sum,
            "behaviour": Behaviour.recomputed,
            "correction": Correction.sequence,
            "num_epochs": 2,
        }
    ),
    "minibatches": Case(algorithm={"minibatches": 2, "surrogate": Surrogate.cispo}, shares=IN_TURN),
}


def groups(seed: int) -> list[list[Rollout]]:
    """Four groups of four, one of equal rewards, with a rollout without reward and a cut one."""
    made = random_groups(seed, groups=GROUPS)
    for one in made[1]:
        one.reward = 0.5
    made[2][0].stop_reason = StopReason.max_tokens
    for group in made:
        for one in group:
            one.rewards = {"f": one.reward, "g": float(one.sampled_length % 3)}
    made[3][1].reward, made[3][1].rewards = None, {"f": None, "g": None}
    return made


def run(case: Case, rank: int, processes: int) -> dict[str, object]:
    """Two updates of the process's share."""
    share = case.shares[rank] if processes > 1 else range(GROUPS)
    trained = policy(algorithm=case.algorithm, training=case.training, lr=1e-3)
    found, advantages = [], []
    for seed in range(2):
        made = groups(seed)
        found.append(trained.update([made[index] for index in share]))
        mine = {one.rollout_id: one.advantage for i in share for one in made[i]}
        advantages.append(dict(sorted(pair for d in gather_object([mine]) for pair in d.items())))
    sums = {name: tensor.double().abs().sum().item() for name, tensor in weights(trained).items()}
    return {"metrics": found, "weights": gather_object([sums]), "advantages": advantages}


def main() -> None:
    """All cases."""
    accelerator = Accelerator(cpu=True)
    results = {
        name: run(case, accelerator.process_index, accelerator.num_processes)
        for name, case in CASES.items()
    }
    if accelerator.is_main_process:
        print("RESULT", json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
