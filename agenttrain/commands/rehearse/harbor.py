"""`agenttrain rehearse data=harbor`: the oracle and no attempt at all, on every task.

A task whose solution fails, or that passes untouched, teaches nothing.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from agenttrain.commands.verb import STDOUT, as_config_error, write_report
from agenttrain.runs.setup import Components, prepare_images
from agenttrain.runtimes.base import MachineLost
from agenttrain.runtimes.machines import Machines, harbor_task
from agenttrain.types import Rollout, Task

PASSED = 1.0
"""Reward from which an attempt counts as passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Grades of a task with its own solution and with no attempt.

    They show whether the tests tell a solved task from an unsolved one.
    """

    task: str
    """The task's id."""
    oracle: dict[str, float] | None
    """Rewards by name after the solution has run; None: the container was lost."""
    untouched: dict[str, float] | None
    """Rewards by name without any attempt; None: the container was lost."""
    problems: list[str]
    """Lines for the report; empty if the solution passes and the untouched task does not."""


def rehearse_tasks(components: Components, args: Namespace) -> int:
    """Grade every task of data.train with its own solution and untouched, and print the list.

    Return exit code 1 if the solution of a task fails, or if a task passes untouched.
    """
    with as_config_error():
        prepare_images(components)
        tasks = components.tasks.train.tasks(0, len(components.tasks.train))
    attempts = asyncio.run(_attempt_all(components, tasks))
    bad = [attempt for attempt in attempts if attempt.problems]
    report = {"tasks": len(attempts), "bad": len(bad), "attempts": [asdict(a) for a in attempts]}
    write_report(report, args.json)
    if args.json != STDOUT:  # there the JSON takes the place of the text
        _show(attempts)
    return int(bool(bad))


async def _attempt_all(components: Components, tasks: Sequence[Task]) -> list[Attempt]:
    """Attempt the tasks, at most runtime.max_starting at a time."""
    machines = components.machines
    assert machines is not None
    limit = asyncio.Semaphore(machines.settings.max_starting)

    async def attempt(task: Task) -> Attempt:
        async with limit:
            return await _attempt(machines, task)

    try:
        return await asyncio.gather(*(attempt(task) for task in tasks))
    finally:
        await components.aclose()


async def _attempt(machines: Machines, task: Task) -> Attempt:
    """Grade a task once with its solution, which should pass, and once untouched, which should not.

    A machine that is lost is a problem of the attempt too.
    """
    problems: list[str] = []
    oracle = await _grades(machines, task, problems, solved=True)
    untouched = await _grades(machines, task, problems, solved=False)
    if oracle is not None and not _passes(oracle):
        problems.append("the solution does not pass the tests")
    if untouched is not None and _passes(untouched):
        problems.append("the tests pass without any attempt")
    return Attempt(task=task.task_id, oracle=oracle, untouched=untouched, problems=problems)


async def _grades(
    machines: Machines, task: Task, problems: list[str], *, solved: bool
) -> dict[str, float] | None:
    """Return a task's rewards, with or without its solution; None if its container is lost.

    Adds what goes wrong to `problems`. `machines.grade` begins and grades all steps that are not
    graded yet: without the solution these are all steps of the task.
    """
    harbor, name = harbor_task(task), f"{task.task_id}-{'oracle' if solved else 'untouched'}"
    assert harbor is not None
    rollout = Rollout(task=task, rollout_id=name)
    try:
        machine = await machines.start(name, task)
        parts = harbor.steps or (harbor,)  # a task without steps has one solution, its own
        for part in parts if solved else ():
            if problem := await machines.solve(part, machine):
                problems.append(problem)
            # `next_step` grades this step and begins the next one. False: none follows.
            if harbor.steps and not await machines.next_step(name):
                break
        await machines.grade(rollout)
        return rollout.grades
    except MachineLost as error:
        problems.append(f"{'oracle' if solved else 'untouched'}: {error}")
        return None
    finally:
        await machines.release(name)


def _passes(grades: dict[str, float]) -> bool:
    return grades.get("reward", min(grades.values(), default=0.0)) >= PASSED


def _show(attempts: Sequence[Attempt]) -> None:
    """Print a table of the attempts and the number of tasks with a problem."""
    table = Table("task", "oracle", "untouched", "problem", box=None, header_style="bold")
    for attempt in attempts:
        rewards = [
            "-" if grades is None else " ".join(f"{n}={v:g}" for n, v in grades.items())
            for grades in (attempt.oracle, attempt.untouched)
        ]
        table.add_row(attempt.task, *rewards, "; ".join(attempt.problems))
    console = Console()
    console.print(table)
    bad = sum(bool(attempt.problems) for attempt in attempts)
    console.print(f"{len(attempts)} tasks, {bad} with a problem", highlight=False)
