"""One vLLM server, as its wrapper starts it: in a process group that ends as a whole.

python -m agenttrain.engines.vllm_server.server_process <run folder> <number> <port>
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from agenttrain.engines.vllm.config import VllmSettings
from agenttrain.engines.vllm.server import as_flags, serve, server_arguments
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
        # This server gets an equal share: a machine has count / nodes servers.
        nodes = max(plan.nodes, 1)
        cores = len(os.sched_getaffinity(0)) * nodes // plan.servers["count"]
        os.environ.setdefault("OMP_NUM_THREADS", str(max(cores, 1)))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    flags = server_flags(plan, int(port))
    print(f"server {number}: vllm serve {' '.join(flags)}", flush=True)
    serve(flags)


def server_flags(plan: ServerPlan, port: int) -> list[str]:
    """Set vLLM's environment variables, and return the flags of its server."""
    settings = VllmSettings(
        max_context=plan.max_context,
        tensor_parallel_size=plan.servers["tensor_parallel_size"],
        **VllmServerSettings(**plan.engine).server_keys(),
    )
    os.environ |= {
        "VLLM_SERVER_DEV_MODE": "1",  # routes that pause a server and replace its weights
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
        "VLLM_HOST_IP": "127.0.0.1",  # for the sockets of its workers
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    if plugins := os.environ.get("VLLM_PLUGINS"):  # vLLM loads only those that are listed there
        os.environ["VLLM_PLUGINS"] = f"{plugins},{PLUGIN}"
    model = Path(plan.model)
    tokenizer = None if plan.tokenizer is None else Path(plan.tokenizer)
    arguments = server_arguments(
        model,
        settings,
        plan.dtype,
        plan.rank,
        tokenizer,
        plan.seed,
        record_routes=plan.record_routes,
    )
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
        "shutdown_timeout": GRACE_S,
    }
    if plan.role is None:
        arguments["weight_transfer_config"] = {"backend": plan.backend}
        if plan.backend == BACKEND:
            arguments["worker_extension_cls"] = METHODS
    else:
        # The model's own end-of-turn tokens and sampling defaults, as its callers expect.
        arguments["generation_config"] = "auto"
    # The user's own flags, of which none is among those above: the settings were checked.
    arguments |= {name.replace("-", "_"): value for name, value in plan.servers["args"].items()}
    return as_flags(arguments)


if __name__ == "__main__":
    main()
