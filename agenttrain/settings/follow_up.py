"""The commands that go on with a model which `agenttrain sft` has trained, for the same agent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agenttrain.settings.checks import has_no_effect
from agenttrain.settings.overrides import key_of
from agenttrain.utils.files import conf_folder, parse_yaml
from agenttrain.utils.redaction import shell_command

WARMSTART = "_warmstart"
"""End of an experiment's name for `sft`; before it stands the one for reinforcement learning."""
OF_SFT = (
    *("steps", "sft", "optimizer", "eval", "checkpoint", "hydra", "resume", "resume_changed"),
    *("model.path", "model.revision", "model.init"),
)
"""Sections and settings of a supervised run that say nothing about its agent."""
ROWS = ("data", "data.path", "data.train", "data.train.path", "data.train._target_")
"""Settings that choose a run's rows."""
AGENT = ("tools", "stop_tools", "stop", "environment", "agent")
"""Sections that describe an agent."""
PLACEHOLDERS = ("data=file", "data.train.path=train.jsonl", "data.test.path=test.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp:
    """Two command lines that go on after a supervised run (`agenttrain sft`).

    They run as they are, unless `tasks_missing`.
    """

    evaluate: str
    """Command that evaluates the trained model on tasks: ``agenttrain eval …``."""
    train: str
    """Command that trains it further by reinforcement learning: ``agenttrain …``."""
    tasks_missing: bool
    """True if no setting names tasks. The rows of a supervised run are none: they are
    demonstrations, which hold the answers. The commands then name files that the user has to
    write."""


def after_sft(words: Sequence[str], checkpoint: str) -> FollowUp:
    """Return the commands to go on with the model of `agenttrain sft <words>`.

    They keep the settings of the agent, and leave out those of supervised learning and its rows.

    Example: after ``--config-dir conf experiment=mine data.path=demos.jsonl steps=90`` the first is
    ``agenttrain eval --config-dir conf experiment=mine model.path=<checkpoint>``. After
    ``experiment=shop_warmstart`` both have ``experiment=shop``, if there is one.
    """
    options, settings = _split(words)
    experiments = [text for text in settings if key_of(text) == "experiment"]
    experiment = experiments[-1].partition("=")[2] if experiments else None  # the last one counts
    folders = [conf_folder()]
    if "--config-dir" in options:
        folders.insert(0, Path(options["--config-dir"]))
    rl_experiment = None if experiment is None else _rl_experiment(experiment, folders)
    if rl_experiment is not None:
        settings = [
            f"experiment={rl_experiment}" if text in experiments else text for text in settings
        ]
        tasks_missing = False
    else:
        config_name = options.get("--config-name")
        tasks_missing = _lacks_tasks(settings, experiment, config_name, folders)
    agent_settings = [text for text in settings if not _of(text, (*OF_SFT, "data"))]
    rows = PLACEHOLDERS if tasks_missing else ()
    overrides = [*agent_settings, *rows, f"model.path={checkpoint}"]
    option_words = [word for pair in options.items() for word in pair]

    def command(verb: str) -> str:
        verb_words = [] if verb == "train" else [verb]  # `agenttrain` without a verb trains
        with_effect = [text for text in overrides if not has_no_effect(text, verb)]
        return shell_command([*verb_words, *option_words, *with_effect])

    return FollowUp(evaluate=command("eval"), train=command("train"), tasks_missing=tasks_missing)


def _rl_experiment(experiment: str, folders: Sequence[Path]) -> str | None:
    """Return ``shop`` for ``shop_warmstart``, if one of `folders` has it; else None."""
    name = experiment.removesuffix(WARMSTART)
    if name == experiment:
        return None
    return name if any(_yaml_file(folder, f"experiment/{name}") for folder in folders) else None


def _lacks_tasks(
    settings: Sequence[str],
    experiment: str | None,
    config_name: str | None,
    folders: Sequence[Path],
) -> bool:
    """Return True if no tasks are left once the rows that were typed for `sft` are dropped.

    `settings` are those of `agenttrain sft`, whose rows are demonstrations, wherever they come
    from. Without typed rows, those of the YAML files count: of the experiment and --config-name.

    Example: after ``experiment=mine data.path=demos.jsonl``, the rows of mine.yaml are the tasks.
    """
    if not any(key_of(text) in ROWS for text in settings):
        return True  # `sft` was trained on the rows of the files, so these are demonstrations
    files = [f"experiment/{experiment}"] if experiment else []
    if config_name is not None:
        files.append(config_name)
    if files:
        # The typed demonstrations replaced the rows of `files`, which are taken for tasks. Each
        # bundled experiment has tasks, except `none`.
        bundled_file = _yaml_file(conf_folder(), f"experiment/{experiment}")
        is_bundled = bundled_file is not None and experiment != "none"
        return not is_bundled and not any(_chooses_rows(file, folders) for file in files)
    # The commands then run the default experiment. Its tasks are for its own agent: they do not
    # fit one that the user has typed.
    return any(_of(text, AGENT) for text in settings)


def _split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options that name YAML files, and the settings."""
    options: dict[str, str] = {}
    settings: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, _, value = word.partition("=")
        name = {"-cd": "--config-dir", "-cn": "--config-name"}.get(name, name)
        if name in ("--config-dir", "--config-name"):
            options[name] = value or next(remaining, "")  # --config-dir=conf or --config-dir conf
        elif not word.startswith("-"):
            settings.append(word)
    return options, settings


def _of(override: str, sections: Sequence[str]) -> bool:
    """Return True if an override is of one of these sections, or sets one of these settings."""
    key = key_of(override).partition("@")[0]
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _yaml_file(folder: Path, name: str) -> Path | None:
    path = folder / f"{name.removesuffix('.yaml')}.yaml"
    return path if path.is_file() else None


def _chooses_rows(name: str, folders: Sequence[Path]) -> bool:
    """Return True if a YAML file, or an experiment in its defaults list, chooses the run's rows.

    `name` is that of the file, e.g. ``experiment/shop``, in the first of `folders` that has it.
    """
    path = next((path for folder in folders if (path := _yaml_file(folder, name))), None)
    node = parse_yaml(path.read_text(encoding="utf-8")) if path else None
    if not isinstance(node, Mapping):
        return False
    if any(f"data.{key}" in ROWS for key in node.get("data") or ()):  # data: {path: …}
        return True
    for group, option in _choices(node.get("defaults") or ()):
        if group == "data":
            return True
        # Another experiment: by its group, or without a group as a neighbour of this file.
        # `_self_` is this file's place in its own list.
        file_of = {"experiment": f"experiment/{option}", "": f"{Path(name).parent}/{option}"}
        is_file = group in file_of and option != "_self_"
        if is_file and _chooses_rows(file_of[group], folders):
            return True
    return False


def _choices(defaults: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield group and option of a defaults list; the group of a plain name is empty."""
    for entry in defaults:
        if isinstance(entry, str):
            yield "", entry
        elif isinstance(entry, Mapping):
            for group, option in entry.items():
                name = str(group).removeprefix("override ").removeprefix("optional ")
                yield name.lstrip("/").partition("@")[0], str(option)
