"""Compaction for the shop agent, in a context too short for its questions of three queries.

The tool `sql` repeats the tables of the shop after every result, so that the third query of a
question does not fit into 218 tokens. First `agenttrain sft` shows the bundled agent 2,880
rollouts with bad habits, long and compacted in both ways: without them it answers the request for
a summary with a call. From this one model GRPO learns the questions of three queries, 8 of them a
step in groups of 8, in each of three ways. Three seeds.

    compaction_reward_<way>          mean reward of the last five of 16 steps: `none`,
                                     `drop` (drop_tool_results), `summary` (trained summaries)
    compaction_reward_<way>_before   that of the first step
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import harness
import torch
from transformers import AutoTokenizer

from agenttrain import (
    ChatTemplateConfig,
    FunctionTool,
    ResponseSchemaConfig,
    Rollout,
    RolloutConfig,
    RolloutContext,
    RolloutRequest,
    ScriptedEngine,
    Task,
    Toolbox,
    ToolContext,
    ToolFailure,
    load_chat,
    model_folder,
    run_rollout,
)
from agenttrain.cli import main
from agenttrain.data.bundled import demonstrations, shop
from agenttrain.rollout.compaction import Summary
from agenttrain.tools.builtin.final_answer import final_answer
from agenttrain.tracking.rollouts import write_step
from agenttrain.utils.sqlite import QueryFailed, answer_query, restrict

CONTEXT = 218
LIMITS: dict[str, dict[str, Any]] = {
    "none": {},
    "drop": {"compaction": "drop_tool_results", "compact_at": 186},
    "summary": {"compaction": "credit_compaction.Notes", "compact_at": 145, "summary_tokens": 16},
}
"""Settings of `rollout` that differ between the ways."""
SHARED: dict[str, Any] = {"max_turns": 8, "max_turn_tokens": 32, "max_completion_tokens": 1000}
TABLES = (
    "customers (name, city), products (name, price, stock), "
    "orders (id, customer, product, quantity); customer, product: name"
)
HABITS = replace(demonstrations.SHOP, give_up=0.05, follow_chain=0.8, confuse=0.06)
MISREMEMBER = 0.2
"""Share of summaries that name something other than the last result."""
DEMONSTRATIONS, BATCH, STEPS, WINDOW = 2880, 32, 16, 5
RUN = (
    "tools=[final_answer]",
    "+tools.sql._target_=credit_compaction.sql",
    "tracker=none",
    "eval.questions=0",
)


class Notes(Summary):
    """A summary of few tokens, and no turn: what is not in it is forgotten."""

    request = "Notes?"
    resume = "Go on."

    def keep(self, turns: Any, room: int, chat: Any) -> Sequence[Any]:
        """Keep no turn."""
        return []


def sql(query: str, context: ToolContext) -> str:
    """Run a read-only SQL query.

    Args:
        query: One SELECT statement.
    """
    with closing(shop.connect(context.task.columns)) as database:
        restrict(database)
        try:
            text = answer_query(database, query, max_rows=4)
        except QueryFailed as error:
            raise ToolFailure(str(error)) from error
    return f"{text} {TABLES}"


class Demonstrator:
    """Answers as `demonstrations` do, each session by its row, and writes notes where asked."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.asked = tokenizer.encode(Notes.request, add_special_tokens=False)
        self.left: dict[str, list[demonstrations.Message]] = {}
        self.rng = random.Random(0)

    def begin(self, session: str, row: dict[str, Any]) -> None:
        """Decide what a session will do."""
        self.left[session] = demonstrations.shop_demonstration(row, self.rng, HABITS)

    def __call__(self, token_ids: Sequence[int], session: str, turn: int) -> str:
        """Return the next answer of a session."""
        left = self.left[session]
        if self.tokenizer.decode(token_ids[-20:]).count(Notes.request):
            result = left[0]["content"] if left[0]["role"] == "tool" else ""
            if self.rng.random() < MISREMEMBER:
                result = self.rng.choice((*shop.NAMES, *shop.PRODUCTS))
            return result
        if left[0]["role"] == "tool":
            left.pop(0)
        call = left.pop(0)["tool_calls"][0]["function"]
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


