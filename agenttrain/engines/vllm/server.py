"""vLLM's own OpenAI server, in a process of its own: `python -m agenttrain.engines.vllm.server`.

Its argument is JSON: the keys of `engine`, and those of a `ServedModel`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from agenttrain.engines.spec import ServedModel
from agenttrain.engines.vllm.config import VllmSettings

GRACE_S = 30
"""Seconds that answers in flight have left once the server is asked to end."""
IN_PROCESS_ONLY = ("skip_tokenizer_init", "use_tqdm_on_load", "enable_sleep_mode")
"""Arguments of an engine in the trainer's process that a server does not take over."""


def main() -> None:
    """Serve until SIGTERM."""
    settings, served = json.loads(sys.argv[1])
    flags = server_flags(VllmSettings(**settings), ServedModel(**served))
    # `vllm serve` asks for the metadata of a distribution that the build for CPUs does not have.
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    sys.argv = ["vllm serve", *flags]
    serve()


def server_flags(settings: VllmSettings, served: ServedModel) -> list[str]:
    """Return the flags of vLLM's server, once vLLM's environment is set."""
    import torch

    from agenttrain.engines.vllm.setup import engine_arguments, set_environment

    set_environment(settings)
    if not torch.cuda.is_available() and settings.tensor_parallel_size == 1:
        # The engine's process works itself, and none is started below it: seconds less.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    rank, name = 0, served.name
    if served.adapters is not None:
        described = Path(served.adapters, "adapter_config.json").read_text(encoding="utf-8")
        rank, name = int(json.loads(described)["r"]), f"{served.name}-base"
    arguments = engine_arguments(
        Path(served.folder), settings, served.dtype, rank, Path(served.tokenizer), served.seed
    )
    for unused in IN_PROCESS_ONLY:
        arguments.pop(unused, None)
    arguments |= {
        "host": served.host,
        "port": served.port,
        "served_model_name": name,
        "generation_config": served.generation,
        "override_generation_config": served.sampling,
        "chat_template": served.template,
        # As in training: a template that takes parts as well would be given lists.
        "chat_template_content_format": "string",
        "enable_prompt_tokens_details": True,
        "shutdown_timeout": GRACE_S,
        "uvicorn_log_level": "warning",
        "disable_uvicorn_access_log": True,
    }
    if served.call_parser is not None:
        arguments |= {"enable_auto_tool_choice": True, "tool_call_parser": served.call_parser}
    if served.adapters is not None:
        arguments["lora_modules"] = {"name": served.name, "path": served.adapters}
    return [word for name, value in arguments.items() for word in flag(name, value)]


def flag(name: str, value: Any) -> list[str]:
    """Return an argument as words of a command line; none for None."""
    words = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{'' if value else 'no-'}{words}"]
    return [f"--{words}", json.dumps(value) if isinstance(value, dict) else str(value)]


if __name__ == "__main__":
    main()
