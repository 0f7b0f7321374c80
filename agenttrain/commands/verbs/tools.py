"""`agenttrain tools`: the tools as the model sees them, and what calls of them return."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from agenttrain.commands.verb import SAVED, Verb, add_json, whole
from agenttrain.types import ConfigError, ToolCall


def add_arguments(parser: ArgumentParser) -> None:
    """Add the calls and the row that they are made for."""
    parser.add_argument(
        "--call",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "JSON"),
        help="call a tool; several are made one after the other",
    )
    row = parser.add_mutually_exclusive_group()
    row.add_argument(
        "--row", type=whole(), metavar="N", help="the tools of this row of data.train, from 0"
    )
    row.add_argument("--task", metavar="ID", help="the tools of the row with this task_id")
    add_json(parser)


def run(args: Namespace, overrides: list[str]) -> int:
    """Print the model's tools, or call them; return exit code 1 if a call has an error."""
    from agenttrain.commands.running import compose_single

    calls = tuple(read_call(name, text, number) for number, (name, text) in enumerate(args.call))
    composed = compose_single("tools", args, overrides)
    from agenttrain.commands.tools import ToolsOptions, show  # imports torch

    row = [] if args.row is None else ["--row", str(args.row)]
    row += [] if args.task is None else ["--task", args.task]
    options = ToolsOptions(
        calls=calls, json=args.json, row=args.row, task_id=args.task, words=(*overrides, *row)
    )
    return show(composed.config, options)


def read_call(name: str, text: str, number: int) -> ToolCall:
    """Return the call of `--call NAME JSON`; raises ConfigError for text that is no JSON object."""
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--call {name} {text}: is not JSON: {error}; quote it for the shell, e.g. --call "
            f"{name} '{{\"a\": 1}}'"
        ) from error
    if not isinstance(arguments, dict):
        problem = "must be an object of arguments, e.g. {}"
        raise ConfigError(f"--call {name} {text}: {problem}")
    return ToolCall(id=f"call_{number}", name=name, arguments=arguments)


VERB = Verb(
    name="tools",
    help="the tools as the model sees them, and what calls of them return",
    page="guides/tools.md",
    examples={
        "tools experiment=calculator": "schemas, limits and an example of each",
        'tools --call sql \'{"query": "SELECT 1"}\'': "what the model would read",
    },
    add_arguments=add_arguments,
    run=run,
    settings={**SAVED},
)
