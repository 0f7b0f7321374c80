"""`agenttrain init`: a new folder with the skeleton of an agent: tool, reward, rows, YAML, test."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from agenttrain.commands.verb import Verb


def add_arguments(parser: ArgumentParser) -> None:
    """Add the agent's name."""
    parser.add_argument("name", type=Path, metavar="NAME", help="the new folder")


def run(args: Namespace, overrides: list[str]) -> int:
    """Make the folder."""
    from agenttrain.commands.init.command import init

    return init(args.name)


VERB = Verb(
    name="init",
    help="a new folder with the skeleton of an agent: tool, reward, rows, YAML, test",
    page="start/your-agent.md",
    examples={
        "init my_agent": "make the folder my_agent",
        "init agents/librarian": "a folder in another one",
    },
    add_arguments=add_arguments,
    run=run,
    settings=None,
)
