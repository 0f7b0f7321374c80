"""`agenttrain data`: the rows of a run as the model will see them, without loading weights."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from math import ceil

from agenttrain.commands.verb import as_config_error
from agenttrain.data.tasks import COLUMN_SAMPLE, TaskSource, column_names
from agenttrain.rollout.episode import end_episode, start_episode
from agenttrain.runs.setup import Components, context_of
from agenttrain.settings.run_config import RunConfig
from agenttrain.tracking.pictures import decoded
from agenttrain.types import Rollout, Task
from agenttrain.utils.content import images_in
from agenttrain.utils.seeds import derive_seed

MEASURED = 500
"""Prompts whose tokens are counted, from the first row on."""
PERCENTILES = (50, 90, 99)
TYPES = {str: "text", bool: "true/false", int: "number", float: "number", dict: "object"}


def show(config: RunConfig, prompts: int) -> int:
    """Print a summary of the rows and the first `prompts` prompts. Raises ConfigError.

    Return exit code 1 if the chat template fails its certificate (its check, which training
    requires), or if the rows lack a column that a reward reads.
    """
    with as_config_error():
        components = Components(config, shows_demonstrations=True)
        certificate, tasks = components.certificate, components.tasks
        lacks_column = False
        # One part for each source of a mixture; a single one without a mixture.
        for part in components.parts:
            # Errors name a source's key as the run has it: data.sources.shop.where for data.where.
            with part.relocated_errors():
                lacks_column |= _print_rows(part)
        shown = tasks.train.tasks(0, min(prompts, len(tasks.train)))
        for task in asyncio.run(_tasks_with_prompts(shown, components)):
            ids = components.prompt_ids(task)
            later_turns = "".join(f"\n(later) {text}" for text in task.user_turns)
            source = f" of {task.source}" if task.source else ""
            heading = f"── task {task.task_id}{source}, {len(ids)} tokens "
            rule = "─" * max(100 - len(heading), 2)  # fills the line to 100 columns
            images = components.chat.place(ids, task.messages)  # with their positions in `ids`
            prompt = decoded(components.chat.decode, ids, images)
            print(f"\n{heading}{rule}\n{prompt}{later_turns}")
    if not certificate.passed:
        print(
            "\nthe chat template fails its certificate: agenttrain check prints the reasons",
            file=sys.stderr,
        )
    return int(lacks_column or not certificate.passed)


def _print_rows(components: Components) -> bool:
    """Print a summary of the rows, and the columns that rewards read; True if one is missing.

    `relocated` renames keys in a line: data.train of a source becomes data.sources.<name>.train.
    """
    columns = components.rubric.columns
    for line in _describe_sources(components, context_of(components.config)):
        print(components.relocated(line))
    splits = components.tasks.by_key
    columns_by_key = {key: column_names(source) for key, source in splits.items()}
    missing, reward_lines = False, []
    for reward, names in columns.items():
        if not names:
            reward_lines.append(f"reward.{reward}  needs no column")
        for name in names:
            absent = [key for key, present in columns_by_key.items() if name not in present]
            place = f"in {' and '.join(absent)}: MISSING" if absent else "found"
            reward_lines.append(f"reward.{reward}  column {name} {place}")
            missing = missing or bool(absent)
    print("\n".join(map(components.relocated, reward_lines)))
    return missing


async def _tasks_with_prompts(tasks: Sequence[Task], components: Components) -> list[Task]:
    """Return the tasks with their complete prompts, including messages of an environment's reset.

    Raises ToolUnavailable if the reset fails, or if there is no prompt at all.
    """
    complete_tasks, seed = [], components.config.seed
    try:
        for task in tasks:
            rollout = Rollout(task=task, rollout_id=f"data-{task.task_id}")
            episode = await start_episode(
                rollout,
                components.part_of(task).environments,
                seed=derive_seed(seed, task.task_id),
                group_seed=derive_seed(seed),
            )
            complete_tasks.append(rollout.task)  # with the messages of the reset
            await end_episode(rollout, episode)
    finally:
        await components.aclose()
    return complete_tasks


def _describe_sources(components: Components, context: int | None) -> Iterator[str]:
    """Yield the numbers of rows, their columns and the lengths of their prompts."""
    config, tasks = components.config, components.tasks
    yield from tasks.notes
    for key, source in tasks.by_key.items():
        endless = len(source) == sys.maxsize  # a generator of rows
        section = config.data.test if key == "data.test" else config.data.train
        target = section.get("_target_", "held out of data.train")
        yield f"{key}  {'rows without end' if endless else f'{len(source):,} rows'}, {target}"
        first = source.tasks(0, min(len(source), COLUMN_SAMPLE))
        columns = []
        for name in column_names(source):
            values = [task.columns[name] for task in first if name in task.columns]
            kinds = sorted({_type_name(value) for value in values})
            gaps = "" if len(values) == len(first) else f" in {len(values)} of {len(first)}"
            columns.append(f"{name} ({' or '.join(kinds)}{gaps})")
        yield f"  columns  {', '.join(columns or ['none beside the messages'])}"
        yield from _describe_lengths(source, components, context)


def _describe_images(first: Sequence[Task], components: Components, note: str) -> Iterator[str]:
    """Yield a line with the number of images in the `first` rows, their sizes and their tokens.

    `note` ends the line. Nothing is yielded without images, or for a model that reads none.
    """
    images = [image for task in first for image in images_in(task.messages)]
    placeholders = components.chat.placeholders
    if not images or placeholders is None:
        return
    # By area: the first and the last are the smallest and the largest.
    sizes = sorted(
        {(image.width * image.height, f"{image.width}x{image.height}") for image in images}
    )
    tokens = sorted(map(placeholders.tokens, images))
    rows = sum(any(images_in(task.messages)) for task in first)
    (_, smallest), (_, largest) = sizes[0], sizes[-1]
    pixels = smallest if len(sizes) == 1 else f"{smallest} to {largest}"
    fewest, most = tokens[0], tokens[-1]
    token_range = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    yield (
        f"  images  {len(images)} in {rows} of {len(first):,} rows, {pixels} pixels, "
        f"{token_range} tokens each{note}"
    )


def _type_name(value: object) -> str:
    """Return the name of a value's type."""
    return next((name for kind, name in TYPES.items() if isinstance(value, kind)), "list")


