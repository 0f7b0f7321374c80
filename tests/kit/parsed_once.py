"""A YAML file of conf/ is parsed once a session, not at every composition of settings.

A session composes more than a thousand times, each time from about thirty files, which OmegaConf
parses in pure Python: an eighth of the time of a composition.
"""

from __future__ import annotations

import pickle
from typing import Any, TextIO

import yaml


def install() -> None:
    """Answer OmegaConf's loader with a new copy of what the same text was parsed to before."""
    load = yaml.load
    documents: dict[str, bytes] = {}

    def load_once(stream: TextIO | str | bytes, Loader: Any) -> Any:
        if Loader.__name__ != "OmegaConfLoader" or isinstance(stream, str | bytes):
            return load(stream, Loader)
        text = stream.read()
        if text not in documents:
            stream.seek(0)  # not the text: an error names the file of the stream
            documents[text] = pickle.dumps(load(stream, Loader))
        return pickle.loads(documents[text])

    yaml.load = load_once
