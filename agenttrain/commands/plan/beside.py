"""GPUs beside those of the trainer: of the rollout process's copy of the policy, and of roles.

Everything here is computed; none of it has been run on a GPU. The policy's servers are in
`servers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from agenttrain.commands.plan.estimate import GIB, MemoryEstimate, copied
from agenttrain.commands.plan.remedies import Planner
from agenttrain.commands.plan.servers import TENSOR_PARALLEL, fits, most
from agenttrain.engines.memory import EngineLoad
from agenttrain.engines.vllm_server.config import RoleConfig
from agenttrain.engines.vllm_server.memory import role_memory
from agenttrain.settings.engine_checks import run_spec
from agenttrain.settings.role_checks import used_roles
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.config import ModelConfig

COPY = "rollout process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A part of the run on GPUs that the trainer does not have."""

    key: str
    """``rollout process``, or the section of a role: ``roles.judge``."""
    what: str
    count: int
    """Processes, or servers."""
    gpus: int
    """GPUs of each."""
    bytes: int
    """Of each GPU."""
    fits: bool | None
    """None: the GPUs' memory is not known."""
    remedy: str | None
    """Setting with which it fits; None: it fits, or there is none."""


def plan_beside(config: RunConfig, planner: Planner, memory: MemoryEstimate) -> list[Beside]:
    """Return the parts that have GPUs beside the trainer's; with a CPU there are none."""
    machine = memory.machine
    if machine.kind == "cpu":
        return []
    parts = [] if machine.shared or not copied(config) else [_copy(config, planner, memory)]
    for name, role in used_roles(config, "train").items():
        parts.append(_role(f"roles.{name}", role, planner, memory))
    return parts


def _copy(config: RunConfig, planner: Planner, memory: MemoryEstimate) -> Beside:
    load, estimate = memory.load, run_spec(config).server_memory
    assert estimate is not None
    sizes = planner.sizes(config.model)
    engine_load = EngineLoad(
        rows=load.rows,
        prompt=load.prompt,
        sampled=load.sampled,
        limit=load.limit,
        on_gpu=True,
        memory=memory.machine.memory,
        taken=0,
        sharded=False,
        adapters=config.model.lora.rank > 0,
    )
    by_rows = {
        rows: estimate(config.engine, replace(engine_load, rows=rows), sizes, 1)
        for rows in (load.rows >> power for power in range(load.rows.bit_length()))
    }
    chosen, size = by_rows[load.rows], memory.machine.memory
    is_enough = fits(chosen, size)
    able = [rows for rows, one in by_rows.items() if is_enough is False and fits(one, size)]
    return Beside(
        key=COPY,
        what=f"a copy of the policy and keys and values of {load.rows:,} rollouts",
        count=1,
        gpus=1,
        bytes=most(chosen),
        fits=is_enough,
        remedy=f"engine.max_rows={able[0]}" if able else None,
    )


def _role(key: str, role: RoleConfig, planner: Planner, memory: MemoryEstimate) -> Beside:
    assert role.model is not None
    model = ModelConfig(path=role.model, revision=role.revision)
    sizes = planner.sizes(model, f"{key}.model")
    load = memory.load
    limit = role.max_context or sizes.max_context or load.context
    engine_load = EngineLoad(
        rows=min(role.max_rows, load.in_flight),
        prompt=min(load.prompt, limit),
        sampled=min(load.context, limit),
        limit=limit,
        on_gpu=True,
        memory=memory.machine.memory,
        taken=0,
        sharded=False,
        adapters=False,
    )
    by_gpus = {
        gpus: role_memory(role, engine_load, sizes, gpus)
        for gpus in (role.tensor_parallel_size, *TENSOR_PARALLEL)
    }
    chosen, size = by_gpus[role.tensor_parallel_size], memory.machine.memory
    is_enough = fits(chosen, size)
    able = [
        gpus
        for gpus, one in by_gpus.items()
        if is_enough is False and gpus > role.tensor_parallel_size and fits(one, size)
    ]
    return Beside(
        key=key,
        what=f"{role.model}, {sizes.parameters:,} weights, of which each GPU has its part",
        count=role.count,
        gpus=role.tensor_parallel_size,
        bytes=most(chosen),
        fits=is_enough,
        remedy=f"{key}.tensor_parallel_size={able[0]}" if able else None,
    )


def lines(parts: Sequence[Beside]) -> Iterator[str]:
    """Yield the parts as text."""
    if not parts:
        return
    yield ""
    yield "beside the trainer's GPUs (computed, never run on GPUs)"
    yield f"{'':<18}{'GiB':>8}  of each GPU"
    for part in parts:
        gpus = f"{part.count} x {part.gpus} GPU{'s' * (part.gpus > 1)}"
        yield f"{part.key:<18}{part.bytes / GIB:8.2f}  {gpus}: {part.what}"
        if part.fits is False:
            remedy = part.remedy or "no known setting makes it fit; choose a smaller model"
            yield f"DOES NOT FIT: {part.key}; {remedy}"


def record(parts: Sequence[Beside]) -> list[dict[str, Any]]:
    """Return the parts for --json."""
    return [{"computed_only": True, **asdict(part)} for part in parts]
