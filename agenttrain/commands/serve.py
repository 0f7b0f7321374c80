"""`agenttrain serve`: an agent behind OpenAI's chat completions; its tools stay with the client."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from socket import gethostname, socket
from typing import TYPE_CHECKING

from agenttrain.commands.verb import as_config_error
from agenttrain.engines.config import DEFAULT_ENGINE
from agenttrain.engines.registry import names_with, spec_of
from agenttrain.engines.spec import ServedModel
from agenttrain.launch.processes import count_gpus
from agenttrain.settings.checks import base_problems
from agenttrain.settings.mixture import source_views
from agenttrain.settings.run_config import RunConfig
from agenttrain.types import ConfigError
from agenttrain.utils.child_process import ChildGone
from agenttrain.utils.garbage import no_garbage_collection
from agenttrain.utils.model_path import base_folder, model_folder, packed_experts, weights_folder
from agenttrain.utils.sections import raise_config_error
from agenttrain.utils.temporary import TemporaryFolder

if TYPE_CHECKING:
    from agenttrain.chat.chat import Chat

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""Keys of `eval` for requests that name none."""


def serve(config: RunConfig, args: Namespace, *, engine_named: bool = False) -> int:
    """Answer requests until SIGTERM or Ctrl-C; return the exit code. Raises ConfigError.

    An engine that has a server of its own, as vLLM has, serves by it. If this machine cannot run
    that server, ours answers with the default engine, unless the user named the engine
    (`engine_named`): then ConfigError says why.
    """
    from agenttrain.serving.app import listen

    spec = spec_of(config.engine)
    has_server = spec.server is not None
    # Two kinds of engines can serve: those with a server of their own, and those that sample from
    # the model in our process (`own_weights` is False). One that is neither is refused if the user
    # named it; if a run's settings did, `_serve_here` samples with the default engine.
    is_unusable = spec.own_weights and not has_server
    if engine_named and is_unusable:
        raise ConfigError(
            f"engine={config.engine.name}: has no server of its own, and agenttrain serve samples "
            "from the model in its own process; leave it out"
        )
    uses_its_server = has_server
    if has_server:
        problems = list(spec.check_machine(config.engine, count_gpus))
        if problems and engine_named:
            raise ConfigError("\n".join(problems))
        for problem in problems:  # "until then": until the user has mended the problem
            print(f"note: {problem}; until then engine={DEFAULT_ENGINE} answers")
        uses_its_server = not problems
    if uses_its_server and args.hosts:
        raise ConfigError(
            f"--hosts {','.join(args.hosts)}: the own server of engine={config.engine.name} "
            "answers to every name; leave it out"
        )
    try:
        listener = listen(args.host, args.port)  # before the model is loaded
    except OSError as error:
        reason = str(error.strerror or error).partition(" (")[0]
        raise ConfigError(
            f"--host {args.host} --port {args.port}: cannot be bound: {reason}; name another "
            "port, or --port 0 for a free one"
        ) from error
    with listener:
        if args.host not in LOOPBACK:
            print(
                f"note: --host {args.host}: everybody who reaches this address can use the "
                "model; nothing is authenticated"
            )
        with as_config_error():
            if uses_its_server:
                _serve_by_engine(config, args, listener)
            else:
                _serve_here(config, args, listener)
    return 0


def _load_chat(config: RunConfig) -> Chat:
    """Return the chat of the model's tokenizer, once the model's folder is verified."""
    from transformers import AutoTokenizer

    from agenttrain.runs.sampling import verify_model
    from agenttrain.runs.setup import chat_of

    verify_model(config)
    folder = model_folder(config.model.path, revision=config.model.revision)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return chat_of(config, tokenizer, tools=_has_tools(config))


def _has_tools(config: RunConfig) -> bool:
    """Return True if the run has tools, or one of its sources."""
    views = source_views(config).values() or [config]
    return any(view.tools or view.environment for view in views)


