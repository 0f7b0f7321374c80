"""`agenttrain replay <run>`: the loop once more over what the model and the tools had said.

The same prompt, parser, limits and template glue must give the same ids, mask, messages and stop
reason; where they do not, a template, a tool's schema or the loop has changed since.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agenttrain.config.errors import ConfigError
from agenttrain.config.schema import OnToolFailure, RunConfig
from agenttrain.config.suggest import did_you_mean
from agenttrain.engine.recorded import RecordedEngine
from agenttrain.evaluate import limits_of, restricted
from agenttrain.recorded import EVALUATED, recorded_tasks, step_records
from agenttrain.rollout.declared import read_declared
from agenttrain.rollout.demonstration import BadDemonstration
from agenttrain.rollout.loop import RolloutContext, RolloutRequest, run_rollout
from agenttrain.rollout.recorded import recorded_tools
from agenttrain.rollout.seeds import seeds_of
from agenttrain.runs.setup import Components, context_of
from agenttrain.tracking.json_lines import dumps
from agenttrain.tracking.rollouts_file import rollout_record
from agenttrain.tracking.rollouts_read import completions
from agenttrain.tracking.run_folder import read_summary
from agenttrain.types import Origin, Rollout, Sampling, StopReason, Task

Record = Mapping[str, Any]
UNREPEATABLE = (StopReason.timeout, StopReason.error)
"""Ends by the clock or by a fault, whose moment no file holds: the tokens before are compared."""
BEFORE, AFTER = 8, 24
"""Tokens shown on either side of a difference."""


def replay_rollouts(
    config: RunConfig, folder: Path, *, step: int, rollout_id: str | None, live: bool
) -> int:
    """Replay a rollout of a step, or all of them, and print what came of each.

    `live`: its tools are run again instead of their recorded answers; else nothing is imported or
    started for them, as long as tools.json holds their schemas. The exit code is 0 when every one
    is identical. Raises ConfigError for a rollout that is not there.
    """
    said = f"replay {folder}"
    records = _chosen(step_records(folder, step, said), rollout_id, f"{said} step={step}")
    components = Components(config, tools=None if live else read_declared(folder))
    _ = components.chat  # built first: an error in it is reported before one in the data
    if read_summary(folder).get("verb") == "sft":
        return _print_all(records, _demonstrations(components, records), step)
    tasks = recorded_tasks(config, components.tasks, records, step)
    lost = [record["task_id"] for record in records if record["rollout_id"] not in tasks]
    if lost:
        raise ConfigError(
            f"{said} step={step}: task {lost[0]} with its recorded prompt is not in the data now; "
            "a replay needs the rows that the run had"
        )
    if step == EVALUATED:
        tasks = {name: _evaluated(task, components) for name, task in tasks.items()}
        config = replace(config, rollout=limits_of(config.rollout, config.eval))
    differences = asyncio.run(_replay_all(config, components, records, tasks, live=live))
    return _print_all(records, differences, step)


def _demonstrations(components: Components, records: Sequence[Record]) -> list[str | None]:
    """Make the demonstrations of a supervised step anew from their rows; where each differs."""
    source, demonstrate = components.train_tasks, components.demonstrator
    differences: list[str | None] = []
    for record in records:
        # The id begins with the row's place: `7/demonstrations/7`.
        place, _, name = record["rollout_id"].partition("/")
        (task,) = source.tasks(int(place), 1)
        if task.task_id != name:
            text = f"rollout {record['rollout_id']}: DIFFERS: its row is {task.task_id} now"
            differences.append(text)
            continue
        try:
            rollout = demonstrate(task, record["rollout_id"])
        except BadDemonstration as error:
            differences.append(f"rollout {record['rollout_id']}: DIFFERS: {error}")
        else:
            differences.append(difference(record, rollout, components.chat.decode))
    return differences


def _print_all(records: Sequence[Record], differences: Sequence[str | None], step: int) -> int:
    """Print what came of each rollout; 0 where all are identical, else 1."""
    for record, difference in zip(records, differences, strict=True):
        print(difference or _identical(record))
    same = sum(difference is None for difference in differences)
    if len(records) > 1:
        print(f"{same} of {len(records)} rollouts of step {step} replay to identical ids")
    return int(same < len(records))


def _evaluated(task: Task, components: Components) -> Task:
    """The task as an evaluation had it."""
    environments = components.environments
    methods = environments.toolbox_of(environments.kind_of(task))
    declared = (*components.toolbox.names, *methods.names)
    return restricted(task, components.config.eval.tools, declared)


def _chosen(
    records: Sequence[dict[str, Any]], rollout_id: str | None, said: str
) -> list[dict[str, Any]]:
    chosen = [r for r in records if rollout_id is None or r["rollout_id"] == rollout_id]
    if not chosen:
        known = [record["rollout_id"] for record in records]
        raise ConfigError(
            f"{said} rollout={rollout_id}: no such rollout{did_you_mean(str(rollout_id), known)}; "
            f"there are {known[0]} to {known[-1]}"
        )
    return chosen


async def _replay_all(
    config: RunConfig,
    components: Components,
    records: Sequence[Record],
    tasks: Mapping[str, Task],
    *,
    live: bool,
) -> list[str | None]:
    try:
        return [
            difference(
                record,
                await replay(record, tasks[record["rollout_id"]], config, components, live=live),
                components.chat.decode,
            )
            for record in records
        ]
    finally:
        await components.aclose()


async def replay(
    record: Record, task: Task, config: RunConfig, components: Components, *, live: bool
) -> Rollout:
    """The rollout that the loop makes of a record's completions and tool results.

    `live`: an environment is reset with the seeds that it had.
    """
    engine = RecordedEngine(
        completions(record, components.chat.stop_token_ids),
        max_context=context_of(config) or sys.maxsize,
    )
    tools, environments = components.toolbox, components.environments
    if not live:
        tools, environments = recorded_tools(
            record, task, tools, environments, over=lambda: engine.exhausted
        )
    seed, group_seed = seeds_of(record["rollout_id"], config.seed)
    request = RolloutRequest(
        task=task,
        sampling=Sampling(seed=seed),
        rollout_id=record["rollout_id"],
        group_id=record["group_id"],
        group_seed=group_seed,
    )
    context = RolloutContext(
        engine=engine,
        chat=components.chat,
        toolbox=tools,
        limits=replace(config.rollout, timeout_s=None, on_tool_failure=OnToolFailure.drop),
        environments=environments,
    )
    return await run_rollout(request, context)


def difference(
    record: Record, rollout: Rollout, decode: Callable[[Sequence[int]], str]
) -> str | None:
    """Where a replayed rollout first differs from its record, with both texts; None: nowhere."""
    made = json.loads(dumps(rollout_record(rollout)))
    where = f"rollout {record['rollout_id']}: DIFFERS"
    recorded, replayed = record["trajectories"], made["trajectories"]
    for before, after in zip(recorded, replayed, strict=False):
        if text := _trajectory_difference(before, after, decode, made.get("error")):
            return where + text
    if len(recorded) != len(replayed):
        return f"{where}: {len(recorded)} trajectories were recorded, {len(replayed)} replayed"
    stops = record["stop_reason"], made["stop_reason"]
    if stops[0] != stops[1] and stops[0] not in UNREPEATABLE:
        return f"{where}: stop reason {stops[0]} was recorded, {stops[1]} replayed"
    return None


def _trajectory_difference(
    record: Record, made: Record, decode: Callable[[Sequence[int]], str], error: str | None
) -> str | None:
    if record["token_ids"] != made["token_ids"]:
        return _first_id(record, made, decode, error)
    if _mask(record) != _mask(made):
        return ": the ids are the same, the mask is not"
    old, new = record["messages"], made["messages"]
    for index, (before, after) in enumerate(zip(old, new, strict=False)):
        if before != after:
            return f" in message {index}\n  recorded  {before}\n  replayed  {after}"
    if len(old) != len(new):
        return f": {len(old)} messages were recorded, {len(new)} replayed"
    return None


def _first_id(
    record: Record, made: Record, decode: Callable[[Sequence[int]], str], error: str | None
) -> str:
    old, new = record["token_ids"], made["token_ids"]
    pairs = enumerate(zip(old, new, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(old), len(new)))
    error = "" if error is None else f"\n  {error}"
    return (
        f" at position {position} of {len(old)} ({_place(record, position)}){error}\n"
        f"  recorded  {_around(old, position, decode)}\n"
        f"  replayed  {_around(new, position, decode)}"
    )


def _place(record: Record, position: int) -> str:
    for span in record["spans"]:
        if position < span["end"]:
            return f"turn {span['turn']}, {span['origin']}"
    return "after its end"


def _around(token_ids: Sequence[int], position: int, decode: Callable[[Sequence[int]], str]) -> str:
    before = decode(token_ids[max(position - BEFORE, 0) : position])
    after = decode(token_ids[position : position + AFTER])
    number = token_ids[position] if position < len(token_ids) else "none"
    return f"id {number}: {before!r} then {after!r}"


def _mask(record: Record) -> list[tuple[int, int]]:
    """The stretches of sampled tokens, joined where they touch."""
    mask: list[tuple[int, int]] = []
    for span in record["spans"]:
        if span["origin"] != Origin.sampled:
            continue
        if mask and mask[-1][1] == span["start"]:
            mask[-1] = (mask[-1][0], span["end"])
        else:
            mask.append((span["start"], span["end"]))
    return mask


def _identical(record: Record) -> str:
    tokens = sum(len(trajectory["token_ids"]) for trajectory in record["trajectories"])
    note = ""
    if record["stop_reason"] in UNREPEATABLE:
        note = f" up to its end by {record['stop_reason']}"
    return (
        f"rollout {record['rollout_id']}: identical{note}: {tokens} ids, mask, "
        f"messages, stop reason {record['stop_reason']} ({len(completions(record))} turns, "
        f"{len(record['tool_calls'])} calls)"
    )
