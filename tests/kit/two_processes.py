"""Run by torchrun in each process: updates of a policy on this process's share of the rollouts.

``two_processes.py <mode> <case>…`` tells, from the first process, ``{case: {"metrics":
…, "weights": …, "advantages": …}}``. A mode is ``ddp``, ``fsdp2``, or ``ddp-context-2`` for groups
of two processes that compute together. Without torchrun the one process has all rollouts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import tiny
import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from torchrun import tell
from training_cases import policy, random_groups
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from agenttrain.algorithms.config import (
    Advantage,
    Aggregation,
    Behaviour,
    Gate,
    KlEstimator,
    KlPlace,
    Rewards,
    Scale,
    TeacherConfig,
)
from agenttrain.algorithms.objectives.config import build_objective
from agenttrain.launch.worker import leave
from agenttrain.trainer import train_policy
from agenttrain.training.config import LoraSettings, TrainingConfig
from agenttrain.training.lora import add_lora
from agenttrain.training.policy import Policy
from agenttrain.training.sharding import Sharding, full_tensor
from agenttrain.training.teacher_scores import ModelTeacher, Teacher
from agenttrain.training.world import World
from agenttrain.types import Completion, Finish, Origin, Rollout, StopReason
from agenttrain.utils.exit_codes import DONE

GROUPS = 4
STEPS = 6


@dataclass(frozen=True, kw_only=True)
class Case:
    """One policy with some steps in a row."""

    algorithm: dict = field(default_factory=dict)
    shares: tuple[tuple[int, ...], ...] = ((0, 1, 2), (3,))
    """Groups of each process."""
    training: dict = field(default_factory=lambda: {"token_budget": 100})
    optimizer: dict = field(default_factory=dict)
    steps: int = 2
    lora: bool = False
    dtype: torch.dtype = torch.float32
    offload: bool = False
    within: int | None = None
    """Successive ranks that share the weights; None: all."""
    pictures: bool = False
    """A model that could see, of rollouts of text."""
    recurrent: bool = False
    """A model with recurrent layers."""
    branches: bool = False
    """Rollouts of three trajectories each, one of which began in another."""
    tolerance: float = 1e-4
    """Relative, of metrics: AdamW makes more of a gradient's rounding."""


NONE_LEFT = ((0, 1, 2, 3), ())
IN_TURN = ((0, 2), (1, 3))
KL_IN_REWARD = {"kl": {"beta": 0.1, "estimator": KlEstimator.k1, "place": KlPlace.reward}}
SGD = {"name": "sgd", "lr": 0.05}
RECORDED = {"optimizer": SGD, "steps": STEPS, "tolerance": 1e-5}
BF16 = {"dtype": torch.bfloat16, "tolerance": 0.02}

HOW = {
    "recorded": Case(**RECORDED),
    "recorded, none left": Case(**RECORDED, shares=NONE_LEFT),
    "recorded, kl and minibatches": Case(
        **RECORDED,
        algorithm={"kl": {"beta": 0.1}, "minibatches": 2, "num_epochs": 2},
        shares=IN_TURN,
    ),
    "recorded, recomputed layers": Case(
        **RECORDED, training={"token_budget": 100, "activation_checkpointing": "all"}
    ),
    "recorded, recomputed blocks": Case(
        **RECORDED, training={"token_budget": 100, "activation_checkpointing": "blocks"}
    ),
    "synced reference": Case(
        algorithm={"kl": {"beta": 0.1, "reference": {"sync_steps": 1}}}, steps=3
    ),
    "adapters": Case(lora=True, algorithm={"kl": {"beta": 0.1}}),
    "offload": Case(offload=True),
    "state elsewhere between updates": Case(
        training={"token_budget": 100, "offload_during_rollouts": True},
        dtype=torch.bfloat16,
        tolerance=0.02,
    ),
    "weights for pictures": Case(**RECORDED, pictures=True),
    "recurrent layers": Case(
        recurrent=True,
        training={"token_budget": 100, "share_prefix": "always", "activation_checkpointing": "all"},
    ),
    "teacher": Case(algorithm={"teacher": TeacherConfig(path="t", gate=Gate.failed)}),
    "teacher, none left": Case(
        algorithm={"teacher": TeacherConfig(path="t", reward_weight=0.0)}, shares=NONE_LEFT
    ),
    "muon": Case(optimizer={"name": "muon"}),
    "bf16": Case(**BF16),
    "adapters in bf16": Case(**BF16, lora=True),
    "mixed precision": Case(
        training={"token_budget": 100, "mixed_precision": "bf16"}, tolerance=0.02
    ),
}
"""How a policy is held and updated: for DDP and FSDP2."""

