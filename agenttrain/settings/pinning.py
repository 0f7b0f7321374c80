"""Models of the hub that a run names: pinned to the commits that the names stand for now.

config.yaml has the commits, so that a resumed run reads the same files. `fetch` downloads weights
before a run starts: in the launcher, or in the first rank to come, for which the others wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agenttrain.settings.compose import Composed
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.config import Init
from agenttrain.types import ConfigError
from agenttrain.utils.hub import COMMIT, download_command, has_weights, is_hub_id, snapshot
from agenttrain.utils.model_path import model_folder, weights_folder

REWARD_MODEL = "agenttrain.rewards.builtin.reward_model.RewardModel"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """One model of the hub in a run's settings."""

    section: tuple[str, ...]
    """Keys of the section with `path` and `revision`, such as ("reward", "reward_model")."""
    path: str
    revision: str | None
    loaded: bool
    """True if the run needs its weights."""

    @property
    def key(self) -> str:
        """The setting that names it."""
        return ".".join([*self.section, "path"])


def hub_models(config: RunConfig, verb: str) -> Iterator[HubModel]:
    """Yield the models of the hub that a verb reads of those that the settings name."""
    template = config.chat_template
    named: list[tuple[tuple[str, ...], Any, Any, bool]] = [
        (
            ("model",),
            config.model.path,
            config.model.revision,
            config.model.init is not Init.random,
        ),
        (("chat_template",), template.path, template.revision, False),
    ]
    for name, section in {} if verb == "sft" else config.reward.items():
        if isinstance(section, Mapping) and section.get("_target_") == REWARD_MODEL:
            named.append((("reward", name), section.get("path"), section.get("revision"), True))
    for section_keys, path, revision, loaded in named:
        if isinstance(path, str) and is_hub_id(path):
            yield HubModel(section=section_keys, path=path, revision=revision, loaded=loaded)


def pin(composed: Composed, verb: str) -> None:
    """Replace every revision by its commit, in the settings and in those for config.yaml."""
    for model in hub_models(composed.config, verb):
        folder = model_folder(model.path, (), revision=model.revision, key=model.key)
        _set_revision(composed, model, folder.name)


def adopt_pins(composed: Composed, started: Composed) -> None:
    """Give models the commits that a run was started with, unless the command names others."""
    begun = {model.section: model for model in hub_models(started.config, "train")}
    for model in hub_models(composed.config, "train"):
        earlier = begun.get(model.section)
        if earlier and earlier.path == model.path and not COMMIT.fullmatch(model.revision or ""):
            _set_revision(composed, model, earlier.revision)


def _set_revision(composed: Composed, model: HubModel, revision: str | None) -> None:
    section: Any = composed.config
    plain: Any = composed.plain
    for name in model.section:
        section = section[name] if isinstance(section, dict) else getattr(section, name)
        plain = plain[name]
    plain["revision"] = revision
    if isinstance(section, dict):
        section["revision"] = revision
    else:
        section.revision = revision


def pins(config: RunConfig, verb: str) -> list[str]:
    """Return the pinned revisions as overrides, for other processes that compose the same run."""
    return [
        f'++{".".join(model.section)}.revision="{model.revision}"'
        for model in hub_models(config, verb)
    ]


def fetch(config: RunConfig, verb: str) -> None:
    """Download the weights that a run needs and the cache lacks. Raises ConfigError."""
    for model in hub_models(config, verb):
        if model.loaded:
            weights_folder(model.path, revision=model.revision, key=model.key)


def check_cached(configs: Iterable[RunConfig], verb: str) -> None:
    """Raise ConfigError for models whose weights are not in the cache."""
    models = dict.fromkeys(model for config in configs for model in hub_models(config, verb))
    problems = [
        f"{model.key}={model.path}: its weights are not in the cache, and the nodes have no "
        f"network (slurm.offline=true); run `{download_command(model.path, model.revision)}` here "
        "first"
        for model in models
        if model.loaded and not has_weights(snapshot(model.path, model.revision, model.key))
    ]
    if problems:
        raise ConfigError("\n".join(problems))
