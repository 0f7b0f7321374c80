"""`agenttrain serve`: an agent behind OpenAI's chat API, its tools with the client."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from agenttrain.commands.verb import Verb, whole

HOST, PORT = "127.0.0.1", 8000


def add_arguments(parser: ArgumentParser) -> None:
    """Add the checkpoint, the address and the names."""
    add = parser.add_argument
    add("--step", metavar="N", help="a checkpoint's step, or best")
    text = f"the address to listen on ({HOST}); nothing is authenticated"
    add("--host", default=HOST, metavar="ADDRESS", help=text)
    text = f"the port ({PORT}); 0 takes a free one"
    add("--port", type=whole(0, 65535), default=PORT, metavar="N", help=text)
    text = "further names that clients ask by, as behind a proxy; * for all"
    add("--hosts", type=host_names, default=(), metavar="NAME,…", help=text)
    add("--name", metavar="NAME", help="the model's name for clients (the run folder's)")


def host_names(text: str) -> tuple[str, ...]:
    """Return the names in a list, with or without brackets; for argparse."""
    return tuple(filter(None, (name.strip() for name in text.strip("[]").split(","))))


def run(args: Namespace, overrides: list[str]) -> int:
    """Answer chat requests."""
    from agenttrain.commands.running import compose_single
    from agenttrain.commands.serve import ServeOptions, serve
    from agenttrain.settings.engine_checks import admit_engine, typed_engine
    from agenttrain.settings.saved import at_step, run_of

    folder, words = at_step(overrides, args.step)
    composed = compose_single("serve", args, words)
    admit_engine(composed)
    served = args.name or ("agent" if folder is None else run_of(folder).resolve().name)
    options = ServeOptions(host=args.host, port=args.port, name=served, hosts=args.hosts)
    return serve(composed.config, options, engine_named=typed_engine(words) is not None)


VERB = Verb(
    name="serve",
    help="an agent behind OpenAI's chat API, its tools with the client",
    page="guides/use.md",
    examples={
        "serve run=outputs/shop/<run>": "the newest checkpoint",
        "serve run=outputs/shop/<run> --step best --port 8080 --name shop": "the best one",
    },
    add_arguments=add_arguments,
    run=run,
    settings={
        "run=FOLDER": "the agent of a run, or of one of its checkpoints; or model.path=…",
        "trust=true": "let the code run that the folder's config.yaml names",
        "engine=vllm": "vLLM's own server, where vLLM is installed",
    },
)
