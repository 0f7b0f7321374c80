"""The part `grpo` of gpu.py: a whole GRPO step with tools, beside TRL's parts on the same engine.

Four groups of eight rollouts of four turns. In each turn the engine samples a drawn number of
tokens, after which the text of a call counts as sampled too (`rollout_sides.py`); tools take a
log-normal time with a median of 50 ms and a sigma of 1. Both sides have the same model, in
bfloat16, the same engine, lengths and calls, and take turns; a step is

    agenttrain    `collect`, `train_policy` with AdamW, whose weights are float32 copies, `sync`
                  with its checks
    trl           TRL's tool loop, its forward pass for the log-probabilities from before the update
                  (vllm_importance_sampling_correction, its default), `_compute_loss` and backward
                  in batches of eight in its order and AdamW on the bfloat16 weights, and the weight
                  sync of its colocated vLLM, a `load_weights` for each weight

so that what differs is how the work is done. `GRPOTrainer.train` itself cannot be used: a random
model calls no tools. Figures, medians over the steps after one that warms up:

    seconds, rollouts, update, sync    of the step and of its phases
    trl_over_agenttrain                round by round
    engine_kernel                      vLLM's attention backend
    trl_sync_call                      vLLM's method that TRL's side loads weights by
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import train_step_cases as cases
from gpu_engine import backend, build_engine
from gpu_step import build_model
from rollout_sides import CONTEXT, GROUP, PLAIN, Plan, make_plan, on_engine, ours, trls
from tools import make_trl
from transformers import AutoTokenizer

from agenttrain.algorithms.config import AlgorithmConfig
from agenttrain.chat.chat import Chat
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.loading import load_chat
from agenttrain.engines.vllm.engine import VllmEngine
from agenttrain.trainer import train_policy
from agenttrain.training.config import TrainingConfig, WeightSyncConfig, optimizer_settings
from agenttrain.training.kernels import counting_calls, disable_cudnn_attention, kernel_names
from agenttrain.training.policy import Policy
from agenttrain.training.weight_sync import SyncProbe, sync
from agenttrain.utils.model_path import model_folder

TURNS, ROLLOUTS, QUICK_ROLLOUTS = 4, 32, 8
ROUNDS, QUICK_ROUNDS = 4, 1
TRL_BATCH = 8
LR = 1e-6
PHASES = ("rollouts", "update", "sync")


class Clock:
    """Seconds of a step's phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, phase: str) -> None:
        """End a phase, which began where the last one ended."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[phase], self._last = now - self._last, now


class Ours:
    """The package's step."""

    def __init__(self, model: Any, engine: VllmEngine, chat: Chat, runner: asyncio.Runner) -> None:
        self.engine, self.chat, self.runner = engine, chat, runner
        self.policy = Policy(
            model,
            algorithm=AlgorithmConfig(name="grpo"),
            optimizer=optimizer_settings({"name": "adamw", "lr": LR}),
            training=TrainingConfig(),
            temperature=1.0,
            max_completion_tokens=10**5,
            steps=100,
        )
        self.kernel = self.policy.kernel
        self.version = 0
        self.probe: SyncProbe | None = None

    def step(self, plan: Plan) -> dict[str, float]:
        """Do a step; return the seconds of its phases."""
        torch.backends.cuda.enable_cudnn_sdp(False)
        clock = Clock()
        rollouts = ours(self.engine, self.chat, plan, self.runner).rollouts
        clock.end("rollouts")
        for rollout in rollouts:
            rollout.reward = float(rollout.sample % 2)
        groups = [rollouts[first : first + GROUP] for first in range(0, len(rollouts), GROUP)]
        train_policy(self.policy, groups)
        clock.end("update")
        self.version += 1
        config, prompt = WeightSyncConfig(), plan.prompts[0]
        self.probe = self.runner.run(
            sync(self.policy, self.engine, self.version, config, self.probe, prompt_ids=prompt)
        )
        clock.end("sync")
        return clock.seconds


