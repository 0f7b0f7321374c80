#!/usr/bin/env python
"""Compare a ranking and a rubric whose judges are simulated: the table of docs/guides/ranking.md.

    python scripts/bench/ranking.py

Both are the package's own rewards. Their judge is a program in place of a language model: it reads
the true quality of a rollout from its text and errs by noise. A score is a whole number from 0 to
10; a timid judge gives 5 to 8 only. A comparison ranks by quality plus noise, and may prefer what
stands first.

`signal` is the correlation of the advantages with those of the true quality, over all rollouts of
groups whose qualities differ. `noise` is the mean square of the advantages in groups whose
qualities are all equal, where each of them trains towards nothing.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agenttrain.algorithms.advantages import advantages
from agenttrain.algorithms.config import Advantage, Scale
from agenttrain.rewards.builtin.judge import Judge
from agenttrain.rewards.builtin.ranking import Ranking
from agenttrain.rewards.rubric import Rubric
from agenttrain.types import Rollout, Task

GROUP, GROUPS = 8, 200


@dataclass
class SimulatedJudge:
    """Answers chat completions about texts such as ``attempt 3 of quality 0.25``."""

    noise: float
    """Standard deviation of an error, in units of quality."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Scores of the qualities 0 and 1."""
    position: float = 0.0
    """Quality that the first place of a comparison is worth; the last is worth 0."""
    ties: bool = False
    """Call qualities that differ by less than `noise` equally good."""
    name: str = "role:judge"

    def complete(self, body: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Return the reply to a request for a score, or for a ranking."""
        text = body["messages"][-1]["content"]
        qualities = [float(value) for value in re.findall(r"of quality ([\d.]+)", text)]
        rng = random.Random(text)
        if "Rank all" not in text:
            low, high = self.scale
            score = round(low + (high - low) * (qualities[0] + rng.gauss(0, self.noise)))
            return answer(f"Score: {min(max(score, 0), 10)}")
        last = max(len(qualities) - 1, 1)
        values = {
            number: quality + rng.gauss(0, self.noise) + self.position * (last - number) / last
            for number, quality in enumerate(qualities)
        }
        return answer(f"Ranking: {self.ranked(values)}")

    def ranked(self, values: Mapping[int, float]) -> str:
        """Return the numbers from 1 on, best first, as the text of a ranking."""
        order = sorted(values, key=lambda number: -values[number])
        text, top = str(order[0] + 1), values[order[0]]
        for number in order[1:]:
            is_tie = self.ties and top - values[number] < self.noise
            top = top if is_tie else values[number]
            text += f"{' = ' if is_tie else ' > '}{number + 1}"
        return text


def answer(text: str) -> dict[str, Any]:
    """Return a chat completion with this text."""
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def group_of(number: int, qualities: Sequence[float]) -> list[Rollout]:
    """Return the rollouts of a question, whose texts say how good they are."""
    question = {"role": "user", "content": f"question {number}"}
    task = Task(task_id=str(number), messages=(question,))
    rollouts = []
    for sample, quality in enumerate(qualities):
        rollout = Rollout(
            task=task, rollout_id=f"train-1-{number}-{sample}", group_id=f"train-1-{number}"
        )
        text = f"attempt {sample} of quality {quality:.3f}"
        rollout.trajectories[0].messages += [question, {"role": "assistant", "content": text}]
        rollout.trajectories[0].prompt_messages = 1
        rollouts.append(rollout)
    return rollouts


def advantages_of(function: Any, groups: Sequence[Sequence[Rollout]]) -> torch.Tensor:
    """Return the advantages [P groups, G rollouts] that GRPO makes of a reward."""
    rollouts = [rollout for group in groups for rollout in group]
    asyncio.run(Rubric({"it": function}).score(rollouts))
    rewards_PG = torch.tensor([[rollout.reward for rollout in group] for group in groups])
    return advantages(rewards_PG.double(), baseline=Advantage.group, scale=Scale.group)


def measured(
    function: Any, draw: Callable[[random.Random], Sequence[float]], groups: int = GROUPS
) -> tuple[float, float]:
    """Return signal and noise of a reward, over groups whose qualities `draw` gives."""
    rng = random.Random(0)
    qualities = [list(draw(rng)) for _ in range(groups)]
    given_PG = advantages_of(function, [group_of(n, row) for n, row in enumerate(qualities)])
    true_PG = advantages(
        torch.tensor(qualities, dtype=torch.float64), baseline=Advantage.group, scale=Scale.group
    )
    equal_P = (true_PG == 0).all(1)
    noise = given_PG[equal_P].square().mean().item() if equal_P.any() else 0.0
    pair = given_PG[~equal_P].flatten().tolist(), true_PG[~equal_P].flatten().tolist()
    is_flat = any(len(set(values)) < 2 for values in pair)
    return (0.0 if is_flat else statistics.correlation(*pair)), noise


def right_or_wrong(rng: random.Random) -> list[float]:
    """Draw the answers to a question that has one: 0 or 1, for many questions all the same."""
    rate = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    return [float(rng.random() < rate) for _ in range(GROUP)]


def essays(rng: random.Random) -> list[float]:
    """Draw texts that are all about as good: qualities that differ by a tenth."""
    middle = rng.uniform(0.3, 0.7)
    return [min(max(rng.gauss(middle, 0.1), 0.0), 1.0) for _ in range(GROUP)]


def rubric(judge: SimulatedJudge) -> Judge:
    """Return the reward that scores each rollout by itself."""
    return Judge(url=judge, prompt="{{ question }}: {{ final }}", pattern=r"Score: (\d+)", high=10)


def ranking(judge: SimulatedJudge) -> Ranking:
    """Return the reward that compares the rollouts of a group."""
    return Ranking(url=judge, prompt="{{ question }}: {{ answers }} {{ instructions }}")


def exact(rollout: Rollout) -> float:
    """Check the answer, as `exact_match` does: without any error."""
    return float(rollout.trajectories[0].messages[-1]["content"].endswith("1.000"))


NOISE = 0.1
JUDGED = {
    "judge": rubric(SimulatedJudge(noise=NOISE)),
    "judge, timid": rubric(SimulatedJudge(noise=NOISE, scale=(5.0, 8.0))),
    "ranking": ranking(SimulatedJudge(noise=NOISE)),
    "ranking, with ties": ranking(SimulatedJudge(noise=NOISE, ties=True)),
    "ranking, first place worth 0.3": ranking(SimulatedJudge(noise=NOISE, position=0.3)),
}
CASES: dict[str, tuple[Callable[[random.Random], Sequence[float]], dict[str, Any]]] = {
    "right or wrong": (right_or_wrong, {"exact_match": exact, **JUDGED}),
    "essays": (essays, JUDGED),
}


def main() -> None:
    """Print the table."""
    print("| groups | reward | signal | noise |\n|---|---|---|---|")
    for title, (draw, functions) in CASES.items():
        for name, function in functions.items():
            signal, noise = measured(function, draw)
            print(f"| {title} | {name} | {signal:.2f} | {noise:.2f} |")


if __name__ == "__main__":
    main()
