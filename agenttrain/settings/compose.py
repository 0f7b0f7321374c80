"""YAML files and overrides -> RunConfig, through Hydra's compose API; and the folder of the run."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, fields, replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, cast, get_type_hints

from hydra import compose, version
from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import run_job
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from agenttrain.data.config import LEAVE_OUT_SOURCES, SOURCES, has_test_rows
from agenttrain.engines import registry
from agenttrain.engines.config import DEFAULT_ENGINE
from agenttrain.settings.messages import check_values, explained, with_files
from agenttrain.settings.mixture import sections_in_mixture, with_only
from agenttrain.settings.overrides import as_typed
from agenttrain.settings.run_config import CHOICES, RunConfig
from agenttrain.types import ConfigError
from agenttrain.utils.files import conf_folder, list_groups
from agenttrain.utils.model_path import bundled_models, is_foreign
from agenttrain.utils.redaction import hide_secrets
from agenttrain.utils.sections import plain, raise_config_error, sections_below, validated

HYDRA_VERSION = "1.3"
"""Hydra behaves as this version, whichever is installed."""
OPEN_SECTIONS = (
    *("tools.", "environment.", "user.", "reward.", "data.train.", "data.test."),
    *("data.map.", "data.sources.", "algorithm.objective.", "tracker.own."),
    *("chat_template.kwargs.", "optimizer.schedule_options."),
    *("engine.", "servers.args."),
    *("roles.judge.args.", "roles.user.args.", "roles.teacher.args."),
)
"""Sections whose keys depend on a choice in them, or that hold arguments of a user's functions: any
key may be set in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """The checked settings, and the same as plain data for config.yaml."""

    config: RunConfig
    plain: dict[str, Any]
    neutral: bool = False
    """True if experiment=none took the place of the default experiment, which is for the bundled
    agent and not for the model of this run. `agenttrain check` says so."""
    raw: DictConfig | None = None
    """Hydra's composed settings with its section `hydra`; None except for a new run that starts."""
    in_mixture: Mapping[str, str] = field(default_factory=dict)
    """Sections that `data.only` took from a source, and their keys in the mixture, such as
    ``{"data": "data.sources.shop"}``. A worker composes the same command line again: what is added
    to it, such as a pinned revision, has to name the key in the mixture. Empty without `data.only`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Places of YAML files beside conf/: Hydra's --config-dir and --config-name."""

    extra: str | None = None
    """A folder of the user's whose groups are added."""
    name: str = "train"
    """The file that is composed, without `.yaml`."""

    def groups(self) -> dict[str, list[str]]:
        """Return every group with its options."""
        return list_groups(conf_folder(), *([Path(self.extra)] if self.extra else []))


@cache
def schema() -> DictConfig:
    """Return the defaults of every setting, with names and types that OmegaConf checks.

    Some sections take any key, because pydantic checks them later (`validated`): those of the
    engine and the objective, whose keys depend on which is chosen, and those that may be None. A
    section of CHOICES has the settings that all its choices share, and takes any other key too. Do
    not change the returned node: OmegaConf.merge and Hydra copy it.
    """
    # An instance, because OmegaConf does not see pydantic's defaults in the class. It is built from
    # empty sections, for which pydantic needs one validator instead of one for each section.
    config = validated(RunConfig, _empty_sections(RunConfig))
    config.algorithm.objective = {}  # type: ignore[assignment]  # it takes any key
    node = cast(DictConfig, OmegaConf.structured(config))
    node.engine = {"name": DEFAULT_ENGINE}
    for section, (shared_settings, _choices) in CHOICES.items():
        shared_node = OmegaConf.structured(shared_settings())
        OmegaConf.update(node, section, shared_node, merge=False)  # replaces the default choice
        OmegaConf.set_struct(OmegaConf.select(node, section), False)
    _open_optional(node, RunConfig)
    return node


def _empty_sections(cls: type) -> dict[str, Any]:
    """Return empty sections for all defaults that are sections: ``{"model": {"lora": {}}, …}``."""
    hints = get_type_hints(cls, include_extras=True)
    # The default factory of a section is its own class: `lora: LoraConfig`, made by LoraConfig().
    names = [field.name for field in fields(cls) if field.default_factory is hints[field.name]]
    return {name: _empty_sections(hints[name]) for name in names}


def _open_optional(node: DictConfig, cls: type) -> None:
    """Replace each section of `cls` that is None by an empty mapping that takes any key."""
    for name, section in sections_below(cls).items():
        if node[name] is None:
            node[name] = {}
            OmegaConf.set_struct(node[name], False)
        else:
            _open_optional(node[name], section)


@cache
def register() -> None:
    """Register the typed settings with Hydra as `run_config`; only the first call does it."""
    ConfigStore.instance().store(name="run_config", node=schema())


