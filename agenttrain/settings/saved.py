"""Configurations of earlier runs, from which `resume=` and `eval run=` start."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf

from agenttrain.health.config import StopWhenConfig
from agenttrain.settings.command_line import Command
from agenttrain.settings.compose import (
    Composed,
    Source,
    complete_objective,
    compose_raw,
    compose_run,
    convert,
    empty_mapping_problems,
    schema,
)
from agenttrain.settings.messages import check_values, explained
from agenttrain.settings.overrides import as_typed, key_of
from agenttrain.settings.pinning import adopt_pins
from agenttrain.settings.resumable import RESUMABLE, may_change
from agenttrain.settings.run_config import RunConfig
from agenttrain.settings.trust import check_trusted, own_sections
from agenttrain.settings.untrusted import (
    SECTIONS,
    resolvers,
    run_place,
    untrusted_values,
)
from agenttrain.training.config import ActivationCheckpointing, Init
from agenttrain.types import ConfigError
from agenttrain.utils.moved import in_this_layout
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.sections import raise_config_error, shown

EVALUABLE = (
    *("eval", "data", "engine", "tracker", "rollout", "reward", "seed", "distributed"),
    *("watchdog", "servers", "roles"),
)
"""Sections that an evaluation of a run may change: the others are the agent itself."""
TRAINED = tuple(name for name in SECTIONS if name != "sweep")
"""Sections that training uses, and `submit`."""
EVALUATED = tuple(name for name in TRAINED if name != "algorithm")
"""Sections that an evaluation uses."""
USED = {
    "play": tuple(name for name in EVALUATED if name != "reward"),
    "serve": tuple(
        name
        for name in EVALUATED
        if name not in ("tools", "environment", "agent", "user", "data", "reward", "rollout")
        and name not in ("tracker", "roles", "slurm")
    ),
    "plan": ("engine",),
}
"""Sections that a verb uses besides training and evaluation: nothing is scored, a server's clients
run the tools, and a plan starts nothing."""
BEST = "best"
"""Name of the best checkpoint in a run's folder."""


def check_new(config: RunConfig) -> None:
    """Raise ConfigError for settings that only a resumed run can have."""
    if config.resume is not None:
        raise ConfigError(
            f"resume={config.resume}: has no effect in a YAML file; leave it out there, "
            f"and type agenttrain resume={quote(config.resume)}"
        )
    if config.resume_changed:
        raise ConfigError("resume_changed: there is no run yet to go on with; leave it out")


def settings_for_resume(
    folder: Path,
    overrides: Sequence[str],
    source: Source,
    *,
    trust: bool = False,
    used_sections: Sequence[str] = TRAINED,
) -> Composed:
    """Return the settings of `resume=<folder>`; raises ConfigError. Needs a `hydra_session`.

    With `trust`, code that the folder's config.yaml names may run. Without it, the sections whose
    code the verb runs, `used_sections`, have to hold data only (`untrusted.py`), or be signed by
    this user.
    """
    argument = f"resume={folder}"
    composed = saved_settings(
        argument,
        folder,
        source,
        overrides=overrides,
        allowed=RESUMABLE,
        used_sections=used_sections,
        trust=trust,
    )
    return _prepare_resume(argument, folder, composed)


def settings_for_auto_resume(
    folder: Path, overrides: Sequence[str], source: Source, *, trust: bool = False
) -> Composed:
    """Return the settings of `resume=auto` for the run in `folder`, composed from `overrides`.

    Raises ConfigError if the run was started with other settings. Needs a `hydra_session`.
    """
    argument = f"resume=auto hydra.run.dir={folder}"
    composed = compose_run(overrides, source)
    complete_objective(composed)  # with its defaults, as in the saved settings
    saved_node, _ = _read(argument, folder, trust=trust)
    started = convert(saved_node)
    # Before they are compared, `composed` gets what the first start has chosen: commits of models,
    # and the level of activation checkpointing in place of `auto`.
    adopt_pins(composed, started)
    _adopt_level(composed, started)
    raise_config_error(
        f"{key}={shown(now)}: the run in {folder} was started with {key}={shown(saved)}; leave it "
        "so, or name another folder"
        for key, saved, now in differences(started.plain, composed.plain)
        if not may_change(key, (*RESUMABLE, "resume"))
    )
    return _prepare_resume(argument, folder, composed)


