"""One vLLM server, as its wrapper starts it: in a process group that ends as a whole.

python -m agenttrain.engines.vllm_server.server_process <run folder> <number> <port>
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from agenttrain.engines.vllm_server.config import VllmServerSettings
from agenttrain.engines.vllm_server.files_transport import BACKEND, METHODS, OWN_GROUP, PLUGIN
from agenttrain.engines.vllm_server.guard import HOST
from agenttrain.engines.vllm_server.server_records import ServerPlan
from agenttrain.utils.child_process import end_with_parent

GRACE_S = 5
"""Seconds in which answers in flight have to end once the server gets SIGTERM."""
KEEP_ALIVE_S = 3600
"""Seconds for which an idle connection stays open: longer than an update of the policy."""
NAME = "policy"
"""Name of the model for clients."""


def main() -> None:
    """Serve until SIGTERM, or until the wrapper has ended."""
    end_with_parent()
    os.environ[OWN_GROUP] = "1"
    folder, number, port = sys.argv[1:]
    plan = ServerPlan.read(Path(folder))
    if plan.gpus is None:
        # By default each server would use all cores, and bind its threads to the same first ones.
        nodes = max(plan.nodes, 1)
        share = len(os.sched_getaffinity(0)) * nodes // plan.servers["count"]
        os.environ.setdefault("OMP_NUM_THREADS", str(max(share, 1)))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    flags = server_flags(plan, int(port))
    # `vllm serve` asks for the metadata of a distribution that the build for CPUs does not have.
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    print(f"server {number}: vllm serve {' '.join(flags)}", flush=True)
    sys.argv = ["vllm serve", *flags]
    serve()


def server_flags(plan: ServerPlan, port: int) -> list[str]:
    """Set vLLM's environment variables, and return the flags of its server."""
    import torch

    from agenttrain.engines.vllm.config import VllmSettings
    from agenttrain.engines.vllm.server import IN_PROCESS_ONLY, flag
    from agenttrain.engines.vllm.setup import engine_arguments, set_environment

    engine = VllmServerSettings(**plan.engine)
    settings = VllmSettings(
        max_context=plan.max_context,
        max_rows=engine.max_rows,
        memory_share=engine.memory_share,
        kv_cache_mb=engine.kv_cache_mb,
        tensor_parallel_size=plan.servers["tensor_parallel_size"],
        quantization=engine.quantization,
        enforce_eager=engine.enforce_eager,
    )
    os.environ |= {
        "VLLM_SERVER_DEV_MODE": "1",  # routes that pause a server and replace its weights
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
        "VLLM_HOST_IP": "127.0.0.1",  # for the sockets of its workers
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    if plugins := os.environ.get("VLLM_PLUGINS"):  # vLLM loads only those that are listed there
        os.environ["VLLM_PLUGINS"] = f"{plugins},{PLUGIN}"
    set_environment(settings)
    if not torch.cuda.is_available() and settings.tensor_parallel_size == 1:
        # The engine runs in the server's process, which saves seconds at the start.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = Path(plan.model)
    tokenizer = None if plan.tokenizer is None else Path(plan.tokenizer)
    arguments: dict[str, Any] = engine_arguments(
        model, settings, plan.dtype, plan.rank, tokenizer, plan.seed
    )
    for unused in IN_PROCESS_ONLY:
        arguments.pop(unused, None)
    if plan.rank:
        os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        arguments["max_loras"] = plan.adapters
    arguments |= {
        "dtype": plan.dtype,
        "host": os.environ.get(HOST, "127.0.0.1"),
        "port": port,
        "served_model_name": plan.role or NAME,
        "middleware": "agenttrain.engines.vllm_server.guard.TokenGuard",
        "enable_scale_out": True,  # token ids in, token ids out
        "enable_prompt_tokens_details": True,
        "shutdown_timeout": GRACE_S,
        "uvicorn_log_level": "warning",
        "disable_uvicorn_access_log": True,
    }
    if plan.role is None:
        arguments["weight_transfer_config"] = {"backend": plan.backend}
        if plan.backend == BACKEND:
            arguments["worker_extension_cls"] = METHODS
    else:
        # The model's own end-of-turn tokens and sampling defaults, as its callers expect.
        arguments["generation_config"] = "auto"
    arguments |= {name.replace("-", "_"): value for name, value in plan.servers["args"].items()}
    return [word for name, value in arguments.items() for word in flag(name, value)]


if __name__ == "__main__":
    main()
