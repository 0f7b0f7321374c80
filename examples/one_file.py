"""Reinforcement learning with tools, whole, in one file.

    python examples/one_file.py

A language model of 635,000 parameters is asked short stories about numbers, calls tools to compute
and hands in an answer. It knows how to call a tool, but often the wrong one: half of its answers
are right. Under a minute of GRPO on one CPU core takes it to about eight in ten, on questions that
it has not seen before.

Read this from top to bottom. Everything is made of the package's own parts. The command
`agenttrain` adds settings, checkpoints, evaluation, several GPUs and many checks, and goes through
the same steps (`Trainer.step`; its sampling and rewards are in `rollout/source.py`):

    task -> rollout -> reward -> advantage -> packed batch -> loss -> update -> weight sync

Tensor names end with their shape: P tasks of a step, G rollouts of a task, N = P x G rollouts
of an update, B sequences of a packed batch, S sampled tokens of a batch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agenttrain.algorithms.advantages import advantages
from agenttrain.algorithms.config import Advantage, Aggregation, AlgorithmConfig, Scale
from agenttrain.algorithms.credit import set_advantages
from agenttrain.algorithms.loss import LossInputs, policy_loss
from agenttrain.algorithms.losses import token_weights
from agenttrain.algorithms.objectives.config import build_objective
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.loading import load_chat
from agenttrain.data.bundled.calculator import row
from agenttrain.engines.config import Sampling
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.engines.transformers.engine import TransformersEngine
from agenttrain.rollout.config import RolloutConfig, RolloutRequest
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.request import RolloutContext
from agenttrain.tools.tool import FunctionTool
from agenttrain.tools.toolbox import Toolbox
from agenttrain.training.batch import make_sequences
from agenttrain.training.logprobs import Scorer
from agenttrain.types import Rollout, Task
from agenttrain.utils.model_path import model_folder
from agenttrain.utils.seeds import derive_seed

STEPS = 12
TASKS_PER_STEP = 16  # P
GROUP_SIZE = 8  # G
LEARNING_RATE = 1e-3  # times a factor that rises for three steps, then falls
TOKEN_BUDGET = 4096  # tokens of one forward pass
SEED = 0

LIMITS = RolloutConfig(
    max_turns=6, max_turn_tokens=48, max_completion_tokens=512, max_result_tokens=32
)
# GRPO: compare with the group, clip each token's ratio, average over tokens, then over rollouts.
ALGORITHM = AlgorithmConfig(
    name="grpo",
    advantage=Advantage.group,
    scale=Scale.group,
    objective=build_objective("clip", low=0.2, high=0.2),
    aggregation=Aggregation.sequence_mean,
)


# 1. Tools are typed Python functions. The model sees their signatures and docstrings; what they
#    return becomes a reply, what they raise an error that the model can read.


def add(a: float, b: float) -> float:
    """Return a + b.

    Args:
        a: A number.
        b: A number.
    """
    return a + b


def subtract(a: float, b: float) -> float:
    """Return a - b.

    Args:
        a: A number.
        b: A number.
    """
    return a - b


def multiply(a: float, b: float) -> float:
    """Return a * b.

    Args:
        a: A number.
        b: A number.
    """
    return a * b


def final_answer(answer: str) -> str:
    """Give the answer and stop.

    Args:
        answer: The answer.
    """
    return "ok"


# 2. Tasks are what the model is asked, and columns that only the reward sees.


def make_tasks(start: int, count: int) -> list[Task]:
    """Make tasks number `start` and following.

    Example: "Mia has 14 coins. Mia finds 15 more. How many coins does Mia have now?", answer "29".
    """
    rows = [row("train", index, SEED) for index in range(start, start + count)]
    return [
        Task(
            task_id=one["task_id"],
            messages=tuple(one["messages"]),
            columns={"answer": one["answer"]},
        )
        for one in rows
    ]


# 3. The reward is a function of the finished rollout: 1 for the right answer, otherwise 0.


def reward(rollout: Rollout) -> float:
    """Return 1.0 if the rollout handed in the task's answer."""
    answers = [
        result.call.arguments.get("answer")
        for result in rollout.tool_results
        if result.call.name == "final_answer" and result.error is None
    ]
    return float(answers == [rollout.task.columns["answer"]])


