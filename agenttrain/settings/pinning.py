"""Models and data sets of the hub that a run names: pinned to the commits that they stand for now.

config.yaml has the commits, so that a resumed run reads the same files. `fetch` downloads weights
before a run starts: in the launcher, or in the first rank to come, for which the others wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agenttrain.data.config import HUB_ROWS, DataConfig
from agenttrain.settings.compose import Composed
from agenttrain.settings.role_checks import used_roles
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.config import Init, ModelConfig
from agenttrain.types import ConfigError
from agenttrain.utils.hub import (
    COMMIT,
    data_commit,
    download_command,
    has_weights,
    is_hub_id,
    snapshot,
)
from agenttrain.utils.model_path import base_model, model_folder, weights_folder
from agenttrain.utils.sections import raise_config_error

WITHOUT_DATA = ("plan", "serve")
"""Verbs that read no rows."""
WITHOUT_TEACHER = ("eval", "sft", "play", "serve")
"""Verbs in which nothing is learned from rewards."""
REWARD_MODEL = "agenttrain.rewards.builtin.reward_model.RewardModel"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A model or a data set of the hub that a run's settings name."""

    section: tuple[str, ...]
    """Keys of the section with `path` and `revision`, such as ("reward", "reward_model")."""
    path: str
    revision: str | None
    loaded: bool
    """True if the run needs its weights."""
    part: str = ""
    """Prefix of its keys: `base_` for the base model of the adapters in the section's path."""
    name: str = "path"
    """Key of the path in its section."""

    @property
    def key(self) -> str:
        """The setting that names it."""
        return ".".join([*self.section, f"{self.part}{self.name}"])

    @property
    def revision_key(self) -> str:
        """The setting of its revision."""
        return ".".join([*self.section, f"{self.part}revision"])


def hub_models(config: RunConfig, verb: str) -> Iterator[HubModel]:
    """Yield the hub models in those settings that the verb reads; raises ConfigError.

    They are those of the policy, the chat template, reward models, the teacher, the roles, and the
    base of the policy's adapters. A local folder in their place is left out.
    """
    template, policy = config.chat_template, config.model

    def in_section(
        keys: tuple[str, ...], path: Any, revision: Any, *, loaded: bool, name: str = "path"
    ) -> Iterator[HubModel]:
        """Yield the model that the key `name` of a section names, if its path is a hub id."""
        if isinstance(path, str) and is_hub_id(path):
            yield HubModel(section=keys, path=path, revision=revision, loaded=loaded, name=name)

    reads_weights = policy.init is not Init.random
    yield from in_section(("model",), policy.path, policy.revision, loaded=reads_weights)
    # Only the template is read, and none of that model's weights.
    yield from in_section(("chat_template",), template.path, template.revision, loaded=False)
    # The sections `reward` of the run and of its sources, with the keys above them.
    rewards: list[tuple[tuple[str, ...], Any]] = []
    if verb != "sft":
        rewards = [((), config.reward)]
        for source, data in config.data.sources.items():
            rewards.append((("data", "sources", source), data.reward))
    for parent_keys, sections in rewards:
        for name, section in (sections or {}).items():
            if isinstance(section, Mapping) and section.get("_target_") == REWARD_MODEL:
                path, revision = section.get("path"), section.get("revision")
                yield from in_section((*parent_keys, "reward", name), path, revision, loaded=True)
    teacher = config.algorithm.loaded_teacher
    if teacher is not None and verb not in WITHOUT_TEACHER:
        keys = ("algorithm", "teacher")
        yield from in_section(keys, teacher.path, teacher.revision, loaded=True)
    for name, role in used_roles(config, verb).items():
        keys = ("roles", name)
        yield from in_section(keys, role.model, role.revision, loaded=True, name="model")
    yield from _base_of_adapters(policy)


def _base_of_adapters(policy: ModelConfig) -> Iterator[HubModel]:
    """Yield the hub model on which the adapters in `model.path` were trained, if they were.

    Raises ConfigError for a `model.base_revision` without such a model.
    """
    base = base_model(policy.path, policy.revision)  # its path and the revision in the adapters
    if base is not None and is_hub_id(base[0]):
        path, saved_revision = base
        revision = policy.base_revision or saved_revision
        yield HubModel(section=("model",), path=path, revision=revision, loaded=True, part="base_")
    elif policy.base_revision is not None:
        raise ConfigError(
            f"model.base_revision={policy.base_revision}: model.path={policy.path} holds no "
            "adapters for a model of the hub; leave it out"
        )