def _adopt_level(composed: Composed, started: Composed) -> None:
    """Copy the level of activation checkpointing that a run has chosen, in place of `auto`."""
    training = composed.config.training
    if training.activation_checkpointing is ActivationCheckpointing.auto:
        level = started.config.training.activation_checkpointing
        training.activation_checkpointing = level
        composed.plain["training"]["activation_checkpointing"] = str(level)


def _prepare_resume(argument: str, folder: Path, composed: Composed) -> Composed:
    """Set `resume` in `composed` to `folder`; raises ConfigError if its run cannot be resumed."""
    if _summary(folder).get("verb") == "eval":
        raise ConfigError(
            f"{argument}: holds an evaluation, which cannot go on; name a run's folder"
        )
    steps, done = composed.config.steps, done_steps(folder)
    if steps < done:
        raise ConfigError(
            f"steps={steps}: the run in {folder} has done {done} steps already; leave steps out, "
            f"or raise it above {done}"
        )
    composed.config.resume = str(folder)
    composed.plain["resume_changed"] = []  # applies to this start: config.yaml does not keep it
    return composed


def differences(
    before: Any, now: Any, prefix: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value before, value now) of each setting that differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*before, *now]):
            values = before.get(name), now.get(name)
            yield from differences(*values, prefix=(*prefix, str(name)))
    elif before != now:
        yield ".".join(prefix), before, now


def settings_for_eval(
    folder: Path,
    overrides: Sequence[str],
    source: Source,
    *,
    trust: bool = False,
    used_sections: Sequence[str] = EVALUATED,
) -> Composed:
    """Return the settings of `eval run=<folder>`, with the checkpoint as the model.

    `folder` is that of a checkpoint, or of a run, for its newest checkpoint. `used_sections` are
    those whose code the verb runs; with `trust` all of it may run. Sections of EVALUABLE may be
    changed by `overrides`. Raises ConfigError. Needs a `hydra_session`.
    """
    run = run_of(folder)
    composed = saved_settings(
        f"run={run}",
        run,
        source,
        overrides=overrides,
        allowed=EVALUABLE,
        used_sections=used_sections,
        trust=trust,
    )
    checkpoint = run / "checkpoints" / "latest" if run == folder else folder
    if not checkpoint.is_dir():
        raise ConfigError(f"run={folder}: has no checkpoint yet")
    changes_data = any(re.match(r"data\b", text) for text in overrides)
    scores_answers = "reward" in used_sections  # and so needs tasks
    if scores_answers and _summary(run).get("verb") == "sft" and not changes_data:
        raise ConfigError(
            f"run={folder}: its data are demonstrations, which hold the answers; name the tasks to "
            "evaluate on, e.g. data=shop"
        )
    # The run's settings of its first model do not fit the checkpoint: it may have been a model of
    # the hub with a revision, or one with random weights (`init`).
    path = str(checkpoint.resolve())  # `latest` is a link, which a run that goes on moves
    composed.config.model.path = composed.plain["model"]["path"] = path
    composed.config.model.revision = composed.plain["model"]["revision"] = None
    composed.config.model.init = Init.pretrained
    composed.plain["model"]["init"] = str(Init.pretrained)
    return composed


def first_model(folder: Path) -> tuple[str, str | None, Init]:
    """Return path, revision and init of the model that was trained in the run of `folder`."""
    node, _ = _read(f"run={folder}", folder)
    return str(node.model.path), node.model.get("revision"), Init(node.model.init)


def run_of(folder: Path) -> Path:
    """Return the folder of the run, given that folder or one of its checkpoints."""
    is_inside = folder.resolve().parent.name == "checkpoints"
    is_checkpoint = is_inside and not (folder / "config.yaml").exists()
    return folder.parent.parent if is_checkpoint else folder


