"""The verbs, each in a module of its own, which is imported when the verb is typed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from agenttrain.commands.verb import VERBS, Verb
from agenttrain.types import ConfigError
from agenttrain.utils.names import did_you_mean

DEFAULT = "train"
"""Verb of a command that names none."""
RUNNING = ("train", "sft", "eval")
"""Verbs whose processes torchrun may start; the others print."""
BEFORE = {
    **dict.fromkeys(("--config-dir", "-cd", "--config-name", "-cn", "--cfg", "-c"), 1),
    **dict.fromkeys(("--package", "-p", "--info", "-i"), 1),
    **dict.fromkeys(("-m", "--multirun", "--resolve", "--hydra-help"), 0),
    **dict.fromkeys(("-h", "--help", "--version"), 0),
}
"""Options that may stand before the verb, and the number of their values."""


def load_verb(name: str) -> Verb:
    """Import a verb."""
    module = import_module(f"agenttrain.commands.verbs.{name.replace('-', '_')}")
    verb: Verb = module.VERB
    return verb


def split_verb(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the verb, `train` when none is given, and the other arguments.

    Example: ``["--config-dir", "mine", "check", "seed=1"]`` -> ``("check", ["--config-dir", "mine",
    "seed=1"])``.
    """
    position = _first_word(arguments)
    if position is None or arguments[position] not in VERBS:
        return DEFAULT, list(arguments)
    return arguments[position], [*arguments[:position], *arguments[position + 1 :]]


def typed_verb(arguments: Sequence[str]) -> str | None:
    """Return the verb, None when none is given; raises ConfigError for a word that is no verb."""
    position = _first_word(arguments)
    word = "" if position is None else arguments[position]
    if word and "=" not in word and word not in VERBS and not word.startswith(("+", "~")):
        raise ConfigError(
            f"{word}: no such verb{did_you_mean(word, VERBS)}; the verbs are {', '.join(VERBS)}, "
            "and settings are written key=value"
        )
    return word if word in VERBS else None


def _first_word(arguments: Sequence[str]) -> int | None:
    """Return the position of the first argument that is neither an option nor an option's value.

    None if there is none, or if an unknown option comes before it.
    """
    position = 0
    while position < len(arguments) and arguments[position].startswith("-"):
        name, equals, _ = arguments[position].partition("=")
        if name not in BEFORE:
            return None
        position += 1 if equals else 1 + BEFORE[name]
    return position if position < len(arguments) else None
