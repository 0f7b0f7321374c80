"""Run by torchrun in each process: what a policy of several processes saves, sends and blames.

``process_states.py <ddp|fsdp2> <folder>`` goes on from what one process saved in <folder>/one, and
saves in <folder>/<mode>; the first process tells what it found.
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

import tiny
import torch
from torchrun import tell
from training_cases import random_groups
from two_processes import Case, full_weights, make

from agenttrain.health.crash import Evidence
from agenttrain.launch.worker import leave
from agenttrain.trainer import train_policy
from agenttrain.training.checkpoint import Checkpoints
from agenttrain.training.nonfinite import BrokenUpdate
from agenttrain.training.policy import Policy
from agenttrain.training.weight_sync import named_weights, policy_logprobs
from agenttrain.training.world import World
from agenttrain.utils.exit_codes import DONE

CASES = {
    "adamw": Case(algorithm={"kl": {"beta": 0.1}}),
    "masters": Case(dtype=torch.bfloat16),
    "adapters": Case(lora=True),
}
IDS = list(range(7, 60))


def learn(trained: Policy, step: int, world: World) -> dict[str, float]:
    """The step's update, its groups shared out in turn."""
    made = random_groups(step, groups=3)
    mine = [g if i % world.size == world.rank else [] for i, g in enumerate(made)]
    return train_policy(trained, mine)


def saved(case: Case, mode: str, world: World, folder: Path) -> dict:
    """Two updates, a checkpoint, and the update after it."""
    trained = make(case, mode, world)
    for step in range(2):
        learn(trained, step, world)
    keeping(folder, world).save(trained, step=2)
    return told(trained, world)


def keeping(folder: Path, world: World) -> Checkpoints:
    """The checkpoints of a folder."""
    return Checkpoints(folder, tokenizer=tiny.tokenizer(), keep=1, main=world.is_main)


def told(trained: Policy, world: World) -> dict:
    """The weights exactly, and those after one more update with its metrics."""
    before = sums(trained)
    metrics = learn(trained, 2, world)
    return {"before": before, "metrics": metrics, "after": sums(trained)}


def sums(trained: Policy) -> dict[str, float]:
    """What distinguishes each weight."""
    found = full_weights(trained.model)
    return {
        name: (tensor.double().flatten() * torch.arange(1, tensor.numel() + 1)).sum().item()
        for name, tensor in found.items()
    }


def loaded(case: Case, mode: str, world: World, folder: Path) -> dict:
    """What the checkpoint of others makes of a policy with other weights."""
    torch.manual_seed(5)
    trained = make(case, mode, world)
    learn(trained, 7, world)
    keeping(folder, world).load_latest(trained)
    drawn = world.gather([random.random()])
    return {**told(trained, world), "drawn": drawn}


def sent(case: Case, mode: str, world: World) -> dict[str, float]:
    """Greatest differences between the policy, what it samples from, and what it sends."""
    trained = make(case, mode, world, sampled=True)
    learn(trained, 0, world)
    trained.refresh_sampler()
    plain = tiny.model(seed=3).to(case.dtype)
    missing, unexpected = plain.load_state_dict(dict(named_weights(trained.model)), strict=False)
    assert not missing and not unexpected, (missing, unexpected)
    own = torch.tensor(trained.probe_logprobs(IDS))
    sampled = torch.tensor(policy_logprobs(trained.sampler, IDS))
    received = torch.tensor(policy_logprobs(plain, IDS))
    return {
        "sampler": (own - sampled).abs().max().item(),
        "sent": (own - received).abs().max().item(),
    }


def blamed(mode: str, world: World, folder: Path) -> dict:
    """Who is named when a rollout of the last process has an engine's logprob that is NaN."""
    trained = make(Case(), mode, world)
    made = random_groups(0, groups=3)
    mine = [g if i % world.size == world.rank else [] for i, g in enumerate(made)]
    (span,) = [
        span for span in made[1][2].trajectories[0].spans if span.turn == 1 and span.logprobs
    ]
    object.__setattr__(span, "logprobs", (math.nan,) * len(span.token_ids))
    checkpoints = keeping(folder / "checkpoints", world)
    if world.is_main:
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("seed: 0\n")
    evidence = Evidence(folder=folder, policy=trained, checkpoints=checkpoints)
    errors = []
    try:
        with evidence.collect(1, [rollout for group in mine for rollout in group]):
            train_policy(trained, mine)
    except BrokenUpdate as error:
        errors.append([str(error), *error.culprits])
    return {"errors": world.gather(errors)}


def main() -> None:
    """All of it."""
    world, mode, folder = World.start(), sys.argv[1], Path(sys.argv[2])
    found: dict = {}
    for name, case in CASES.items():
        found[name] = {
            "loaded": loaded(case, mode, world, folder / "one" / name),
            "saved": saved(case, mode, world, folder / mode / name),
            "sent": sent(case, mode, world),
        }
    found["blamed"] = blamed(mode, world, folder / f"{mode}-crash")
    if world.is_main:
        tell(world.rank, found)


if __name__ == "__main__":
    main()
    leave(DONE)
