"""`agenttrain check`, and what it has in common with `agenttrain submit`: files and templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agenttrain.settings.command_line import Command
from agenttrain.settings.compose import Composed
from agenttrain.settings.machine import float32_on_gpu
from agenttrain.settings.sizes import describe
from agenttrain.types import ConfigError
from agenttrain.utils.model_path import BUNDLED

BUNDLED_EXPERIMENTS = ("shop", "calculator")
"""Their settings suit the tiny bundled models."""
DEFAULT_EXPERIMENT = "shop"
"""The default of train.yaml."""


def check(command: Command, runs: Sequence[Composed]) -> int:
    """Print the runs, each template's certificate once. Exit code 1 for a refused one."""
    print("\n\n".join(describe(run.config) for run in runs), flush=True)
    if hint := _hint(command, runs):
        print(f"\n{hint}", flush=True)
    passed = _certify_all(runs)
    notes = dict.fromkeys(note for run in runs if (note := float32_on_gpu(run.config)))
    if notes:
        import torch  # only here: a wrong setting is answered before

        if torch.cuda.is_available():
            print("\n" + "\n".join(notes), flush=True)
    return 0 if passed else 1


def check_files(runs: Sequence[Composed]) -> None:
    """Refuse a template or response schema of the user's that cannot be read, before the rest."""
    templates = {run.config.chat_template.path for run in runs} - {None}
    schemas = {run.config.response_schema.path for run in runs} - {None}
    if not templates and not schemas:
        return
    from agenttrain.chat.loading import (
        read_spec,
        read_template,  # only here: tokenizers come with it
    )
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


CERTIFIED = (
    *("model", "chat_template", "response_schema", "tools", "stop_tools", "environment"),
    *("data", "reward"),
)
"""Sections that the certificate, the rows and their prompts depend on."""


def _certify_all(runs: Sequence[Composed]) -> bool:
    """Print each template's certificate once, and check what every run is made of, as it does
    itself before it loads weights; whether all certificates passed. Raises ConfigError."""
    # Tokenizers and torch come with these.
    from agenttrain.runs.fingerprints import check_resumed
    from agenttrain.runs.loading import verify_model
    from agenttrain.runs.setup import Components, complete, overlong_notes
    from agenttrain.types import AgenttrainError

    shown: dict[str, Components] = {}
    checked: set[str] = set()
    for config in (run.config for run in runs):
        structured = config.rollout.structured_calls
        key = repr([structured, *(getattr(config, part) for part in CERTIFIED)])
        others = [config.engine, config.eval, config.training, config.optimizer.name]
        whole = repr([key, *others, config.tasks_per_step, config.resume])
        try:
            first = key not in shown
            if first:
                verify_model(config)
                shown[key] = Components(config)
                print("\n" + "\n".join(shown[key].certificate.lines()), flush=True)
            if not shown[key].certificate.passed or whole in checked:
                continue
            checked.add(whole)
            components = shown[key].with_config(config)
            complete(components)
            if first:
                notes = (*components.tasks.notes, *overlong_notes(components))
                print("\n".join((_prompts(components.prompt_lengths), *notes)))
            check_resumed(components)
        except (AgenttrainError, OSError, ValueError) as error:
            raise ConfigError(str(error)) from error
    return all(components.certificate.passed for components in shown.values())


def _prompts(lengths: Mapping[str, Sequence[int]]) -> str:
    parts = [
        f"the first {len(tokens)} of {key} have {min(tokens)} to {max(tokens)} tokens"
        for key, tokens in lengths.items()
        if tokens
    ]
    return f"prompts        {'; '.join(parts) or 'given by the environment'}"


def _hint(command: Command, runs: Sequence[Composed]) -> str | None:
    """Return advice where the bundled agent's settings would train a model of the user's."""
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
