"""`agenttrain serve`: an agent behind OpenAI's chat completions; its tools stay with the client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agenttrain.commands.play import checkpoint_of
from agenttrain.settings.command_line import first_value
from agenttrain.settings.run_config import RunConfig
from agenttrain.settings.saved import run_of
from agenttrain.types import AgenttrainError, ConfigError, Sampling

LOOPBACK = ("127.0.0.1", "localhost", "::1")
HOST, PORT = LOOPBACK[0], 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Words of the command beside the overrides."""

    host: str
    port: int
    """0: a free one."""
    name: str
    """Name of the model for clients."""


def parse(arguments: Sequence[str]) -> tuple[ServeOptions, list[str]]:
    """Take ``host=``, ``port=``, ``name=`` and ``step=`` out of the arguments.

    `run=` then names the step's checkpoint. Raises ConfigError.
    """
    words, host = first_value(arguments, "host")
    words, port = first_value(words, "port")
    words, name = first_value(words, "name")
    words, step = first_value(words, "step")
    if port is not None and (not port.isdecimal() or int(port) > 65535):
        raise ConfigError(f"port={port}: give a number up to 65535; 0 takes a free one")
    folder = next((Path(text[4:]) for text in words if text.startswith("run=")), None)
    if step is not None:
        if folder is None:
            raise ConfigError(f"step={step}: is a step of a run; add run=<run folder>")
        words = [text for text in words if not text.startswith("run=")]
        words.append(f"run={checkpoint_of(folder, step)}")
    served = name or ("agent" if folder is None else run_of(folder).resolve().name)
    return ServeOptions(host=host or HOST, port=int(port or PORT), name=served), words


def serve(config: RunConfig, options: ServeOptions) -> int:
    """Answer requests until SIGTERM or Ctrl-C; return the exit code. Raises ConfigError."""
    from agenttrain.serving.app import build_app, listen, run

    try:
        listener = listen(options.host, options.port)  # before the model is loaded
    except OSError as error:
        reason = str(error.strerror or error).partition(" (")[0]
        raise ConfigError(
            f"host={options.host} port={options.port}: cannot be bound: {reason}; name another "
            "port, or port=0 for a free one"
        ) from error
    from transformers import AutoTokenizer

    from agenttrain.runs.sampling import sampling_engine, verify_model
    from agenttrain.runs.setup import chat_of
    from agenttrain.serving.answers import ChatServer
    from agenttrain.utils.model_path import model_folder

    with listener:
        try:
            verify_model(config)
            folder = model_folder(config.model.path, revision=config.model.revision)
            tokenizer = AutoTokenizer.from_pretrained(folder)
            chat = chat_of(config, tokenizer, tools=bool(config.tools or config.environment))
            engine = sampling_engine(config)
        except (AgenttrainError, OSError, ValueError) as error:
            raise ConfigError(str(error)) from error
        defaults = Sampling(
            temperature=config.eval.temperature,
            top_p=config.eval.top_p,
            top_k=config.eval.top_k,
            min_p=config.eval.min_p,
        )
        server = ChatServer(engine=engine, chat=chat, model=options.name, defaults=defaults)
        port = listener.getsockname()[1]
        host = f"[{options.host}]" if ":" in options.host else options.host
        if options.host not in LOOPBACK:
            print(
                f"note: host={options.host}: everybody who reaches this address can use the model; "
                "nothing is authenticated"
            )
        print(f"model  {config.model.path}")
        print(f"serving {options.name} at http://{host}:{port}/v1", flush=True)
        run(build_app(server, on_end=engine.aclose), listener)
    return 0