def _serve_here(config: RunConfig, args: Namespace, listener: socket) -> None:
    """Serve by our own server, whose engine samples in this process."""
    from agenttrain.runs.sampling import sampling_engine
    from agenttrain.serving.answers import ChatServer
    from agenttrain.serving.app import build_app, run

    with no_garbage_collection():  # collections while a model loads would only cost time
        chat, engine = _load_chat(config), sampling_engine(config)
    server = ChatServer(engine=engine, chat=chat, model=args.name, defaults=config.eval.sampling())
    _announce(config, args, listener.getsockname()[1])
    # Names in the header Host that the app answers to: another name may be a web page's that leads
    # here (DNS rebinding). A server for other machines is reached by its IP address too.
    is_local = args.host in LOOPBACK
    names = {*LOOPBACK, *args.hosts}
    if not is_local:
        names |= {args.host, gethostname()}
    app = build_app(server, hosts=names, any_address=not is_local, on_end=engine.aclose)
    run(app, listener)


def _check_adapters(config: RunConfig, model: Path) -> None:
    """Raise ConfigError for adapters in the folder `model` that an engine's server cannot apply.

    Called only if `model` holds adapters. The errors name the engines that sample from the weights
    in our own process, which apply such adapters (`names_with(own_weights=False)`).
    """
    if reason := packed_experts(model):
        raise ConfigError(
            f"model.path={config.model.path}: holds adapters of packed experts ({reason}), which "
            "vLLM reads wrongly or not at all; merge them first (agenttrain export), or set "
            f"{names_with(own_weights=False)}"
        )
    # Adapters that were trained on a base in 4 bits fit these weights only. The server has the
    # base's files, in more bits.
    if config.model.quantization is not None:
        raise ConfigError(
            f"model.quantization={config.model.quantization}: the server of "
            f"engine={config.engine.name} would add the adapters to the weights of the base's "
            "files, which are others than those in 4 bits; merge them first (agenttrain export), "
            f"or set {names_with(own_weights=False)}"
        )


def _serve_by_engine(config: RunConfig, args: Namespace, listener: socket) -> None:
    """Serve by the engine's own server, with the template and the ends of turn of the training."""
    from agenttrain.chat.encoding import ChatError
    from agenttrain.chat.loading import server_parser
    from agenttrain.serving.server_command import run_command

    chat, parser = _load_chat(config), None
    try:
        parser = server_parser(chat, config.response_schema)
    except ChatError:  # without tools no parser of calls is needed
        if _has_tools(config):
            raise
    server = spec_of(config.engine).server
    assert server is not None
    path, revision = config.model.path, config.model.revision
    model = model_folder(path, revision=revision)
    raise_config_error(base_problems(config.model, model))
    # The folder of the base model, if `model` holds adapters; else None.
    base = base_folder(path, revision, config.model.base_revision)
    if base:
        _check_adapters(config, model)
    port = listener.getsockname()[1]
    weights = str(base or weights_folder(path, revision=revision))
    with TemporaryFolder() as temporary:
        template = temporary / "chat_template.jinja"
        template.write_text(chat.saved_template, encoding="utf-8")
        # The server ends a turn at the tokens that ended turns in training.
        text = json.dumps({"eos_token_id": list(chat.stop_token_ids)})
        (temporary / "generation_config.json").write_text(text, encoding="utf-8")
        served = ServedModel(
            folder=weights,
            tokenizer=str(model),
            adapters=str(model) if base else None,
            dtype=config.model.dtype,
            name=args.name,
            host=args.host,
            port=port,
            template=str(template),
            generation=str(temporary),
            call_parser=parser,
            sampling={name: getattr(config.eval, name) for name in SAMPLING},
            seed=config.seed,
        )
        print(f"engine={config.engine.name}: its server starts", flush=True)
        listener.close()  # for the server to bind it
        try:
            run_command(
                server(config.engine, served),
                args.host,
                port,
                on_ready=lambda: _announce(config, args, port),
            )
        except ChildGone as error:
            raise ConfigError(f"engine={config.engine.name}: its server {error}") from error


def _announce(config: RunConfig, args: Namespace, port: int) -> None:
    host = f"[{args.host}]" if ":" in args.host else args.host
    print(f"model  {config.model.path}")
    print(f"serving {args.name} at http://{host}:{port}/v1", flush=True)