@contextmanager
def hydra_session(source: Source) -> Iterator[None]:
    """Open Hydra's compose API over `source`, as a hydra.main with the same options does.

    Hydra's own initialize_config_dir takes no --config-dir.
    """
    if source.extra and not Path(source.extra).is_dir():
        raise ConfigError(f"--config-dir {source.extra}: there is no such folder")
    version.setbase(HYDRA_VERSION)
    register()
    search_path = create_config_search_path(str(conf_folder()))
    if source.extra:
        path, anchor = f"file://{Path(source.extra).resolve()}", SearchPathQuery(provider="schema")
        search_path.prepend(provider="command-line", path=path, anchor=anchor)
    GlobalHydra.instance().clear()
    Hydra.create_main_hydra2(task_name="agenttrain", config_search_path=search_path)
    try:
        yield
    finally:
        GlobalHydra.instance().clear()


def compose_raw(
    overrides: Sequence[str], source: Source, *, with_hydra: bool = False
) -> DictConfig:
    """Compose settings without conversion; raises ConfigError. Needs a `hydra_session`."""
    problems, remaining = list[str](), list(overrides)
    while True:
        try:
            with explained(remaining, source.groups):
                parsed = OverridesParser.create().parse_overrides(remaining)
                check_values(parsed, source.groups)
                raw = compose(source.name, remaining, return_hydra_config=with_hydra)
            break
        except ConfigError as error:
            problems.append(str(error))
            # Hydra stops at the first unknown key. Without that key it reports the next one.
            unknown = [
                text for text in remaining if problems[-1].startswith(f"{text}: unknown key")
            ]
            remaining = [text for text in remaining if text not in unknown]
            if not unknown or not remaining:
                break
    raise_config_error(problems)
    return raw


def compose_run(overrides: Sequence[str], source: Source, *, with_hydra: bool = False) -> Composed:
    """Return the settings under `overrides`; raises ConfigError. Needs a `hydra_session`.

    `with_hydra`: keep Hydra's own settings too, as `Composed.raw`, for a run that starts.
    """
    raw = compose_raw(overrides, source, with_hydra=with_hydra)
    with explained(overrides, source.groups):
        sections = {str(key): _to_plain(raw[key]) for key in raw if key != "hydra"}
        if _replaces_sources(overrides, sections["data"]):
            sections["data"]["sources"] = {}
        # Hydra has checked `sections` against the schema, but not what `+algorithm.typo=1` added or
        # `~steps` left out: `convert` merges them into the schema once more.
        adds_or_deletes = any(text.startswith(("+", "~")) for text in overrides)
        try:
            composed = convert(sections) if adds_or_deletes else _validate(sections)
        except ConfigError as error:
            raise ConfigError(with_files(str(error), overrides, source.name)) from error
    # With `data.only` the run's `tools` are that source's, which a typed `tools=[]` does not mean.
    if sections["data"].get("only") is None:
        _check_emptied(overrides, composed)
    return replace(composed, raw=raw) if with_hydra else composed


def _replaces_sources(overrides: Sequence[str], data: Mapping[str, Any]) -> bool:
    """Return True if a typed group of rows (``data=file``) is to replace the `data.sources`.

    Hydra merges the body of an experiment into the typed group. The sources of the experiment would
    then stay beside the rows of the group, so that the caller has to remove them.
    """
    groups = [text.removeprefix("data=") for text in overrides if text.startswith("data=")]
    types_sources = any(SOURCES in text.partition("=")[0] for text in overrides)
    if not groups or types_sources:
        return False
    # data=mix has no rows, because it is for sources. data=own gets its rows by other overrides.
    has_rows = bool(data["train"])
    return has_rows or groups[-1] == "own"


def compose_new(overrides: Sequence[str], source: Source, *, starts: bool) -> Composed:
    """Return the settings of a new run, as `compose_run`.

    The default experiment, with its learning rate and limits, is for the bundled agent. Another
    bundled model brings the experiment of its name. For a model of the user's, a run that `starts`
    has to name an experiment (ConfigError), and a command that only shows settings uses
    experiment=none (`Composed.neutral`).
    """
    # Only train.yaml has a default experiment.
    if source.name != "train" or any(text.startswith("experiment=") for text in overrides):
        return compose_run(overrides, source, with_hydra=starts)
    overrides = [*overrides, *_bundled_experiment(overrides)]

    def compose_neutral() -> Composed:
        return replace(compose_run([*overrides, "experiment=none"], source), neutral=True)

    paths = [
        text.removeprefix("model.path=") for text in overrides if text.startswith("model.path=")
    ]
    if not starts and paths and is_foreign(paths[-1]):
        # The outcome is clear without composing the default experiment first.
        return compose_neutral()
    composed = compose_run(overrides, source, with_hydra=starts)
    model, settings = composed.config.model, composed.config
    if not is_foreign(model.path):
        return composed
    if starts:
        raise ConfigError(
            f"model.path={model.path}: is not the bundled agent, whose settings and questions are "
            f"the default (experiment=shop: optimizer.lr={settings.optimizer.lr:g}, steps="
            f"{settings.steps}, …); add experiment=none, and data, tools and rewards of your own, "
            "or experiment=shop to train it on these"
        )
    return compose_neutral()