def checkpoint_of(folder: Path, step: str) -> Path:
    """Return the checkpoint of `--step N` or `--step best`; raises ConfigError if there is none."""
    checkpoints = folder / "checkpoints"
    # A mixture has a best checkpoint of each source, best-<source>.
    links = [BEST, *sorted(link.name for link in checkpoints.glob(f"{BEST}-*"))]
    if step not in links and not step.isdecimal():
        hint = did_you_mean(step, links)
        raise ConfigError(f"--step {step}: expected a step's number or {' or '.join(links)}{hint}")
    path = checkpoints / (step if step in links else f"step-{int(step):06d}")
    if not path.is_dir():
        steps = ", ".join(map(str, _checkpoint_steps(checkpoints)))
        existing = f"those of the steps {steps}" if steps else "none"
        raise ConfigError(f"--step {step}: {folder} has no such checkpoint; it has {existing}")
    return path


def at_step(
    overrides: Sequence[str], step: str | None, typed: str | None = None
) -> tuple[Path | None, list[str]]:
    """Return the folder of `run=` (or None), and overrides whose `run=` names its checkpoint.

    Example: with `step` "40", ``run=outputs/a`` becomes
    ``run=outputs/a/checkpoints/step-000040``. None leaves it as it is.

    `typed` is the value of `--step`, if it differs from `step`: ``play --step 0`` is the model
    before training, to which no checkpoint belongs, so that `step` is None. Raises ConfigError for
    a `--step` without a run.
    """
    words = list(overrides)
    folders = [Path(text.removeprefix("run=")) for text in words if text.startswith("run=")]
    folder = folders[0] if folders else None
    typed_step = step or typed
    if folder is None and typed_step is not None:
        raise ConfigError(f"--step {typed_step}: is a step of a run; add run=<run folder>")
    if folder is not None and step is not None:
        words = [text for text in words if not text.startswith("run=")]
        words.append(f"run={checkpoint_of(folder, step)}")
    return folder, words


def finished_steps(folder: Path) -> int | None:
    """Return the number of steps of a finished run; None if it is not finished."""
    summary = _summary(folder)
    return int(summary.get("steps", 0)) if summary.get("status") == "finished" else None


def stopped_when(folder: Path, stop_when: StopWhenConfig) -> bool:
    """Return True if the condition `stop_when` ended the run in `folder` before its last step."""
    record = _summary(folder).get("stopped_when") or {}  # its settings, and the mean
    return bool(record) and asdict(stop_when).items() <= record.items()


def done_steps(folder: Path) -> int:
    """Return the steps up to the newest checkpoint, which a resumed run does not repeat."""
    return max([finished_steps(folder) or 0, *_checkpoint_steps(folder / "checkpoints")])


def _checkpoint_steps(checkpoints: Path) -> list[int]:
    numbers = (path.name.removeprefix("step-") for path in checkpoints.glob("step-*"))
    return sorted(int(number) for number in numbers if number.isdecimal())


