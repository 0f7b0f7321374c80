"""The adapter of verifiers, against the real package in an environment of its own."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from adapter_kit import arun, environments, run, texts
from parts import call

from agenttrain.environments.adapters.verifiers import (
    Verifiers,
    VerifiersRows,
    environment_process,
)
from agenttrain.environments.config import EnvironmentSettings
from agenttrain.environments.environments import Environments
from agenttrain.settings.untrusted import untrusted_values
from agenttrain.types import Rollout, StopReason, ToolError

PYTHON = os.environ.get("VERIFIERS_PYTHON", "")
"""A Python that has the package verifiers."""
needs_verifiers = pytest.mark.skipif(not PYTHON, reason="scripts/test-ecosystems verifiers runs it")
KIT = Path(__file__).parents[1] / "kit"
SUMS = "verifiers_tasks"
SHARED = {"taskset": {"shared_tool": True}}
OWN = {"taskset": {"task": {"tool": True}}}


@pytest.fixture(autouse=True)
def tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(KIT))


def world(args: dict[str, Any] | None = None, id: str = SUMS) -> tuple[Environments, VerifiersRows]:
    given = {"id": id, "python": PYTHON, "args": args or {}}
    rows = VerifiersRows(**given)  # first, so that its process is used
    return environments(Verifiers, **given), rows


def add(a: int, b: int) -> str:
    return call("adder_add", f'{{"a": {a}, "b": {b}}}')


def end(text: str) -> str:
    return f"{text}<|im_end|>"


@needs_verifiers
def test_one_answer_is_scored_by_the_tasks_own_rewards() -> None:
    worlds, rows = world()
    assert (len(rows), rows[3]) == (4, {"task_id": f"verifiers/{SUMS}/3", "verifiers_task": 3})
    assert worlds.toolboxes["world"].schemas() == []
    done = run(end("4"), worlds=worlds, row=rows[2])
    assert texts(done, "system") + texts(done, "user") == ["Be brief.", "2 + 2?"]
    assert (done.stop_reason, done.environment_reward) == (StopReason.completed, 1.0)
    assert run(end("5"), worlds=worlds, row=rows[2]).environment_reward == 0.0
    # A scorer that breaks is no score.
    done = run(end("break"), worlds=worlds, row=rows[2])
    assert (done.stop_reason, done.environment_reward) == (StopReason.error, None)
    assert "RuntimeError: the scorer is broken" in str(done.error)
    # What our limits cut off is scored as far as it came.
    done = run("4 " * 300, worlds=worlds, row=rows[2])
    assert (done.stop_reason, done.environment_reward) == (StopReason.max_tokens, 0.0)
    done = run(end("4"), worlds=worlds, row={})
    assert "the row has no column 'verifiers_task'; use data=verifiers" in str(done.error)


@needs_verifiers
def test_many_rollouts_share_a_process_and_have_their_own_state() -> None:
    worlds, rows = world(SHARED)

    async def many() -> list[Rollout]:
        answers = {n: [*[add(n, n)] * (n % 3), end(str(2 * n))] for n in range(4)}
        try:
            return await asyncio.gather(
                *(
                    arun(*said, worlds=worlds, rollout_id=f"r{n}", row=rows[n])
                    for n, said in answers.items()
                )
            )
        finally:
            await worlds.aclose()

    # 1 for the sum, 0.1 for each call: 0, 1, 2 and 0 calls.
    rewards = [done.environment_reward for done in asyncio.run(many())]
    assert rewards == pytest.approx([1.0, 1.1, 1.2, 1.0])


@needs_verifiers
def test_tools_of_the_rollout_and_a_stop_condition() -> None:
    worlds, rows = world(OWN)
    (schema,) = worlds.toolboxes["world"].schemas()
    assert schema["function"]["name"] == "adder_add"
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    # 1 for the sum; 0.1 · (1 call that worked, 3 letters beside the first call).
    done = run(f"Hm.{add(13, 2)}", add(2, 2), end("4"), worlds=worlds, row=rows[2])
    assert [result.error for result in done.tool_results] == [ToolError.exception, None]
    assert "13 is not added" in done.tool_results[0].content
    assert texts(done, "tool")[1] == "4"
    assert done.environment_reward == pytest.approx(1.4)
    # @stop third_call; 0.1 · 3 calls.
    done = run(add(1, 1), add(1, 2), add(1, 3), worlds=worlds, row=rows[2])
    assert done.stop_reason is StopReason.environment_done
    assert done.environment_reward == pytest.approx(0.3)


@needs_verifiers
def test_the_environment_speaks_for_the_user() -> None:
    worlds, rows = world(id="verifiers_quiz")
    done = run(end("one"), end("two"), end("three"), worlds=worlds, row=rows[0])
    assert texts(done, "user") == ["Count.", "more than one", "more than two"]
    assert (done.stop_reason, done.environment_reward) == (StopReason.completed, 1.5)  # 0.5 · 3
    done = run(end("one"), "two " * 300, worlds=worlds, row=rows[0])
    assert (done.stop_reason, done.environment_reward) == (StopReason.max_tokens, 1.0)
    done = run(end("die"), worlds=worlds, row=rows[0])
    assert (done.stop_reason, done.environment_reward) == (StopReason.error, None)
    assert "no luck" in str(done.error)
    worlds, rows = world({"player": {"max_turns": 1}}, "verifiers_quiz")
    done = run(end("one"), end("two"), worlds=worlds, row=rows[0])
    assert (done.stop_reason, done.environment_reward) == (StopReason.completed, 0.5)


@needs_verifiers
def test_a_process_that_is_killed_is_an_error_and_the_next_rollout_has_a_new_one() -> None:
    worlds, rows = world()
    process = environment_process(SUMS, PYTHON, {})
    child = psutil.Process(process._child.pid)

    class Dies(Verifiers):
        def user(self, message: Any) -> Any:
            child.kill()
            return super().user(message)

    worlds.kinds["world"].cls = Dies
    done = run(end("4"), worlds=worlds, row=rows[2])
    assert (done.stop_reason, done.environment_reward) == (StopReason.error, None)
    assert "was ended by SIGKILL" in str(done.error)
    worlds.kinds["world"].cls = Verifiers
    assert run(end("4"), worlds=worlds, row=rows[2]).environment_reward == 1.0


ANSWERS = """#!{python}
import json, sys

