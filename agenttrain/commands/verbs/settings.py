"""`agenttrain settings`: every setting: type, default, meaning."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from agenttrain.commands.verb import Verb, add_json
from agenttrain.types import ConfigError


def add_arguments(parser: ArgumentParser) -> None:
    """Add the section and the forms of the list."""
    parser.add_argument("section", nargs="?", metavar="SECTION", help="or a single key")
    form = parser.add_mutually_exclusive_group()
    add_json(form)
    form.add_argument(
        "--schema",
        action="store_true",
        help="print a JSON schema with which editors complete YAML",
    )


def run(args: Namespace, overrides: list[str]) -> int:
    """Print the settings, or their schema."""
    from agenttrain.commands import settings

    if not args.schema:
        return settings.show(args.section, args.json)
    if args.section is not None:
        raise ConfigError(f"{args.section}: the schema is of all sections; leave it out")
    return settings.show_schema()


VERB = Verb(
    name="settings",
    help="every setting: type, default, meaning",
    page="reference/settings.md",
    examples={
        "settings optimizer": "the settings of a section",
        "settings --schema": "for an editor",
    },
    add_arguments=add_arguments,
    run=run,
    settings=None,
)
