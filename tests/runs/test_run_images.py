"""Whole runs of a model that sees: the engine's probabilities are the trainer's, and a run that was
killed ends as one that was not."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import vision_kit
from children import Moment, agenttrain, arm
from same_run import assert_same, metrics

from agenttrain.utils.exit_codes import DONE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5"])
def words(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("seeing")
    vision_kit.save(folder / "model", request.param)
    (folder / "pictures").mkdir()
    rows = [{"prompt": "what is 3 + 4?"}]
    for number in range(5):
        name = f"pictures/{number}.png"
        (folder / name).write_bytes(vision_kit.file_bytes(16 + 8 * number, 8, number))
        rows.append({"prompt": "what is it?", "images": [name] * (1 + number % 2)})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        *("experiment=none", f"model.path={folder / 'model'}", "data=file"),
        *(f"data.path={folder / 'rows.jsonl'}", "eval.questions=0", "tracker=none", "steps=4"),
        *("algorithm=grpo", "algorithm.kl.beta=0.1", "algorithm.group_size=3", "tasks_per_step=3"),
        *("tools=[]", "engine.max_context=400", "optimizer.lr=0.01", "checkpoint.every=1"),
        *("reward=[]", "+reward.drawn._target_=drawing.drawn", "rollout.max_turn_tokens=12"),
    )


def test_a_run_that_is_killed_equals_one_that_was_not(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    ended = agenttrain(*words, f"hydra.run.dir={whole}", log=tmp_path / "whole.txt")
    assert ended.code == DONE, ended.said
    assert all(row["sampling/logprob_gap_max"] < 1e-4 for row in metrics(whole))
    again = (*words, "resume=auto", f"hydra.run.dir={folder}")
    moment = Moment(kind="update", steps=2)
    ended = agenttrain(*again, log=tmp_path / "log.txt", prepare=partial(arm, moment))
    assert ended.code == -signal.SIGKILL, ended.said
    ended = agenttrain(*again, log=tmp_path / "log.txt")
    assert ended.code == DONE, ended.said
    assert_same(folder, whole)
    replayed = agenttrain("replay", str(whole), "trust=true", log=tmp_path / "replay.txt")
    assert replayed.code == DONE, replayed.said
    images = sorted(path.name for path in (whole / "rollouts" / "images").iterdir())
    assert 0 < len(images) <= 5
