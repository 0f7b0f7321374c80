"""`agenttrain view`: a step's rollouts as a page, token by token."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from agenttrain.commands.verb import Verb, add_folder, add_new_file, whole


def add_arguments(parser: ArgumentParser) -> None:
    """Add the run, the step and the file."""
    add_folder(parser)
    parser.add_argument("--step", type=whole(), metavar="N", help="the step (the last one)")
    add_new_file(parser, "the page (beside the rollouts)")


def run(args: Namespace, overrides: list[str]) -> int:
    """Write the page and print its path."""
    from agenttrain.commands.records import view

    return view(args.folder, args.step, args.to)


VERB = Verb(
    name="view",
    help="a step's rollouts as a page, token by token",
    page="operate/viewer.md",
    examples={
        "view outputs/shop/<run>": "the last step",
        "view outputs/shop/<run> --step 10 --to page.html": "another step, to another file",
    },
    add_arguments=add_arguments,
    run=run,
    settings=None,
)
