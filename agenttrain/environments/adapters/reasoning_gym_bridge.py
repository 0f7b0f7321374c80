"""The child process of `ReasoningGym`: makes the package's tasks and scores answers.

It runs under a Python that has reasoning_gym and not agenttrain. Requests and replies are JSON
lines, and a reply depends on its request alone::

    {"dataset": "chain_sum", "config": {}, "seed": 3}                  ->  {"question": "State …"}
    {"dataset": "chain_sum", "config": {}, "seed": 3, "answer": "12"}  ->  {"score": 1.0}

or ``{"error": "ValueError: …"}``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import reasoning_gym


def reply(request: dict[str, Any]) -> dict[str, Any]:
    """Return the question of a seed, or the score of an answer to it."""
    dataset = reasoning_gym.create_dataset(
        request["dataset"], seed=request["seed"], size=1, **request["config"]
    )
    entry = dataset[0]
    if "answer" not in request:
        return {"question": entry["question"]}
    return {"score": float(dataset.score_answer(answer=request["answer"], entry=entry))}


def main() -> None:
    """Answer each line of the standard input on the standard output, until it ends."""
    replies = sys.stdout
    sys.stdout = sys.stderr  # what a dataset prints is no reply
    for line in sys.stdin:
        try:
            answer = reply(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