def _describe_lengths(
    source: TaskSource, components: Components, context: int | None
) -> Iterator[str]:
    """Yield the prompts' tokens, and the rows that do not fit into the context."""
    first = source.tasks(0, min(len(source), MEASURED))
    lengths = sorted(len(components.prompt_ids(task)) for task in first if task.messages)
    if not lengths:
        yield "  prompts are given by the environment's reset"
        return
    resets = any(kind.has_reset for kind in components.environments.kinds.values())
    percentiles = {p: lengths[ceil(p / 100 * len(lengths)) - 1] for p in PERCENTILES}
    spread = "  ".join(f"p{p} {length}" for p, length in percentiles.items())
    note = "" if len(first) == len(source) else f", of the first {len(first):,} rows"
    note += ", without what the environment's reset adds" if resets else ""
    yield f"  prompt tokens  min {lengths[0]}  {spread}  max {lengths[-1]}{note}"
    yield from _describe_images(first, components, note)
    if context is None:
        return
    overlong = sum(length >= context for length in lengths)
    most = components.config.rollout.max_turn_tokens
    tight = sum(length < context < length + most for length in lengths)
    if overlong:
        yield f"  overlong  {overlong} of {len(first):,} fill the context of {context} and are left"
        yield "            out; shorten them, or raise engine.max_context"
    if tight:
        yield f"  tight  {tight} of {len(first):,} leave less than rollout.max_turn_tokens={most}"
