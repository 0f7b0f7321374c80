"""Training the examples, for their tests."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from code_blocks import ROOT, blocks
from judge_server import Reply, Server

from agenttrain import cli

EXAMPLES = ROOT / "examples"
FOLDERS = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
SMALL = ("debug=tiny", "steps=2", "tasks_per_step=1", "eval.questions=0", "tracker=none")


def train(folder: Path, *overrides: str) -> list[dict]:
    """Train for two steps; return the rollouts of the first."""
    words = ["--config-dir", "conf", f"experiment={folder.name}", *SMALL, *overrides]
    assert cli.main([*words, "hydra.run.dir=run"]) == 0
    assert json.loads((folder / "run" / "summary.json").read_text())["steps"] == 2
    lines = (folder / "run" / "rollouts" / "step-000001.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def commands(name: str) -> list[list[str]]:
    """The words of the commands in an example's README."""
    fences = [b for b in blocks(EXAMPLES / name / "README.md") if b.language == "bash"]
    return [shlex.split(command) for block in fences for command in block.commands()]


def call_of_readme(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the README's `agenttrain tools … --call` prints."""
    (words,) = (words[1:] for words in commands(name) if words[:2] == ["agenttrain", "tools"])
    assert cli.main(words) == 0
    return capsys.readouterr().out


def train_shop(folder: Path) -> None:
    """Train a shop agent; its rollouts are conversations that end with the answer it prints."""
    rollouts = train(folder, "rollout.max_turns=6")
    assert len(rollouts) == 2
    for rollout in rollouts:
        assert rollout["stop_reason"] == "completed", rollout
        assert rollout["tool_calls"][-1]["name"] == "final_answer"
        (conversation,) = rollout["trajectories"]  # all turns continue it
        queries = [m for m in conversation["messages"] if m["role"] == "tool"]
        assert len(queries) == len(rollout["tool_calls"]) - 1
        output = folder / "run" / "agents" / f"{rollout['rollout_id']}.stdout"
        assert output.read_text().strip() == rollout["tool_calls"][-1]["arguments"]["answer"]


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
QUERIES = {
    "DELETE FROM orders": "only SELECT is allowed",
    ENDLESS: "the query took longer than 2 s",
    "SELECT id FROM orders ORDER BY id": "; 20; … (only the first 20 rows)",
    "SELECT hex(zeroblob(20000))": "00… (only the first 2000 characters)",
    "SELECT COUNT(*) FROM orders": "60",
}
"""Queries of a model that means no good -> the end of what an agent replies."""


def openai_answer(name: str, arguments: dict[str, str]) -> dict[str, Any]:
    """A chat completion that is one call."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    message = {"role": "assistant", "content": None}
    message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    head = {"id": "1", "object": "chat.completion", "created": 0, "model": "agent"}
    return {**head, "choices": [choice], "usage": usage}


def anthropic_answer(name: str, arguments: dict[str, str]) -> dict[str, Any]:
    """An answer of Anthropic's messages that is one call."""
    call = {"type": "tool_use", "id": "call_1", "name": name, "input": arguments}
    head = {"id": "1", "type": "message", "role": "assistant", "model": "agent"}
    usage = {"input_tokens": 1, "output_tokens": 1}
    return {**head, "content": [call], "stop_reason": "tool_use", "usage": usage}


def check_queries(program: Path, python: str) -> None:
    """Let a shop agent run `QUERIES`; expect the replies, and the answer that it prints at last."""
    server = Server()

    def call(name: str, arguments: dict[str, str]) -> Callable[[], Reply]:
        def reply() -> Reply:
            is_openai = server.asked[-1]["path"].endswith("/chat/completions")
            return 200, (openai_answer if is_openai else anthropic_answer)(name, arguments)

        return reply

    queries = [call("sql", {"query": query}) for query in QUERIES]
    server.replies = [*queries, call("final_answer", {"answer": "60"})]
    task = {
        "messages": [{"role": "user", "content": "How many orders are there?"}],
        "columns": {"database_seed": 3},
        "model": "agent",
    }
    environment = {
        **os.environ,
        **{"PYTHONPATH": str(ROOT), "AGENTTRAIN_MODEL": "agent"},
        **{"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "none"},
        **{"ANTHROPIC_BASE_URL": server.url.removesuffix("/v1"), "ANTHROPIC_API_KEY": "none"},
    }
    try:
        ended = subprocess.run(
            [python, str(program)],
            input=json.dumps(task) + "\n",
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
        )
    finally:
        server.close()
    assert ended.stdout.strip() == "60", ended.stdout + ended.stderr
    # Each request but the first ends with the reply to the call before it.
    replies = [json.dumps(r["messages"][-1], ensure_ascii=False) for r in server.asked[1:]]
    for reply, expected in zip(replies, QUERIES.values(), strict=True):
        assert expected in reply, replies