class Trl:
    """The step of TRL's parts."""

    def __init__(self, model: Any, engine: VllmEngine, loop: Any) -> None:
        self.model, self.engine, self.loop = model, engine, loop
        on_gpu = model.device.type == "cuda"
        self.trainer = cases._trl_trainer(model, bf16=on_gpu, use_cpu=not on_gpu)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        self.kernel: str | None = None
        self.sync_call = "load_weights"

    def step(self, plan: Plan) -> dict[str, float]:
        """Do a step; return the seconds of its phases."""
        torch.backends.cuda.enable_cudnn_sdp(True)
        clock = Clock()
        sampled = trls(self.engine, self.loop, plan)
        clock.end("rollouts")
        if self.kernel is None:  # in the step that warms up: counting takes time
            with counting_calls() as kernels:
                self.update(plan, sampled)
            self.kernel = kernel_names(kernels)
        else:
            self.update(plan, sampled)
        clock.end("update")
        self.sync()
        clock.end("sync")
        return clock.seconds

    def update(self, plan: Plan, sampled: Any) -> None:
        """Compute the old log-probabilities, loss and gradient, and update the weights."""
        rows = []
        for index, ids in enumerate(sampled.completion_ids):
            rows.append(
                {
                    "prompt_ids": torch.tensor(plan.prompts[index]),
                    "completion_ids": torch.tensor(ids),
                    "tool_mask": torch.tensor(sampled.tool_masks[index]),
                    "advantages": torch.tensor(1.0 if index % 2 else -1.0),
                }
            )
        total = torch.tensor(sum(map(sum, sampled.tool_masks)), device=self.model.device)
        for first in range(0, len(rows), TRL_BATCH):
            inputs = self.batch(rows[first : first + TRL_BATCH])
            inputs["num_items_in_batch"] = total
            with torch.no_grad():
                old, *_ = self.trainer._get_per_token_logps_and_entropies(
                    self.model,
                    torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
                    torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
                    inputs["completion_ids"].shape[1],
                )
            inputs["old_per_token_logps"] = old
            self.trainer._compute_loss(self.model, inputs).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def batch(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Pad as TRL does: prompts to the left, completions to the right."""
        pad = cases._padded
        prompts = [row["prompt_ids"].flip(0) for row in rows]
        completions = [row["completion_ids"] for row in rows]
        inputs = {
            "prompt_ids": pad(prompts).flip(1),
            "prompt_mask": pad([torch.ones_like(row) for row in prompts]).flip(1),
            "completion_ids": pad(completions),
            "completion_mask": pad([torch.ones_like(row) for row in completions]),
            "tool_mask": pad([row["tool_mask"] for row in rows]),
            "advantages": torch.stack([row["advantages"] for row in rows]),
        }
        return {name: tensor.to(self.model.device) for name, tensor in inputs.items()}

    def sync(self) -> None:
        """Load each weight, as `VLLMGeneration.sync_weights` does for a colocated engine.

        Where vLLM has packed the weights for its kernels, as its CPU build does, it cannot load
        one weight: all are loaded by `reload_weights`, and `sync_call` says so.
        """
        llm = self.engine._driver.llm
        worker = llm.model_executor.driver_worker.worker
        weights = [(name, weight.data) for name, weight in self.model.named_parameters()]

        def load() -> None:
            if self.sync_call == "load_weights":
                try:
                    for pair in weights:
                        worker.get_model().load_weights([pair])
                except AttributeError:
                    self.sync_call = "reload_weights"
            if self.sync_call == "reload_weights":
                worker.reload_weights(weights_iterator=iter(weights))
            llm.reset_prefix_cache()

        on_engine(self.engine, load)


def measure_grpo(options: argparse.Namespace) -> dict[str, Any]:
    """Measure steps of both sides."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count = QUICK_ROLLOUTS if options.quick else ROLLOUTS
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    disable_cudnn_attention()
    tokenizer = copy.copy(AutoTokenizer.from_pretrained(model_folder("bundled:shop")))
    loop = make_trl(tokenizer)  # changes the tokenizer's template to TRL's, for both sides
    chat = load_chat(tokenizer, ChatTemplateConfig(), ResponseSchemaConfig())
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        model = plain_model(options.shape, tokenizer, device)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        engine = build_engine(Path(folder), "bfloat16", max_context=CONTEXT)
        engine_kernel = backend(engine)
        trl_side = Trl(model, engine, loop)
        sides: dict[str, Ours | Trl] = {
            "agenttrain": Ours(copy.deepcopy(model), engine, chat, runner),
            "trl": trl_side,
        }
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for round_ in range(-1, rounds):
            plan = make_plan(chat, tokenizer, count, TURNS, tool="50ms", seed=round_)
            for name, side in sides.items():
                seconds = side.step(plan)
                if round_ >= 0:  # the first warms up
                    measured[name].append(seconds)
                print(f"round {round_} {name:10} {seconds}", flush=True)
        figures = {name: phases(measured[name]) for name in sides}
        for name, side in sides.items():
            figures[name]["kernel"] = side.kernel
        runner.run(engine.aclose())
    totals = {name: [sum(step.values()) for step in steps] for name, steps in measured.items()}
    pairs = zip(totals["trl"], totals["agenttrain"], strict=True)
    return {
        "sides": figures,
        "engine_kernel": engine_kernel,
        "trl_sync_call": trl_side.sync_call,
        "rollouts": count,
        "sampled_tokens": plan.sampled,
        "trl_over_agenttrain": statistics.median(theirs / mine for theirs, mine in pairs),
    }


def phases(steps: list[dict[str, float]]) -> dict[str, Any]:
    """Return the medians of a step's seconds and of its phases'."""
    return {
        "seconds": statistics.median(sum(step.values()) for step in steps),
        **{phase: statistics.median(step[phase] for step in steps) for phase in PHASES},
    }


def plain_model(shape: str, tokenizer: Any, device: torch.device) -> Any:
    """Return a random model that samples plain text only, so that no reply is a call."""
    model = build_model(
        shape,
        len(tokenizer),
        device,
        tied=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.no_grad():
        # Logits of a standard deviation of 5, so that a zero never wins.
        model.lm_head.weight.normal_(std=5 / model.config.hidden_size**0.5)
        model.lm_head.weight[:PLAIN] = 0
    return model
