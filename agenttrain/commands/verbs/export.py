"""`agenttrain export`: a checkpoint as a model folder with a card, or on the hub."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from agenttrain.commands.verb import Verb, one_of


def add_arguments(parser: ArgumentParser) -> None:
    """Add the checkpoint, the place and the form."""
    add = parser.add_argument
    add("folder", nargs="?", type=Path, metavar="RUN", help="a run, or one of its checkpoints")
    add("--run", type=Path, metavar="FOLDER", help="the same")
    add("--to", metavar="PLACE", help="a folder that does not exist yet, or hub:org/name")
    add("--step", metavar="N", help="a checkpoint's step, or best (the newest)")
    add(
        "--format",
        type=one_of("transformers", "adapter", "merged"),
        default="transformers",
        metavar="NAME",
        help="transformers, merged (adapters into the weights) or adapter",
    )
    add(
        "--dtype",
        type=one_of("auto", "float32", "bfloat16", "float16"),
        default="auto",
        metavar="NAME",
        help="auto (as saved), float32, bfloat16 or float16",
    )
    add(
        "--public",
        type=one_of("true", "false"),
        metavar="true",
        help="a new model of the hub is public",
    )


def run(args: Namespace, overrides: list[str]) -> int:
    """Export a checkpoint."""
    from agenttrain.commands.export import export_checkpoint

    return export_checkpoint(args)


VERB = Verb(
    name="export",
    help="a checkpoint as a model folder with a card, or on the hub",
    page="guides/use.md",
    examples={
        "export outputs/shop/<run> --to my_agent": "for transformers, vLLM and others",
        "export outputs/shop/<run> --to small --dtype bfloat16": "in half the bytes",
    },
    add_arguments=add_arguments,
    run=run,
    settings=None,
)
