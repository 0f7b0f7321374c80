"""What Hydra makes of conf/ is made once a session, not at every composition of settings.

A session composes more than a thousand times. Hydra reads about thirty files for each of them, and
nearly always for the same choice of options: that takes two thirds of a composition. Overrides of
values, and everything of ours, run every time.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TextIO

import yaml
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore

from agenttrain.utils.files import conf_folder


def install() -> None:
    """Answer OmegaConf's YAML loader and two pure functions of Hydra from earlier results."""
    yaml.load = _parse_once(yaml.load)
    defaults_list._create_defaults_list = _choose_once(defaults_list._create_defaults_list)
    merge = ConfigLoaderImpl._compose_config_from_defaults_list
    ConfigLoaderImpl._compose_config_from_defaults_list = _merge_once(merge)
    # A copy of the sources of files need not copy all registered settings.
    ConfigStore.__deepcopy__ = lambda store, memo: store


def _parse_once(load: Callable[..., Any]) -> Callable[..., Any]:
    """Parse each YAML text once. OmegaConf's loader is written in Python."""
    documents: dict[str, bytes] = {}

    def parse(stream: TextIO | str | bytes, Loader: Any) -> Any:
        if Loader.__name__ != "OmegaConfLoader" or isinstance(stream, str | bytes):
            return load(stream, Loader)
        text = stream.read()
        if text not in documents:
            stream.seek(0)  # not the text: an error names the file of the stream
            documents[text] = pickle.dumps(load(stream, Loader))
        return pickle.loads(documents[text])

    return parse


def _choose_once(create: Callable[..., Any]) -> Callable[..., Any]:
    """Walk the defaults lists once for each choice of options."""
    choices: dict[str, bytes] = {}

    def choose(repo: Any, config_name: Any, overrides: Any, **options: Any) -> Any:
        chosen = {k: v for k, v in vars(overrides).items() if k != "config_overrides"}
        key = repr((config_name, chosen, options))
        if not _is_bundled(repo):
            return create(repo, config_name, overrides, **options)
        if key not in choices:
            result = create(repo, config_name, overrides, **options)
            state = {k: v for k, v in vars(overrides).items() if k in chosen}
            choices[key] = pickle.dumps((result, state))
        result, state = pickle.loads(choices[key])
        vars(overrides).update(state)
        return result

    return choose


def _merge_once(merge: Callable[..., Any]) -> Callable[..., Any]:
    """Merge the files of each list of defaults once."""
    configs: dict[str, bytes] = {}

    def compose(loader: Any, defaults: Any, repo: Any) -> Any:
        if not _is_bundled(repo):
            return merge(loader, defaults, repo)
        key = repr(defaults)
        if key not in configs:
            configs[key] = pickle.dumps(merge(loader, defaults, repo))
        return pickle.loads(configs[key])

    return compose


def _is_bundled(repo: Any) -> bool:
    """Tell whether all files come from conf/ and Hydra, and none from a folder of a test's."""
    bundled = {f"file://{conf_folder()}", "pkg://hydra.conf", "structured://"}
    return {source.full_path() for source in repo.get_sources()} <= bundled
