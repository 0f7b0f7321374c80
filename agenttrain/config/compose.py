"""YAML files and overrides -> RunConfig, through Hydra's compose API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra import compose, version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from agenttrain.config.errors import ConfigError, explained
from agenttrain.config.groups import conf_folder, list_groups
from agenttrain.config.schema import RunConfig

HYDRA_VERSION = "1.3"
"""Hydra behaves as this version did, whatever is installed."""
OPEN_SECTIONS = (
    *("tools.", "environment.", "reward.", "data.train.", "data.test."),
    "data.map.",
    *("chat_template.kwargs.", "optimizer.schedule_options."),
)
"""Sections that hold arguments of other people's functions: any key may be set below them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """A checked type of every setting, and the same as plain data for config.yaml."""

    config: RunConfig
    plain: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where YAML files are looked for beside conf/: Hydra's --config-dir and --config-name."""

    extra: str | None = None
    """A folder of the user's whose groups are added."""
    name: str = "train"

    def groups(self) -> dict[str, list[str]]:
        """Every group with its options."""
        return list_groups(conf_folder(), *([Path(self.extra)] if self.extra else []))


def register() -> None:
    """Make the typed settings known to Hydra as `run_config`."""
    ConfigStore.instance().store(name="run_config", node=RunConfig)


@contextmanager
def hydra_session(source: Source) -> Iterator[None]:
    """Hydra's compose API over `source`, which a hydra.main with the same options would see.

    Hydra's own initialize_config_dir knows no --config-dir.
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
    """The composed settings before conversion; raises ConfigError. Needs a `hydra_session`."""
    with explained(overrides, source.groups):
        return compose(source.name, list(overrides), return_hydra_config=with_hydra)


def compose_run(overrides: Sequence[str], source: Source) -> Composed:
    """The settings that `overrides` make; raises ConfigError. Needs a `hydra_session`."""
    raw = compose_raw(overrides, source)
    with explained(overrides, source.groups):
        return convert(raw)


def convert(raw: DictConfig | Mapping[str, Any]) -> Composed:
    """Plain data or a DictConfig -> settings.

    Merged into the schema once more, because `+algorithm.typo=1` passes Hydra. Raises OmegaConf's
    errors for unknown keys, wrong types and values that are missing.
    """
    node = raw if isinstance(raw, DictConfig) else OmegaConf.create(dict(raw))
    plain = OmegaConf.to_container(node, resolve=True, throw_on_missing=True, enum_to_str=True)
    typed = OmegaConf.merge(OmegaConf.structured(RunConfig), plain)
    config = cast(RunConfig, OmegaConf.to_object(typed))
    # OmegaConf has lists only; validate.py counts.
    config.optimizer.betas = cast(tuple[float, float], tuple(config.optimizer.betas))
    complete = OmegaConf.to_container(typed, throw_on_missing=True, enum_to_str=True)
    return Composed(config=config, plain=cast(dict[str, Any], complete))


def open_keys(overrides: Sequence[str]) -> list[str]:
    """`tools.sql.timeout_s=5` -> `++tools.sql.timeout_s=5`: no YAML needs to list the argument."""
    return [f"++{text}" if text.startswith(OPEN_SECTIONS) else text for text in overrides]
