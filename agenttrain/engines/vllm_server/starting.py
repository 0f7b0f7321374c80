"""Building the engine of a run's servers, and running one server alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agenttrain.engines.base import Engine
from agenttrain.engines.config import EngineDtype
from agenttrain.engines.language_model import has_states
from agenttrain.engines.placement import place
from agenttrain.engines.spec import EngineInputs
from agenttrain.engines.vllm_server.config import VllmServerSettings
from agenttrain.engines.vllm_server.files_transport import BACKEND as FILES
from agenttrain.engines.vllm_server.guard import TOKEN
from agenttrain.engines.vllm_server.local import (
    LocalServers,
    end_node_servers,
    plan_node_servers,
    reusable_servers,
    weights_folder,
)
from agenttrain.engines.vllm_server.nccl_transport import BACKEND as NCCL
from agenttrain.engines.vllm_server.nccl_transport import NcclSender
from agenttrain.engines.vllm_server.outside import Outside
from agenttrain.engines.vllm_server.server_records import (
    FOLDER,
    ServerPlan,
    is_running,
    last_lines,
    log_path,
    read_record,
)
from agenttrain.engines.vllm_server.versions import ADAPTERS
from agenttrain.engines.weights_place import remove_weights_folder
from agenttrain.training.config import Transport
from agenttrain.types import ConfigError
from agenttrain.utils.exit_codes import DONE
from agenttrain.utils.sections import plain, shown

if TYPE_CHECKING:
    from agenttrain.engines.vllm_server.wrapper import Wrapper

SERVER = "agenttrain.engines.vllm_server.server_process"
"""Module that is run as a server."""


def build(settings: VllmServerSettings, inputs: EngineInputs, *, module: str = SERVER) -> Engine:
    """Return the engine over servers that are started here, or by others.

    The first update waits for them; on the trainer's GPU it starts them. `module` is run as a
    server.
    """
    import torch

    from agenttrain.engines.vllm_server.broadcast_fleet import BroadcastFleet
    from agenttrain.engines.vllm_server.fleet import Fleet
    from agenttrain.engines.vllm_server.server_engine import (
        BroadcastEngine,
        ServedForm,
        VllmServerEngine,
    )
    from agenttrain.engines.weight_files import WeightWriter

    folder, servers = inputs.run_folder, inputs.servers
    assert folder is not None, "servers and run find each other in the run's folder"
    plan = server_plan(settings, inputs, module)
    weights: Path | None = None
    if plan.backend == FILES:
        size = sum(file.stat().st_size for file in inputs.model.glob("*.safetensors"))
        weights = weights_folder(folder, inputs.sync_folder, size, servers)
        plan = replace(plan, weights=str(weights))
    alpha = None if inputs.adapters is None else inputs.adapters.alpha  # None: all weights
    end_servers: Callable[[], None]
    start_servers: Callable[[], None] | None = None
    outside: Outside | None = None
    if servers.outside:
        outside = outside_servers(plan, inputs)
        print(f"engine: {len(outside.urls)} servers of servers.admin_urls", flush=True)
        end_servers = partial(remove_weights_folder, folder)  # the servers go on after the run
    elif servers.nodes:
        where = f"servers.nodes={servers.nodes} other machines (logs: {folder / FOLDER})"
        print(
            f"engine: waits for servers.count={servers.count} servers of {where}; outside a job "
            f"of submit, start each: agenttrain engine-server {folder} number=N host=ADDRESS",
            flush=True,
        )
        plan_node_servers(folder.resolve(), plan)
        end_servers = partial(end_node_servers, folder.resolve())
    else:
        local_servers = LocalServers(folder.resolve(), plan, servers.count)
        end_servers = local_servers.end
        # vLLM takes the memory that a GPU loses during its start for its own, and the start fails
        # if a GPU gains any (`memory_profiling` and `determine_available_memory` of vLLM 0.32).
        # On a shared GPU the server therefore starts once the trainer has its weights there and
        # has written them, and the trainer does nothing until it answers.
        if inputs.shares_gpu:
            start_servers = partial(_start_local, local_servers, folder, plan)
        else:
            _start_local(local_servers, folder, plan)
    form = ServedForm(
        max_context=plan.max_context,
        dtype=getattr(torch, plan.dtype),
        quantized=settings.quantization is not None,
        grammars=inputs.tokenizer is not None,
    )
    mode = inputs.sync_mode
    if weights is None:  # there are no weight files: the trainer broadcasts the weights
        ahead = inputs.max_staleness > 0
        broadcast_fleet = BroadcastFleet(
            folder.resolve(),
            servers,
            mode,
            outside,
            ahead=ahead,
            record_routes=plan.record_routes,
        )
        return BroadcastEngine(broadcast_fleet, end_servers, form, NcclSender())
    fleet = Fleet(
        folder.resolve(),
        servers,
        mode,
        outside,
        plan.adapters,
        record_routes=plan.record_routes,
    )
    writer = WeightWriter(weights, alpha=alpha)
    return VllmServerEngine(fleet, end_servers, form, writer, start_servers)


def _start_local(servers: LocalServers, folder: Path, plan: ServerPlan) -> None:
    """Start the servers of the run in `folder`, and print so."""
    count = plan.servers["count"]
    progress = f"{count} servers start" if count > 1 else "a server starts"
    if running := reusable_servers(folder, plan):
        progress = f"{len(running)} of {count} servers are running, and are reused"
    print(f"engine: {progress} (logs: {folder / FOLDER})", flush=True)
    servers.start()


def server_plan(settings: VllmServerSettings, inputs: EngineInputs, module: str) -> ServerPlan:
    """Return the plan by which servers are started, without the folder of the weight files."""
    import torch
    from transformers import AutoConfig

    dtype = inputs.dtype if settings.dtype is EngineDtype.auto else str(settings.dtype)
    if settings.dtype is EngineDtype.auto and inputs.on_gpu and torch.cuda.is_bf16_supported():
        dtype = "bfloat16"
    limit = AutoConfig.from_pretrained(inputs.model).get_text_config().max_position_embeddings
    gpus = None
    if inputs.on_gpu and not inputs.servers.outside:
        # The trainer's GPU, if they share it, is the first one.
        gpus = place(inputs.servers, 0 if inputs.shares_gpu else inputs.trainers, inputs.taken)
    return ServerPlan(
        module=module,
        model=str(inputs.model),
        tokenizer=None if inputs.tokenizer is None else str(inputs.tokenizer),
        dtype=dtype,
        max_context=settings.max_context or limit,
        seed=inputs.seed,
        engine=plain(replace(settings, memory_share=settings.share(shares_gpu=inputs.shares_gpu))),
        servers=plain(inputs.servers),
        rank=0 if inputs.adapters is None else inputs.adapters.rank,
        # Rollouts go on with the adapters that they began with, for up to `max_staleness` updates.
        adapters=ADAPTERS + inputs.max_staleness,
        weights=None,
        backend=NCCL if inputs.transport is Transport.nccl else FILES,
        gpus=gpus,
        record_routes=inputs.record_routes,
    )


def outside_servers(plan: ServerPlan, inputs: EngineInputs) -> Outside:
    """Return the servers that somebody else started. Raises ConfigError without a token."""
    servers, token = inputs.servers, os.environ.get(TOKEN)
    if not token:
        raise ConfigError(
            f"servers.admin_urls={shown(servers.admin_urls)}: {TOKEN} is not set; export the token "
            "that the servers were started with"
        )
    from transformers import AutoConfig

    text = ""
    ids: tuple[int, ...] = ()
    with suppress(OSError, ValueError):  # a folder without a tokenizer
        text, ids = _sample_text(inputs.tokenizer or inputs.model)
    return Outside(
        urls=tuple(url.rstrip("/") for url in servers.admin_urls),
        router=None if servers.url is None else servers.url.rstrip("/"),
        token=token,
        plan=plan,
        text=text,
        token_ids=ids,
        has_states=has_states(AutoConfig.from_pretrained(inputs.model).get_text_config()),
    )


def _sample_text(folder: Path) -> tuple[str, tuple[int, ...]]:
    """Return a text with the tokenizer's special tokens, and its ids, to compare tokenizers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = f"{''.join(tokenizer.all_special_tokens)}The 2nd of 31 naïve cats: [x, y]\n"
    return text, tuple(tokenizer.encode(text, add_special_tokens=False))


