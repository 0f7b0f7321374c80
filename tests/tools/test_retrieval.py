"""The retrieval example: it runs, and a model that looks things up is rewarded."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agenttrain.cli import main
from agenttrain.data.bundled.encyclopedia import ALL_PEOPLE
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rollout.config import RolloutRequest
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.request import RolloutContext
from agenttrain.runs.setup import prepare
from agenttrain.settings.compose import Source, compose_run, hydra_session
from agenttrain.types import StopReason


@pytest.mark.slow
def test_the_experiment_trains_for_two_steps(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["experiment=retrieval", "debug=tiny", "tracker=none", "eval.questions=2"]
    assert main([*arguments, f"hydra.run.dir={folder}"]) == 0
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    lines = (folder / "rollouts" / "step-000002.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["trajectories"][0]["messages"][0]["content"].startswith(
        "Search the encyclopedia"
    )


def test_looking_up_twice_earns_the_reward() -> None:
    with hydra_session(Source()):
        config = compose_run(["experiment=retrieval"], Source()).config
    prepared = prepare(config)
    tasks = prepared.tasks.train.tasks(0, 200)
    task = next(task for task in tasks if task.columns["family"] == "person-founded")
    (person,) = [p for p in ALL_PEOPLE if p.name in task.messages[1]["content"]]
    calls = [
        ("search", {"query": person.name}),
        ("search", {"query": f"town {person.town.name} founded"}),
        ("final_answer", {"answer": str(person.town.founded)}),
    ]
    script = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    ]
    engine = ScriptedEngine(script, encode=prepared.tokenizer.encode)
    rollout = asyncio.run(
        run_rollout(
            RolloutRequest(task=task),
            RolloutContext(
                engine=engine, chat=prepared.chat, toolbox=prepared.toolbox, limits=config.rollout
            ),
        )
    )
    assert rollout.stop_reason is StopReason.stop_tool
    first, second, _ = [result.content for result in rollout.tool_results]
    assert f"born {person.born} in {person.town.name}" in first
    assert f"founded in {person.town.founded}" in second
    asyncio.run(prepared.rubric.score([rollout]))
    assert rollout.reward == 1.0