WHAT = {
    **{str(kind): Case(algorithm={"aggregation": kind}) for kind in Aggregation},
    "none left": Case(shares=NONE_LEFT),
    "none left, kl in reward": Case(algorithm=KL_IN_REWARD, shares=NONE_LEFT),
    "none left, every mask": Case(
        algorithm={
            "top_entropy": 0.5,
            "entropy": {"bonus": 0.1, "adaptive": {"target": 1.0}},
            "kl": {"beta": 0.1},
            "mask_truncated": True,
            "off_policy_threshold": 0.1,
        },
        shares=NONE_LEFT,
    ),
    "none left, sequences": Case(
        algorithm={
            "objective": build_objective("vespo"),
            "behaviour": Behaviour.recomputed,
            "correction": {"level": "sequence", "mode": "mask", "max": 1e9},
        },
        shares=NONE_LEFT,
    ),
    "none left, clip": Case(
        algorithm={
            "objective": build_objective("clip", ratio="sequence_mean", low=1e-3, high=1e-3)
        },
        shares=NONE_LEFT,
    ),
    "every mask": Case(
        algorithm={"top_entropy": 0.5, "entropy": {"bonus": 0.1}, "mask_truncated": True}
    ),
    "over the batch": Case(
        algorithm={"advantage": Advantage.batch, "scale": Scale.batch, **KL_IN_REWARD}
    ),
    "turns over the batch": Case(
        algorithm={"credit": {"name": "turn_reward", "gamma": 0.5}, "scale": Scale.batch}
    ),
    "turns, none left": Case(algorithm={"credit": {"name": "turn_baseline"}}, shares=NONE_LEFT),
    "turns of branches": Case(
        algorithm={"credit": {"name": "turn_reward", "gamma": 0.5}}, branches=True
    ),
    "states, none left": Case(algorithm={"credit": {"name": "gigpo"}}, shares=NONE_LEFT),
    "states of branches": Case(
        algorithm={"credit": {"name": "gigpo"}, "aggregation": Aggregation.sequence_sum},
        branches=True,
    ),
    "each reward": Case(algorithm={"rewards": Rewards.normalize_each, "scale": Scale.batch}),
    "sequences": Case(
        algorithm={
            "objective": build_objective("clip", ratio="sequence_sum"),
            "behaviour": Behaviour.recomputed,
            "correction": {"level": "sequence"},
            "num_epochs": 2,
        }
    ),
    "minibatches": Case(
        algorithm={"minibatches": 3, "objective": build_objective("cispo", high=0.2)},
        shares=IN_TURN,
    ),
}
"""What is computed: for DDP."""


CASES = {**WHAT, **HOW}


def groups(seed: int, *, branches: bool = False) -> list[list[Rollout]]:
    """Four groups of four, one of equal rewards, with a rollout without reward and a cut one."""
    made = random_groups(seed, groups=GROUPS)
    for one in (one for group in made for one in group if branches):
        branch(one)
    for one in made[1]:
        one.reward = 0.5
    made[2][0].stop_reason = StopReason.max_tokens
    for group in made:
        for one in group:
            one.rewards = {"f": one.reward, "g": float(one.sampled_length % 3)}
            one.turn_scores = {"g": tuple(0.5 * turn for turn in range(one.turns))}
    made[3][1].reward, made[3][1].rewards = None, {"f": None, "g": None}
    return made


def branch(one: Rollout) -> None:
    """Add a trajectory from amid the first, and one that begins anew; both sample a turn."""
    (first,) = one.trajectories
    shared = first.prompt_length + 1
    amid, anew = one.branch(0, shared, role="summary"), one.begin(role="helper", delegation=None)
    for trajectory in (amid, anew):
        trajectory.append_context([11, 12, 13 + one.sample], Origin.prompt)
        own = (20 + one.sample, 21, 2)
        done = Completion(
            token_ids=own, logprobs=(-5.5,) * 3, finish=Finish.stop, versions=((0, 3),)
        )
        trajectory.append_sampled(done, trajectory.token_ids)
    for trajectory in one.trajectories:
        trajectory.states = [f"{turn + one.sample % 2}" for turn in range(trajectory.turns)]


