"""`agenttrain timeline`: who sampled, waited, trained, synced and saved when, as a page."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from agenttrain.commands.verb import Verb, add_folder, add_new_file


def add_arguments(parser: ArgumentParser) -> None:
    """Add the run, the steps and the file."""
    add_folder(parser)
    parser.add_argument("--steps", metavar="A-B", help="these steps, or one: --steps 10 (all)")
    add_new_file(parser, "the page (timeline.html in the run's folder)")


def run(args: Namespace, overrides: list[str]) -> int:
    """Write the page and print its path."""
    from agenttrain.commands.timeline import timeline

    return timeline(args.folder, args.steps, args.to)


VERB = Verb(
    name="timeline",
    help="who sampled, waited, trained, synced and saved when, as a page",
    page="operate/timeline.md",
    examples={
        "timeline outputs/shop/<run>": "all of a run, also of one that goes on",
        "timeline outputs/shop/<run> --steps 10-12 --to page.html": "three steps, to another file",
    },
    add_arguments=add_arguments,
    run=run,
    settings=None,
)
