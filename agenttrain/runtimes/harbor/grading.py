"""Grade a rollout as Harbor does: its tests run once the agent has ended, and write the rewards."""

from __future__ import annotations

import json
import tempfile
from math import isfinite
from pathlib import Path

from agenttrain.runtimes.base import MachineLost
from agenttrain.runtimes.harbor.task import HarborTask, Step
from agenttrain.types import CommandResult, RolloutMachine

TESTS, SOLUTION, VERIFIER_LOGS = "/tests", "/solution", "/logs/verifier"
REWARD_JSON, REWARD_TEXT = f"{VERIFIER_LOGS}/reward.json", f"{VERIFIER_LOGS}/reward.txt"
LOGS = ("/logs/agent", VERIFIER_LOGS, "/logs/artifacts")
LARGEST_REWARD = 1 << 16
"""Bytes of a reward file."""
ROOT = "0"
"""User of the grader's own steps, whoever the machine's user is."""
STEP_S = 60.0
SETUP, SETUP_S = "setup.sh", 600.0
IN_BASH = 'if command -v bash >/dev/null 2>&1; then exec bash "$1"; else exec sh "$1"; fi'
LAST_CHARS = 500
"""Characters of the tests' output that an error quotes."""


async def make_folders(machine: RolloutMachine) -> None:
    """Make the folders that Harbor mounts, which every user may write to."""
    folders = " ".join(LOGS)
    script = f"chmod u+w / 2>/dev/null; mkdir -p {folders} && chmod 777 {folders}"
    await _run(machine, script)


async def begin_step(machine: RolloutMachine, step: Step) -> None:
    """Copy a step's files to the working folder, and run its setup, in bash if the image has it.

    Raises MachineLost.
    """
    if not step.workdir.is_dir():
        return
    folder = (await machine.exec(["pwd"], timeout_s=STEP_S)).text.strip()
    await machine.copy_in(step.workdir, folder)
    if not (step.workdir / SETUP).is_file():
        return
    result = await machine.exec(
        ["sh", "-c", IN_BASH, "sh", f"{folder.rstrip('/')}/{SETUP}"], timeout_s=SETUP_S
    )
    if result.code:
        raise MachineLost(
            f"steps/{step.folder.name}/workdir/{SETUP} failed: {_end_of_output(result)}"
        )


async def remove_tests(machine: RolloutMachine) -> None:
    """Remove tests and their outputs, for tests that follow or an agent that must not see them."""
    await _run(machine, f"rm -rf {TESTS} {VERIFIER_LOGS}")
    await make_folders(machine)


async def solve(machine: RolloutMachine, task: HarborTask, env: dict[str, str]) -> CommandResult:
    """Run the task's solution as the agent's user. Raises MachineLost if it cannot be copied."""
    assert task.solution is not None
    await machine.copy_in(task.solution, SOLUTION)
    await _run(machine, f"chmod +x {SOLUTION}/solve.sh")
    return await machine.exec(
        ["sh", "-c", f"({SOLUTION}/solve.sh) > /logs/agent/oracle.txt 2>&1"],
        timeout_s=task.solution_timeout_s,
        env={"DEBIAN_FRONTEND": "noninteractive", **env},
    )


async def collect(machine: RolloutMachine, task: HarborTask) -> None:
    """Run the commands that save the agent's state for the tests."""
    for item in task.collect:
        result = await machine.exec(
            ["sh", "-c", item.command], timeout_s=item.timeout_s, user=item.user
        )
        if result.code:
            raise MachineLost(
                f"verifier.collect: `{item.command}` failed: {_end_of_output(result)}"
            )


async def move_artifacts(source: RolloutMachine, target: RolloutMachine, task: HarborTask) -> None:
    """Copy the declared artifacts, and /logs/artifacts, to the same paths of a fresh container."""
    for path in dict.fromkeys((*task.artifacts, "/logs/artifacts")):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, "artifact")
            if await source.copy_out(path, copy):
                await target.copy_in(copy, path)