def _summary(folder: Path) -> dict[str, Any]:
    """Return summary.json; empty if it is missing or cannot be read."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def tracker_project(command: Command) -> str | None:
    """Return the trackers' project for a run; None: the folder that holds the run folder names it.

    With `hydra.run.dir` runs of several experiments may lie in one folder, so the experiment names
    the project, unless `hydra.job.name` does. A run without an experiment is of the project `run`.
    A run that is resumed or evaluated keeps the name of its project, from its summary.json.
    """
    if command.saved is not None:
        return _summary(run_of(command.saved)).get("project")
    typed_values = {key_of(word): word.partition("=")[2] for word in command.words}
    if "hydra.run.dir" not in typed_values:
        return None
    if "hydra.job.name" in typed_values:
        return typed_values["hydra.job.name"]
    # The composed settings do not have the name of their experiment. train.yaml chooses `shop`;
    # another file of --config-name is taken for an experiment itself.
    default = "shop" if command.source.name == "train" else command.source.name
    experiment = typed_values.get("experiment", default).rpartition("/")[2]
    return "run" if experiment in ("none", "null") else experiment


def saved_settings(
    argument: str,
    folder: Path,
    source: Source,
    *,
    overrides: Sequence[str] = (),
    allowed: Sequence[str] = (),
    used_sections: Sequence[str] = (),
    trust: bool = False,
) -> Composed:
    """Return the settings of the run in `folder`, changed by overrides of `allowed` settings.

    `argument` is the typed argument with the folder, e.g. ``resume=outputs/a``.

    Code that config.yaml names in `used_sections` needs `trust`, unless the user has signed the
    section or an override has replaced the value. Raises ConfigError.
    """
    parsed = _parse_allowed(argument, overrides, allowed, source)
    node, signed = _read(argument, folder, trust=trust)
    plain = cast(dict[str, Any], OmegaConf.to_container(node, enum_to_str=True))
    raise_config_error(empty_mapping_problems(overrides, plain))
    with explained(overrides, source.groups):
        groups = source.groups()
        group_choices = [  # engine=vllm, in place of values such as steps=20
            o for o in parsed if o.key_or_group in groups and isinstance(o.value(), str | list)
        ]
        values = [override for override in parsed if override not in group_choices]
        _apply(node, group_choices, values, source, evaluates=allowed is EVALUABLE)
        try:
            composed = convert(node)
            # `untrusted_values` below has to see settings at the keys at which they are signed and
            # typed. `data.only` moves those of a source (data.sources.shop.tools) to the top.
            without_only = composed
            if composed.in_mixture:
                merged = OmegaConf.merge(node, {"data": {"only": None}})
                without_only = convert(cast(DictConfig, merged))
        except ConfigError as error:
            raise ConfigError(_with_file(str(error), folder / "config.yaml", parsed)) from error
    # A typed mapping is merged into the saved one: only its own values are the user's.
    typed_paths = [tuple(o.key_or_group.replace("/", ".").split(".")) for o in group_choices]
    for override in values:
        typed_paths += _value_paths(override.value(), tuple(override.key_or_group.split(".")))
    untrusted = [
        value
        for value in untrusted_values(without_only.plain, used_sections)
        if not _is_within(value.path, (*signed, *typed_paths))
        and _is_of_used_source(value.path, composed.in_mixture, used_sections)
    ]
    check_trusted(argument, untrusted, trust=trust)
    return composed


def _apply(
    node: DictConfig,
    group_choices: Sequence[Override],
    values: Sequence[Override],
    source: Source,
    *,
    evaluates: bool,
) -> None:
    """Change the saved settings `node` by overrides: first groups, then values, as Hydra does.

    An override of `group_choices` replaces a section by another option: ``engine=vllm``.
    `evaluates`: the settings are for an evaluation.
    """
    # All settings of a new run with these options. Apart from the options, they are defaults.
    new = compose_raw([str(o.input_line) for o in group_choices], source)
    saved_engine = node.engine.get("name")
    for override in group_choices:
        node[override.key_or_group] = new[override.key_or_group]
    if node.engine.get("name") != saved_engine:
        # The new engine may have no servers, or refuse settings of those of the saved engine.
        _reset_servers(node, new)
        if evaluates and "async_training" in node:
            # An evaluation trains nothing: these settings must not rule out the new engine.
            node.async_training = new.async_training
    for override in values:
        OmegaConf.update(node, override.key_or_group, override.value(), force_add=True)


def _reset_servers(node: DictConfig, new: DictConfig) -> None:
    """Replace the settings of servers in `node` by those of `new`, a run with another engine.

    Those of the weight sync to servers, where weights are written and how they are sent, are
    replaced too.
    """
    node.servers = new.servers
    for key in ("folder", "transport"):
        if key in node.get("weight_sync", {}):
            node.weight_sync[key] = new.weight_sync[key]


def _parse_allowed(
    argument: str, overrides: Sequence[str], allowed: Sequence[str], source: Source
) -> list[Override]:
    """Parse the overrides of a saved run; raises ConfigError unless each may change a setting."""
    parsed: list[Override] = []
    for text in overrides:
        with explained([text], source.groups):
            parsed += OverridesParser.create().parse_overrides([text])
            check_values(parsed[-1:], source.groups)
        if parsed[-1].is_sweep_override():
            raise ConfigError(f"{as_typed(text)}: a saved run takes one value, not several")
    for override in parsed:
        key = override.key_or_group
        if not may_change(key, allowed) or override.type is OverrideType.DEL:
            hint = did_you_mean(key.partition(".")[0], allowed) or did_you_mean(key, allowed)
            raise ConfigError(
                f"{as_typed(override.input_line)}: cannot be combined with {argument}"
                f"{hint}; what may change is: {', '.join(allowed)}"
            )
    return parsed


def _with_file(text: str, file: Path, typed: Sequence[Override]) -> str:
    """Name the file in each problem of a setting that was not typed.

    Example: ``steps=0: …`` -> ``steps=0 (in outputs/a/config.yaml): …``.
    """
    lines = []
    for line in text.splitlines():
        setting, colon, problem = line.partition(": ")
        key = setting.partition("=")[0]
        is_typed = any(f"{key}.".startswith(f"{o.key_or_group}.") for o in typed)
        place = "" if is_typed else f" (in {file})"
        lines.append(f"{setting}{place}{colon}{problem}")
    return "\n".join(lines)


def _value_paths(value: Any, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the path of every single value in the typed `value` at `path`.

    Example: ``{a: {b: 1}}`` at ``("tools",)`` -> ``[("tools", "a", "b")]``.
    """
    if not isinstance(value, Mapping):
        return [path]
    return [place for name in value for place in _value_paths(value[name], (*path, str(name)))]