VALUES = {{
    "load": {{"tools": [], "tasks": 1}},
    "begin": {{"messages": [{{"role": "user", "content": "2 + 2 ="}}]}},
    "answer": {{"messages": None}},
    "finish": {{"reward": 0.5}},
}}
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({{"n": request["n"], "value": VALUES.get(request["do"])}}), flush=True)
"""


def test_a_pooled_instance_goes_on_with_a_new_process(tmp_path: Path) -> None:
    python = tmp_path / "python"  # answers as the bridge does
    python.write_text(ANSWERS.format(python=sys.executable))
    python.chmod(0o755)
    worlds = environments(Verifiers, id="sums", python=str(python))
    kind = worlds.kinds["world"]
    kind.pooled = True

    async def rewards() -> list[float | None]:
        first = await arun(end("4"), worlds=worlds, row={"verifiers_task": 0})
        process = environment_process("sums", str(python))
        process._child.kill()
        assert len(kind.idle) == 1 and not process.alive
        second = await arun(end("4"), worlds=worlds, row={"verifiers_task": 0})
        await worlds.aclose()
        return [first.environment_reward, second.environment_reward]

    assert asyncio.run(rewards()) == [0.5, 0.5]


@needs_verifiers
def test_a_scorer_that_hangs_is_an_error_and_its_episode_is_abandoned() -> None:
    worlds, rows = world()
    worlds.kinds["world"].settings = EnvironmentSettings(hook_timeout_s=5.0)
    done = run(end("wait"), worlds=worlds, row=rows[2])
    assert (done.stop_reason, done.environment_reward) == (StopReason.error, None)
    assert "its reward took too long" in str(done.error)
    process = environment_process(SUMS, PYTHON, {})
    for _ in range(600):
        if not process._replies:
            break
        time.sleep(0.1)
    assert not process._replies  # nothing waits for it any more
    assert run(end("4"), worlds=worlds, row=rows[2]).environment_reward == 1.0


RUN = f"""
import os, sys
from agenttrain.environments.adapters.verifiers import environment_process
process = environment_process({SUMS!r}, {PYTHON!r}, {SHARED!r})
print(process._child.pid, flush=True)
sys.stdin.read()
"""


@needs_verifiers
@pytest.mark.parametrize("ended_by", [None, signal.SIGKILL])
def test_the_process_and_its_tool_servers_end_with_the_run(ended_by: signal.Signals | None) -> None:
    env = {**os.environ, "PYTHONPATH": f"{KIT}{os.pathsep}{KIT.parents[1]}"}
    with subprocess.Popen(
        [sys.executable, "-c", RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        started = [child, *child.children(recursive=True)]
        assert len(started) > 1
        if ended_by is None:
            parent.communicate(b"")
        else:
            parent.send_signal(ended_by)
    _, alive = psutil.wait_procs(started, timeout=60)
    assert alive == []


@needs_verifiers
def test_an_environment_that_nobody_uses_ends() -> None:
    process = environment_process(SUMS, PYTHON, {})
    assert environment_process(SUMS, PYTHON) is not process  # other arguments
    child = psutil.Process(process._child.pid)
    del process
    gc.collect()
    for _ in range(600):
        if not child.is_running() or child.status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    raise AssertionError("it still runs")


@needs_verifiers
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"id": "nothing_there"},
            "^id=nothing_there: ModuleNotFoundError: taskset 'nothing_there'",
        ),
        ({"id": "json"}, "^id=json: TypeError: .*exports no Taskset subclass"),
        ({"args": {"taskset": {"cuont": 3}}}, "^args=.*: taskset.cuont: Extra inputs are not"),
        ({"args": {"taskset": {"count": 0}}}, f"^id={SUMS}: has no tasks"),
        (
            {"args": {"taskset": {"image": True}}},
            f"^id={SUMS}: task 0: its user message is no text",
        ),
        ({"args": {"agent": {"harness": {"id": "bash"}}}}, "^args.agent.harness=.*agent=endpoint"),
        (
            {"args": {"id": "user-sim"}},
            f"^id={SUMS}: its environment has the agents assistant, user",
        ),
        (
            {"args": {"taskset": {"task": {"judges": [{"id": "reference", "model": "m"}]}}}},
            f"^id={SUMS}: its tasks have judges.*reward=judge",
        ),
        ({"python": sys.executable}, "^python=.*: has no package verifiers 0.4; python3 -m venv"),
    ],
)
def test_what_cannot_be_trained_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Verifiers.tools(**{"id": SUMS, "python": PYTHON, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id": ""}, "^id=: must name a taskset"),
        ({"python": "/no/python"}, "^python=/no/python: is no program; make an environment .*pip"),
        ({"python": "/bin/false"}, "^python=/bin/false: its process ended with exit code 1"),
        ({"args": [1]}, r"^args=\[1\]: must have names"),
        ({"limit": 0}, "^limit=0: must be a number of tasks"),
        ({"start_timeout_s": 0}, "^start_timeout_s=0: must be a number above 0"),
    ],
)
def test_mistakes(arguments: dict[str, Any], message: str) -> None:
    given = {"id": SUMS, "python": sys.executable, **arguments}
    for build in (Verifiers.tools, VerifiersRows):
        with pytest.raises(ValueError, match=message):
            build(**given)


def test_a_python_without_the_package() -> None:
    with pytest.raises(ValueError, match=r"has no package verifiers 0.4; python3 -m venv"):
        Verifiers.tools(id=SUMS, python=sys.executable)


def test_the_python_of_somebody_elses_run_needs_trust() -> None:
    target = "agenttrain.environments.adapters.verifiers.Verifiers"
    section = {"_target_": target, "id": SUMS, "python": "/x/python"}
    values = untrusted_values({"environment": {"verifiers": section}})
    assert [value.key for value in values] == [
        "environment.verifiers.id",
        "environment.verifiers.python",
    ]
