"""A command line as the object that composes its settings."""

from __future__ import annotations

from collections.abc import Sequence

from agenttrain import cli
from agenttrain.settings.command_line import Command, command_of


def parse(arguments: Sequence[str]) -> Command:
    """Return the command of a verb that takes settings."""
    _, args, settings = cli.parse(arguments)
    checks = args.verb == "check"
    verb = (checks and args.target) or args.verb  # `check sft` is about the settings of sft
    return command_of(verb, args, settings, checks=checks)