def _bundled_experiment(overrides: Sequence[str]) -> list[str]:
    """Return `experiment=<name>` if the last `model=` is a bundled model with an experiment."""
    choices = [text.removeprefix("model=") for text in overrides if text.startswith("model=")]
    if not choices or choices[-1] not in bundled_models():
        return []
    file = conf_folder() / "experiment" / f"{choices[-1]}.yaml"
    return [f"experiment={choices[-1]}"] if file.is_file() else []


def _check_emptied(overrides: Sequence[str], composed: Composed) -> None:
    """Raise ConfigError if `tools=[]`, `reward=[]` or a `{}` does not empty its section.

    `tools=[]` chooses no option of the group `tools`. Tools that the body of an experiment adds by
    name stay, because Hydra merges the body after the group. An empty mapping changes nothing.
    """
    problems = list(empty_mapping_problems(overrides, composed.plain))
    for section in ("tools", "reward"):
        if f"{section}=[]" not in overrides:
            continue
        components = _components_not_typed(section, getattr(composed.config, section), overrides)
        if components:
            chosen = [text for text in overrides if text.startswith("experiment=")]
            body = f"the body of {chosen[-1] if chosen else 'a YAML file'}"
            deletions = " ".join(f"~{component}" for component in components)
            problems.append(
                f"{section}=[]: {body} has {' '.join(components)}, which stays; to leave it out "
                f"too add {deletions}"
            )
    raise_config_error(problems)


def _components_not_typed(
    section: str, components: Mapping[str, Any], overrides: Sequence[str]
) -> list[str]:
    """Return the keys of the components, such as ``tools.sql``, that no override has made."""
    typed_keys = {text.lstrip("+").partition("=")[0] for text in overrides}
    keys = []
    for name, settings in components.items():
        if not isinstance(settings, Mapping):  # `section_problems` reports it
            continue
        has_typed_target = f"{section}.{name}._target_" in typed_keys
        # reward.environment has a `_target_` by default: +reward.environment.weight=2 makes it.
        has_only_typed_keys = {f"{section}.{name}.{key}" for key in settings} <= typed_keys
        if not (has_typed_target or has_only_typed_keys):
            keys.append(f"{section}.{name}")
    return keys


def empty_mapping_problems(overrides: Sequence[str], plain: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for each `section={}` of a section with keys: merging it removes none."""
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        if override.is_delete() or override.value() != {}:
            continue
        if not OmegaConf.select(OmegaConf.create(dict(plain)), key):
            continue
        remedy = f"it is a section; set its keys with {key}.<key>=…"
        if key == "data.test":
            remedy = "for no evaluation set eval.questions=0"
        elif key == SOURCES:
            remedy = LEAVE_OUT_SOURCES
        elif key.startswith(f"{SOURCES}.") and key.endswith(".test"):
            remedy = f"for no test rows write {key}=null"
        elif key in ("tools", "reward"):
            remedy = f"to leave all of it out write {key}=[]"
        yield f"{as_typed(override.input_line)}: leaves its keys as they are; {remedy}"


def _to_plain(value: Any) -> Any:
    """Convert a value of a node to plain data; raises OmegaConf's error if a value is missing."""
    if not OmegaConf.is_config(value):
        return value
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)


def convert(raw: DictConfig | Mapping[str, Any]) -> Composed:
    """Convert plain data or a DictConfig to settings.

    They are merged into the schema. Raises OmegaConf's errors for unknown keys, wrong types and
    missing values, and ConfigError for values out of their bounds.
    """
    node = raw if isinstance(raw, DictConfig) else OmegaConf.create(dict(raw))
    data = OmegaConf.to_container(node, resolve=True, throw_on_missing=True, enum_to_str=True)
    typed = OmegaConf.merge(schema(), data)
    return _validate(cast(dict[str, Any], _to_plain(typed)))


