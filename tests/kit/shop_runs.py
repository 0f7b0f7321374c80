"""Runs of the shop agent that tests compare: their settings, and what was sampled in them."""

from __future__ import annotations

import json
from pathlib import Path

SETTINGS = (
    *("experiment=shop", "steps=5", "tasks_per_step=4", "algorithm.group_size=4"),
    "rollout.on_malformed_call=stop",  # the programs end there too
    *("algorithm.minibatches=1", "optimizer.warmup_steps=0", "optimizer.lr=1e-4"),
    *("eval.questions=0", "checkpoint.every=1", "tracker=none"),
)


def sampled(folder: Path, steps: int = 5) -> list[tuple]:
    """Ids, mask, log-probabilities and rewards of all steps' rollouts, in their order."""
    rows = []
    for step in range(1, steps + 1):
        for line in (folder / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines():
            rollout = json.loads(line)
            (trajectory,) = rollout["trajectories"]
            ids = trajectory["token_ids"]
            mask = [0] * len(ids)
            for span in trajectory["spans"]:
                if span["origin"] == "sampled":
                    mask[span["start"] : span["end"]] = [1] * (span["end"] - span["start"])
            values = (rollout["rollout_id"], rollout["reward"])
            rows.append((*values, ids, mask, trajectory["logprobs"]))
    return rows
