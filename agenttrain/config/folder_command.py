"""Verbs that take a folder and a few words of their own: `replay <run> step=3 rollout=ID`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agenttrain.config.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderCommand:
    """A verb's folder and words, as typed."""

    folder: Path
    words: dict[str, str]
    """The verb's own `key=value` words."""
    overrides: list[str]
    """Settings: the other words."""

    def step(self, usage: str) -> int | None:
        """Return the value of `step=`; raises ConfigError for one that is no number."""
        text = self.words.get("step")
        if text is not None and not text.isdecimal():
            raise ConfigError(f"step={text}: is no step's number; {usage}")
        return None if text is None else int(text)


def parse_folder(arguments: Sequence[str], keys: Sequence[str], usage: str) -> FolderCommand:
    """Parse the arguments; the verb takes `keys`. Raises ConfigError, quoting `usage`."""
    folders = [word for word in arguments if "=" not in word]
    if len(folders) != 1 or folders[0].startswith("-"):
        raise ConfigError(usage)
    words: dict[str, str] = {}
    overrides = []
    for text in arguments:
        key, separator, value = text.partition("=")
        if not separator:
            continue
        if key not in keys:
            overrides.append(text)
        elif key in words or not value:
            raise ConfigError(f"{text}: give {key}= one value; {usage}")
        else:
            words[key] = value
    return FolderCommand(folder=Path(folders[0]), words=words, overrides=overrides)
