"""The adapter of reasoning_gym, against the real package in an environment of its own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from adapter_kit import arun, environments, run, texts

from agenttrain.environments.adapters.reasoning_gym import ReasoningGym, task_process
from agenttrain.environments.config import EnvironmentSettings
from agenttrain.environments.environment import EnvironmentKind
from agenttrain.environments.environments import Environments
from agenttrain.types import StopReason

PYTHON = os.environ.get("REASONING_GYM_PYTHON", "")
"""A Python that has the package reasoning_gym."""
needs_package = pytest.mark.skipif(
    not PYTHON, reason="scripts/test-ecosystems reasoning_gym runs it"
)


def end(text: str) -> str:
    return f"{text}<|im_end|>"


def question(dataset: str, seed: int, **config: object) -> str:
    return str(ReasoningGym(dataset=dataset, python=PYTHON, config=config).reset({"seed": seed}))


@needs_package
@pytest.mark.parametrize("seed", [0, 7])
def test_a_sum_is_scored_by_the_package(seed: int) -> None:
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    worlds = environments(ReasoningGym, dataset="chain_sum", python=PYTHON, config=config)
    row = {"seed": seed}
    text = question("chain_sum", seed, **config)
    assert "Then put the answer alone in <answer> tags." in text
    (total,) = re.findall(r"problem: (\d [+-] \d) =", text)
    right = str(eval(total))
    done = run(
        end(f"So <answer>1000</answer> or <answer> {right} </answer>"), worlds=worlds, row=row
    )
    assert texts(done, "user") == [text]
    assert (done.stop_reason, done.environment_reward) == (StopReason.completed, 1.0)
    worlds = environments(ReasoningGym, dataset="chain_sum", python=PYTHON, config=config)
    assert run(end(right), worlds=worlds, row=row).environment_reward == 0.0  # without tags
    worlds = environments(ReasoningGym, dataset="chain_sum", python=PYTHON, config=config)
    wrong = run(end("<answer>1000</answer>"), worlds=worlds, row=row)
    assert wrong.environment_reward < 0.5


@needs_package
@pytest.mark.parametrize("dataset", ["chain_sum", "leg_counting", "spell_backward"])
def test_a_seed_makes_a_task_again(dataset: str) -> None:
    assert question(dataset, 3) == question(dataset, 3) != question(dataset, 4)


@needs_package
def test_rollouts_share_a_process_and_a_dead_one_is_replaced() -> None:
    process = task_process(PYTHON)
    assert task_process(PYTHON) is process
    process.ask({"dataset": "chain_sum", "config": {}, "seed": 1}, limit_s=60.0)
    child = process.child
    os.kill(child.pid, signal.SIGKILL)
    while child.alive:
        time.sleep(0.01)
    assert question("chain_sum", 1)
    assert process.child is not child


SUMS = """
class Sums:
    def __init__(self, seed):
        self.seed = seed

    def __getitem__(self, index):
        return {"question": f"{self.seed} + 1 ="}

    def score_answer(self, answer, entry):
        return float(answer == str(self.seed + 1))


def create_dataset(name, seed, size):
    return Sums(seed)
"""


def test_a_pooled_instance_goes_on_with_a_new_process(tmp_path: Path) -> None:
    (tmp_path / "reasoning_gym.py").write_text(SUMS)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    kind = EnvironmentKind(
        "world",
        ReasoningGym,
        bound={"dataset": "sums", "python": str(python)},
        settings=EnvironmentSettings(pooled=True),
    )
    worlds = Environments({"world": kind})

    async def rewards() -> list[float | None]:
        first = await arun(end("<answer>4</answer>"), worlds=worlds, row={"seed": 3})
        child = task_process(str(python)).child
        child.kill()
        assert len(kind.idle) == 1 and not child.alive
        second = await arun(end("<answer>8</answer>"), worlds=worlds, row={"seed": 7})
        await worlds.aclose()
        task_process(str(python)).child.kill()
        return [first.environment_reward, second.environment_reward]

    assert asyncio.run(rewards()) == [1.0, 1.0]


@needs_package
def test_a_dataset_that_is_none_is_named_before_the_run() -> None:
    with pytest.raises(ValueError, match=r"^dataset=nope: ValueError: .*'nope' not registered"):
        ReasoningGym.tools(dataset="nope", python=PYTHON)
    with pytest.raises(ValueError, match=r"^dataset=chain_sum: TypeError: .*'terms'"):
        ReasoningGym.tools(dataset="chain_sum", python=PYTHON, config={"terms": 2})
    assert ReasoningGym.tools(dataset="chain_sum", python=PYTHON) == []


def test_what_cannot_be_right_is_named() -> None:
    with pytest.raises(ValueError, match=r"^python=.*: has no package reasoning_gym; python3 -m"):
        ReasoningGym.tools(dataset="chain_sum", python=sys.executable)
    for arguments, problem in (
        ({"python": "nowhere"}, "python=nowhere: is no program"),
        ({"dataset": ""}, "dataset="),
        ({"config": 3}, "config=3"),
        ({"prompt": "{{ question }} {{ hint }}"}, "uses hint"),
        ({"reply_timeout_s": 0}, "reply_timeout_s=0"),
    ):
        with pytest.raises(ValueError, match=re.escape(problem)):
            ReasoningGym.check(**{"dataset": "chain_sum", "python": sys.executable, **arguments})
