"""An agent that `agenttrain serve` answers for, asked for the turns of a greedy evaluation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from agenttrain.cli import main
from agenttrain.runs.setup import Components
from agenttrain.settings.compose import Source, compose_run, hydra_session


@contextmanager
def served(*words: str) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    """The server that the words start, and a client; the process is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agenttrain.cli", "serve", *words, "port=0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    try:
        url = next(line.split()[-1] for line in process.stdout if line.startswith("serving agent"))
        yield process, openai.OpenAI(base_url=url, api_key="none", timeout=120)
    finally:
        process.kill()
        process.wait()


def greedy(folder: Path, *words: str) -> list[dict[str, Any]]:
    """The main trajectories of a greedy evaluation's rollouts."""
    short = ("eval.questions=6", "tracker=none", f"hydra.run.dir={folder}")
    assert main(["eval", *words, *short]) == 0
    records = map(json.loads, (folder / "rollouts" / "step-000000.jsonl").open("rb"))
    return [r["trajectories"][0] for r in records if r["rollout_id"].startswith("eval-greedy")]


def tools_of(*words: str) -> Any:
    """The schemas of the tools that the words select, for a request."""
    with hydra_session(Source()):
        return Components(compose_run(list(words), Source()).config).toolbox.schemas()


def ask_again(client: openai.OpenAI, trajectories: list[dict[str, Any]], tools: Any) -> int:
    """Ask for every turn of the trajectories, and expect their ids; return the calls that came."""
    calls = 0
    for trajectory in trajectories:
        recorded = [message for message in trajectory["messages"] if message["role"] == "tool"]
        messages: list[Any] = [trajectory["messages"][0]]
        ids = trajectory["token_ids"]
        for span in (span for span in trajectory["spans"] if span["origin"] == "sampled"):
            answer = client.chat.completions.create(
                model="agent",
                messages=messages,
                tools=tools,
                temperature=0,
                max_tokens=48,
                extra_body={"return_token_ids": True},
            )
            assert answer.prompt_token_ids == ids[: span["start"]]
            (choice,) = answer.choices
            assert choice.token_ids == ids[span["start"] : span["end"]]
            messages.append(choice.message)
            made = choice.message.tool_calls or ()
            calls += len(made)
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": recorded.pop(0)["content"]}
                for call in made
            ]
    return calls
