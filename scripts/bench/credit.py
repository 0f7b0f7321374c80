"""Credit per turn, distillation and compaction: what each saves.

A Markov decision process that can be solved by hand: in each of ten states, one of eight actions
earns 0.1 at once, and every action leads to the next state. The policy is a table of logits. It
learns by the trainer's own functions: `turn_advantages` and `policy_loss`. The reward of a rollout
is the sum over its turns, so that with `credit=rollout` every turn's advantage has the noise of the
nine others in it.

    mdp_rollouts_<kind>              rollouts until the expected reward is 0.9: the mean of five
                                     seeds, at the best of four learning rates
    mdp_rollouts_turn_over_rollout   turn_baseline over rollout

The default run of `agenttrain` trains the bundled agent with GRPO. Its last checkpoint then teaches
the bundled agent anew, without rewards and with one rollout per question. Both count the sampled
tokens until the mean reward of five steps is 0.9. Means of three seeds; left out with --quick.

    distill_tokens                   of the student, infinite if it does not get there
    grpo_tokens                      of the teacher's own training
    distill_tokens_over_grpo         their ratio

`credit_shop.py` and `credit_compaction.py` explain their own figures; each can be run by itself.
Left out with --quick.

    shop_steps_<credit>              steps of the shop agent on its questions of three queries
    compaction_reward_<way>          its reward in a context too short for them
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import credit_compaction
import credit_shop
import harness
import torch

from agenttrain.algorithms.advantages import advantages as compare
from agenttrain.algorithms.config import Advantage, AlgorithmConfig, Scale
from agenttrain.algorithms.credit import TurnRewards, turn_advantages
from agenttrain.algorithms.loss import LossInputs, policy_loss
from agenttrain.algorithms.objectives.config import build_objective
from agenttrain.cli import main

STATES, ACTIONS, GROUP, GROUPS = 10, 8, 4, 1
ENOUGH, MOST = 0.9, 20_000
RATES = (3.0, 10.0, 30.0, 100.0)
KINDS: dict[str, dict[str, Any]] = {
    "rollout": {},
    "turn_reward": {"credit": {"name": "turn_reward", "gamma": 0.5}},
    "turn_baseline": {"credit": {"name": "turn_baseline", "gamma": 0.5}},
    "gigpo": {"credit": {"name": "gigpo", "gamma": 0.5}},
}


def learn(kind: str, rate: float, seed: int) -> int:
    """Return the number of rollouts until the expected reward is `ENOUGH`, at most `MOST`."""
    config = AlgorithmConfig(
        name=kind,
        group_size=GROUP,
        advantage=Advantage.leave_one_out,
        scale=Scale.none,
        objective=build_objective("reinforce"),
        **KINDS[kind],
    )
    noise = torch.Generator().manual_seed(seed)
    right = torch.randint(ACTIONS, (STATES,), generator=noise)
    logits = torch.zeros(STATES, ACTIONS, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=rate)
    sequences = GROUPS * GROUP
    states = tuple(str(state) for state in range(STATES))
    for rollouts in range(0, MOST, sequences):
        probabilities = logits.detach().softmax(-1)
        if probabilities.gather(1, right[:, None]).mean() >= ENOUGH:
            return rollouts
        # [states, sequences] -> [sequences, states]
        actions = torch.multinomial(probabilities, sequences, True, generator=noise).T
        earned = (actions == right).double() / STATES
        if config.turn_credit is None:
            totals = earned.sum(1).reshape(GROUPS, GROUP)
            each = compare(totals, baseline=config.advantage, scale=config.scale)
            advantages = each.flatten()[:, None].expand(-1, STATES)
        else:
            advantages = torch.tensor(by_turn(map(tuple, earned.tolist()), config, states))
        logprobs = logits.log_softmax(-1)[torch.arange(STATES), actions].flatten()
        loss, _ = policy_loss(
            LossInputs(
                logprobs_S=logprobs,
                behaviour_S=logprobs.detach(),
                sequence_S=torch.arange(sequences).repeat_interleave(STATES),
                advantages_S=advantages.flatten(),
                weights_B=torch.full((sequences,), 1 / sequences),
            ),
            config,
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return MOST


def by_turn(
    rewards: Iterable[tuple[float, ...]], config: AlgorithmConfig, states: tuple[str, ...]
) -> list[list[float]]:
    """Return the advantages by rollout and turn."""
    made = [TurnRewards(rewards=values, states=states) for values in rewards]
    groups = [made[start : start + GROUP] for start in range(0, len(made), GROUP)]
    return [
        advantages
        for group in turn_advantages(groups, config).advantages
        for advantages in group
        if advantages is not None
    ]


WINDOW, DISTILL_SEEDS = 5, 3
DISTILL = (
    *("algorithm.teacher.reward_weight=0", "algorithm.advantage=none", "algorithm.scale=none"),
    *("algorithm.group_size=1", "tasks_per_step=64", "steps=40"),
    "algorithm.aggregation=token_mean",
)


def distill() -> dict[str, float]:
    """Return the mean tokens that GRPO, and distillation from its agent, sample."""
    grpo, distilled = [], []
    for seed in range(DISTILL_SEEDS):
        with tempfile.TemporaryDirectory() as place:
            teacher, student = Path(place) / "teacher", Path(place) / "student"
            grpo.append(tokens_of_run(teacher, 16 * 8, f"seed={seed}"))
            path = f"algorithm.teacher.path={teacher / 'checkpoints' / 'latest'}"
            distilled.append(tokens_of_run(student, 64, path, *DISTILL, f"seed={seed}"))
    print(f"tokens by seed: GRPO {grpo}, distillation {distilled}")
    student_mean, teacher_mean = statistics.mean(distilled), statistics.mean(grpo)
    return {
        "distill_tokens": student_mean,
        "grpo_tokens": teacher_mean,
        "distill_tokens_over_grpo": student_mean / teacher_mean,
    }


def tokens_of_run(folder: Path, rollouts: int, *settings: str) -> float:
    """Run; return the tokens sampled until the mean reward of `WINDOW` steps is `ENOUGH`."""
    shown = ["tracker=none", "eval.questions=0", f"hydra.run.dir={folder}"]
    if main([*settings, *shown]) != 0:
        raise RuntimeError(f"the run with {settings} failed")
    rewards: list[float] = []
    tokens = 0.0
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rewards.append(row["reward"])
        tokens += rollouts * row["completions/mean_length"]
        if len(rewards) >= WINDOW and statistics.mean(rewards[-WINDOW:]) >= ENOUGH:
            return tokens
    return float("inf")


def measure(quick: bool) -> dict[str, float]:
    """Return the mean rollouts of each kind over the seeds, and the figures of the shop agent."""
    figures: dict[str, float] = {}
    for kind in KINDS:
        runs = {
            rate: [learn(kind, rate, seed) for seed in range(2 if quick else 5)] for rate in RATES
        }
        best = min(runs, key=lambda rate: statistics.mean(runs[rate]))
        print(f"{kind}: rate {best:g}, rollouts by seed {runs[best]}")
        figures[f"mdp_rollouts_{kind}"] = statistics.mean(runs[best])
    whole, turn = figures["mdp_rollouts_rollout"], figures["mdp_rollouts_turn_baseline"]
    figures["mdp_rollouts_turn_over_rollout"] = turn / whole
    if quick:
        return figures
    return {
        **figures,
        **distill(),
        **credit_shop.measure(quick),
        **credit_compaction.measure(quick),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    harness.run(__doc__ or "", measure)