def _validate(sections: Mapping[str, Any]) -> Composed:
    """Build the settings from sections that the schema has typed; raises ConfigError."""
    config = validated(RunConfig, sections)
    if config.data.only is not None:
        # Begin again with the sections of that source, in which `only` is None.
        run_of_source = _validate(with_only(config, sections))
        return replace(run_of_source, in_mixture=sections_in_mixture(config))
    complete = plain(config)  # with the defaults of the choices
    if not has_test_rows(config.data):  # no evaluation; config.yaml still has the typed number
        config.eval.questions = 0
    # An engine from outside is written by its `_target_`, which `plain` does not know.
    complete["engine"] = registry.plain(config.engine)
    composed = Composed(config=config, plain=complete)
    if config.algorithm.objective.is_own:
        # As typed. To know its defaults its module has to be imported, and not before the other
        # settings are checked: the caller calls `complete_objective` then.
        complete["algorithm"]["objective"] = sections["algorithm"]["objective"]
    else:
        complete_objective(composed)
    return composed


def complete_objective(composed: Composed) -> None:
    """Write the settings of the objective with its defaults into `composed.plain`.

    Imports an objective of the user's.
    """
    objective = composed.config.algorithm.objective
    composed.plain["algorithm"]["objective"] = objective.plain()


def open_keys(overrides: Sequence[str]) -> list[str]:
    """Turn `tools.sql.timeout_s=5` into `++tools.sql.timeout_s=5`, for keys that no YAML lists."""
    return [f"++{text}" if text.startswith(OPEN_SECTIONS) else text for text in overrides]


def check_writable(folder: Path, setting: str, remedy: str) -> None:
    """Raise ConfigError, ``<setting>: …; <remedy>``, unless files can be written into the folder.

    For a folder that does not exist, its nearest existing parent must be writable.
    """
    nearest = next((p for p in (folder, *folder.absolute().parents) if p.exists()), Path("/"))
    if not nearest.is_dir():
        raise ConfigError(f"{setting}: {nearest} is a file, not a folder; {remedy}")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{setting}: {nearest} may not be written (read-only?); {remedy}")


def in_run_folder(composed: Composed, job: Callable[[Path], int]) -> int:
    """Make the folder of a new run as Hydra would, call `job` with it, and return its exit code.

    Hydra's job settings apply: chdir, env_set, logging, callbacks. Raises ConfigError if the folder
    cannot be made. Needs a `hydra_session`.
    """
    raw, hydra = composed.raw, cast(Hydra, GlobalHydra.instance().hydra)
    assert raw is not None, "compose_run(with_hydra=True) keeps it"
    with read_write(raw.hydra), open_dict(raw.hydra):  # as Hydra.run does
        raw.hydra.mode = RunMode.RUN
    job_started, config_error = False, None

    def task(_: DictConfig) -> int | None:
        nonlocal job_started, config_error
        job_started = True
        try:
            return job(Path(HydraConfig.get().runtime.output_dir))
        except ConfigError as error:
            config_error = error  # raised below: Hydra would print a message of its own
            return None

    callbacks = Callbacks(raw)
    callbacks.on_run_start(config=raw, config_name=raw.hydra.job.config_name)
    context = HydraContext(config_loader=hydra.config_loader, callbacks=callbacks)
    try:
        job_return = run_job(
            task_function=task,
            config=raw,
            job_dir_key="hydra.run.dir",
            job_subdir_key=None,
            hydra_context=context,
        )
    except OSError as error:
        if job_started:
            raise
        raise ConfigError(
            f"hydra.run.dir={error.filename}: the run's folder cannot be made: {error.strerror}; "
            "name another one: hydra.run.dir=…"
        ) from error
    callbacks.on_run_end(config=raw, config_name=raw.hydra.job.config_name, job_return=job_return)
    code = job_return.return_value  # raises what the job raised
    if config_error is not None:
        raise config_error
    return int(code)


def print_info(info: str | None, overrides: Sequence[str], source: Source) -> None:
    """Print Hydra's information about `info`, or its help for None. Needs a `hydra_session`."""
    hydra, words = cast(Hydra, GlobalHydra.instance().hydra), list(overrides)
    with redirect_stdout(StringIO()) as printed:
        if info is None:
            arguments = Namespace(overrides=words)
            hydra.hydra_help(config_name=source.name, args_parser=get_args_parser(), args=arguments)
        else:
            hydra.show_info(info, config_name=source.name, overrides=words, run_mode=RunMode.RUN)
    print(hide_secrets(printed.getvalue()), end="")


def run_folder(composed: Composed, overrides: Sequence[str], source: Source) -> Path:
    """Return the absolute folder of a run, composed of `overrides` with Hydra's settings."""
    assert composed.raw is not None
    with explained(overrides, source.groups):
        return Path(str(composed.raw.hydra.run.dir)).absolute()


def job_name(composed: Composed) -> str:
    """Return Hydra's name of a run composed with Hydra's settings: the experiment's name."""
    assert composed.raw is not None
    return str(composed.raw.hydra.job.name)
