"""`agenttrain servers`: the servers of a run: state, weights, load, and the ends of their logs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from agenttrain.commands.verb import Verb, add_folder, add_json, whole

LINES = 3


def add_arguments(parser: ArgumentParser) -> None:
    """Add the run and the length of the logs' ends."""
    add_folder(parser)
    text = f"last lines of each log ({LINES})"
    parser.add_argument("--lines", type=whole(), default=LINES, metavar="N", help=text)
    add_json(parser)


def run(args: Namespace, overrides: list[str]) -> int:
    """Print the servers of a run."""
    from agenttrain.commands.servers import servers

    return servers(args.folder, args.lines, args.json)


VERB = Verb(
    name="servers",
    help="the servers of a run: state, weights, load, and the ends of their logs",
    page="guides/fleet.md",
    examples={
        "servers outputs/shop/<run>": "the table",
        "servers outputs/shop/<run> --lines 40": "with more of the logs",
    },
    add_arguments=add_arguments,
    run=run,
    settings=None,
)
