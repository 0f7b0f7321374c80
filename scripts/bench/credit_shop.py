"""Credit per turn for the shop agent: steps that it needs on the questions of three queries.

The bundled agent learns the questions that take three queries alone, 8 of them a step in groups of
8. The answer earns 1, and each turn that runs the next query of the row's plan 1/6: the rewards are
the same with every credit, which decides only where they go. The environment runs the queries; its
state is the set of results that the agent has seen. Five seeds; `gamma` is 0.95.

    shop_steps_<credit>   steps until five steps have answered 0.9 of the questions in the mean; a
                          run that does not get there in 40 steps counts as 40
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import harness
import torch

from agenttrain import Rollout
from agenttrain.cli import main
from agenttrain.data.bundled import shop
from agenttrain.utils.sqlite import QueryFailed, answer_query, restrict

CREDITS = {
    "rollout": (),
    "turn_reward": ("algorithm/credit=turn_reward", "algorithm.credit.gamma=0.95"),
    "gigpo": ("algorithm/credit=gigpo", "algorithm.credit.gamma=0.95"),
}
MOST, WINDOW, ENOUGH = 40, 5, 0.9
SETTINGS = (
    "data.train.curriculum=[[0,[0,0,1]]]",
    "tools=[final_answer]",
    "+environment.shop._target_=credit_shop.Shop",
    "+reward.queries._target_=credit_shop.next_queries",
    "reward.queries.weight=0.5",
    "tasks_per_step=8",
    f"steps={MOST}",
    "stop_when.metric=success",
    f"stop_when.above={ENOUGH}",
    f"stop_when.patience={WINDOW}",
    "eval.questions=0",
    "tracker=none",
)


class Shop:
    """The database of a row, and the results that the agent has seen."""

    def reset(self, row: Mapping[str, Any]) -> None:
        """Open the row's database."""
        self.database = shop.connect(row)
        restrict(self.database)
        self.seen: set[str] = set()

    def sql(self, query: str) -> str:
        """Run a read-only SQL query.

        Args:
            query: One SELECT statement.
        """
        try:
            text = answer_query(self.database, query)
        except QueryFailed as error:
            return f"Error: {error}"
        self.seen.add(text)
        return text

    def state(self) -> list[str]:
        """Return the results seen, on which the next query depends, without their order."""
        return sorted(self.seen)

    def close(self) -> None:
        """Close the database."""
        self.database.close()


def next_queries(rollout: Rollout) -> list[float]:
    """Return for each turn the share of the row's plan that it ran: 1/3 for its next query."""
    scores = [0.0] * rollout.turns
    plan, done, result = rollout.task.columns["plan"], 0, ""
    for made in rollout.tool_results:
        wanted = plan[done].format(result=result) if done < len(plan) else None
        if made.call.name == "sql" and made.call.arguments.get("query") == wanted:
            turn = int(made.call.id.split("_")[1])
            scores[turn] += 1 / len(plan)
            done, result = done + 1, made.content
    return scores


def steps_needed(credit: str, seed: int) -> int:
    """Run; return the steps until the mean of `WINDOW` steps is `ENOUGH`, at most `MOST`."""
    with tempfile.TemporaryDirectory() as place:
        settings = [*SETTINGS, *CREDITS[credit], f"seed={seed}", f"hydra.run.dir={place}/run"]
        if main(settings) != 0:
            raise RuntimeError(f"the run with {settings} failed")
        lines = Path(place, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    print(credit, seed, len(lines), [round(json.loads(line)["success"], 2) for line in lines])
    return len(lines)


def measure(quick: bool) -> dict[str, float]:
    """Return the mean steps of each credit over the seeds."""
    runs: dict[str, list[int]] = {credit: [] for credit in CREDITS}
    for seed in range(1 if quick else 5):
        for credit, steps in runs.items():
            steps.append(steps_needed(credit, seed))
    for credit, steps in runs.items():
        print(f"{credit}: steps by seed {steps}")
    return {f"shop_steps_{credit}": statistics.mean(steps) for credit, steps in runs.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    harness.run(__doc__ or "", measure)
