"""`agenttrain engine-server`: a vLLM server: one of a run, or one for runs elsewhere."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from agenttrain.commands.verb import Verb, add_folder, whole


def add_arguments(parser: ArgumentParser) -> None:
    """Add the server's folder, number and address."""
    add_folder(parser, text="the folder of a run; with --port a new one")
    add = parser.add_argument
    text = "which of servers.count, from 0 (0): a run starts them itself"
    add("--number", type=whole(), metavar="N", help=text)
    text = "a server for servers.admin_urls; the folder gets its log"
    add("--port", type=whole(1, 65535), metavar="N", help=text)
    add("--host", metavar="ADDRESS", help="the address that it listens on (127.0.0.1)")
    text = "wait for a run with servers.nodes to begin"
    add("--wait", type=whole(), metavar="SECONDS", help=text)
    text = "end with this process, as servers do that a run starts"
    add("--parent", type=whole(), metavar="PID", help=text)


def run(args: Namespace, overrides: list[str]) -> int:
    """Run one server."""
    from agenttrain.commands.engine_server import engine_server

    return engine_server(args, overrides)


VERB = Verb(
    name="engine-server",
    help="a vLLM server: one of a run, or one for runs elsewhere",
    page="guides/fleet.md",
    examples={
        "engine-server outputs/shop/<run> --number 1": "replace one without restarts left",
        "engine-server /tmp/server --port 8000 model=shop": "one for runs elsewhere",
    },
    add_arguments=add_arguments,
    run=run,
    settings={
        "trust=true": "start what the folder's plan names, if somebody else wrote it",
    },
)
