"""`agenttrain check`, and what it has in common with `agenttrain submit`: files and templates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agenttrain.config.command import Command
from agenttrain.config.compose import Composed
from agenttrain.config.describe import describe
from agenttrain.config.errors import ConfigError
from agenttrain.config.model_path import BUNDLED

BUNDLED_EXPERIMENTS = ("shop", "calculator")
"""Their settings suit the tiny bundled models."""
DEFAULT_EXPERIMENT = "shop"
"""Of train.yaml."""


def check(command: Command, runs: Sequence[Composed]) -> int:
    """Print the runs, each template's certificate once. Exit code 1 for a refused one."""
    print("\n\n".join(describe(run.config) for run in runs), flush=True)
    if hint := _hint(command, runs):
        print(f"\n{hint}", flush=True)
    return 0 if _certify_all(runs) else 1


def check_files(runs: Sequence[Composed]) -> None:
    """Refuse a template or response schema of the user's that cannot be read, before the rest."""
    templates = {run.config.chat_template.path for run in runs} - {None}
    schemas = {run.config.response_schema.path for run in runs} - {None}
    if not templates and not schemas:
        return
    from agenttrain.chat.carried import read_template  # only here: tokenizers come with it
    from agenttrain.chat.specs import read_spec
    from agenttrain.types import AgenttrainError

    try:
        for path in templates:
            read_template(str(path))
        for path in schemas:
            read_spec(Path(str(path)))
    except AgenttrainError as error:
        raise ConfigError(str(error)) from error


def certify_files(runs: Sequence[Composed]) -> bool:
    """Print each template's certificate; whether all passed. Raises ConfigError."""
    check_files(runs)
    return _certify_all(runs)


def _certify_all(runs: Sequence[Composed]) -> bool:
    """Print each template's certificate once; whether all passed. Raises ConfigError."""
    from agenttrain.types import AgenttrainError

    parts = (
        *("model", "chat_template", "response_schema", "tools", "stop_tools", "environment"),
        *("data", "reward"),
    )
    shown: dict[str, bool] = {}
    for run in runs:
        structured = run.config.rollout.structured_calls
        key = repr([structured, *(getattr(run.config, part) for part in parts)])
        if key not in shown:
            try:
                shown[key] = _certify(run)
            except (AgenttrainError, OSError, ValueError) as error:
                raise ConfigError(str(error)) from error
    return all(shown.values())


def _certify(run: Composed) -> bool:
    """Print a run's certificate, and how long its first prompts are; whether it passed."""
    from agenttrain.check import (  # tokenizers come with it
        certified,
        check_rows,
        prompt_lengths,
        rewards_of,
        splits_of,
        told,
    )

    found = certified(run.config)
    print("\n" + "\n".join(found.certificate.lines()), flush=True)
    if found.certificate.passed:
        tasks = splits_of(run.config)
        row_tools = check_rows(found, tasks.by_key)
        print(told(prompt_lengths(found, tasks.by_key)))
        rewards_of(run.config, found, row_tools)
    return found.certificate.passed


def _hint(command: Command, runs: Sequence[Composed]) -> str | None:
    """What to say where the bundled agent's settings would train somebody's own model."""
    names = [t.partition("=")[2] for t in command.overrides if t.startswith("experiment=")]
    experiment = names[-1] if names else DEFAULT_EXPERIMENT
    bundled = all(run.config.model.path.startswith(BUNDLED) for run in runs)
    theirs = command.source.name != "train" or command.saved is not None
    if bundled or theirs or experiment not in BUNDLED_EXPERIMENTS:
        return None
    return (
        f"note: steps, optimizer.lr, rollout.max_turn_tokens and others are the bundled agent's "
        f"settings\n      (experiment={experiment}); add experiment=none for a model of your own"
    )
