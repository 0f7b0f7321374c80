"""`agenttrain compare`: a sweep's configurations against their results."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from agenttrain.commands.verb import Verb, add_folder, add_json


def add_arguments(parser: ArgumentParser) -> None:
    """Add the sweep, its metrics and the forms of the table."""
    add_folder(parser, "SWEEP", "the sweep's folder")
    parser.add_argument("metrics", nargs="*", metavar="METRIC", help="columns of the table")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the curves: .png, .svg, .pdf or .html"
    )
    form = parser.add_mutually_exclusive_group()
    add_json(form)
    form.add_argument("--markdown", action="store_true", help="print a Markdown table")


def run(args: Namespace, overrides: list[str]) -> int:
    """Print the sweep's table."""
    from agenttrain.commands.sweep.compare import compare

    return compare(args)


VERB = Verb(
    name="compare",
    help="a sweep's configurations against their results",
    page="guides/sweeps.md",
    examples={
        "compare outputs/shop/<sweep>": "the table",
        "compare outputs/shop/<sweep> reward/mean --plot curves.png": "a metric, drawn",
    },
    add_arguments=add_arguments,
    run=run,
    settings=None,
)
