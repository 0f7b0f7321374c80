"""Checks of settings against the machine that the command runs on.

`agenttrain check` and the verbs that run something share `machine_problems`. `agenttrain submit`
does not use it: the job's machine is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

from agenttrain.engines.placement import placement_problems
from agenttrain.engines.registry import OutsideEngine, names_with, spec_of
from agenttrain.engines.vllm_server.spec import installed_problems
from agenttrain.launch.config import DistributedConfig, DistributedName, uneven_groups
from agenttrain.settings.command_line import CHECK
from agenttrain.settings.engine_checks import policy_gpus, replays_routes
from agenttrain.settings.role_checks import (
    VERBS_WITH_SERVERS,
    fleets,
    server_shares_gpu,
    used_roles,
)
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.config import Dtype, MixedPrecision, Transport

SAMPLING_VERBS = ("train", "eval", CHECK)
"""Verbs of runs that start an engine."""
CHECKED_VERBS = (*SAMPLING_VERBS, "sft")
"""Verbs of runs that have a policy, in one process or several."""


def run_gpus(config: RunConfig, verb: str, trainers: int) -> int:
    """Return the number of GPUs that a run asks for.

    These are one for each of its `trainers` (training processes), one for the copy of the policy in
    the rollout process, if there is one, and those of the servers that the run or its job starts.
    Servers that somebody else starts are not counted.
    """
    if verb not in VERBS_WITH_SERVERS:
        return trainers
    server_gpus = sum(fleet.gpu_count for fleet in fleets(config, verb).values())
    if config.servers.nodes:  # started by the job on nodes of their own, so not among `fleets`
        server_gpus += config.servers.gpu_count
    # vLLM in the trainers' processes runs on their GPUs. It may be spread over more of them.
    engine_gpus: int = getattr(config.engine, "tensor_parallel_size", 1)
    return max(policy_gpus(config, trainers), engine_gpus) + server_gpus


def machine_problems(
    verb: str, configs: Sequence[RunConfig], count_gpus: Callable[[], int]
) -> list[str]:
    """Return lines ``key=value: problem; remedy`` about this machine, each problem once.

    `count_gpus` may import torch, which takes seconds: it is called if a check needs the number.
    """
    if verb not in CHECKED_VERBS:
        return []
    problems: list[str] = []
    for config in configs:
        problems += _policy_problems(config, count_gpus)
        if verb in SAMPLING_VERBS:
            problems += broadcast_problems(config, count_gpus)
            problems += _engine_problems(config, verb, count_gpus)
            problems += _server_problems(config, verb, count_gpus)
    return list(dict.fromkeys(problems))


def _policy_problems(config: RunConfig, count_gpus: Callable[[], int]) -> Iterator[str]:
    """Yield problems of the policy and the processes that train it."""
    if config.distributed.name is not DistributedName.single:
        problem = process_count_problem(config.distributed, count_gpus())
        if problem is not None:
            yield problem
    if config.training.mixed_precision == "fp16" and not count_gpus():
        yield (
            "training.mixed_precision=fp16: needs a GPU, and there is none here; set "
            "training.mixed_precision=bf16 or no"
        )
    if config.model.quantization is not None and find_spec("bitsandbytes") is None:
        yield (
            f"model.quantization={config.model.quantization}: bitsandbytes is not installed "
            "here: pip install 'agenttrain[4bit]'"
        )


def _engine_problems(config: RunConfig, verb: str, count_gpus: Callable[[], int]) -> Iterator[str]:
    """Yield problems of the engine, unless somebody else starts its servers."""
    if config.servers.outside:
        return
    spec = spec_of(config.engine)
    yield from spec.check_machine(config.engine, count_gpus)
    needs_gpu = replays_routes(config, verb) and spec.routes_need_gpu
    if needs_gpu and not config.servers.nodes and not count_gpus():
        remedy = names_with(records_routes=True, routes_need_gpu=False)
        yield (
            f"algorithm.router_replay=rollout: engine={config.engine.name} returns the "
            "experts by which it samples on a GPU only, and there is none here; set "
            f"{remedy}, or leave it out"
        )


def _server_problems(config: RunConfig, verb: str, count_gpus: Callable[[], int]) -> Iterator[str]:
    """Yield problems of the servers that the run starts on this machine."""
    # `fleets` and `used_roles` know no CHECK, which is for a run that trains.
    run_verb = "train" if verb == CHECK else verb
    for name, role in used_roles(config, run_verb).items():
        yield from installed_problems(f"roles.{name}.model={role.model}")
    fleets_here = fleets(config, run_verb)
    if not fleets_here:
        return
    trainers = 1
    if config.distributed.name is not DistributedName.single:
        trainers = config.distributed.processes or count_gpus()
    taken_gpus = policy_gpus(config, trainers)  # which servers cannot have
    if server_shares_gpu(config, count_gpus()):
        taken_gpus = 0  # the only GPU, which a server shares with the trainer
        yield from _shared_gpu_problems(config)
    yield from placement_problems(fleets_here, count_gpus(), taken_gpus)


def broadcast_problems(config: RunConfig, count_gpus: Callable[[], int]) -> list[str]:
    """Return the problems of weight_sync.transport=nccl on this machine."""
    key = "weight_sync.transport=nccl"
    if config.weight_sync.transport is not Transport.nccl:
        return []
    if not count_gpus():
        return [
            f"{key}: goes from the trainer's GPU to those of the servers, and there is no GPU "
            "here; set weight_sync.transport=files, or leave it out"
        ]
    return list(installed_problems(key))  # only vLLM's servers receive weights by nccl


def _shared_gpu_problems(config: RunConfig) -> Iterator[str]:
    """Yield settings that do not go with a server on the trainer's GPU."""
    if config.weight_sync.transport is Transport.nccl:
        yield (
            "weight_sync.transport=nccl: NCCL connects no two processes on one GPU, and the server "
            "has the trainer's, the only one here; set weight_sync.transport=files, or leave it out"
        )


def process_count_problem(section: DistributedConfig, gpus: int) -> str | None:
    """Return the problem of the number of processes on a machine with `gpus` GPUs, or None."""
    if section.processes is None:
        if not gpus:
            return (
                f"distributed={section.name}: there is no GPU here to run a process on each; say "
                "how many there are to be on the CPU, e.g. distributed.processes=2"
            )
        # There will be a process for each GPU. A number in the settings was checked with them.
        return next(uneven_groups(section, gpus), None)
    if gpus and section.processes > gpus:
        return f"distributed.processes={section.processes}: this machine has {gpus} GPUs; lower it"
    return None


def float32_on_gpu(config: RunConfig) -> str | None:
    """Return a note about parts of a run that a GPU would compute in float32, or None."""
    notes = []
    if config.model.dtype is Dtype.float32 and config.training.mixed_precision is MixedPrecision.no:
        notes.append(
            "model.dtype=float32 with training.mixed_precision=no trains without fused attention "
            "and the fast units of 16 bits; set model.dtype=bfloat16 (the optimizer keeps float32 "
            "copies), or training.mixed_precision=bf16"
        )
    if not isinstance(config.engine, OutsideEngine):
        notes += spec_of(config.engine).gpu_notes(config.engine)
    return f"note: on a GPU {'; '.join(notes)}" if notes else None
