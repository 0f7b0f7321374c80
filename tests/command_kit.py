"""A command line as the object that composes its settings."""

from __future__ import annotations

from collections.abc import Sequence

from agenttrain import cli
from agenttrain.settings.command_line import Command, command_of


def parse(arguments: Sequence[str]) -> Command:
    """Return the command of a verb that takes settings."""
    _, args, settings = cli.parse(arguments)
    return command_of(args.verb, args, settings, checks=args.verb == "check")
