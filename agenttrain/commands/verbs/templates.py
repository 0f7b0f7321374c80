"""`agenttrain templates`: the table of known chat templates, or the certificate of a tokenizer."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from agenttrain.commands.verb import Verb, add_json


def add_arguments(parser: ArgumentParser) -> None:
    """Add the tokenizer and its texts, and the forms of the table."""
    add = parser.add_argument
    add("folder", nargs="?", type=Path, metavar="TOKENIZER", help="its folder, or org/name")
    add("--certify", action="store_true", help="certify the known families here (24 s)")
    add("--revision", metavar="NAME", help="branch, tag or commit of the hub")
    add("--chat-template", metavar="NAME", help="as in chat_template=… (auto)")
    add("--path", type=Path, metavar="FILE", help="as in chat_template.path=…: a Jinja file")
    add("--response-schema", metavar="NAME", help="as in response_schema=… (auto)")
    add("--schema-path", type=Path, metavar="FILE", help="as in response_schema.path=…: YAML")
    add("--no-tools", action="store_true", help="certify training without tools")
    add_json(parser)
    add("--markdown", action="store_true", help="print a Markdown table")


def run(args: Namespace, overrides: list[str]) -> int:
    """Print the table or a certificate."""
    from agenttrain.commands.templates import templates  # imports tokenizers

    return templates(args)


VERB = Verb(
    name="templates",
    help="the table of known chat templates, or the certificate of a tokenizer",
    page="guides/chat-templates.md",
    examples={
        "templates": "every family that is known",
        "templates my_model --chat-template hermes": "the certificate of a tokenizer",
    },
    add_arguments=add_arguments,
    run=run,
    settings=None,
)
