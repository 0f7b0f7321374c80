"""vLLM's own OpenAI server, in a process of its own: `python -m agenttrain.engines.vllm.server`.

Its argument is JSON: the keys of `engine`, and those of a `ServedModel`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agenttrain.engines.spec import ServedModel
from agenttrain.engines.vllm.config import VllmSettings

GRACE_S = 30
"""Seconds in which answers in flight have to end once the server gets SIGTERM."""
IN_PROCESS_ONLY = ("skip_tokenizer_init", "use_tqdm_on_load", "enable_sleep_mode")
"""Names of arguments that `engine_arguments` sets for an engine in the trainer's process, and that
vLLM's server does not get."""
OF_ALL_SERVERS = {
    "enable_prompt_tokens_details": True,
    "uvicorn_log_level": "warning",
    "disable_uvicorn_access_log": True,
}
"""Further arguments of every server that agenttrain starts, with their values."""


def main() -> None:
    settings, served = json.loads(sys.argv[1])
    serve(server_flags(VllmSettings(**settings), ServedModel(**served)))


def serve(flags: Sequence[str]) -> None:
    """Run vLLM's server in this process, until it ends."""
    # `vllm serve` asks for the metadata of a distribution that the build for CPUs does not have.
    from vllm.entrypoints.launchers.api_server.entry import main as vllm_main

    sys.argv = ["vllm serve", *flags]
    vllm_main()


def server_arguments(
    folder: Path,
    settings: VllmSettings,
    dtype: str,
    lora_rank: int,
    tokenizer: Path | None,
    seed: int,
    *,
    record_routes: bool = False,
) -> dict[str, Any]:
    """Set vLLM's environment variables, and return the arguments of its server, by name.

    `folder` has the model, and `tokenizer`, a folder too, is for requests with text or a grammar.
    `dtype` is the weights' number format. `lora_rank` is the rank of adapters, 0 without any. With
    `record_routes` outputs have the experts of their tokens.
    """
    import torch

    from agenttrain.engines.vllm.setup import engine_arguments, set_environment

    set_environment(settings)
    if not torch.cuda.is_available() and settings.tensor_parallel_size == 1:
        # Run the engine in the server's process. vLLM would start another one for it, which takes
        # seconds. With a GPU, where a start takes longer anyway, vLLM's default stays.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    arguments = engine_arguments(
        folder, settings, dtype, lora_rank, tokenizer, seed, record_routes=record_routes
    )
    for unused in IN_PROCESS_ONLY:
        arguments.pop(unused, None)
    return arguments | OF_ALL_SERVERS


def server_flags(settings: VllmSettings, served: ServedModel) -> list[str]:
    """Return the flags with which vLLM's own server serves a trained model to clients."""
    rank, name = 0, served.name
    if served.adapters is not None:
        # Clients ask for the adapters by `served.name`, so the base model needs another one.
        config = Path(served.adapters, "adapter_config.json").read_text(encoding="utf-8")
        rank, name = int(json.loads(config)["r"]), f"{served.name}-base"
    arguments = server_arguments(
        Path(served.folder), settings, served.dtype, rank, Path(served.tokenizer), served.seed
    )
    arguments |= {
        "host": served.host,
        "port": served.port,
        "served_model_name": name,
        "generation_config": served.generation,
        "override_generation_config": served.sampling,
        "chat_template": served.template,
        # Text, as in training: vLLM would pass lists of parts to a template that accepts both.
        "chat_template_content_format": "string",
        "shutdown_timeout": GRACE_S,
    }
    if served.call_parser is not None:
        arguments |= {"enable_auto_tool_choice": True, "tool_call_parser": served.call_parser}
    if served.adapters is not None:
        arguments["lora_modules"] = {"name": served.name, "path": served.adapters}
    return as_flags(arguments)


def as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments as words of a command line, without those that are None."""
    return [word for name, value in arguments.items() for word in _flag(name, value)]


def _flag(name: str, value: Any) -> list[str]:
    """Return an argument as words of a command line: ``["--max-num-seqs", "8"]``; [] for None."""
    words = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{'' if value else 'no-'}{words}"]
    return [f"--{words}", json.dumps(value) if isinstance(value, dict) else str(value)]


if __name__ == "__main__":
    main()