async def train() -> list[float]:
    """Train the policy; return the mean reward of every step."""
    # 4. The parts. One copy of the weights serves both sides: the engine samples from the very
    #    module that the optimizer updates.
    torch.manual_seed(SEED)
    folder = model_folder("bundled:calculator")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # Renders prompts and tool replies as the model's chat template does, and parses its calls.
    chat = load_chat(tokenizer, ChatTemplateConfig(), ResponseSchemaConfig())
    tools = [FunctionTool(function) for function in (add, subtract, multiply, final_answer)]
    # A call to a stop tool ends the rollout.
    toolbox = Toolbox({tool.name: tool for tool in tools}, stop_tools=["final_answer"])
    engine = TransformersEngine(model, TransformersSettings(max_context=1024))
    # Computes log-probabilities of sampled tokens, many rollouts in one forward pass.
    scorer = Scorer(model, temperature=LIMITS.temperature, logits_budget_mb=1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99))

    context = RolloutContext(engine=engine, chat=chat, toolbox=toolbox, limits=LIMITS)

    history = []
    for step in range(STEPS):
        started = time.perf_counter()

        # 5. Rollouts: G for each of P tasks, all at once. In each, the model writes, its calls
        #    are run, their replies are appended, until it calls `final_answer` or hits a limit.
        #    The model's own token ids are kept; nothing is decoded and tokenised again.
        requests = [
            RolloutRequest(
                task=task,
                rollout_id=f"{step}-{place}-{sample}",
                group_id=f"{step}-{place}",
                sample=sample,
                sampling=Sampling(seed=derive_seed(SEED, step, place, sample)),
            )
            for place, task in enumerate(make_tasks(step * TASKS_PER_STEP, TASKS_PER_STEP))
            for sample in range(GROUP_SIZE)
        ]
        # The engine decodes these together, in this order: the run repeats bit for bit.
        engine.expect([request.rollout_id for request in requests])
        rollouts = await asyncio.gather(*(run_rollout(request, context) for request in requests))

        # 6. Advantages: how much better a rollout did than the others of its group. Where all of
        #    a group are right, or all wrong, they are zero: there is nothing to learn from it.
        rewards_PG = torch.tensor([reward(rollout) for rollout in rollouts]).view(-1, GROUP_SIZE)
        advantages_PG = advantages(rewards_PG, baseline=ALGORITHM.advantage, scale=ALGORITHM.scale)

        # 7. and 8. One optimizer update: see below.
        for parameters in optimizer.param_groups:
            parameters["lr"] = LEARNING_RATE * min((step + 1) / 3, 1 - step / STEPS)
        loss = update(scorer, optimizer, rollouts, advantages_PG.flatten().tolist())

        # 9. Weight sync: the engine forgets what it cached under the old weights, and marks what
        #    it samples from now on with the new version.
        await engine.update(weights=(), version=step + 1)  # no tensors: it shares the module

        history.append(rewards_PG.mean().item())
        sampled = sum(rollout.sampled_length for rollout in rollouts)
        print(
            f"step {step + 1:2}  reward {history[-1]:.3f}  loss {loss:+.4f}  "
            f"tokens {sampled}  {time.perf_counter() - started:.1f} s",
            flush=True,
        )
    await engine.aclose()
    await toolbox.aclose()
    return history


def update(
    scorer: Scorer,
    optimizer: torch.optim.Optimizer,
    rollouts: Sequence[Rollout],
    advantages_N: Sequence[float],
) -> float:
    """Make rollouts with advantages other than zero likelier or less likely; return the loss."""
    # 7. Packing: rollouts stand one after the other in few long sequences, without padding. Each
    #    attends to itself only. A token's weight in the loss counts all rollouts of the update,
    #    also those without a gradient, so that the sum over batches is the mean over rollouts.
    lengths_N = torch.tensor([rollout.sampled_length for rollout in rollouts])
    weights_N = token_weights(
        lengths_N,
        ALGORITHM.aggregation,
        tokens=int(lengths_N.sum()),
        rollouts=len(rollouts),
        fixed_length=LIMITS.max_completion_tokens,
    )
    sequences = []
    for rollout, advantage, weight in zip(rollouts, advantages_N, weights_N.tolist(), strict=True):
        set_advantages(rollout, advantage)
        if advantage != 0:
            sequences += [replace(one, weight=weight) for one in make_sequences(rollout)]
    batches = scorer.pack(sequences, TOKEN_BUDGET, torch.device("cpu"))

    # 8. The loss mask: the scorer returns log-probabilities of sampled tokens only (S), so prompts,
    #    template and tool replies are context and nothing else. `behaviour_S` are those that the
    #    engine sampled them with.
    total = 0.0
    optimizer.zero_grad()
    with scorer.ready():
        for batch in batches:
            logprobs_S, _entropy_S = scorer(batch)
            inputs = LossInputs(
                logprobs_S=logprobs_S,
                behaviour_S=batch.behaviour_S,
                sequence_S=batch.sequence_S,  # the rollout that each token belongs to
                advantages_S=batch.advantages_S,
                weights_B=batch.weights_B,
            )
            loss, _metrics = policy_loss(inputs, ALGORITHM)
            loss.backward()
            total += loss.item()
    torch.nn.utils.clip_grad_norm_(scorer.model.parameters(), max_norm=1.0)
    optimizer.step()
    return total


if __name__ == "__main__":
    rewards = asyncio.run(train())
    first, last = sum(rewards[:2]) / 2, sum(rewards[-2:]) / 2
    print(f"reward {first:.3f} -> {last:.3f} (means of the first and the last two steps)")
