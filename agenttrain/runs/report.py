"""The end of a run on the console, and the pages of its rollouts."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from agenttrain.evaluation import Evaluation
from agenttrain.settings.follow_up import after_sft
from agenttrain.settings.run_config import RunConfig
from agenttrain.tracking import viewer
from agenttrain.tracking.metrics import Scores
from agenttrain.tracking.notable import Section, notable_rollouts
from agenttrain.tracking.report import print_report
from agenttrain.tracking.rollouts import read_step, rollout_record, step_path
from agenttrain.tracking.run_folder import read_summary
from agenttrain.tracking.usage import usage_lines
from agenttrain.utils.files import write_atomically
from agenttrain.utils.model_path import model_folder

SHOWN = 3
"""Rollouts printed at the end of a run."""


def print_scores(
    *,
    before: Sequence[Scores],
    after: Sequence[Evaluation],
    decode: Callable[[Sequence[int]], str],
    run_folder: Path,
    dashboards: Sequence[str],
    best: Mapping[str, Any] | None,
) -> None:
    """Print the scores before and after, the best ones, and SHOWN rollouts.

    The rollouts are those of the first evaluation in `after`, the sampled one: the best ones with
    the most tool results, and the worst one.
    """
    rollouts = [
        rollout
        for evaluation in after[:1]
        for rollout in evaluation.rollouts
        if rollout.reward is not None
    ]
    ranked = sorted(rollouts, key=lambda r: (r.reward, len(r.tool_results)), reverse=True)
    chosen = ranked if len(ranked) < SHOWN else [*ranked[: SHOWN - 1], ranked[-1]]
    print_report(
        Console(),
        before=before,
        after=after,
        rollouts=[rollout_record(rollout) for rollout in chosen],
        decode=decode,
        run_folder=run_folder,
        dashboards=dashboards,
        best=best,
        usage=read_summary(run_folder).get("usage"),
    )


def print_losses(
    folder: Path,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    dashboards: Sequence[str],
    arguments: Sequence[str],
) -> None:
    """Print the held-out losses of supervised learning, and the commands to run next.

    `arguments` are those of the run's own command.
    """
    if before and after:
        print(
            f"held-out loss  {before['loss']:.4f} -> {after['loss']:.4f} nats per token, "
            f"{after['conversations']:.0f} conversations"
        )
    follow_up = after_sft(arguments, str(folder / "checkpoints" / "latest"))
    print(f"run            {folder}")
    for title, text in usage_lines(read_summary(folder).get("usage", {})):
        print(f"{title:<15}{text}")
    print(f"tokens         agenttrain view {shlex.quote(str(folder))}")
    for dashboard in dashboards:
        print(f"dashboard      {dashboard}")
    print(f"next           {follow_up.evaluate}")
    print(f"               {follow_up.train}")
    # The rows of this run are demonstrations: asked as tasks, they would hold their own answers.
    # The command above then names files of tasks that the user has to write.
    if follow_up.tasks_missing:
        print(
            "               with rows of tasks in train.jsonl and test.jsonl: demonstrations hold "
            "the answers"
        )


def write_page(config: RunConfig, folder: Path, step: int, to: Path | None = None) -> Path:
    """Write the HTML page of a step's rollouts; return its path, by default beside their file."""
    path = to or step_path(folder, step).with_suffix(".html")
    title = f"{folder.resolve().name}, step {step}"
    return _write(config, folder, path, read_step(folder, step), title=title)


def write_front_page(config: RunConfig, folder: Path, to: Path | None = None) -> Path:
    """Write the page of a run's rollouts that are worth a look to `to`; return its path.

    `to` is ``rollouts/index.html`` of the run's `folder` by default.
    """
    command = f"view {folder}"  # an error about a run without rollouts begins with it
    notable = notable_rollouts(folder, command)
    path = to or folder / "rollouts" / "index.html"
    title = folder.resolve().name
    return _write(config, folder, path, notable.records, title=title, sections=notable.sections)


def _write(
    config: RunConfig,
    folder: Path,
    path: Path,
    rollouts: Iterable[Mapping[str, Any]],
    *,
    title: str,
    sections: Sequence[Section] = (),
) -> Path:
    """Write a page of rollout records of the run in `folder`."""
    from transformers import AutoTokenizer

    # The checkpoint has the run's tokenizer; the folder model.path may have changed since.
    tokenizer_folder = folder / "checkpoints" / "latest"
    if not tokenizer_folder.exists():
        tokenizer_folder = model_folder(config.model.path, revision=config.model.revision)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    page = viewer.render(
        rollouts, tokenizer.decode, title=title, folder=folder / "rollouts", sections=sections
    )
    write_atomically(path, page)
    return path
