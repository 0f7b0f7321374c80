"""Servers of roles in a run: started by its first process, asked by each that judges or scores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from agenttrain.engines.base import EngineError
from agenttrain.engines.config import EngineDtype, StartedServers
from agenttrain.engines.placement import gpu_numbers, place
from agenttrain.engines.vllm_server.config import RoleConfig
from agenttrain.engines.vllm_server.roles import await_start, role_folder, role_plan, start_role
from agenttrain.engines.vllm_server.server_records import ServerPlan
from agenttrain.engines.vllm_server.starting import SERVER
from agenttrain.settings.engine_checks import policy_gpus
from agenttrain.settings.role_checks import fleets, used_roles
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.world import World
from agenttrain.utils.model_path import weights_folder


class StartedRoles:
    """The servers of a run's roles, for all training processes together."""

    def __init__(self, run: Path, world: World, roles: Mapping[str, RoleConfig]) -> None:
        self._run, self._world, self._roles = run, world, roles

    async def ready(self) -> None:
        """Wait until all servers have answered; raises EngineError, in all processes."""
        if not self._roles:
            return
        failure: Exception | None = None
        if self._world.is_main:
            try:
                for name, role in self._roles.items():
                    await await_start(role_folder(self._run, name), name, role.count)
            except EngineError as error:
                failure = error
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
    """Start the role servers of a run, in its first process. The stack ends them."""
    import torch

    world, roles = world or World(), used_roles(config, verb)
    trainers = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    on_gpu = torch.cuda.is_available()
    gpus = _gpus(fleets(config, verb), policy_gpus(config, trainers)) if on_gpu else {}
    for name, role in roles.items() if world.is_main else ():
        print(f"roles.{name}: servers start (logs: {role_folder(run, name)}/servers)", flush=True)
        plan = _plan(config, name, role, gpus.get(f"roles.{name}"), module)
        stack.callback(start_role(run, plan).end)
    return StartedRoles(run, world, roles)


def _gpus(
    started: Mapping[str, StartedServers], trainers: int
) -> dict[str, tuple[tuple[int | str, ...], ...]]:
    """Return the GPUs of each server of each fleet; those that name none take free ones in turn."""
    taken = {gpu for servers in started.values() for gpu in servers.gpus or ()}
    places = {}
    for key, servers in started.items():
        places[key] = place(servers, trainers, taken)
        taken |= {*gpu_numbers(servers, trainers, taken)}
    return places


def _plan(
    config: RunConfig,
    name: str,
    role: RoleConfig,
    gpus: tuple[tuple[int | str, ...], ...] | None,
    module: str,
) -> ServerPlan:
    import torch
    from transformers import AutoConfig

    assert role.model is not None
    folder = weights_folder(role.model, revision=role.revision, key=f"roles.{name}.model")
    dtype = str(role.dtype)
    if role.dtype is EngineDtype.auto:
        fast = gpus is not None and torch.cuda.is_bf16_supported()
        dtype = "bfloat16" if fast else "float32"
    limit = AutoConfig.from_pretrained(folder).get_text_config().max_position_embeddings
    return role_plan(
        name,
        role,
        folder,
        module=module,
        dtype=dtype,
        max_context=role.max_context or limit,
        seed=config.seed,
        gpus=gpus,
    )