async def demonstrate(count: int) -> list[Rollout]:
    """Return rollouts in which the demonstrator acts: one in three in each of the contexts."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder("bundled:shop"))
    answers = Demonstrator(tokenizer)
    engine = ScriptedEngine(
        answers,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        keeps_sent=False,
    )
    tools = {"final_answer": FunctionTool(final_answer), "sql": FunctionTool(sql)}
    context = RolloutContext(
        engine=engine,
        chat=load_chat(tokenizer, ChatTemplateConfig(), ResponseSchemaConfig()),
        toolbox=Toolbox(tools, stop_tools=["final_answer"]),
    )
    done = []
    for index in range(count):
        row = shop.row("train", index, 1, [(0, (0.2, 0.3, 0.5))])
        task = Task(task_id=row.pop("task_id"), messages=tuple(row.pop("messages")), columns=row)
        way = [*LIMITS][index % 3]
        limits = RolloutConfig(**SHARED, **LIMITS[way])
        engine.max_context = 1000 if way == "none" else CONTEXT
        session = f"demonstration-{index}"
        answers.begin(session, row)
        request = RolloutRequest(task=task, rollout_id=session, group_id=session)
        done.append(await run_rollout(request, replace(context, limits=limits)))
    return done


def warm_start(folder: Path, count: int) -> Path:
    """Return the model that has learned the demonstrations."""
    write_step(folder, 1, asyncio.run(demonstrate(count)))
    settings = [
        *("sft", "data=rollouts", f"data.path={folder}/rollouts/*.jsonl", *RUN),
        *("optimizer=muon_warmstart", "optimizer.lr=3e-3", f"steps={count // BATCH}"),
        *("optimizer.warmup_steps=5", "optimizer.schedule=linear", f"sft.batch_size={BATCH}"),
        f"hydra.run.dir={folder}/sft",
    ]
    if main(settings) != 0:
        raise RuntimeError(f"the warm start with {settings} failed")
    return folder / "sft" / "checkpoints" / "latest"


def rewards_of_run(way: str, seed: int, model: Path) -> list[float]:
    """Run from the warm start; return the mean reward of each step."""
    limits = {**SHARED, **LIMITS[way]}
    with tempfile.TemporaryDirectory() as place:
        settings = [
            *RUN,
            *(f"rollout.{name}={value}" for name, value in limits.items()),
            *("data.train.curriculum=[[0,[0,0,1]]]", f"engine.max_context={CONTEXT}"),
            *(f"model.path={model}", "tasks_per_step=8", f"steps={STEPS}", f"seed={seed}"),
            f"hydra.run.dir={place}/run",
        ]
        if main(settings) != 0:
            raise RuntimeError(f"the run with {settings} failed")
        lines = Path(place, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rewards: list[float] = [json.loads(line)["reward"] for line in lines]
    print(way, seed, [round(reward, 2) for reward in rewards], flush=True)
    return rewards


def measure(quick: bool) -> dict[str, float]:
    """Return the mean rewards of each way over the seeds."""
    runs: dict[str, list[list[float]]] = {way: [] for way in LIMITS}
    with tempfile.TemporaryDirectory() as place:
        model = warm_start(Path(place), 320 if quick else DEMONSTRATIONS)
        for seed in range(1 if quick else 3):
            for way, rewards in runs.items():
                rewards.append(rewards_of_run(way, seed, model))
    figures: dict[str, float] = {}
    for way, rewards in runs.items():
        figures[f"compaction_reward_{way}"] = mean(mean(run[-WINDOW:]) for run in rewards)
        figures[f"compaction_reward_{way}_before"] = mean(run[0] for run in rewards)
    return figures


if __name__ == "__main__":
    torch.set_num_threads(1)
    harness.run(__doc__ or "", measure)
