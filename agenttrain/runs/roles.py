"""Servers of a run's roles (judge, user, teacher): its first process starts them, all use them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import fields
from pathlib import Path

from agenttrain.engines.base import EngineError
from agenttrain.engines.config import EngineDtype, StartedServers
from agenttrain.engines.placement import gpu_numbers, place
from agenttrain.engines.vllm_server.config import RoleConfig, VllmServerSettings
from agenttrain.engines.vllm_server.roles import await_start, role_folder, start_role
from agenttrain.engines.vllm_server.server_records import ServerPlan
from agenttrain.engines.vllm_server.starting import SERVER
from agenttrain.settings.engine_checks import policy_gpus
from agenttrain.settings.role_checks import fleets, used_roles
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.world import World
from agenttrain.utils.model_path import weights_folder
from agenttrain.utils.sections import plain


class StartedRoles:
    """The servers of a run's roles, which `start_roles` has started; training waits for them.

    All training processes have one, and call its methods together.
    """

    def __init__(self, run: Path, world: World, roles: Mapping[str, RoleConfig]) -> None:
        self._run, self._world, self._roles = run, world, roles

    async def ready(self) -> None:
        """Wait until all servers have answered.

        If one does not start, the first process raises EngineError, and the others PeerFailed.
        """
        if not self._roles:
            return
        failure: Exception | None = None
        if self._world.is_main:
            try:
                for name, role in self._roles.items():
                    await await_start(role_folder(self._run, name), name, role.count)
            except EngineError as error:
                failure = error
        # With a failure this raises in all processes. Patient: servers may take minutes to start.
        self._world.exchange((), "the servers of roles", failure, patient=True)


def start_roles(
    config: RunConfig,
    verb: str,
    run: Path,
    stack: AsyncExitStack,
    *,
    world: World | None = None,
    module: str = SERVER,
) -> StartedRoles:
    """Start the servers that a run's roles need, in its first process; the stack ends them.

    All training processes call this, and get the object by which they wait together until the
    servers answer. It finds them by the records that they write to the folder `run`. `module` is
    the Python module that a server runs.
    """
    import torch

    world, roles = world or World(), used_roles(config, verb)
    started = StartedRoles(run, world, roles)
    if not roles:  # there may be no GPU beside the trainer's to be found
        return started
    # Training processes of this machine: torchrun or a scheduler sets it where there are several
    # machines.
    trainers = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    # The GPUs of the trainers and of the policy's copy are not free.
    on_gpu = torch.cuda.is_available()
    # In every process, so that all raise the same error.
    gpus = _gpus(fleets(config, verb), policy_gpus(config, trainers)) if on_gpu else {}
    if not world.is_main:
        return started
    for name, role in roles.items():
        print(f"roles.{name}: servers start (logs: {role_folder(run, name)}/servers)", flush=True)
        plan = _plan(config, name, role, gpus.get(f"roles.{name}"), module)
        stack.callback(start_role(run, plan).end)
    return started


def _gpus(
    fleets_by_key: Mapping[str, StartedServers], trainers: int
) -> dict[str, tuple[tuple[int | str, ...], ...]]:
    """Return the GPUs of each server, by the key of its fleet, e.g. `roles.judge`.

    Fleets whose settings name no GPUs take free ones, in turn. The first `trainers` GPUs are the
    trainer's. The GPUs are named as for CUDA_VISIBLE_DEVICES: where this process sees only GPUs 4
    to 7 of the machine, its GPU number 0 has the name 4.
    """
    # Numbers of GPUs, first those that some fleet's settings name: no other fleet may take them.
    taken = {gpu for servers in fleets_by_key.values() for gpu in servers.gpus or ()}
    gpus_by_fleet = {}
    for key, servers in fleets_by_key.items():
        gpus_by_fleet[key] = place(servers, trainers, taken)  # named GPUs stay, although taken
        taken |= {*gpu_numbers(servers, trainers, taken)}
    return gpus_by_fleet


def _plan(
    config: RunConfig,
    name: str,
    role: RoleConfig,
    gpus: tuple[tuple[int | str, ...], ...] | None,
    module: str,
) -> ServerPlan:
    """Return the plan of a role's servers.

    `gpus` are those of each server, None on the CPU. `module` is the Python module that a server
    runs.
    """
    import torch
    from transformers import AutoConfig

    assert role.model is not None
    folder = weights_folder(role.model, revision=role.revision, key=f"roles.{name}.model")
    dtype = str(role.dtype)
    if role.dtype is EngineDtype.auto:
        has_bfloat16 = gpus is not None and torch.cuda.is_bf16_supported()
        dtype = "bfloat16" if has_bfloat16 else "float32"
    model_context = AutoConfig.from_pretrained(folder).get_text_config().max_position_embeddings
    max_context = role.max_context or model_context
    # A RoleConfig has two sets of settings: of each server, and of how many are started and where.
    engine = VllmServerSettings(max_context=max_context, **role.server_keys())
    fleet_keys = [field.name for field in fields(StartedServers)]
    servers = StartedServers(**{key: getattr(role, key) for key in fleet_keys})
    return ServerPlan(
        module=module,
        model=str(folder),
        tokenizer=str(folder),
        dtype=dtype,
        max_context=max_context,
        seed=config.seed,
        engine=plain(engine),
        servers=plain(servers),
        # The model is frozen: neither LoRA adapters (of this rank and number) nor weights are sent.
        rank=0,
        adapters=0,
        weights=None,
        gpus=gpus,
        role=name,
    )