def hub_rows(config: RunConfig, verb: str) -> Iterator[HubModel]:
    """Yield the hub data sets that a verb reads, once for each section that names one.

    Example: for ``data=hub data.path=openai/gsm8k`` these are the sections ``data.train``,
    ``data.test`` and ``data``, each of which has a `path` and a `revision`.
    """
    if verb in WITHOUT_DATA:
        return
    places: dict[tuple[str, ...], DataConfig] = {
        ("data", "sources", name): source for name, source in config.data.sources.items()
    }
    for place, data in (places or {("data",): config.data}).items():
        sections = {(*place, "train"): data.train, (*place, "test"): data.test}
        named: dict[tuple[str, ...], tuple[Any, Any]] = {
            keys: (section.get("path"), section.get("revision"))
            for keys, section in sections.items()
            if section.get("_target_") == HUB_ROWS
        }
        # The splits may have got their path and revision from `data.path` and `data.revision`, by
        # interpolation. Then config.yaml holds them at both places, and both are pinned.
        split_paths = [path for path, _ in named.values()]
        if data.path is not None and data.path in split_paths:
            named[place] = (data.path, data.revision)
        for section_keys, (path, revision) in named.items():
            if isinstance(path, str) and not Path(path).exists():  # else it is a local folder
                # `loaded` is about weights, which rows have not.
                yield HubModel(section=section_keys, path=path, revision=revision, loaded=False)


def pin(composed: Composed, verb: str) -> None:
    """Replace every revision by its commit, in `composed.config` and `composed.plain`.

    A data set keeps its revision if the hub does not answer: its rows may be in the cache. Raises
    ConfigError, with the key, for a model or data set that does not exist.
    """
    for rows in hub_rows(composed.config, verb):
        # For messages: `data.train.path` is by default `data.path`, which the user has typed.
        key = "data.path" if rows.path == composed.config.data.path else rows.key
        commit = data_commit(rows.path, rows.revision, key)
        if commit is not None:
            _set_revision(composed, rows, commit)
    for model in hub_models(composed.config, verb):
        # Asks the hub for the commit, and downloads all files but the weights into the cache. ():
        # whether the model is complete is not checked here.
        folder = model_folder(model.path, (), revision=model.revision, key=model.key)
        _set_revision(composed, model, folder.name)  # the cache names a snapshot by its commit


def adopt_pins(composed: Composed, started: Composed) -> None:
    """Pin the models of a run that goes on to the commits that its first start has chosen.

    `started` has the settings of that start, `composed` those of this one, whose typed commits
    stay. Compares the models of "train", the verb that reads most of them.
    """
    started_models = {model.key: model for model in _models_and_rows(started.config, "train")}
    for model in _models_and_rows(composed.config, "train"):
        started_model = started_models.get(model.key)
        if started_model is None or started_model.path != model.path:
            continue
        if not COMMIT.fullmatch(model.revision or ""):
            _set_revision(composed, model, started_model.revision)


def _models_and_rows(config: RunConfig, verb: str) -> Iterator[HubModel]:
    yield from hub_models(config, verb)
    yield from hub_rows(config, verb)


def _set_revision(composed: Composed, model: HubModel, revision: str | None) -> None:
    """Set a model's revision in `composed.config` and in `composed.plain`."""
    section: Any = composed.config
    plain: Any = composed.plain
    for name in model.section:
        section = section[name] if isinstance(section, dict) else getattr(section, name)
        plain = plain[name]
    name = f"{model.part}revision"  # "revision", or "base_revision" for the base of adapters
    plain[name] = revision
    if isinstance(section, dict):
        section[name] = revision
    else:
        setattr(section, name, revision)


def pins(composed: Composed, verb: str) -> list[str]:
    """Return the pinned revisions as overrides, for other processes that compose the same run.

    Example: ``['++model.revision="5a1…"', '++data.train.revision="9c0…"']``. With ++ a key that the
    section does not have yet, as one of a reward's arguments, is added.
    """
    overrides = []
    for model_or_rows in _models_and_rows(composed.config, verb):
        section, _, rest = model_or_rows.revision_key.partition(".")
        # With `data.only`, settings were moved from data.sources.shop to the top. The other process
        # composes the same command line, where they are at their first place.
        typed_section = composed.in_mixture.get(section, section)
        revision = model_or_rows.revision
        if revision is not None:  # None: the hub did not answer for a data set
            overrides.append(f'++{typed_section}.{rest}="{revision}"')
    return overrides


def fetch(config: RunConfig, verb: str) -> None:
    """Download the weights that a run needs and the cache lacks. Raises ConfigError."""
    for model in hub_models(config, verb):
        if model.loaded:
            weights_folder(model.path, revision=model.revision, key=model.key)


def check_cached(configs: Iterable[RunConfig], verb: str) -> None:
    """Raise ConfigError for models whose weights are not in the cache, for slurm.offline=true."""
    models = dict.fromkeys(model for config in configs for model in hub_models(config, verb))
    raise_config_error(
        f"{model.key}={model.path}: its weights are not in the cache, and the nodes have no "
        f"network (slurm.offline=true); run `{download_command(model.path, model.revision)}` here "
        "first"
        for model in models
        if model.loaded and not has_weights(snapshot(model.path, model.revision, model.key))
    )
