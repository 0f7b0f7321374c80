"""`agenttrain completion`: completion of verbs, groups, settings and files for bash and zsh."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from agenttrain.commands.verb import Verb, one_of


def add_arguments(parser: ArgumentParser) -> None:
    """Add the shell."""
    parser.add_argument(
        "what",
        type=one_of("bash", "zsh", "install"),
        metavar="bash|zsh|install",
        help="print the script of this shell, or install it",
    )
    parser.add_argument(
        "shell",
        nargs="?",
        type=one_of("bash", "zsh"),
        metavar="SHELL",
        help="with install: bash or zsh (that of $SHELL)",
    )


def run(args: Namespace, overrides: list[str]) -> int:
    """Print the script, or write the file that loads it."""
    from agenttrain.commands.completion.command import completion

    return completion(args.what, args.shell)


VERB = Verb(
    name="completion",
    help="completion of verbs, groups, settings and files for bash and zsh",
    page="start/install.md",
    examples={
        "completion install": "for the shell of $SHELL",
        "completion bash": "print the script",
    },
    add_arguments=add_arguments,
    run=run,
    settings=None,
)