def seeing(seed: int) -> Gemma3ForConditionalGeneration:
    """A tiny model with a part for pictures."""
    text = tiny.model().config
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config={
            **{"vocab_size": text.vocab_size, "hidden_size": 32, "intermediate_size": 48},
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"head_dim": 8, "query_pre_attn_scalar": 8},
        },
        vision_config={**sizes, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        **{"boi_token_index": 3, "eoi_token_index": 4, "image_token_index": 5},  # in no rollout
    )
    torch.manual_seed(seed)
    return Gemma3ForConditionalGeneration(config).float().eval()


def recurrent(seed: int) -> Qwen3_5ForCausalLM:
    """A tiny model of which every other layer is recurrent."""
    config = Qwen3_5TextConfig(
        vocab_size=tiny.model().config.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    torch.manual_seed(seed)
    return Qwen3_5ForCausalLM(config).float().eval()


def make(case: Case, mode: str, world: World, *, sampled: bool = False) -> Policy:
    """The case's policy; each process begins with other weights, of which the first one's count."""
    AcceleratorState._reset_state()  # another mixed precision than the case before
    build = seeing if case.pictures else recurrent if case.recurrent else tiny.model
    model = build(seed=world.rank).to(case.dtype)
    if case.lora:
        add_lora(model, LoraSettings(rank=4))
        torch.manual_seed(9)  # adapters that do something: B begins with zeros
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
    way, _, context = mode.partition("-context-")
    sharding = Sharding(cpu_offload=case.offload, within=case.within) if way == "fsdp2" else None
    return policy(
        model,
        algorithm=case.algorithm,
        training=case.training,
        processes={
            "world": world,
            "sharding": sharding,
            "sampled": sampled,
            "context_parallel": int(context or 1),
        },
        **{"lr": 1e-3, **case.optimizer},
    )


def teacher_of(case: Case, trained: Policy, mode: str) -> Teacher | None:
    """The case's teacher, which sees another prompt and is of another size; None without one."""
    if trained.algorithm.teacher is None:
        return None
    return ModelTeacher(
        tiny.model(5, num_hidden_layers=1),
        temperature=1.0,
        training=TrainingConfig(**case.training),
        accelerator=trained.accelerator,
        world=trained.world,
        sharding=Sharding() if mode == "fsdp2" else None,
        prompt_ids=lambda one, _: [7, 8, 9, 40 + one.sample],
    )


def advantages_of(rollout: Rollout) -> list[tuple[str, float | None]]:
    """The advantage of each sampled token, or None of the rollout."""
    each = [trajectory.advantages for trajectory in rollout.trajectories]
    if None in each:
        return [(rollout.rollout_id, None)]
    return [(f"{rollout.rollout_id}/{s}", a) for s, a in enumerate(a for own in each for a in own)]


def run(case: Case, mode: str, world: World) -> dict[str, object]:
    """Steps on the process's share."""
    share = dict(enumerate(case.shares)).get(world.rank, ()) if world.size > 1 else range(GROUPS)
    trained = make(case, mode, world)
    teacher = teacher_of(case, trained, mode)
    found, advantages = [], []
    for seed in range(case.steps):
        made = groups(seed, branches=case.branches)
        own = [made[i] if i in share else [] for i in range(GROUPS)]
        with trained.optimizer_on_device():
            found.append(train_policy(trained, own, teacher))
        mine = dict(pair for i in share for one in made[i] for pair in advantages_of(one))
        everyone = world.gather([mine])
        advantages.append(dict(sorted(pair for d in everyone for pair in d.items())))
    tensors = full_weights(trained.model)
    sums = {name: tensor.double().abs().sum().item() for name, tensor in tensors.items()}
    return {"metrics": found, "weights": world.gather([sums]), "advantages": advantages}


def full_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every weight by its name in `state_dict`; the processes gather one after the other."""
    return {name: full_tensor(tensor.detach()) for name, tensor in model.state_dict().items()}


def main() -> None:
    """The named cases of a mode."""
    world, mode = World.start(), sys.argv[1]
    results = {name: run(CASES[name], mode, world) for name in sys.argv[2:]}
    if world.is_main:
        tell(world.rank, results)


if __name__ == "__main__":
    main()
    leave(DONE)