def run_server(folder: Path, number: int, owner: int | None, host: str) -> int:
    """Implement `EngineSpec.run_server`, for `agenttrain engine-server`."""
    from agenttrain.engines.vllm_server.wrapper import Wrapper

    if is_running(folder, number):
        raise ConfigError(
            f"number={number}: server {number} of {folder} runs already, or is started again by "
            "its wrapper; leave it alone"
        )
    return _run_wrapper(Wrapper(folder, number, owner, host))


def serve_alone(
    settings: VllmServerSettings,
    inputs: EngineInputs,
    host: str,
    port: int,
    *,
    module: str = SERVER,
) -> int:
    """Run a server for runs that name its address in servers.admin_urls, until it is stopped.

    Implements `EngineSpec.serve_alone`. The folder is the server's own, as one of a run: it gets
    the plan that the server's process reads, and the server has number 0. The environment has the
    token. Return the exit code.
    """
    from agenttrain.engines.vllm_server.wrapper import Wrapper

    token, folder = os.environ.get(TOKEN), inputs.run_folder
    assert folder is not None
    if not token:
        raise ConfigError(
            f"port={port}: {TOKEN} is not set; export a secret of your own, the same for the "
            "servers and for the run"
        )
    if is_running(folder, 0):
        raise ConfigError(f"{folder}: has a server that runs; name another folder")
    server_plan(settings, inputs, module).write(folder)
    print(f"server: http://{host}:{port} (log: {log_path(folder, 0)})", flush=True)
    return _run_wrapper(Wrapper(folder, 0, host=host, port=port, token=token))


def _run_wrapper(wrapper: Wrapper) -> int:
    """Run a wrapper and return its exit code. Print how its server ended, unless it was stopped."""
    code = wrapper.run()
    if code != DONE and (record := read_record(wrapper.folder, wrapper.number)) is not None:
        log = log_path(wrapper.folder, wrapper.number)
        lines = last_lines(wrapper.folder, wrapper.number)
        print(f"server {wrapper.number} {record.end}; the end of {log}:\n{lines}", file=sys.stderr)
    return code