async def grade(machine: RolloutMachine, task: HarborTask, env: dict[str, str]) -> dict[str, float]:
    """Run the tests; return the rewards that they wrote, by name.

    `task.bundled_tests`: they are in the machine's image, so none are copied. Whatever keeps the
    tests from writing a reward is trouble of the infrastructure: MachineLost, never a reward of 0.
    """
    if not task.bundled_tests:
        await remove_tests(machine)  # the agent may have prepared anything there
        for tests in task.tests:
            await machine.copy_in(tests, TESTS)
    script = f"({TESTS}/test.sh) > {VERIFIER_LOGS}/test-stdout.txt 2>&1"
    await _run(machine, f"chmod +x {TESTS}/test.sh")
    user = task.verifier_user
    if user is None and task.agent_user is not None:
        user = ROOT  # the machine runs as the agent's user, and the tests would too
    result = await machine.exec(
        ["sh", "-c", script], timeout_s=task.verifier_timeout_s, env=env, user=user
    )
    if result.timed_out:
        limit = f"verifier.timeout_sec={task.verifier_timeout_s:g}"
        raise MachineLost(f"{limit}: the tests of {task.name} took longer")
    for path in (REWARD_JSON, REWARD_TEXT):  # of tests that write both, the named rewards count
        text = await _read(machine, path)
        if text is not None:
            return _read_rewards(path, text)
    log = await _read(machine, f"{VERIFIER_LOGS}/test-stdout.txt") or ""
    raise MachineLost(
        f"the tests of {task.name} ended with exit code {result.code} and wrote neither "
        f"{REWARD_TEXT} nor {REWARD_JSON}; they printed: {log[-LAST_CHARS:].strip()}"
    )


def _read_rewards(path: str, text: str) -> dict[str, float]:
    """Return the rewards in a reward file, by name; a single number has the name `reward`.

    Raises MachineLost for a file without rewards. The fault is the tests', so the rollout must not
    be scored, and MachineLost is the error for that: it ends as `error`, not with a reward of 0.
    """
    if not text.strip():
        raise MachineLost(f"{path}: the tests left it empty")
    try:
        value = json.loads(text) if path == REWARD_JSON else float(text)
        rewards = value if isinstance(value, dict) else {"reward": value}
        numbers = {name: _finite_number(number) for name, number in rewards.items()}
        for name in numbers:
            name.encode()  # fails for half of a surrogate pair, which JSON can hold and no file
    except (ValueError, OverflowError, RecursionError) as error:
        reason = f"{text[:200]!r} is no reward: a reward is a finite number"
        raise MachineLost(f"{path}: {reason}") from error
    if not numbers:
        raise MachineLost(f"{path}: names no reward")
    return numbers


def _finite_number(value: object) -> float:
    """Return a number. Raises ValueError, and OverflowError for one that no float can hold."""
    if not isinstance(value, int | float) or not isfinite(value):
        raise ValueError
    return float(value)


async def _read(machine: RolloutMachine, path: str) -> str | None:
    """Return a file's text; None if there is none."""
    result = await machine.exec(
        ["sh", "-c", 'test -f "$1" && head -c "$2" "$1"', "sh", path, str(LARGEST_REWARD)],
        timeout_s=STEP_S,
        cwd="/",
        user=ROOT,
        max_bytes=4 * LARGEST_REWARD,
    )
    return None if result.code else result.text


async def _run(machine: RolloutMachine, script: str) -> None:
    result = await machine.exec(["sh", "-c", script], timeout_s=STEP_S, cwd="/", user=ROOT)
    if result.code:
        raise MachineLost(f"`{script}` failed in the container: {_end_of_output(result)}")


def _end_of_output(result: CommandResult) -> str:
    words = result.text.strip()[-LAST_CHARS:]
    return words or f"exit code {result.code}"