def _is_within(path: tuple[str, ...], sections: Sequence[tuple[str, ...]]) -> bool:
    """Return True if `path` begins with one of the sections' paths."""
    return any(path[: len(section)] == section for section in sections)


def _is_of_used_source(
    path: tuple[str, ...], in_mixture: Mapping[str, str], used_sections: Sequence[str]
) -> bool:
    """Return False for a value of a mixture that a run of one of its sources does not use.

    `path` is the value's in the mixture, and `in_mixture` is `Composed.in_mixture` of the run. With
    ``data.only=shop`` it is ``{"data": "data.sources.shop", "tools": "data.sources.shop.tools"}``:

        data.sources.shop.tools.sql    True: it is `tools.sql` of the run
        data.sources.sums.tools.add    False: of another source
        tools.find                     False: the source has tools of its own

    Without `data.only` it is empty, and the result True.
    """
    if not in_mixture:
        return True
    run_section = run_place(path)[0]  # "tools" for all three
    place = in_mixture.get(run_section, run_section)
    return run_section in used_sections and _is_within(path, [tuple(place.split("."))])


def _read(
    argument: str, folder: Path, *, trust: bool = False
) -> tuple[DictConfig, list[tuple[str, ...]]]:
    """Return the settings in a folder's config.yaml, and the paths of sections this user signed.

    Resolvers (``${oc.env:HOME}``) read more than the file. Those in sections that this user did not
    sign need `trust`, or the user's consent on a terminal, before anything is resolved.
    """
    file = folder / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{argument}: is no run folder: there is no config.yaml in it")
    with _explained_file(argument):
        loaded = OmegaConf.load(file)
        if not loaded:
            raise ValueError("it is empty")
        if not isinstance(loaded, DictConfig):
            raise ValueError("it holds a list, and a run's settings are a mapping of names")
        raw = cast(dict[str, Any], OmegaConf.to_container(loaded))
        signed = own_sections(raw)
        raw.pop("provenance", None)
        unsigned_resolvers = [
            value for value in resolvers(raw) if not _is_within(value.path, signed)
        ]
        # After `own_sections`: the signature covers the names that the run wrote.
        settings = in_this_layout(raw)  # old names of settings become today's
        data = settings.get("data")
        only = data.get("only") if isinstance(data, Mapping) else None
        if only is not None:
            # A run with data.only=shop saves the sections of that source, and `only` as null.
            raise ValueError(
                f"data.only={only} was written into it, where a run leaves null; type it instead"
            )
        # Checks names and types. Its errors are about the file, and not about an override or an
        # option of a group: both arguments are empty.
        with explained([], groups=dict):
            typed = OmegaConf.merge(schema(), settings)
    check_trusted(argument, unsigned_resolvers, trust=trust)
    with _explained_file(argument):
        OmegaConf.resolve(typed)
    return cast(DictConfig, typed), signed


@contextmanager
def _explained_file(argument: str) -> Iterator[None]:
    """Turn an error in the block about a run's config.yaml into a ConfigError.

    `argument` is the typed argument that names the run: ``resume=outputs/a``.
    """
    try:
        yield
        return
    except UnicodeDecodeError as error:
        problem = f"it is not UTF-8 text: {error.reason} at byte {error.start}"
    except RecursionError:
        problem = "a value in it contains itself, or is nested too deeply"
    except Exception as error:
        problem = str(error).partition("\n")[0]
    raise ConfigError(
        f"{argument}: its config.yaml does not fit: {problem}; put back the file that the run wrote"
    )
